"""`folio chat` against a server that answers as the test says."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from folio.app.cli import chat as chat_module
from folio.app.cli.chat import Conversation, Reply, Terminal, read_message
from folio.app.cli.connection import Server
from folio.app.cli.main import main
from folio.app.cli.text import printable
from tests.app.cli.conftest import Stdin
from tests.app.cli.fake_server import DONE, Answer, error, event, serving, stream, text, usage


def echo(bodies: list[Any]) -> Answer:
    async def answer(request: web.Request, body: Any) -> web.StreamResponse:
        bodies.append(body)
        said = body["messages"][-1]["content"]
        return await stream(request, text("You "), text(f"said {said}."), usage(9, 4, 5), DONE)

    return answer


def test_a_conversation(stdin: Stdin, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bodies: list[Any] = []
    saved = tmp_path / "saved.json"
    lines = ("hi", "/system Be brief.", "/model two", "again", f"/save {saved}", "/clear", "new", "/nope", "/quit")
    stdin.type(*lines)
    with serving(echo(bodies)) as url:
        assert main(["chat", "--url", url, "--temperature", "0", "--max-tokens", "7"]) == 0
    shown = capsys.readouterr().out
    assert "one at http://127.0.0.1" in shown
    assert "You said hi.\n9 prompt tokens (5 cached) · 4 tokens · first after " in shown
    assert "there is no command /nope" in shown
    assert [body["model"] for body in bodies] == ["one", "two", "two"]
    assert [len(body["messages"]) for body in bodies] == [1, 4, 2]
    assert bodies[1]["messages"][:2] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert {(body["temperature"], body["max_tokens"]) for body in bodies} == {(0.0, 7)}
    assert [message["role"] for message in json.loads(saved.read_text())["messages"]] == [
        *("system", "user", "assistant", "user", "assistant")
    ]


@pytest.mark.parametrize(
    ("card", "options", "sent"),
    [
        ({"owned_by": "folio"}, (), {"top_p": 0.95, "top_k": 64}),  # regression: word salad at temperature 1
        ({"owned_by": "folio", "sampling": {"temperature": 0.6, "top_k": 20}}, (), {"temperature": 0.6, "top_k": 20}),
        (
            {"owned_by": "folio", "sampling": {"temperature": 0.6, "top_k": 20}},
            ("--temperature", "0"),
            {"temperature": 0.0, "top_k": 20},
        ),
        ({"owned_by": "openai"}, (), {}),  # which refuses top_k
    ],
)
def test_the_models_own_sampling(
    card: dict[str, Any], options: tuple[str, ...], sent: dict[str, Any], stdin: Stdin
) -> None:
    bodies: list[Any] = []
    stdin.type("hi")
    with serving(echo(bodies), cards=[{"id": "one"} | card]) as url:
        assert main(["chat", "--url", url, *options]) == 0
    assert {name: bodies[0][name] for name in bodies[0] if name in ("temperature", "top_p", "top_k")} == sent


def test_a_server_without_a_list_of_models(stdin: Stdin) -> None:
    """Regression: the model's sampling is in the list, without which nothing was asked."""

    bodies: list[Any] = []
    stdin.type("hi")
    with serving(echo(bodies), models=()) as url:
        assert main(["chat", "--url", url, "--model", "one"]) == 0
    assert (bodies[0]["model"], "top_k" in bodies[0]) == ("one", False)


def test_a_wait_is_shown(stdin: Stdin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With the place in the queue and the tokens of the prompt, until the answer begins."""
    asked: list[Any] = []
    comments = (
        b': keep-alive {"queue": 3, "expected_s": 12.4, "computed_tokens": 0, "prompt_tokens": 7300}\n\n',
        b': keep-alive {"queue": 0, "expected_s": 0.4, "computed_tokens": 1024, "prompt_tokens": 7300}\n\n',
        b": keep-alive\n\n",
    )

    async def slow(request: web.Request, body: Any) -> web.StreamResponse:
        asked.append(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in (*comments, text("Hello."), DONE):
            await response.write(part)
            await asyncio.sleep(0.15)
        return response

    monkeypatch.setattr(chat_module, "_LOOK_S", 0.05)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    stdin.type("hi")
    with serving(slow) as url:
        assert main(["chat", "--url", url]) == 0
    shown = capsys.readouterr()
    assert asked[0]["stream_options"] == {"include_usage": True, "include_progress": True}
    assert "s: place 3 in the queue, about 12 s more\x1b[K" in shown.err
    assert "s: 1,024 of 7,300 prompt tokens\x1b[K" in shown.err
    assert shown.err.endswith("\r\x1b[K")  # the line is gone
    assert "Hello." in shown.out


def test_errors_are_shown_and_the_session_goes_on(stdin: Stdin, capsys: pytest.CaptureFixture[str]) -> None:
    bodies: list[Any] = []

    async def answer(request: web.Request, body: Any) -> web.StreamResponse:
        bodies.append(body)
        said = body["messages"][-1]["content"]
        if said == "full":
            return error("the queue is full", 429, "rate_limit_error", **{"Retry-After": "3"})
        if said == "bad":
            return error("temperature: must be a number", 400)
        if said == "away":
            return error("no engine replica", 503, "server_error")
        if said == "broken":
            return await stream(request, text("You"), event(error={"message": "a step failed", "type": "server_error"}))
        if said in ("cut", "short"):
            return await stream(request, text("You"), cut=said == "cut")
        if said == "garbage":
            return await stream(request, b"data: {nonsense\n\n")
        return await echo([])(request, body)

    stdin.type("full", "bad", "away", "broken", "cut", "short", "garbage", "hi")
    with serving(answer) as url:
        assert main(["chat", "--url", url]) == 0
    shown = capsys.readouterr().out
    for line in (
        "error: the queue is full (try again in 3 s)",
        "error: temperature: must be a number",
        "error: no engine replica",
        "error: a step failed",
        f"error: the connection to {url} was lost",
        f"error: {url} ended the answer in the middle; send the request again",
        "is no JSON object",
        "You said hi.",
    ):
        assert line in shown
    assert len(bodies[-1]["messages"]) == 1  # what failed is not part of the conversation


def test_an_interrupt_ends_the_answer_only(stdin: Stdin, capsys: pytest.CaptureFixture[str]) -> None:
    has_left = []

    async def answer(request: web.Request, body: Any) -> web.StreamResponse:
        if len(body["messages"]) > 1:
            return await echo([])(request, body)
        response = await stream(request, text("Once upon"))
        try:
            while True:
                await response.write(b": waiting\n\n")
                await asyncio.sleep(0.01)
        finally:
            has_left.append(True)

    class Interrupted(Conversation):
        async def answer(self, text: str, write: Callable[[str], None]) -> Reply:
            def interrupt_at_first_text(said: str) -> None:
                write(said)
                if said == "Once upon":
                    asyncio.current_task().cancel()  # type: ignore[union-attr]  # as asyncio.run does at SIGINT

            return await super().answer(text, interrupt_at_first_text)

    stdin.type("a story", "hi", KeyboardInterrupt())
    with serving(answer) as url:
        Terminal(Interrupted(Server(url), "one", None, {})).run()
    shown = capsys.readouterr().out
    assert "Once upon\ncancelled · 1 event ·" in shown
    assert "You said hi." in shown
    assert has_left


def test_a_pipe_is_answered_once(stdin: Stdin, capsys: pytest.CaptureFixture[str]) -> None:
    stdin.pipe("two\nlines\n")
    with serving(echo(bodies := [])) as url:
        assert main(["chat", "--url", f"{url}/v1/"]) == 0
    assert capsys.readouterr().out == "You said two\nlines.\n"
    assert len(bodies) == 1


def test_a_server_without_usage(stdin: Stdin, capsys: pytest.CaptureFixture[str]) -> None:
    async def answer(request: web.Request, body: Any) -> web.StreamResponse:
        if "stream_options" in body:
            return error("unknown field stream_options", 400)
        return await stream(request, text("a"), text("b"), text("c"), DONE)

    stdin.type("hi")
    with serving(answer) as url:
        assert main(["chat", "--url", url]) == 0
    assert "abc\n3 events · first after" in capsys.readouterr().out


def test_an_empty_answer_is_not_remembered(stdin: Stdin) -> None:
    """Regression: the next request had two messages of the user in succession, which many templates refuse."""
    bodies: list[Any] = []

    async def answer(request: web.Request, body: Any) -> web.StreamResponse:
        bodies.append(body)
        return await stream(request, DONE)

    stdin.type("one", "two")
    with serving(answer) as url:
        assert main(["chat", "--url", url]) == 0
    assert [[message["content"] for message in body["messages"]] for body in bodies] == [["one"], ["two"]]


def test_escape_sequences_are_not_obeyed(stdin: Stdin, capsys: pytest.CaptureFixture[str]) -> None:
    async def answer(request: web.Request, body: Any) -> web.StreamResponse:
        return await stream(request, text("a\x1b]0;owned\x07b\r\x9b2J"), text("é\tü\n"), DONE)

    stdin.pipe("hi")
    with serving(answer) as url:
        assert main(["chat", "--url", url]) == 0
    assert capsys.readouterr().out == "a]0;ownedb2Jé\tü\n"
    assert printable("a\u202eb\u2066c") == "abc"


def test_text_that_cannot_be_written_or_read(stdin: Stdin, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: half a surrogate pair, and a pipe that is not UTF-8, ended in tracebacks."""
    stdin.pipe("hi")

    async def answer(request: web.Request, body: Any) -> web.StreamResponse:
        return await stream(request, text("a\ud83db"), DONE)

    with serving(answer) as url:
        assert main(["chat", "--url", url]) == 0
    assert capsys.readouterr().out == "ab\n"
    stdin.pipe(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"))
    assert main(["chat"]) == 2
    assert "standard input cannot be read: it is not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--url", "http://127.0.0.1:1"], "nothing answers at http://127.0.0.1:1: start a server with `folio serve`"),
        (["--url", "ftp://x"], "--url is 'ftp://x'; it must begin with http:// or https://"),
        (["--temperature", "-1"], "folio chat: Invalid value"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], line: str, stdin: Stdin, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin.pipe("hi")
    assert main(["chat", *arguments]) > 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(line)
    assert shown.err.count("\n") == 1


def test_no_message_and_a_server_of_another_kind(stdin: Stdin, capsys: pytest.CaptureFixture[str]) -> None:
    async def answer(request: web.Request, body: Any) -> web.StreamResponse:
        return web.Response(text="<html>not here</html>", status=404, content_type="text/html")

    with serving(answer) as url:
        for typed, line in (("", "standard input is empty"), ("hi", "has no /v1/chat/completions")):
            stdin.pipe(typed)
            assert main(["chat", "--url", url]) > 0
            assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("one",), "one"),
        (("one\\", "two\\", "three"), "one\ntwo\nthree"),
        (('"""one', "two\\", 'three"""'), "one\ntwo\\\nthree"),
        (('"""', "one", '"""'), "\none\n"),
    ],
)
def test_messages_of_several_lines(lines: tuple[str, ...], message: str, stdin: Stdin) -> None:
    stdin.type(*lines)
    assert read_message() == message


def test_the_summary() -> None:
    reply = Reply()
    for at_s in (0.1, 0.2, 0.3):
        reply.take({"choices": [{"delta": {"content": "a"}}]}, at_s)
    assert reply.summary() == "3 events · first after 100 ms · 10.0 events/s"
    reply.take({"choices": [{"delta": {}, "finish_reason": "length"}], "usage": {"completion_tokens": 5}}, 0.4)
    assert reply.summary() == "5 tokens · first after 100 ms · 20.0 tokens/s · cut off at the limit of tokens"
    assert Reply().summary() == "no text"
