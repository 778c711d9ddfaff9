"""Answers of `/v1/messages`: the pieces of an output as a message, whole or event by event."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import from_json

from folio.app.api.anthropic.body import MessagesRequest
from folio.app.api.anthropic.replies import (
    BlockDelta,
    BlockStart,
    BlockStop,
    Content,
    InputDelta,
    MessageDelta,
    MessageEnd,
    MessageEvent,
    MessageObject,
    MessageStart,
    MessageStop,
    MessageTokensDetails,
    MessageUsage,
    Ping,
    SignatureDelta,
    StopReason,
    TextContent,
    TextDelta,
    ThinkingContent,
    ThinkingDelta,
    ToolUseContent,
)
from folio.app.api.openai.answers import ChatAnswer
from folio.app.api.output.parser import Part
from folio.app.engine.request.delta import FinishReason
from folio.app.fleet.messages import Piece


class MessageAnswer:
    """The answer to a request, as it grows: blocks of reasoning, text and calls, each complete before the next begins.

    Args:
        chat: splits the pieces into parts.
    """

    def __init__(self, request: MessagesRequest, chat: ChatAnswer) -> None:
        self._request = request
        self._chat = chat
        self._has_begun = False
        self._blocks: list[Content] = []
        self._block: Content | None = None  # the one that grows
        self._text = ""  # of that block: reasoning, or a call's input as JSON

    def events(self, piece: Piece) -> Iterator[MessageEvent]:
        """The events of a piece of the output. The output's last piece ends the message."""
        parts = self._chat.parts(piece)  # also sets the public id
        if not self._has_begun:
            self._has_begun = True
            yield MessageStart(message=self._message([]))
            yield Ping()
        for part in parts:
            yield from self._grow(part)
        if piece.finish_reason is not None:
            yield from self._end_block()
            end = self._end(piece, piece.finish_reason)
            yield MessageDelta(delta=end, usage=self._usage())
            yield MessageStop()

    def full_answer(self, outputs: Sequence[Sequence[Piece]]) -> MessageObject:
        """The whole message. Args: the output of the one prompt, in one piece or several."""
        [pieces] = outputs
        *_, last, _ = (event for piece in pieces for event in self.events(piece))
        assert isinstance(last, MessageDelta)
        return self._message(self._blocks, **dict(last.delta))

    def _grow(self, part: Part) -> Iterator[MessageEvent]:
        if part.kind == "call":
            yield from self._begin(ToolUseContent(id=self._chat.new_call_id(), name=part.text, input={}))
        elif part.kind == "arguments":
            self._text += part.text
            yield self._delta(InputDelta(partial_json=part.text))
        elif part.kind == "reasoning":
            if not isinstance(self._block, ThinkingContent):
                yield from self._begin(ThinkingContent(thinking="", signature=""))
            self._text += part.text
            if self._request.shows_thinking:
                yield self._delta(ThinkingDelta(thinking=part.text))
        else:
            if not isinstance(self._block, TextContent):
                yield from self._begin(TextContent(text=""))
            self._text += part.text
            yield self._delta(TextDelta(text=part.text))

    def _begin(self, block: Content) -> Iterator[MessageEvent]:
        yield from self._end_block()
        self._block, self._text = block, ""
        self._blocks.append(block)
        # A copy: callers through a handle may read an event after its block has grown.
        yield BlockStart(index=len(self._blocks) - 1, content_block=block.model_copy())

    def _delta(self, delta: Any) -> BlockDelta:
        return BlockDelta(index=len(self._blocks) - 1, delta=delta)

    def _end_block(self) -> Iterator[MessageEvent]:
        block, self._block = self._block, None
        if block is None:
            return
        if isinstance(block, ToolUseContent):
            block.input = _input_of(self._text)
        elif isinstance(block, TextContent):
            block.text = self._text
        else:
            block.thinking = self._text if self._request.shows_thinking else ""
            block.signature = hashlib.sha256(self._text.encode()).hexdigest()
            yield self._delta(SignatureDelta(signature=block.signature))
        yield BlockStop(index=len(self._blocks) - 1)

    def _end(self, piece: Piece, reason: FinishReason) -> MessageEnd:
        stop: StopReason = "end_turn"
        if reason == "length":
            is_full = self._chat.usage.completion_tokens < self._request.max_tokens
            stop = "model_context_window_exceeded" if is_full else "max_tokens"
        elif isinstance(piece.stop_reason, str):
            return MessageEnd(stop_reason="stop_sequence", stop_sequence=piece.stop_reason)
        elif self._chat.ending(piece)["finish_reason"] == "tool_calls":
            stop = "tool_use"
        return MessageEnd(stop_reason=stop, stop_sequence=None)

    def _message(self, content: list[Content], **end: Any) -> MessageObject:
        return MessageObject(id=self._chat.id, model=self._request.model, content=content, usage=self._usage(), **end)

    def _usage(self) -> MessageUsage:
        usage = self._chat.usage
        cached, details = usage.prompt_tokens_details.cached_tokens, usage.completion_tokens_details
        return MessageUsage(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
            output_tokens_details=None
            if details is None
            else MessageTokensDetails(thinking_tokens=details.reasoning_tokens),
        )


def _input_of(arguments: str) -> dict[str, Any]:
    """A call's input, or its beginning if the output was cut off; empty if the model wrote no JSON object."""
    try:
        given = from_json(arguments, allow_inf_nan=False, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return given if isinstance(given, dict) else {}
