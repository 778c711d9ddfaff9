"""Answers of `/v1/responses`: the pieces of an output as a response, whole or event by event."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar

from app.engine.delta import FinishReason, TokenLogprobs
from app.errors import OverloadedError, RequestError
from app.fleet.messages import Piece
from app.http_errors import error_response
from app.openai.answers import ChatAnswer
from app.openai.responses.body import NamedSchemaFormat, ResponsesRequest, TextConfig
from app.openai.responses.replies import (
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    FailureDetail,
    IncompleteDetails,
    InputTokensDetails,
    ItemEvent,
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputTokensDetails,
    PartEvent,
    ReasoningDeltaEvent,
    ReasoningDoneEvent,
    ReasoningEcho,
    ReasoningText,
    ResponseEvent,
    ResponseObject,
    ResponseUsage,
    SchemaFormatEcho,
    StreamEvent,
    TextDeltaEvent,
    TextDoneEvent,
    TextEcho,
)
from app.openai.sampling_body import TextFormat
from app.request_context import current_context

# Fields of a response that have the request's values.
_ECHOED = (
    "model",
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "user",
)

E = TypeVar("E", bound=StreamEvent)


class ResponseAnswer:
    """The response to a request, as it grows: reasoning, messages and calls, each complete before the next begins.

    Args:
        chat: splits the pieces into parts.
    """

    def __init__(self, request: ResponsesRequest, chat: ChatAnswer) -> None:
        self._request = request
        self._chat = chat
        self._num_events = 0
        self._items: list[OutputItem] = []
        self._item: OutputItem | None = None  # the one that grows
        self._held_entries: tuple[TokenLogprobs, ...] = ()
        if request.stream and (context := current_context()) is not None:
            context.silent_events = self.silent_events

    @property
    def has_begun(self) -> bool:
        return bool(self._num_events)

    def silent_events(self) -> Iterator[StreamEvent]:
        """The events while there is no output: the response is in progress. It has its id from the first of them on."""
        self._chat.keep_id()
        if not self.has_begun:
            yield self._event(ResponseEvent, type="response.created", response=self._response("in_progress"))
        yield self._event(ResponseEvent, type="response.in_progress", response=self._response("in_progress"))

    def events(self, piece: Piece) -> Iterator[StreamEvent]:
        """The events of a piece of the output. The output's last piece ends the response."""
        parts = self._chat.parts(piece)  # also sets the public id
        if not self.has_begun:
            yield from self.silent_events()
        entries, self._held_entries = (*self._held_entries, *piece.logprobs), ()
        if not parts:
            self._held_entries = entries
        for part in parts:
            if part.kind == "content":
                yield from self._text(part.text, entries)
                entries = ()
            elif part.kind == "reasoning":
                yield from self._reason(part.text)
            elif part.kind == "call":
                yield from self._begin_call(part.text)
            else:
                yield self._continue_call(part.text)
        if piece.finish_reason is not None:
            yield from self._end(piece.finish_reason)

    def failed(self, error: BaseException) -> ResponseEvent:
        """The last event of a response that has begun and then failed."""
        message = error_response(error)[1].error.message
        if self._item is not None:
            self._item.status = "incomplete"
        response = self._response("failed")
        response.error = FailureDetail(code="server_error", message=message)
        if isinstance(error, OverloadedError):
            response.error.code = "rate_limit_exceeded"
        elif isinstance(error, RequestError):
            response.error.code = "invalid_prompt"
        return self._event(ResponseEvent, type="response.failed", response=response)

    def full_answer(self, outputs: Sequence[Sequence[Piece]]) -> ResponseObject:
        """Args: the output of the one prompt, in one piece or several."""
        [pieces] = outputs
        *_, last = (event for piece in pieces for event in self.events(piece))
        assert isinstance(last, ResponseEvent)
        return last.response

    def _event(self, kind: type[E], **fields: Any) -> E:
        self._num_events += 1
        return kind(**fields, sequence_number=self._num_events - 1)

    def _text(self, content: str, entries: Sequence[TokenLogprobs]) -> Iterator[StreamEvent]:
        item = self._item
        if not isinstance(item, OutputMessage):
            yield from self._end_item("completed")
            item = OutputMessage(id=f"msg_{uuid.uuid4().hex}", status="in_progress", content=[])
            yield from self._begin_item(item, OutputText(text=""))
        [part] = item.content
        logprobs = self._chat.logprobs(entries)
        part.text += content
        part.logprobs += logprobs.content if logprobs is not None else []
        if content:
            new = part.logprobs[len(part.logprobs) - len(entries) :] if logprobs is not None else []
            yield self._event(TextDeltaEvent, **self._place(item), delta=content, logprobs=new)

    def _reason(self, text: str) -> Iterator[StreamEvent]:
        item = self._item
        if not isinstance(item, OutputReasoning):
            yield from self._end_item("completed")
            item = OutputReasoning(id=f"rs_{uuid.uuid4().hex}", status="in_progress", content=[])
            yield from self._begin_item(item, ReasoningText(text=""))
        item.content[0].text += text
        yield self._event(ReasoningDeltaEvent, **self._place(item), delta=text)

    def _begin_call(self, name: str) -> Iterator[StreamEvent]:
        yield from self._end_item("completed")
        call = OutputFunctionCall(
            id=f"fc_{uuid.uuid4().hex}",
            call_id=self._chat.new_call_id(),
            name=name,
            arguments="",
            status="in_progress",
        )
        yield from self._begin_item(call)

    def _continue_call(self, arguments: str) -> StreamEvent:
        call = self._item
        assert isinstance(call, OutputFunctionCall)
        call.arguments += arguments
        return self._event(ArgumentsDeltaEvent, **self._place(call), delta=arguments)

    def _begin_item(self, item: OutputItem, part: OutputText | ReasoningText | None = None) -> Iterator[StreamEvent]:
        self._item = item
        self._items.append(item)
        # Copies: callers through a handle may read an event after its item has grown.
        index, copy = len(self._items) - 1, item.model_copy(deep=True)
        yield self._event(ItemEvent, type="response.output_item.added", output_index=index, item=copy)
        if part is not None and not isinstance(item, OutputFunctionCall):
            item.content.append(part)  # type: ignore[arg-type]  # each item has its kind of part
            place, copied = self._place(item), part.model_copy(deep=True)
            yield self._event(PartEvent, type="response.content_part.added", **place, part=copied)

    def _end_item(self, status: Literal["incomplete", "completed"]) -> Iterator[StreamEvent]:
        item, self._item = self._item, None
        if item is None:
            return
        item.status, place = status, self._place(item)
        if isinstance(item, OutputFunctionCall):
            yield self._event(ArgumentsDoneEvent, **place, name=item.name, arguments=item.arguments)
        else:
            [part] = item.content
            if isinstance(part, OutputText):
                yield self._event(TextDoneEvent, **place, text=part.text, logprobs=part.logprobs)
            else:
                yield self._event(ReasoningDoneEvent, **place, text=part.text)
            yield self._event(PartEvent, type="response.content_part.done", **place, part=part)
        index = place["output_index"]
        yield self._event(ItemEvent, type="response.output_item.done", output_index=index, item=item)

    def _place(self, item: OutputItem) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": len(self._items) - 1}

    def _end(self, reason: FinishReason) -> Iterator[StreamEvent]:
        status: Literal["incomplete", "completed"] = "incomplete" if reason == "length" else "completed"
        if not self._items:  # an empty answer is a message, too
            yield from self._text("", ())
        yield from self._end_item(status)
        response = self._response(status)
        if status == "incomplete":
            response.incomplete_details = IncompleteDetails()
        else:
            response.completed_at = int(time.time())
        yield self._event(ResponseEvent, type=f"response.{status}", response=response)

    def _response(self, status: str) -> ResponseObject:
        asked = self._request
        return ResponseObject.model_validate(
            {name: getattr(asked, name) for name in _ECHOED}
            | {
                "id": self._chat.id,
                "created_at": self._chat.created,
                "status": status,
                "output": list(self._items),
                "usage": None if status == "in_progress" else self._usage(),
                "metadata": asked.metadata or {},
                "parallel_tool_calls": asked.parallel_tool_calls is not False,
                "temperature": 1.0 if asked.temperature is None else asked.temperature,
                "top_p": 1.0 if asked.top_p is None else asked.top_p,
                "top_logprobs": asked.top_logprobs or 0,
                "text": self._text_echo(),
                "truncation": asked.truncation or "disabled",
                "tools": asked.tools or [],
                "tool_choice": asked.tool_choice or "auto",
                "reasoning": ReasoningEcho(**asked.reasoning.model_dump() if asked.reasoning else {}),
            }
        )

    def _usage(self) -> ResponseUsage:
        usage = self._chat.usage
        details = usage.completion_tokens_details
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=details.reasoning_tokens if details else 0),
            total_tokens=usage.total_tokens,
        )

    def _text_echo(self) -> TextEcho:
        text = self._request.text or TextConfig()
        verbosity = text.verbosity or "medium"
        if isinstance(text.format, NamedSchemaFormat):
            return TextEcho(format=SchemaFormatEcho.model_validate(text.format.model_dump()), verbosity=verbosity)
        return TextEcho(format=text.format or TextFormat(type="text"), verbosity=verbosity)
