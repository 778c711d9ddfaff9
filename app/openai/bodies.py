"""Request and response bodies of the OpenAI API. Types are strict and unknown fields are errors.

Fields this version does not act on are accepted only with the value that asks for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from app.engine.params import SamplingParams
from app.engine.request import FinishReason
from app.openai.structures import ResponseFormat
from app.openai.tool_bodies import Text, ToolCall, ToolChoice, Tools


def _only(*allowed: object) -> AfterValidator:
    def check(value: Any) -> Any:
        if value is not None and value not in allowed:
            raise ValueError(f"this version supports only {' or '.join(map(repr, allowed))}")
        return value

    return AfterValidator(check)


def _is_text(text: str) -> str:
    """JSON can carry half of a surrogate pair, which no hash can take."""
    text.encode()  # UnicodeEncodeError is a ValueError
    return text


Name = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_is_text)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Body):
    """`include_usage` adds a last chunk with the token counts."""

    include_usage: bool = False


class _GenerationBody(_Body):
    """What completions and chat completions share.

    Extensions: `top_k`, `ignore_eos`; `priority`, the lower goes first and is preempted last; `cache_salt`, only
    requests with the same one share cached prefixes.
    """

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    priority: int = 0
    cache_salt: Name | None = None
    user: str | None = None
    n: Annotated[int | None, _only(1)] = None
    frequency_penalty: Annotated[float | None, _only(0)] = None
    presence_penalty: Annotated[float | None, _only(0)] = None
    logit_bias: Annotated[dict[str, float] | None, _only({})] = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self, max_tokens: int | None) -> SamplingParams:
        """Raises `RequestError` when a value is out of bounds."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.seed,
            stop=self.stop or (),
            ignore_eos=self.ignore_eos,
        )


class CompletionRequest(_GenerationBody):
    """`POST /v1/completions`: a prompt as text or token ids."""

    prompt: str | list[int]
    max_tokens: int | None = 16
    best_of: Annotated[int | None, _only(1)] = None
    echo: Annotated[bool | None, _only(False)] = None
    logprobs: Annotated[int | None, _only()] = None
    suffix: Annotated[str | None, _only()] = None


class TextPart(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    """One message of a conversation; `content` is text, whole or in parts. An assistant's may have `tool_calls` instead
    or beside it; a tool's answers the call `tool_call_id`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, Field(min_length=1)] = None
    tool_call_id: Text | None = None

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)

    @model_validator(mode="after")
    def _check_role(self) -> Message:
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError(f"tool_calls are an assistant's, and this message is a {self.role}'s")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("a tool's message needs the tool_call_id that it answers, and no other may have one")
        if self.content is None and self.tool_calls is None:
            raise ValueError("content is missing")
        return self


class ChatCompletionRequest(_GenerationBody):
    """`POST /v1/chat/completions`. `max_tokens` is the older name of `max_completion_tokens`; without
    either the answer may fill the context."""

    messages: list[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: Annotated[bool | None, _only(False)] = None
    top_logprobs: Annotated[int | None, _only(0)] = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class PinRequest(_Body):
    """A prefix to keep in the cache under a name: a prompt as text or token ids, or messages that conversations begin
    with."""

    name: Name
    prompt: str | list[int] | None = None
    messages: list[Message] | None = None
    cache_salt: Name | None = None


class PromptTokensDetails(BaseModel):
    """`cached_tokens` of the prompt were found in the prefix cache."""

    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionChoice(BaseModel):
    index: int = 0
    text: str
    logprobs: None = None
    finish_reason: FinishReason | None = None


class Completion(BaseModel):
    """The answer of `/v1/completions`, and one chunk of it when streamed."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    index: int = 0
    message: AssistantMessage
    logprobs: None = None
    finish_reason: FinishReason | None = None


class ChatCompletion(BaseModel):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(BaseModel):
    """What a chunk adds to the message; absent fields are left out of the JSON."""

    role: Literal["assistant"] | None = None
    content: str | None = None

    @model_serializer(mode="wrap")
    def _omit_absent(self, serialize: SerializerFunctionWrapHandler) -> dict[str, str]:
        return {name: value for name, value in serialize(self).items() if value is not None}


class ChatChunkChoice(BaseModel):
    index: int = 0
    delta: ChatDelta
    logprobs: None = None
    finish_reason: FinishReason | None = None


class ChatCompletionChunk(BaseModel):
    """One chunk of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """A served model; `max_model_len` is its context in tokens."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "folio"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = Field(default=None)
    code: str | None = Field(default=None)


class ErrorBody(BaseModel):
    """OpenAI's error JSON."""

    error: ErrorDetail
