"""Request bodies of the OpenAI API. Types are strict and unknown fields are errors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from app.engine.params import SamplingParams, Structure
from app.errors import RequestError
from app.openai.sampling_body import SamplingBody
from app.openai.strict import StrictBody, Text
from app.openai.structures import ResponseFormat, guided_structure, only_structure, structure_of
from app.openai.tool_bodies import EarlierCall, ToolChoice, Tools

MAX_PROMPTS = 256
MAX_TOP_LOGPROBS = 20


def _no_suffix(suffix: str | None) -> str | None:
    if suffix is not None:
        raise ValueError("models here only continue a prompt; leave it out")
    return suffix


def _kind_of(prompt: object) -> str:
    """Its first element decides, so that what is wrong is said of that kind only."""
    if isinstance(prompt, list):
        if prompt and isinstance(prompt[0], str):
            return "texts"
        return "batch" if prompt and isinstance(prompt[0], list) else "tokens"
    return "text"


Name = Annotated[Text, Field(min_length=1, max_length=256)]
TokenIds = list[Annotated[int, Field(ge=0, lt=2**31)]]
Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[TokenIds, Tag("tokens")]
    | Annotated[list[str], Tag("texts")]
    | Annotated[list[TokenIds], Tag("batch")],
    Discriminator(_kind_of),
]


class GenerationBody(SamplingBody):
    """What completions and chat completions share. `model` may be the name of an adapter.

    Extensions: `priority`, the lower goes first and is preempted last; `cache_salt`, only requests with the same one
    share cached prefixes; `tenant`, whose request it is: tenants share no cached prefixes (`isolate_tenants`), and get
    equal shares (`fair_tenants`), for which `user` counts where there is none; `timeout_s`, the request fails when it
    has not finished after so long.
    """

    priority: int = 0
    cache_salt: Name | None = None
    tenant: Name | None = None
    timeout_s: Annotated[float | None, Field(gt=0)] = None
    user: Text | None = None


class CompletionRequest(GenerationBody):
    """`POST /v1/completions`: a prompt as text or token ids, or several of one kind; the answer then has all outputs of
    the first prompt, then those of the second, and so on.

    `logprobs`: of each token, and so many alternatives. `echo`: outputs begin with their prompt; with `logprobs` the
    prompt's tokens have theirs, too, and `max_tokens` may be 0.
    """

    prompt: Prompt
    max_tokens: int | None = 16
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Annotated[str | None, AfterValidator(_no_suffix)] = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Each by itself. Raises `RequestError` when there are none, or more than `MAX_PROMPTS`."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise RequestError("prompt is empty; it needs at least one token, or one prompt", "prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        if len(self.prompt) > MAX_PROMPTS:
            raise RequestError(
                f"prompt has {len(self.prompt)} prompts; a request may have {MAX_PROMPTS}: send several", "prompt"
            )
        return self.prompt

    @property
    def only_echoes(self) -> bool:
        """Whether nothing but the prompt is wanted. The token that is generated nevertheless is not shown."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling_params(self) -> SamplingParams:
        """Raises `RequestError` when a value is out of bounds."""
        of_prompt = self.prompt_logprobs, self.logprobs if self.echo else None
        return self.params(
            1 if self.only_echoes else self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=max((number for number in of_prompt if number is not None), default=None),
            structure=guided_structure(self),
        )


class ForkRequest(SamplingBody):
    """`n` more outputs of a request that runs, or has just ended, from where its output `index` is now. `request_id` is
    the `id` of its answer, or of the chunks that have come so far; `model` the one that it runs with."""

    request_id: str
    index: Annotated[int, Field(ge=0)] = 0
    max_tokens: int | None = 16
    logprobs: int | None = None

    def sampling_params(self) -> SamplingParams:
        """Raises `RequestError` when a value is out of bounds."""
        if self.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs cannot be set for a fork: its prompt is computed already", "prompt_logprobs"
            )
        return self.params(
            self.max_tokens, logprobs=self.logprobs, prompt_logprobs=None, structure=guided_structure(self)
        )


class TextPart(StrictBody):
    type: Literal["text"]
    text: str


class Message(StrictBody):
    """One message of a conversation; `content` is text, whole or in parts. An assistant's may have `tool_calls` instead
    or beside it; a tool's answers the call `tool_call_id`.

    Clients send answers back as they have them: with nulls of OpenAI's that are never set here, and with what they have
    made of them themselves, `parsed` and `provider_specific_fields`, which nobody looks at.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[EarlierCall] | None, Field(min_length=1)] = None
    tool_call_id: Text | None = None
    refusal: None = None
    annotations: Annotated[list[Any] | None, Field(max_length=0)] = None
    audio: None = None
    function_call: None = None
    parsed: Any = None
    provider_specific_fields: Any = None

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


class ChatCompletionRequest(GenerationBody):
    """`POST /v1/chat/completions`. `max_tokens` is the older name of `max_completion_tokens`; without
    either the answer may fill the context. `best_of` and `prompt_logprobs` are extensions here."""

    messages: list[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None

    def sampling_params(self, forced: Structure | None = None, kept_token_ids: Collection[int] = ()) -> SamplingParams:
        """What is asked for, with tools as `ToolUse` describes them.

        Args:
            forced: what `tool_choice` makes of the output.
            kept_token_ids: special tokens that calls begin or end with.

        Raises:
            RequestError: a value is out of bounds.
        """
        asked = {"tool_choice": forced, "response_format": structure_of(self.response_format)}
        asked["guided_json and its like"] = guided_structure(self)
        params = self.params(
            self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            logprobs=self._num_logprobs(),
            prompt_logprobs=self.prompt_logprobs,
            structure=only_structure({name: value for name, value in asked.items() if value is not None}),
        )
        return replace(params, kept_token_ids=sorted(kept_token_ids)) if kept_token_ids else params

    def _num_logprobs(self) -> int | None:
        if self.top_logprobs is None:
            return 0 if self.logprobs else None
        if not self.logprobs:
            raise RequestError(f"top_logprobs is {self.top_logprobs}, but logprobs is not true", "top_logprobs")
        if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError(
                f"top_logprobs is {self.top_logprobs}; it must be between 0 and {MAX_TOP_LOGPROBS}", "top_logprobs"
            )
        return self.top_logprobs


class PinRequest(StrictBody):
    """A prefix to keep in the cache under a name: a prompt as text or token ids, or messages that conversations begin
    with. Only requests with the same `cache_salt` and `tenant` share it."""

    name: Name
    prompt: str | list[int] | None = None
    messages: list[Message] | None = None
    cache_salt: Name | None = None
    tenant: Name | None = None
