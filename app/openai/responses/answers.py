"""From the pieces of an output to a response, whole or event by event."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from app.errors import OverloadedError, RequestError
from app.fleet.messages import Piece
from app.http_errors import error_response
from app.openai.chat_answers import ChatAnswer
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


class ResponseAnswer:
    """The response to a request, as it grows: items appear in `output` in the order in which they begin.

    Args:
        chat: makes contents and calls of the pieces.
    """

    def __init__(self, request: ResponsesRequest, chat: ChatAnswer) -> None:
        self._request = request
        self._chat = chat
        self._created = int(time.time())
        self._sequence_number = 0
        self._begun = False
        self._items: list[OutputItem] = []
        self._message: tuple[int, OutputMessage] | None = None
        self._call: tuple[int, OutputFunctionCall] | None = None  # the latest, until the next one

    def events(self, piece: Piece) -> list[StreamEvent]:
        """What a piece of the output adds; its last one ends the response."""
        chunk = self._chat.chunk(piece)  # which learns the response's id
        events: list[StreamEvent] = []
        if not self._begun:
            self._begun = True
            events += [
                ResponseEvent(
                    type="response.created", response=self._response("in_progress"), sequence_number=self._next()
                ),
                ResponseEvent(
                    type="response.in_progress", response=self._response("in_progress"), sequence_number=self._next()
                ),
            ]
        if chunk is None:
            return events
        [choice] = chunk.choices
        if choice.delta.content:
            events += self._text(choice.delta.content, choice.logprobs.content if choice.logprobs else [])
        for delta in choice.delta.tool_calls or ():
            events += self._arguments(delta)
        if choice.finish_reason is not None:
            events += self._end(choice.finish_reason)
        return events

    def failed(self, error: BaseException) -> ResponseEvent:
        """The last event of a response that has begun and cannot go on."""
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
        return ResponseEvent(type="response.failed", response=response, sequence_number=self._next())

    def full_answer(self, pieces: Sequence[Piece]) -> ResponseObject:
        """Args: the output, in one piece or several."""
        events = [event for piece in pieces for event in self.events(piece)]
        assert isinstance(events[-1], ResponseEvent)
        return events[-1].response

    def _next(self) -> int:
        self._sequence_number += 1
        return self._sequence_number - 1

    def _text(self, content: str, logprobs: list[ChatTokenLogprob]) -> list[StreamEvent]:
        events: list[StreamEvent] = []
        if self._message is None:
            events += self._begin_message()
        assert self._message is not None
        index, message = self._message
        part = message.content[0]
        part.text += content
        part.logprobs += logprobs
        event = TextDeltaEvent(
            item_id=message.id, output_index=index, delta=content, logprobs=logprobs, sequence_number=self._next()
        )
        return [*events, event]

    def _begin_message(self) -> list[StreamEvent]:
        message = OutputMessage(id=f"msg_{uuid.uuid4().hex}", status="in_progress", content=[])
        added = self._added(message)
        part = OutputText(text="")
        message.content.append(part)
        self._message = added.output_index, message
        return [
            added,
            PartEvent(
                type="response.content_part.added",
                item_id=message.id,
                output_index=added.output_index,
                part=part.model_copy(deep=True),
                sequence_number=self._next(),
            ),
        ]

    def _end_message(self, reason: ChoiceEnd) -> list[StreamEvent]:
        assert self._message is not None
        index, message = self._message
        message.status = "incomplete" if reason == "length" else "completed"
        [part] = message.content
        return [
            TextDoneEvent(
                item_id=message.id,
                output_index=index,
                text=part.text,
                logprobs=part.logprobs,
                sequence_number=self._next(),
            ),
            PartEvent(
                type="response.content_part.done",
                item_id=message.id,
                output_index=index,
                part=part,
                sequence_number=self._next(),
            ),
            ItemEvent(type="response.output_item.done", output_index=index, item=message, sequence_number=self._next()),
        ]

    def _arguments(self, delta: ToolCallDelta) -> list[StreamEvent]:
        """The first delta of a call has its id and its function's name."""
        events: list[StreamEvent] = []
        if delta.id is not None:
            events += self._end_call()
            assert delta.function.name is not None
            call = OutputFunctionCall(
                id=f"fc_{uuid.uuid4().hex}",
                call_id=delta.id,
                name=delta.function.name,
                arguments="",
                status="in_progress",
            )
            added = self._added(call)
            self._call = added.output_index, call
            events.append(added)
        assert self._call is not None
        index, call = self._call
        if delta.function.arguments:
            call.arguments += delta.function.arguments
            more = delta.function.arguments
            events.append(
                ArgumentsDeltaEvent(item_id=call.id, output_index=index, delta=more, sequence_number=self._next())
            )
        return events

    def _end_call(self) -> list[StreamEvent]:
        if self._call is None:
            return []
        (index, call), self._call = self._call, None
        call.status = "completed"
        return [
            ArgumentsDoneEvent(
                item_id=call.id,
                output_index=index,
                name=call.name,
                arguments=call.arguments,
                sequence_number=self._next(),
            ),
            ItemEvent(type="response.output_item.done", output_index=index, item=call, sequence_number=self._next()),
        ]

    def _added(self, item: OutputItem) -> ItemEvent:
        index = len(self._items)
        self._items.append(item)
        # A copy: a caller by handle may look at events later, when the item has grown.
        copy = item.model_copy(deep=True)
        return ItemEvent(type="response.output_item.added", output_index=index, item=copy, sequence_number=self._next())

    def _end(self, reason: ChoiceEnd) -> list[StreamEvent]:
        events: list[StreamEvent] = []
        if not self._items:  # an empty answer is a message, too
            events += self._begin_message()
        if self._message is not None:
            events += self._end_message(reason)
        events += self._end_call()
        if reason == "length":
            response = self._response("incomplete")
            response.incomplete_details = IncompleteDetails()
            return [*events, ResponseEvent(type="response.incomplete", response=response, sequence_number=self._next())]
        response = self._response("completed")
        response.completed_at = int(time.time())
        return [*events, ResponseEvent(type="response.completed", response=response, sequence_number=self._next())]

    def _response(self, status: str) -> ResponseObject:
        asked = self._request
        return ResponseObject.model_validate(
            {
                "id": self._chat.id,
                "created_at": self._created,
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
