"""Replies of `/v1/messages`: the message, and the events of its stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from folio.app.api.base import Omitted

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextContent(BaseModel):
    type: Literal["text"] = "text"
    text: str


class ThinkingContent(BaseModel):
    """Reasoning. The signature is a checksum of the text; nothing verifies it."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class ToolUseContent(BaseModel):
    """A call. The result refers to `id`."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


Content = Annotated[TextContent | ThinkingContent | ToolUseContent, Field(discriminator="type")]


class MessageTokensDetails(BaseModel):
    """`thinking_tokens`: those of the output's tokens that are reasoning."""

    thinking_tokens: int


class MessageUsage(BaseModel):
    """The prompt has `input_tokens` + `cache_read_input_tokens`, of which the latter were found in the prefix cache.
    `cache_creation_input_tokens` is always 0: what is written to the cache is not counted."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: Omitted[MessageTokensDetails] = None


class MessageObject(BaseModel):
    """An answer. Its `id` can be forked while it runs and shortly after."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(BaseModel):
    """Tokens of the prompt."""

    input_tokens: int


class MessageStart(BaseModel):
    """The message begins, without content."""

    type: Literal["message_start"] = "message_start"
    message: MessageObject


class Ping(BaseModel):
    """A keep-alive message, without information."""

    type: Literal["ping"] = "ping"


class BlockStart(BaseModel):
    """Block `index` of the content begins."""

    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: Content


class TextDelta(BaseModel):
    type: Literal["text_delta"] = "text_delta"
    text: str


class ThinkingDelta(BaseModel):
    type: Literal["thinking_delta"] = "thinking_delta"
    thinking: str


class SignatureDelta(BaseModel):
    """The signature, after all text of the reasoning."""

    type: Literal["signature_delta"] = "signature_delta"
    signature: str


class InputDelta(BaseModel):
    """More of a call's input, as a part of its JSON."""

    type: Literal["input_json_delta"] = "input_json_delta"
    partial_json: str


class BlockDelta(BaseModel):
    """More of block `index`."""

    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: Annotated[TextDelta | ThinkingDelta | SignatureDelta | InputDelta, Field(discriminator="type")]


class BlockStop(BaseModel):
    """Block `index` is complete."""

    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class MessageEnd(BaseModel):
    """Why the message has ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(BaseModel):
    """The message has ended. The usage is that of the whole message."""

    type: Literal["message_delta"] = "message_delta"
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(BaseModel):
    """The last event."""

    type: Literal["message_stop"] = "message_stop"


MessageEvent = Annotated[
    MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop, Field(discriminator="type")
]
