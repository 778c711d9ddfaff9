"""Answers of `/v1/responses`: the pieces of an output as a response, whole or event by event."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar

from app.errors import OverloadedError, RequestError
from app.fleet.messages import Piece
from app.http_errors import error_response
from app.openai.answers import ChatAnswer
from app.openai.replies import ChatTokenLogprob, ChoiceEnd
from app.openai.responses.body import NamedSchemaFormat, ResponsesRequest
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
    OutputText,
    PartEvent,
    ReasoningEcho,
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
from app.openai.tools.bodies import ToolCallDelta

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
    """The response to a request, as it grows. Items appear in `output` in the order in which they begin.

    Args:
        chat: splits the pieces into content and calls.
    """

    def __init__(self, request: ResponsesRequest, chat: ChatAnswer) -> None:
        self._request = request
        self._chat = chat
        self._num_events = 0
        self._items: list[OutputItem] = []
        self._message: OutputMessage | None = None
        self._call: OutputFunctionCall | None = None  # the latest, until the next one begins

    def events(self, piece: Piece) -> Iterator[StreamEvent]:
        """The events of a piece of the output. The output's last piece ends the response."""
        chunk = self._chat.chunk(piece)  # also sets the public id
        if not self._num_events:
            for kind in ("response.created", "response.in_progress"):
                yield self._event(ResponseEvent, type=kind, response=self._response("in_progress"))
        if chunk is None:
            return
        [choice] = chunk.choices
        if choice.delta.content:
            yield from self._text(choice.delta.content, choice.logprobs.content if choice.logprobs else [])
        for delta in choice.delta.tool_calls or ():
            yield from self._begin_call(delta)
        if choice.finish_reason is not None:
            yield from self._end(choice.finish_reason)

    def failed(self, error: BaseException) -> ResponseEvent:
        """The last event of a response that has begun and then failed."""
        message = error_response(error)[1].error.message
        for item in self._items:
            if item.status == "in_progress":
                item.status = "incomplete"
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

    def _text(self, content: str, logprobs: list[ChatTokenLogprob]) -> Iterator[StreamEvent]:
        if self._message is None:
            yield from self._begin_message()
        assert self._message is not None
        [part] = self._message.content
        part.text += content
        part.logprobs += logprobs
        yield self._event(TextDeltaEvent, **self._place(self._message), delta=content, logprobs=logprobs)

    def _begin_message(self) -> Iterator[StreamEvent]:
        self._message = OutputMessage(id=f"msg_{uuid.uuid4().hex}", status="in_progress", content=[])
        yield self._add(self._message)
        self._message.content.append(OutputText(text=""))
        place, part = self._place(self._message), OutputText(text="")
        yield self._event(PartEvent, type="response.content_part.added", **place, part=part)

    def _begin_call(self, delta: ToolCallDelta) -> Iterator[StreamEvent]:
        """Add a call, which the parser delivers complete. The item ends with the next call or with the response."""
        yield from self._end_call()
        named = {"id": f"fc_{uuid.uuid4().hex}", "call_id": delta.id, "name": delta.function.name}
        call = OutputFunctionCall.model_validate(named | {"arguments": "", "status": "in_progress"})
        yield self._add(call)
        self._call, call.arguments = call, delta.function.arguments or ""
        yield self._event(ArgumentsDeltaEvent, **self._place(call), delta=call.arguments)

    def _end_call(self) -> Iterator[StreamEvent]:
        if (call := self._call) is None:
            return
        self._call, call.status = None, "completed"
        yield self._event(ArgumentsDoneEvent, **self._place(call), name=call.name, arguments=call.arguments)
        yield self._done(call)

    def _place(self, item: OutputItem) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": self._items.index(item)}

    def _add(self, item: OutputItem) -> ItemEvent:
        self._items.append(item)
        # A copy: callers through a handle may read the event after the item has grown.
        index, copy = len(self._items) - 1, item.model_copy(deep=True)
        return self._event(ItemEvent, type="response.output_item.added", output_index=index, item=copy)

    def _done(self, item: OutputItem) -> ItemEvent:
        index = self._items.index(item)
        return self._event(ItemEvent, type="response.output_item.done", output_index=index, item=item)

    def _end(self, reason: ChoiceEnd) -> Iterator[StreamEvent]:
        status: Literal["incomplete", "completed"] = "incomplete" if reason == "length" else "completed"
        if not self._items:  # an empty answer is a message, too
            yield from self._begin_message()
        if (message := self._message) is not None:
            message.status = status
            place, [part] = self._place(message), message.content
            yield self._event(TextDoneEvent, **place, text=part.text, logprobs=part.logprobs)
            yield self._event(PartEvent, type="response.content_part.done", **place, part=part)
            yield self._done(message)
        yield from self._end_call()
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
                "tools": asked.tools or [],
                "tool_choice": asked.tool_choice or "auto",
                "reasoning": ReasoningEcho(effort=asked.reasoning.effort if asked.reasoning else None),
            }
        )

    def _usage(self) -> ResponseUsage:
        usage = self._chat.usage
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
        )

    def _text_echo(self) -> TextEcho:
        given = self._request.text.format if self._request.text is not None else None
        if isinstance(given, NamedSchemaFormat):
            return TextEcho(format=SchemaFormatEcho.model_validate(given.model_dump()))
        return TextEcho(format=given or TextFormat(type="text"))
