"""Server-sent events: chunks written as events, and the data of this API's events read back."""

from __future__ import annotations

from collections.abc import AsyncIterator

from pydantic import BaseModel
from pydantic_core import to_json

from app.openai.replies import ChatCompletionChunk, ChatDelta, Completion

_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
# The empty text of a chunk. It occurs once: within strings quotes are escaped.
_EMPTY = {Completion: '"text":""', ChatCompletionChunk: '"content":""'}


class Frames:
    """Writes the chunks of one stream as events. Most chunks differ only in their text, so the JSON around it, which
    takes most of the time, is serialised once."""

    def __init__(self) -> None:
        self._around: dict[tuple[str, int], tuple[str, str]] = {}  # by id and index of the choice

    def event(self, chunk: BaseModel) -> bytes:
        text = _only_text(chunk)
        if text is None:
            return f"data: {on_one_line(chunk.model_dump_json())}\n\n".encode()
        assert isinstance(chunk, Completion | ChatCompletionChunk)
        key = chunk.id, chunk.choices[0].index
        around = self._around.get(key)
        if around is None:
            around = self._around[key] = _around(chunk)
        return f"data: {around[0]}{on_one_line(to_json(text).decode())}{around[1]}\n\n".encode()


def on_one_line(dumped: str) -> str:
    """Escape line ends other than newline. JSON and events allow them, but clients that split a stream like Python's
    `splitlines`, such as httpx's and requests' `iter_lines`, would break there."""
    return dumped if dumped.isascii() else dumped.translate(_LINE_ENDS)


def _only_text(chunk: BaseModel) -> str | None:
    """The text of a chunk, if it carries nothing else."""
    if not isinstance(chunk, Completion | ChatCompletionChunk) or len(chunk.choices) != 1 or chunk.usage is not None:
        return None
    choice = chunk.choices[0]
    if choice.finish_reason is not None or choice.logprobs is not None:
        return None
    if choice.stop_reason is not None or choice.score is not None:
        return None
    if isinstance(chunk, ChatCompletionChunk):
        delta = chunk.choices[0].delta
        is_plain = delta.role is None and delta.tool_calls is None and chunk.prompt_logprobs is None
        return delta.content if is_plain else None
    completion = chunk.choices[0]
    return completion.text if completion.prompt_logprobs is None else None


def _around(chunk: Completion | ChatCompletionChunk) -> tuple[str, str]:
    """The JSON before and after the text of such a chunk."""
    [choice] = chunk.choices
    change = {"delta": ChatDelta(content="")} if isinstance(chunk, ChatCompletionChunk) else {"text": ""}
    empty = chunk.model_copy(update={"choices": [choice.model_copy(update=change)]})
    before, key, after = on_one_line(empty.model_dump_json()).partition(_EMPTY[type(chunk)])
    return before + key[:-2], after


_DATA, DONE = b"data: ", b"[DONE]"


async def event_data(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each event, which is one line, from the parts of an answer as they arrive; `DONE` included."""
    begun = b""
    async for part in parts:
        *events, begun = (begun + part).split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(_DATA):
                    yield line[len(_DATA) :]
