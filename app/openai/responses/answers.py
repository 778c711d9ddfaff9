"""Answers of `/v1/responses`: the pieces of an output as a response, whole or event by event."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, TypeVar

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
        self._message: tuple[int, OutputMessage] | None = None
        self._call: tuple[int, OutputFunctionCall] | None = None  # the latest, until the next one begins

    def events(self, piece: Piece) -> list[StreamEvent]:
        """The events of a piece of the output. The output's last piece ends the response."""
        chunk = self._chat.chunk(piece)  # also sets the public id
        events: list[StreamEvent] = []
        if not self._num_events:
            for kind in ("response.created", "response.in_progress"):
                events.append(self._event(ResponseEvent, type=kind, response=self._response("in_progress")))
        if chunk is None:
            return events
        [choice] = chunk.choices
        if choice.delta.content:
            events += self._text(choice.delta.content, choice.logprobs.content if choice.logprobs else [])
        for delta in choice.delta.tool_calls or ():
            events += self._begin_call(delta)
        if choice.finish_reason is not None:
            events += self._end(choice.finish_reason)
        return events

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
        events = [event for piece in pieces for event in self.events(piece)]
        assert isinstance(events[-1], ResponseEvent)
        return events[-1].response

    def _event(self, kind: type[E], **fields: Any) -> E:
        self._num_events += 1
        return kind(**fields, sequence_number=self._num_events - 1)

    def _text(self, content: str, logprobs: list[ChatTokenLogprob]) -> list[StreamEvent]:
        events = [] if self._message is not None else self._begin_message()
        assert self._message is not None
        index, message = self._message
        [part] = message.content
        part.text += content
        part.logprobs += logprobs
        fields = {"item_id": message.id, "output_index": index, "delta": content, "logprobs": logprobs}
        return [*events, self._event(TextDeltaEvent, **fields)]

    def _begin_message(self) -> list[StreamEvent]:
        message = OutputMessage(id=f"msg_{uuid.uuid4().hex}", status="in_progress", content=[])
        added = self._add(message)
        part = OutputText(text="")
        message.content.append(part)
        self._message = added.output_index, message
        fields = {"item_id": message.id, "output_index": added.output_index, "part": part.model_copy(deep=True)}
        return [added, self._event(PartEvent, type="response.content_part.added", **fields)]

    def _end_message(self, reason: ChoiceEnd) -> list[StreamEvent]:
        assert self._message is not None
        index, message = self._message
        message.status = "incomplete" if reason == "length" else "completed"
        [part] = message.content
        place = {"item_id": message.id, "output_index": index}
        return [
            self._event(TextDoneEvent, **place, text=part.text, logprobs=part.logprobs),
            self._event(PartEvent, type="response.content_part.done", **place, part=part),
            self._event(ItemEvent, type="response.output_item.done", output_index=index, item=message),
        ]

    def _begin_call(self, delta: ToolCallDelta) -> list[StreamEvent]:
        """Add a call, which the parser delivers complete. The item ends with the next call or with the response."""
        assert delta.id is not None
        assert delta.function.name is not None
        assert delta.function.arguments is not None
        events = self._end_call()
        call = OutputFunctionCall(
            id=f"fc_{uuid.uuid4().hex}",
            call_id=delta.id,
            name=delta.function.name,
            arguments="",
            status="in_progress",
        )
        added = self._add(call)
        call.arguments = delta.function.arguments
        self._call = added.output_index, call
        place = {"item_id": call.id, "output_index": added.output_index}
        return [*events, added, self._event(ArgumentsDeltaEvent, **place, delta=call.arguments)]

    def _end_call(self) -> list[StreamEvent]:
        if self._call is None:
            return []
        (index, call), self._call = self._call, None
        call.status = "completed"
        fields = {"item_id": call.id, "output_index": index, "name": call.name, "arguments": call.arguments}
        return [
            self._event(ArgumentsDoneEvent, **fields),
            self._event(ItemEvent, type="response.output_item.done", output_index=index, item=call),
        ]

    def _add(self, item: OutputItem) -> ItemEvent:
        index = len(self._items)
        self._items.append(item)
        # A copy: callers through a handle may read the event after the item has grown.
        copy = item.model_copy(deep=True)
        return self._event(ItemEvent, type="response.output_item.added", output_index=index, item=copy)

    def _end(self, reason: ChoiceEnd) -> list[StreamEvent]:
        events = [] if self._items else self._begin_message()  # an empty answer is a message, too
        if self._message is not None:
            events += self._end_message(reason)
        events += self._end_call()
        status = "incomplete" if reason == "length" else "completed"
        response = self._response(status)
        if status == "incomplete":
            response.incomplete_details = IncompleteDetails()
        else:
            response.completed_at = int(time.time())
        return [*events, self._event(ResponseEvent, type=f"response.{status}", response=response)]

    def _response(self, status: str) -> ResponseObject:
        asked = self._request
        return ResponseObject.model_validate(
            {
                "id": self._chat.id,
                "created_at": self._chat.created,
                "status": status,
                "model": asked.model,
                "output": list(self._items),
                "usage": None if status == "in_progress" else self._usage(),
                "instructions": asked.instructions,
                "metadata": asked.metadata or {},
                "max_output_tokens": asked.max_output_tokens,
                "max_tool_calls": asked.max_tool_calls,
                "parallel_tool_calls": asked.parallel_tool_calls is not False,
                "temperature": 1.0 if asked.temperature is None else asked.temperature,
                "top_p": 1.0 if asked.top_p is None else asked.top_p,
                "top_logprobs": asked.top_logprobs or 0,
                "text": self._text_echo(),
                "tools": asked.tools or [],
                "tool_choice": asked.tool_choice or "auto",
                "reasoning": ReasoningEcho(effort=asked.reasoning.effort if asked.reasoning else None),
                "prompt_cache_key": asked.prompt_cache_key,
                "safety_identifier": asked.safety_identifier,
                "user": asked.user,
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
