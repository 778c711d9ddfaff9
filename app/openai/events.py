"""Answers as server-sent events, and errors of streams that have begun."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, cast

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import Response, StreamingResponse

from app import http_errors as errors
from app.error_json import AnthropicErrorBody, anthropic_error
from app.openai.messages.replies import MessageEvent
from app.openai.replies import ChatCompletionChunk, ChatDelta, Completion
from app.openai.responses.replies import ErrorEvent, StreamEvent
from app.request_context import note_error, request_id

logger = logging.getLogger(__name__)

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
    if choice.stop_reason is not None or choice.score is not None or choice.token_ids is not None:
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


async def stream_chunks(chunks: AsyncIterator[BaseModel]) -> Response:
    """Server-sent events of completions and chat completions: data only, with an end mark."""

    def failed(error: Exception) -> str:
        return f"data: {json.dumps(errors.error_response(error)[1].model_dump())}\n\n"

    return await _streamed(chunks, Frames().event, failed, "data: [DONE]\n\n")


async def stream_events(events: AsyncIterator[StreamEvent]) -> Response:
    """Server-sent events of responses: with names, and without an end mark."""
    last_number = 0

    def written(event: StreamEvent) -> str:
        nonlocal last_number
        last_number = event.sequence_number
        return f"event: {event.type}\ndata: {on_one_line(event.model_dump_json())}\n\n"

    def failed(error: Exception) -> str:
        detail = errors.error_response(error)[1].error
        return written(
            ErrorEvent(sequence_number=last_number + 1, code=detail.code, message=detail.message, param=detail.param)
        )

    return await _streamed(events, written, failed, "")


async def stream_messages(events: AsyncIterator[MessageEvent]) -> Response:
    """Server-sent events of Anthropic's messages: with names, and without an end mark."""

    def written(event: MessageEvent | AnthropicErrorBody) -> str:
        return f"event: {event.type}\ndata: {on_one_line(event.model_dump_json())}\n\n"

    def failed(error: Exception) -> str:
        return written(anthropic_error(*errors.error_response(error)))

    return await _streamed(events, written, failed, "")


def note_broken_stream(error: Exception) -> None:
    """Log an error of a stream whose status has been sent, with a traceback unless it was to be expected."""
    status, answer = errors.error_response(error)
    note_error(answer.error.code)
    unexpected = status >= 500 and status != 503
    level = logging.ERROR if unexpected else logging.INFO  # without the message, which may quote the request
    logger.log(
        level,
        "the stream of request %s failed: %s",
        request_id(),
        answer.error.code,
        exc_info=error if unexpected else None,
    )


async def _streamed(
    items: AsyncIterator[Any], write: Callable[[Any], str | bytes], failed: Callable[[Exception], str], end: str
) -> Response:
    """A streaming response. The first item is awaited here, so that a request refused at once gets its status."""
    first = await anext(items)

    async def events() -> AsyncIterator[str | bytes]:
        try:
            async with aclosing(cast(Any, items)):
                yield write(first)
                async for item in items:
                    yield write(item)
            yield end
        except Exception as error:  # noqa: BLE001  # the status has been sent: the error becomes an event
            note_broken_stream(error)
            yield failed(error)

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
