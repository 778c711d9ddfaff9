"""Request bodies of the OpenAI API. Types are strict and unknown fields are errors.

Bodies of `/tokenize` and `/detokenize`, shaped as vLLM's.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Discriminator, Field, Tag, model_validator

from app.engine.sampling.params import SamplingParams, Structure
from app.errors import RequestError
from app.openai.base import (
    ClientFields,
    ListOf,
    Name,
    OmitNoneModel,
    StrictBody,
    Text,
    at_most,
    only_text,
    text_or,
    unsupported_field,
)
from app.openai.sampling_body import (
    ResponseFormat,
    SamplingBody,
    TokenIds,
    guided_structure,
    only_structure,
    structure_of,
)
from app.openai.tools.bodies import ToolCall, ToolChoice, Tools

MAX_PROMPTS = 256
MAX_MESSAGES = 4096
# Of one message; of its tool calls, too.
MAX_PARTS = 1024
MAX_TOP_LOGPROBS = 20


def _kind_of(prompt: object) -> str:
    """Its first element decides, so that what is wrong is said of that kind only."""
    if isinstance(prompt, list):
        if prompt and isinstance(prompt[0], str):
            return "texts"
        return "batch" if prompt and isinstance(prompt[0], list) else "tokens"
    return "text"


def _in_path(name: str) -> str:
    """As it can stand in a path."""
    if not name.isprintable():
        raise ValueError("it has a character that cannot be printed; leave that out")
    if {".", ".."} & set(name.split("/")):
        raise ValueError("'.' and '..' would be changed in a path; choose another name")
    return name


PinName = Annotated[Name, AfterValidator(_in_path)]
Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[TokenIds, Tag("tokens")]
    | Annotated[ListOf[str], at_most(MAX_PROMPTS, "prompts"), Tag("texts")]
    | Annotated[ListOf[TokenIds], at_most(MAX_PROMPTS, "prompts"), Tag("batch")],
    Discriminator(_kind_of),
]


class GenerationBody(SamplingBody, ClientFields):
    """What completions, chat completions and responses share."""

    priority: Annotated[int | None, Field(ge=-(2**31), lt=2**31)] = None
    """The lower goes first, and is preempted last. 0 by default."""
    cache_salt: Name | None = None
    """Only requests with the same one share cached prefixes."""
    pin: PinName | None = None
    """Keep the prompt, as far as it fills whole blocks, in the prefix cache of every replica under this name, until it
    is unpinned. It is computed there before the answer begins. The same prompt may be pinned again; another one under
    that name is an error."""
    tenant: Name | None = None
    """Whose request it is: tenants share no cached prefixes (`isolate_tenants`), and get equal shares
    (`fair_tenants`)."""
    timeout_s: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    """The request ends with an error when it has not finished after so many seconds."""
    user: Text | None = None
    """Whom the request comes from: what `tenant` is for `fair_tenants` where there is none."""


class CompletionRequest(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Annotated[Prompt, Field(examples=["The key of room 417 is 93. The key of room 417 is"])]
    """Text or token ids, or several of one kind; the answer then has all outputs of the first prompt, then those of the
    second, and so on."""
    max_tokens: int | None = 16
    """Tokens to generate at most; null: as many as the context has room for. 0 with `echo`: only the prompt."""
    echo: bool | None = None
    """Outputs begin with their prompt; with `logprobs` the prompt's tokens have theirs, too."""
    logprobs: int | None = None
    """Log probabilities of each token, and so many alternatives."""
    suffix: Annotated[None, unsupported_field("models here only continue a prompt; leave it out")] = None
    """Refused: models here only continue a prompt."""

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Each by itself. Raises `RequestError` when there are none."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise RequestError("prompt is empty; it needs at least one token, or one prompt", "prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
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
    """`n` more outputs of a request that runs, or has just ended, from where its output `index` is now; `model` is the
    one that it runs with."""

    request_id: str
    """The `id` of its answer, or of the chunks that have come so far."""
    index: Annotated[int, Field(ge=0)] = 0
    """Of the output."""
    max_tokens: int | None = 16
    """Tokens to generate at most, more than there are already."""
    logprobs: int | None = None
    """Log probabilities of each token, and so many alternatives."""

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


Content = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[ListOf[Annotated[TextPart, only_text]], at_most(MAX_PARTS, "parts"), Tag("parts")],
    text_or("parts"),
]


class Message(StrictBody):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """`developer` is `system` by another name."""
    content: Content | None = None
    """Text, whole or in parts. An assistant's message may have `tool_calls` instead or beside it."""
    name: str | None = None
    """Of who speaks. Chat templates are not shown it."""
    tool_calls: Annotated[ListOf[ToolCall] | None, Field(min_length=1), at_most(MAX_PARTS, "calls")] = None
    """The calls that the assistant has made."""
    tool_call_id: Text | None = None
    """The call that a tool's message answers."""
    refusal: Annotated[
        None, unsupported_field("models here do not refuse in a field of its own; put the text into content")
    ] = None
    """Null, as in answers of OpenAI's."""
    annotations: Annotated[list[Any] | None, Field(max_length=0)] = None
    """Empty, as in answers of OpenAI's."""
    audio: Annotated[None, unsupported_field("messages are text here; leave it out")] = None
    """Null, as in answers of OpenAI's."""
    function_call: Annotated[None, unsupported_field("it is deprecated and not known here; use tool_calls")] = None
    """Null, as in answers of OpenAI's."""
    parsed: Any = None
    """What the official client has made of an answer. Nobody looks at it."""
    provider_specific_fields: Any = None
    """What LiteLLM has made of an answer. Nobody looks at it."""

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


Messages = Annotated[ListOf[Message], at_most(MAX_MESSAGES, "messages")]


class ChatCompletionRequest(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[Messages, Field(examples=[[{"role": "user", "content": "What is Folio?"}]])]
    """The conversation so far."""
    max_tokens: int | None = None
    """The older name of `max_completion_tokens`."""
    max_completion_tokens: int | None = None
    """Tokens to generate at most; by default as many as the context has room for."""
    logprobs: bool | None = None
    """Log probabilities of each token."""
    top_logprobs: int | None = None
    """And so many alternatives of each, between 0 and 20."""
    tools: Tools | None = None
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """"none": tools are not shown; "auto", the default: the model decides; "required", or one by its name: it calls."""
    parallel_tool_calls: bool | None = None
    """Whether a forced answer may call several at once. True by default."""
    response_format: ResponseFormat | None = None
    """What the answer looks like: text, a JSON object, or JSON that follows a schema."""
    modalities: Annotated[ListOf[Literal["text"]] | None, unsupported_field("answers are text here", ["text"])] = None
    """Answers are text."""
    reasoning_effort: Annotated[
        Literal["none"] | None, unsupported_field("what a model thinks is part of its text here; leave it out", "none")
    ] = None
    """What a model thinks is part of its text here: any effort but "none" is refused."""
    verbosity: Annotated[
        Literal["medium"] | None, unsupported_field("say in the prompt how long it may be", "medium")
    ] = None
    """Anything but "medium", which changes nothing, is refused: say it in the prompt."""
    functions: Annotated[None, unsupported_field("it is deprecated and not known here; use tools")] = None
    """Refused: use `tools`."""
    function_call: Annotated[None, unsupported_field("it is deprecated and not known here; use tool_choice")] = None
    """Refused: use `tool_choice`."""
    audio: Annotated[None, unsupported_field("answers are text here; leave it out")] = None
    """Refused: answers are text."""
    prediction: Annotated[
        None, unsupported_field("tokens are guessed by the server's settings (speculation) here; leave it out")
    ] = None
    """Refused: the server's settings say how tokens are guessed."""
    web_search_options: Annotated[None, unsupported_field("this server has no web search; leave it out")] = None
    """Refused: there is no web search."""

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
    """A prefix to keep in the cache under a name: either a prompt, or messages that conversations begin with."""

    name: Annotated[PinName, Field(examples=["rules"])]
    """The same prefix may be pinned again; another one under that name is an error."""
    prompt: str | TokenIds | None = None
    """Text or token ids that prompts begin with. At least one block of tokens."""
    messages: Messages | None = None
    """What conversations begin with."""
    cache_salt: Name | None = None
    """Only requests with the same one share it."""
    tenant: Name | None = None
    """Only requests of the same one share it, unless `isolate_tenants` is off."""


# Their text is made in one call, during which some of the time nothing else runs.
MAX_DETOKENIZED = 1 << 18


class TokenizeRequest(StrictBody):
    """`POST /tokenize`: either a text, or a conversation as `/v1/chat/completions` would write it."""

    model: Annotated[Text | None, Field(max_length=256, examples=["builtin"])] = None
    """The served model, or an adapter of it; by default the model."""
    prompt: Annotated[Text | None, Field(examples=["What is Folio?"])] = None
    """A text."""
    messages: Messages | None = None
    """A conversation."""
    tools: Tools | None = None
    """With messages: functions that the model may call."""
    add_special_tokens: bool | None = None
    """What the tokenizer puts around a text, such as a first token; true by default. A conversation's template writes
    them itself."""
    add_generation_prompt: bool | None = None
    """With messages: what an answer follows. True by default."""
    return_token_strs: bool | None = None
    """Add each token's text."""


class Tokens(OmitNoneModel):
    """`count` tokens; `token_strs` if they were asked for: what is no whole character is written `\\xe2\\x82`."""

    _left_out = frozenset({"token_strs"})

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(StrictBody):
    """`POST /detokenize`."""

    model: Annotated[Text | None, Field(max_length=256, examples=["builtin"])] = None
    """The served model, or an adapter of it; by default the model."""
    tokens: Annotated[TokenIds, at_most(MAX_DETOKENIZED, "tokens"), Field(examples=[[76, 77]])]
    """262,144 at most."""


class DetokenizedText(BaseModel):
    """The text, with special tokens as they are written."""

    prompt: str
