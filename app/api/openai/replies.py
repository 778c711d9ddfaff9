"""Response bodies: completions and chats, whole and in chunks."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from folio.app.api.base import Omitted
from folio.app.api.tools.bodies import ToolCall, ToolCallDelta

ChoiceEnd = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(BaseModel):
    """`cached_tokens` of the prompt were found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """`reasoning_tokens`: those of the outputs' tokens that are reasoning."""

    reasoning_tokens: int


class Usage(BaseModel):
    """Each prompt counts once, whatever the number of its outputs. `completion_tokens_details` is left out for models
    that do not reason."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: Omitted[CompletionTokensDetails] = None


class PromptLogprob(BaseModel):
    """A token of the prompt, or an alternative to it. `rank` is 1 for the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


# For each token of the prompt but the first: token id → log probability, of the token and its alternatives.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class CompletionLogprobs(BaseModel):
    """One entry a token. Incomplete characters are written `bytes:\\xe2\\x82`.

    `text_offset` is the token's offset in the choice's text, in characters. `top_logprobs` is token → log probability.
    `token_logprobs` and `top_logprobs` are null for the first token of an echoed prompt.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """Extensions, left out while null: `stop_reason`, the stop string or token id that ended the output; `score`, of a
    beam; `prompt_logprobs`; `token_ids` of the output, or of the chunk, and `prompt_token_ids`."""

    index: int = 0
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: ChoiceEnd | None = None
    stop_reason: Omitted[str | int] = None
    score: Omitted[float] = None
    prompt_logprobs: Omitted[PromptLogprobs] = None
    token_ids: Omitted[list[int]] = None
    prompt_token_ids: Omitted[list[int]] = None


class Completion(BaseModel):
    """The answer of `/v1/completions`, or one chunk of it when streamed."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """`bytes`: the token's text in UTF-8, which may be part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """One entry a token."""

    content: list[ChatTokenLogprob]


class AssistantMessage(BaseModel):
    """`content` is null when there are only tool calls. `reasoning_content` and `reasoning` are the same, and left out
    without reasoning."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: Omitted[str] = None
    reasoning: Omitted[str] = None
    tool_calls: Omitted[list[ToolCall]] = None


class ChatChoice(BaseModel):
    """Extensions as in `CompletionChoice`."""

    index: int = 0
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChoiceEnd | None = None
    stop_reason: Omitted[str | int] = None
    score: Omitted[float] = None
    token_ids: Omitted[list[int]] = None


class ChatCompletion(BaseModel):
    """The answer of `/v1/chat/completions`; `prompt_logprobs` and `prompt_token_ids` are extensions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: Omitted[Literal["default"]] = None
    prompt_logprobs: Omitted[PromptLogprobs] = None
    prompt_token_ids: Omitted[list[int]] = None


class ChatDelta(BaseModel):
    """A chunk's part of the message."""

    role: Omitted[Literal["assistant"]] = None
    content: Omitted[str] = None
    reasoning_content: Omitted[str] = None
    reasoning: Omitted[str] = None
    tool_calls: Omitted[list[ToolCallDelta]] = None


class ChatChunkChoice(BaseModel):
    index: int = 0
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChoiceEnd | None = None
    stop_reason: Omitted[str | int] = None
    score: Omitted[float] = None
    token_ids: Omitted[list[int]] = None


class ChatCompletionChunk(BaseModel):
    """One chunk of a streamed chat completion. `prompt_logprobs` and `prompt_token_ids`, extensions, come with the
    first."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    service_tier: Omitted[Literal["default"]] = None
    prompt_logprobs: Omitted[PromptLogprobs] = None
    prompt_token_ids: Omitted[list[int]] = None
