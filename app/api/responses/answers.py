"""Answers of `/v1/responses`: the pieces of an output as a response, whole or event by event."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar

from folio.app.api.base import OtherKind
from folio.app.api.openai.answers import ChatAnswer
from folio.app.api.openai.sampling_body import TextFormat
from folio.app.api.responses.body import NamedSchemaFormat, ResponsesRequest, TextConfig
from folio.app.api.responses.call_text import CallText
from folio.app.api.responses.replies import (
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    FailureDetail,
    IncompleteDetails,
    InputDeltaEvent,
    InputDoneEvent,
    InputTokensDetails,
    ItemEvent,
    OutputCustomCall,
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
    SummaryDeltaEvent,
    SummaryDoneEvent,
    SummaryPartEvent,
    SummaryText,
    TextDeltaEvent,
    TextDoneEvent,
    TextEcho,
)
from folio.app.api.responses.tools import CustomTool
from folio.app.engine.request.delta import FinishReason
from folio.app.engine.sampling.token_logprobs import TokenLogprobs
from folio.app.errors import ContextLengthError, OverloadedError, RequestError
from folio.app.fleet.messages import Piece
from folio.app.http.errors import error_response
from folio.app.http.request_context import current_context

# Fields of a response that have the request's values.
_ECHOED = (
    "model",
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "previous_response_id",
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
        self._num_calls = 0
        self._call_text = CallText()  # of the custom call that grows
        if request.stream and (context := current_context()) is not None:
            context.silent_events = self.silent_events

    @property
    def has_begun(self) -> bool:
        return bool(self._num_events)

    def silent_events(self) -> Iterator[StreamEvent]:
        """Events for a time without output: the response is in progress. The first of them fixes the response's id."""
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
                self._num_calls += 1
                if not self._leaves_out_calls:
                    yield from self._begin_call(part.text)
            elif not self._leaves_out_calls:
                yield from self._continue_call(part.text)
        if piece.finish_reason is not None:
            yield from self._end(piece.finish_reason, self._chat.ends_within_call(piece))

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
            is_too_long = isinstance(error, ContextLengthError)  # agents shorten the conversation
            response.error.code = "context_length_exceeded" if is_too_long else "invalid_prompt"
        return self._event(ResponseEvent, type="response.failed", response=response)

    def full_answer(self, outputs: Sequence[Sequence[Piece]]) -> ResponseObject:
        """The whole response. Args: the output of the one prompt, in one piece or several."""
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
            item = OutputMessage(id=self._new_id("msg"), status="in_progress", content=[])
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
            item = OutputReasoning(id=self._new_id("rs"), status="in_progress")
            asked = self._request.reasoning
            summarizes = asked is not None and (asked.summary or asked.generate_summary) is not None
            yield from self._begin_item(item, SummaryText(text="") if summarizes else ReasoningText(text=""))
        [part] = item.summary or item.content
        part.text += text
        kind = SummaryDeltaEvent if isinstance(part, SummaryText) else ReasoningDeltaEvent
        yield self._event(kind, **self._place(item), delta=text)

    @property
    def _leaves_out_calls(self) -> bool:
        most = self._request.max_tool_calls
        return most is not None and self._num_calls > most

    def _begin_call(self, name: str) -> Iterator[StreamEvent]:
        yield from self._end_item("completed")
        shown = self._request.shown_tools.behind(name)
        call: dict[str, Any] = {
            "call_id": self._chat.new_call_id(),
            "namespace": shown.namespace,
            "name": shown.tool.name,
            "status": "in_progress",
        }
        if isinstance(shown.tool, CustomTool):
            self._call_text = CallText()
            yield from self._begin_item(OutputCustomCall(id=self._new_id("ctc"), **call, input=""))
        else:
            yield from self._begin_item(OutputFunctionCall(id=self._new_id("fc"), **call, arguments=""))

    def _continue_call(self, arguments: str) -> Iterator[StreamEvent]:
        call = self._item
        if isinstance(call, OutputCustomCall):
            yield from self._add_input(call, self._call_text.push(arguments))
            return
        assert isinstance(call, OutputFunctionCall)
        call.arguments += arguments
        yield self._event(ArgumentsDeltaEvent, **self._place(call), delta=arguments)

    def _add_input(self, call: OutputCustomCall, text: str) -> Iterator[StreamEvent]:
        if text:
            call.input += text
            yield self._event(InputDeltaEvent, **self._place(call), delta=text)

    def _new_id(self, kind: str) -> str:
        """The id of the next item: it names the response, in whose document a store finds it."""
        return f"{kind}_{document_key(self._chat.id)}_{len(self._items)}"

    def _begin_item(
        self, item: OutputItem, part: OutputText | ReasoningText | SummaryText | None = None
    ) -> Iterator[StreamEvent]:
        self._item = item
        self._items.append(item)
        # Copies: callers through a handle may read an event after its item has grown.
        index, copy = len(self._items) - 1, item.model_copy(deep=True)
        yield self._event(ItemEvent, type="response.output_item.added", output_index=index, item=copy)
        if isinstance(part, SummaryText):
            assert isinstance(item, OutputReasoning)
            item.summary.append(part)
            place, copied = self._place(item), part.model_copy()
            yield self._event(SummaryPartEvent, type="response.reasoning_summary_part.added", **place, part=copied)
        elif part is not None and isinstance(item, OutputMessage | OutputReasoning):
            item.content.append(part)  # type: ignore[arg-type]  # each item has its kind of part
            place, copy_of_part = self._place(item), part.model_copy(deep=True)
            yield self._event(PartEvent, type="response.content_part.added", **place, part=copy_of_part)

    def _end_item(self, status: Literal["incomplete", "completed"]) -> Iterator[StreamEvent]:
        item, self._item = self._item, None
        if item is None:
            return
        item.status, place = status, self._place(item)
        if isinstance(item, OutputCustomCall):
            yield from self._add_input(item, self._call_text.finish())
            yield self._event(InputDoneEvent, **place, input=item.input)
        elif isinstance(item, OutputFunctionCall):
            yield self._event(ArgumentsDoneEvent, **place, name=item.name, arguments=item.arguments)
        elif isinstance(item, OutputReasoning) and item.summary:
            [part] = item.summary
            yield self._event(SummaryDoneEvent, **place, text=part.text)
            yield self._event(SummaryPartEvent, type="response.reasoning_summary_part.done", **place, part=part)
        else:
            [content] = item.content
            if isinstance(content, OutputText):
                yield self._event(TextDoneEvent, **place, text=content.text, logprobs=content.logprobs)
            else:
                yield self._event(ReasoningDoneEvent, **place, text=content.text)
            yield self._event(PartEvent, type="response.content_part.done", **place, part=content)
        index = place["output_index"]
        yield self._event(ItemEvent, type="response.output_item.done", output_index=index, item=item)

    def _place(self, item: OutputItem) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": len(self._items) - 1}

    def _end(self, reason: FinishReason, ends_within_call: bool) -> Iterator[StreamEvent]:
        status: Literal["incomplete", "completed"] = "incomplete" if reason == "length" else "completed"
        if not self._items:  # an empty answer is a message, too
            yield from self._text("", ())
        yield from self._end_item("incomplete" if ends_within_call else status)
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
                "tools": list(asked.shown_tools.kept),
                "tool_choice": "auto" if isinstance(asked.tool_choice, OtherKind) else asked.tool_choice or "auto",
                "store": bool(asked.store),
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


def document_key(response_id: str) -> str:
    """The name of a response's document in a store, which is part of its items' ids."""
    return hashlib.sha256(response_id.encode()).hexdigest()[:32]
