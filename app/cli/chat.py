"""`folio chat`: a conversation with a server of the OpenAI API."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from folio.app.cli.connection import DEFAULT_URL, ApiKey, Model, Server, Url
from folio.app.cli.text import counted, printable, read_text, show_ms
from folio.app.errors import FolioError, RequestError

EXAMPLES = """
folio chat
folio chat --url http://127.0.0.1:8001 --system "Answer in one sentence."
echo "What is a block table?" | folio chat
folio chat --url http://127.0.0.1:11434 --model qwen3 --temperature 0.2
"""

HELP = """\
/clear          forget the conversation
/system [TEXT]  show or set the system message
/model [NAME]   show the models, or choose one
/save FILE      write the conversation to a file, as JSON
/quit           leave; so do Ctrl-D, and Ctrl-C at the prompt
Ctrl-C during an answer ends that answer. A line that ends with \\ goes on in the next one, and so does text
between two lines of \"\"\"."""

_PROMPT, _CONTINUED, _FENCE = "> ", "… ", '"""'
# Sampling of a Folio server's models without `generation_config`: at temperature 1 small models babble otherwise.
_SAMPLING = {"top_p": 0.95, "top_k": 64}
# Tried one after the other, until the server accepts one.
_STREAM_OPTIONS = ({"include_usage": True, "include_progress": True}, {"include_usage": True}, None)
_LOOK_S = 1.0


def chat(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy. By default the model's.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an answer. By default the server's limit.")
    ] = None,
) -> None:
    """Chat with a served model. Text on standard input is answered once; otherwise /help lists commands."""
    sampling = {"temperature": temperature, "max_tokens": max_tokens}
    conversation = Conversation(
        Server(url, api_key), model, system, {name: value for name, value in sampling.items() if value is not None}
    )
    if not sys.stdin.isatty():
        text = read_text(Path("-")).strip()
        if not text:
            raise typer.BadParameter("standard input is empty; write a message to it, or use a terminal")
        reply = asyncio.run(conversation.answer(text, _write))
        if reply.was_cancelled:
            raise KeyboardInterrupt
        _end_line(reply)
        if sys.stderr.isatty():
            _print(reply.summary(), stderr=True)
        return
    asyncio.run(conversation.connect())
    Terminal(conversation).run()


@dataclass(slots=True)
class Reply:
    """An answer and its measurements.

    Attributes:
        num_tokens: by the server's usage; without one, the number of events.
        first_s, last_s: from the request to the first and to the last text.
        was_cancelled: the user ended it.
    """

    text: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    num_tokens: int = 0
    is_counted: bool = False
    first_s: float | None = None
    last_s: float = 0.0
    finish_reason: str | None = None
    was_cancelled: bool = False

    def take(self, event: dict[str, Any], at_s: float) -> str:
        """Take over one event; returns its text."""
        if usage := event.get("usage"):
            self.is_counted = True
            self.num_tokens = usage.get("completion_tokens") or 0
            self.prompt_tokens = usage.get("prompt_tokens")
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        choices = event.get("choices") or []
        if not choices:
            return ""
        self.finish_reason = choices[0].get("finish_reason") or self.finish_reason
        text: str = (choices[0].get("delta") or {}).get("content") or ""
        if text:
            self.first_s = at_s if self.first_s is None else self.first_s
            self.last_s = at_s
            self.num_tokens += not self.is_counted
        self.text += text
        return text

    def summary(self) -> str:
        """One line: tokens, cached tokens, TTFT, tokens/s."""
        if self.first_s is None:
            return "cancelled" if self.was_cancelled else "no text"
        parts = ["cancelled"] if self.was_cancelled else []
        if self.prompt_tokens is not None:
            cached = "" if self.cached_tokens is None else f" ({self.cached_tokens} cached)"
            parts.append(f"{self.prompt_tokens} prompt tokens{cached}")
        unit = "token" if self.is_counted else "event"
        parts += [counted(self.num_tokens, unit), f"first after {show_ms(self.first_s)} ms"]
        if self.num_tokens > 1 and self.last_s > self.first_s:
            parts.append(f"{(self.num_tokens - 1) / (self.last_s - self.first_s):.1f} {unit}s/s")
        if self.finish_reason == "length":
            parts.append("cut off at the limit of tokens")
        return " · ".join(parts)


@dataclass
class Conversation:
    """Messages, and the server that continues them.

    Attributes:
        model: `None` until the first call.
        sampling: fields of each request's body, which override the model's own sampling.
    """

    server: Server
    model: str | None
    system: str | None
    sampling: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)
    _options: int = 0  # index in `_STREAM_OPTIONS`
    _of_models: dict[str, dict[str, Any]] = field(default_factory=dict)

    async def connect(self) -> None:
        """Choose the model. Raises `FolioError`."""
        async with self.server:
            self.model = await self.server.choose_model(self.model)

    async def models(self) -> list[str]:
        async with self.server:
            return await self.server.models()

    def with_system(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    async def answer(self, text: str, write: Callable[[str], None]) -> Reply:
        """Ask, and write the answer as it comes. If it fails or is empty, the conversation stays as before; of a
        cancelled answer the part that has come is kept. Raises `FolioError`."""
        reply = Reply()
        self.messages.append({"role": "user", "content": text})
        try:
            async with self.server as server:
                self.model = await server.choose_model(self.model)
                if self.model not in self._of_models:
                    with suppress(FolioError):  # the request itself tells what is wrong, if anything is
                        self._of_models[self.model] = model_sampling(await server.card(self.model))
                with Waiting() as waiting:
                    await self._try_to_stream(server, reply, write, waiting)
        except asyncio.CancelledError:
            reply.was_cancelled = True  # the interrupt that cancels this task is the caller's
        except BaseException:
            self.messages.pop()
            raise
        if reply.text:
            self.messages.append({"role": "assistant", "content": reply.text})
        else:
            self.messages.pop()  # many templates refuse two messages of the user in succession
        return reply

    async def _try_to_stream(
        self, server: Server, reply: Reply, write: Callable[[str], None], waiting: Waiting
    ) -> None:
        while True:
            try:
                return await self._stream(server, reply, write, waiting)
            except RequestError as error:
                is_known = any(name in str(error) for name in ("stream_options", "include_progress"))
                if not is_known or self._options == len(_STREAM_OPTIONS) - 1:
                    raise
                self._options += 1

    async def _stream(self, server: Server, reply: Reply, write: Callable[[str], None], waiting: Waiting) -> None:
        assert self.model is not None
        sampling = self._of_models.get(self.model, {}) | self.sampling
        body: dict[str, Any] = {"model": self.model, "messages": self.with_system(), "stream": True} | sampling
        if (options := _STREAM_OPTIONS[self._options]) is not None:
            body["stream_options"] = options
        begun = time.perf_counter()
        async with aclosing(server.stream("/v1/chat/completions", body, waiting.note)) as events:
            async for event in events:
                if text := reply.take(event, time.perf_counter() - begun):
                    waiting.end()
                    write(printable(text))


def model_sampling(card: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters of a Folio server's model, by its `generation_config`; other servers apply their own."""
    if card.get("owned_by") != "folio":
        return {}
    return card.get("sampling") or _SAMPLING


class Waiting:
    """A line on standard error until an answer begins: the seconds waited, and the server's figures about its queue and
    the prompt. A context, within a running event loop."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._progress: dict[str, Any] = {}
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> Waiting:
        if sys.stderr.isatty():
            self._task = asyncio.create_task(self._show())
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def note(self, progress: dict[str, Any]) -> None:
        """Take over the progress from a comment of the server's stream."""
        self._progress = {name: value for name, value in progress.items() if isinstance(value, int | float)}

    def end(self) -> None:
        """Remove the line."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
            self._write("")

    async def _show(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self._write(self.text())

    def text(self) -> str:
        """The line's text."""
        waited, of = f"waiting {time.monotonic() - self._begun:.0f} s", self._progress
        if queue := of.get("queue"):
            return f"{waited}: place {queue} in the queue{_about(of)}"
        if of.get("prompt_tokens"):
            return f"{waited}: {of.get('computed_tokens', 0):,} of {of['prompt_tokens']:,} prompt tokens{_about(of)}"
        return waited

    def _write(self, text: str) -> None:
        print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)


def _about(progress: dict[str, Any]) -> str:
    expected = progress.get("expected_s", 0)
    return f", about {expected:.0f} s more" if expected >= 1 else ""


class Terminal:
    """Reads messages and commands from the terminal until the user leaves."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: print(HELP),
            "/clear": self._clear,
            "/system": self._set_system,
            "/model": self._set_model,
            "/save": self._save,
        }

    def run(self) -> None:
        import readline  # noqa: F401 - gives input() its editing and history

        _print(f"{self._conversation.model} at {self._conversation.server.url}; /help lists commands")
        while True:
            try:
                text = read_message().strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return
            name, _, argument = text.partition(" ")
            if name in ("/quit", "/exit"):
                return
            try:
                if name in self._commands:
                    self._commands[name](argument.strip())
                elif text.startswith("/") and "\n" not in text and "/" not in name[1:]:
                    print(f"there is no command {name}; /help lists all")
                elif text:
                    self._answer(text)
            except FolioError as error:
                _show_error(error)
            except KeyboardInterrupt:  # before the first byte, after the last one, or in a command
                print("\ncancelled")

    def _answer(self, text: str) -> None:
        try:
            reply = asyncio.run(self._conversation.answer(text, _write))
        except FolioError:
            print()
            raise
        _end_line(reply)
        _print(reply.summary())

    def _clear(self, _: str) -> None:
        self._conversation.messages.clear()
        print("the conversation is forgotten")

    def _set_system(self, text: str) -> None:
        if text:
            self._conversation.system = text
        print(f"system message: {self._conversation.system or 'none'}")

    def _set_model(self, name: str) -> None:
        names = asyncio.run(self._conversation.models())
        if not name:
            for known in names:
                print(f"{'*' if known == self._conversation.model else ' '} {known}")
        elif name in names:
            self._conversation.model = name
            print(f"model: {name}")
        else:
            print(f"the server has no model {name!r}; it has {', '.join(names) or 'none'}")

    def _save(self, name: str) -> None:
        if not name:
            print("name a file: /save FILE")
            return
        messages = self._conversation.with_system()
        content = {"model": self._conversation.model, "messages": messages}
        try:
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            Path(name).expanduser().write_text(text, encoding="utf-8", errors="replace")
        except (OSError, RuntimeError) as error:  # no home of a ~user
            print(f"{name} cannot be written: {getattr(error, 'strerror', error)}")
        else:
            print(f"{name} has {counted(len(messages), 'message')}")


def read_message() -> str:
    """A message of one line, or of several: lines that end with a backslash, or are between two of three quotes."""
    line = input(_PROMPT)
    if line.strip().startswith(_FENCE):
        lines = [line.strip().removeprefix(_FENCE)]
        while not lines[-1].endswith(_FENCE):
            lines.append(input(_CONTINUED))
        lines[-1] = lines[-1].removesuffix(_FENCE)
        return "\n".join(lines)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(_CONTINUED))
    return "\n".join(lines)


def _show_error(error: Exception) -> None:
    retry_after_s = getattr(error, "retry_after_s", None)
    again = "" if retry_after_s is None else f" (try again in {retry_after_s:g} s)"
    _print(f"error: {printable(str(error))}{again}", style="red")


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _end_line(reply: Reply) -> None:
    if not reply.text.endswith("\n"):
        print()


def _print(text: str, *, stderr: bool = False, style: str = "dim") -> None:
    from rich.console import Console

    Console(stderr=stderr, highlight=False, soft_wrap=True).print(text, style=style, markup=False)
