"""Response bodies of the OpenAI API, and their chunks."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from app.openai.base import OmitNoneModel
from app.openai.tools.bodies import ToolCall, ToolCallDelta

ChoiceEnd = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(BaseModel):
    """`cached_tokens` of the prompt were found in the prefix cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Prompts count once, however many outputs they have."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(BaseModel):
    """A token that stands in the prompt, or could have stood there. `rank`: 1 for the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


# For each token of the prompt: token id → it and its alternatives. The first has none.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class CompletionLogprobs(BaseModel):
    """One entry a token. Tokens that are no whole characters are written `bytes:\\xe2\\x82`.

    `text_offset`: where the token's text begins in the choice's, in characters. `top_logprobs`: token → log
    probability. Both of these and `token_logprobs` are null for the first token of a prompt that is echoed.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(OmitNoneModel):
    """Extensions, left out when there is nothing to say: `stop_reason`, the stop string or token id that ended the
    output; `score`, of a beam; `prompt_logprobs`."""

    _left_out = frozenset({"stop_reason", "score", "prompt_logprobs"})

    index: int = 0
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: ChoiceEnd | None = None
    stop_reason: str | int | None = None
    score: float | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(BaseModel):
    """The answer of `/v1/completions`, and one chunk of it when streamed."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """`bytes`: of the token's text, which may be part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """One entry a token."""

    content: list[ChatTokenLogprob]


class AssistantMessage(OmitNoneModel):
    """`content` is null when there is nothing but tool calls."""

    _left_out = frozenset({"tool_calls"})

    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(OmitNoneModel):
    """Extensions as in `CompletionChoice`."""

    _left_out = frozenset({"stop_reason", "score"})

    index: int = 0
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChoiceEnd | None = None
    stop_reason: str | int | None = None
    score: float | None = None


class ChatCompletion(OmitNoneModel):
    """The answer of `/v1/chat/completions`; `prompt_logprobs` is an extension."""

    _left_out = frozenset({"prompt_logprobs"})

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None


class ChatDelta(OmitNoneModel):
    """What a chunk adds to the message; absent fields are left out of the JSON."""

    _left_out = frozenset({"role", "content", "tool_calls"})

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(OmitNoneModel):
    _left_out = frozenset({"stop_reason", "score"})

    index: int = 0
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChoiceEnd | None = None
    stop_reason: str | int | None = None
    score: float | None = None


class ChatCompletionChunk(OmitNoneModel):
    """One chunk of a streamed chat completion. `prompt_logprobs`, an extension, come with the first."""

    _left_out = frozenset({"prompt_logprobs"})

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ModelCard(BaseModel):
    """A served model, or an adapter of the model `parent`. `max_model_len` is the context in tokens."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "folio"
    max_model_len: int
    parent: str | None = None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
