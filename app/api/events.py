"""Answers as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import Response

from folio.app.api.anthropic.body import MessagesRequest
from folio.app.api.anthropic.replies import MessageEvent, Ping
from folio.app.api.event_response import KEEP_ALIVE, EventResponse
from folio.app.api.openai.bodies import GenerationBody
from folio.app.api.openai.replies import ChatCompletionChunk, ChatDelta, Completion
from folio.app.api.responses.body import ResponsesRequest
from folio.app.api.responses.replies import ErrorEvent, StreamEvent
from folio.app.http import errors
from folio.app.http.error_json import AnthropicErrorBody, anthropic_error
from folio.app.http.request_context import current_context

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
    """The JSON before and after the text of a chunk that has only text."""
    [choice] = chunk.choices
    change = {"delta": ChatDelta(content="")} if isinstance(chunk, ChatCompletionChunk) else {"text": ""}
    empty = chunk.model_copy(update={"choices": [choice.model_copy(update=change)]})
    before, key, after = on_one_line(empty.model_dump_json()).partition(_EMPTY[type(chunk)])
    return before + key[:-2], after


def event_stream(request: BaseModel, items: AsyncIterator[Any]) -> Response:
    """Server-sent events of the answer to a body."""
    if isinstance(request, ResponsesRequest):
        return stream_events(items)
    if isinstance(request, MessagesRequest):
        return stream_messages(items)
    return stream_chunks(items, shows_progress=isinstance(request, GenerationBody) and request.include_progress)


def stream_chunks(chunks: AsyncIterator[BaseModel], *, shows_progress: bool = False) -> Response:
    """Server-sent events of completions and chat completions: data only, with an end mark. Comments interrupt silences.

    Args:
        shows_progress: comments tell the progress of the prompt, as JSON.
    """

    def failed(error: Exception) -> bytes:
        return f"data: {json.dumps(errors.error_response(error)[1].model_dump())}\n\n".encode()

    def silence() -> bytes:
        context = current_context()
        progress = None if context is None or not shows_progress else context.progress
        return KEEP_ALIVE if progress is None else f": keep-alive {json.dumps(asdict(progress))}\n\n".encode()

    end = b"data: [DONE]\n\n"
    return EventResponse(chunks, Frames().event, failed, silence, end, shows_progress=shows_progress)


def stream_events(events: AsyncIterator[StreamEvent]) -> Response:
    """Server-sent events of responses: with names, and without an end mark. Events about the response in progress
    interrupt silences, and comments before there is one."""
    last_number = -1

    def written(event: StreamEvent) -> bytes:
        nonlocal last_number
        last_number = event.sequence_number
        return _named(event)

    def failed(error: Exception) -> bytes:
        detail = errors.error_response(error)[1].error
        return written(
            ErrorEvent(sequence_number=last_number + 1, code=detail.code, message=detail.message, param=detail.param)
        )

    def silence() -> bytes:
        context = current_context()
        if context is None or context.silent_events is None:
            return KEEP_ALIVE
        return b"".join(map(written, context.silent_events()))

    return EventResponse(events, written, failed, silence)


def stream_messages(events: AsyncIterator[MessageEvent]) -> Response:
    """Server-sent events of Anthropic's messages: with names, and without an end mark. Pings interrupt silences."""

    def failed(error: Exception) -> bytes:
        return _named(anthropic_error(*errors.error_response(error)))

    return EventResponse(events, _named, failed, lambda: _named(Ping()))


def _named(event: StreamEvent | MessageEvent | AnthropicErrorBody) -> bytes:
    return f"event: {event.type}\ndata: {on_one_line(event.model_dump_json())}\n\n".encode()
