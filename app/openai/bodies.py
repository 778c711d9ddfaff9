"""Request bodies of the OpenAI API, and bodies of `/tokenize` and `/detokenize` as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Discriminator, Field, Tag, model_validator

from app.config.parsers import ReasoningParserName, ToolParserName
from app.config.shelf import LEAST_WEIGHT, MOST_WEIGHT
from app.engine.sampling.params import SamplingParams
from app.errors import RequestError
from app.openai.base import (
    ClientFields,
    JsonObject,
    ListOf,
    Name,
    Omitted,
    StrictBody,
    Text,
    at_most,
    joined_text,
    none_if_empty,
    only_text,
    text_or,
    unsupported_field,
)
from app.openai.output.plan import OutputPlan
from app.openai.sampling_body import ResponseFormat, SamplingBody, TokenIds, structure_of
from app.openai.tools.bodies import ToolCall, ToolChoice, Tools

MAX_PROMPTS = 256
MAX_MESSAGES = 4096
# Of one message; also the most tool calls of one message.
MAX_PARTS = 1024
MAX_TOP_LOGPROBS = 20
MAX_TEMPLATE_VARIABLES, MAX_DOCUMENTS = 64, 1024
# Decoding them is one call, which holds the interpreter's lock part of the time.
MAX_DETOKENIZED = 1 << 18


def kind_of_prompt(prompt: object) -> str:
    """The kind of the first element, so that errors describe only this kind."""
    if isinstance(prompt, list):
        if prompt and isinstance(prompt[0], str):
            return "texts"
        return "batch" if prompt and isinstance(prompt[0], list) else "tokens"
    return "text"


def _in_path(name: str) -> str:
    if not name.isprintable():
        raise ValueError("the name has a character that cannot be printed; leave it out")
    if {".", ".."} & set(name.split("/")):
        raise ValueError("'.' and '..' would be changed in a URL's path; choose another name")
    return name


PinName = Annotated[Name, AfterValidator(_in_path)]
Prompt = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[TokenIds, Tag("tokens")]
    | Annotated[ListOf[Text], at_most(MAX_PROMPTS, "prompts"), Tag("texts")]
    | Annotated[ListOf[TokenIds], at_most(MAX_PROMPTS, "prompts"), Tag("batch")],
    Discriminator(kind_of_prompt),
]


# A day, as OpenAI's longest `prompt_cache_retention`.
MAX_CACHE_TTL_S = 86_400.0


class GenerationBody(SamplingBody, ClientFields):
    """Fields that completions, chat completions and responses share."""

    priority: Annotated[int | None, Field(ge=-(2**31), lt=2**31)] = None
    """Requests with a lower number are scheduled first and preempted last. 0 by default."""
    cache_salt: Name | None = None
    """Only requests with the same salt share cached prefixes."""
    pin: PinName | None = None
    """Pin the whole blocks of the prompt in the prefix cache of every replica under this name, until they are unpinned.
    They are computed before the answer begins. Pinning the same prompt again has no effect; another prompt under this
    name is an error."""
    tenant: Name | None = None
    """The tenant of the request: tenants share no cached prefixes (`isolate_tenants`) and are scheduled fairly
    (`fair_tenants`)."""
    timeout_s: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    """Seconds after which an unfinished request ends with an error."""
    cache_ttl_s: Annotated[float | None, Field(ge=0, le=MAX_CACHE_TTL_S, allow_inf_nan=False)] = None
    """Seconds for which the prefix is kept in the cache after the request: whole blocks of the prompt, and of the
    output in a conversation. A longer time than `max_cache_ttl_s` is taken for that one. Kept prefixes take at most
    `retain_quota` of the cache, and running requests take precedence. 0: like any other prefix."""
    user: Text | None = None
    """The end user. `fair_tenants` takes the user for the tenant of requests without one."""
    request_id: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")] = None
    """The answer's id, after its prefix. Such an answer cannot be forked. By default a random one."""
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1)] = None
    """Keep this number of tokens at the end of a longer prompt; -1: as many as the context has room for."""

    @property
    def wanted_ttl_s(self) -> float | None:
        """How long the prefix is to be kept in the cache; the server's setting bounds it."""
        if self.cache_ttl_s is None and self.prompt_cache_retention == "24h":
            return MAX_CACHE_TTL_S
        return self.cache_ttl_s


class TokenFields(StrictBody):
    """Tokens in prompts and answers, under vLLM's names."""

    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens to the prompt, such as a first token. By default true for a text, false for a
    conversation, whose template writes them."""
    return_token_ids: bool | None = None
    """Return `prompt_token_ids`, in a stream with the first chunk, and `token_ids` of each output."""
    return_tokens_as_token_ids: bool | None = None
    """Write tokens of log probabilities as `token_id:5`."""


class TemplateFields(StrictBody):
    """What the chat template gets beside messages and tools."""

    chat_template_kwargs: Annotated[JsonObject | None, at_most(MAX_TEMPLATE_VARIABLES, "variables")] = None
    """Variables of the model's chat template, such as `enable_thinking`."""
    documents: Annotated[ListOf[JsonObject] | None, at_most(MAX_DOCUMENTS, "documents"), none_if_empty] = None
    """Documents for chat templates that show some, mostly with `title` and `text`."""
    add_generation_prompt: bool | None = None
    """Add the template's text before an answer. True by default."""
    continue_final_message: bool | None = None
    """The answer continues the last message. `add_generation_prompt` is then false."""
    chat_template: Annotated[None, unsupported_field("the model's own template is used; leave it out")] = None
    """Refused: the model's own template is used."""


class CompletionRequest(GenerationBody, TokenFields):
    """`POST /v1/completions`."""

    prompt: Annotated[Prompt, Field(examples=["The key of room 417 is 93. The key of room 417 is"])]
    """Text or token ids, or a list of one kind. The answer has all outputs of the first prompt, then those of the
    second, and so on."""
    max_tokens: int | None = 16
    """Tokens to generate at most; null: as many as the context has room for. 0 with `echo`: only the prompt."""
    echo: bool | None = None
    """Begin outputs with their prompt; with `logprobs`, also give the log probabilities of the prompt's tokens."""
    logprobs: int | None = None
    """Log probabilities of each token, with this number of alternatives."""
    response_format: ResponseFormat | None = None
    """The form of the answer: text, a JSON object, JSON that follows a schema, or text with such parts."""
    suffix: Annotated[Literal[""] | None, unsupported_field("models here only continue a prompt; leave it out", "")] = (
        None
    )
    """Refused: models here only continue a prompt."""

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list. Raises `RequestError` when it is empty."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise RequestError("prompt is empty; it needs at least one token, or one prompt", "prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    def sampling_params(self) -> SamplingParams:
        """Raises `RequestError`, see `params`."""
        of_prompt = self.prompt_logprobs, self.logprobs if self.echo else None
        return self.params(
            1 if self.echo and self.max_tokens == 0 else self.max_tokens,  # one that is not shown
            logprobs=self.logprobs,
            prompt_logprobs=max((number for number in of_prompt if number is not None), default=None),
            response_format=structure_of(self.response_format),
        )


class ForkRequest(SamplingBody):
    """`POST /v1/forks`: `n` more outputs of a running or recently finished request, with the same `model`. They
    continue output `index` from its current end."""

    request_id: str
    """The `id` of the request's answer or chunks."""
    index: Annotated[int, Field(ge=0)] = 0
    """The output to continue."""
    max_tokens: int | None = 16
    """Tokens to generate at most, beyond the existing ones."""
    logprobs: int | None = None
    """Log probabilities of each token, with this number of alternatives."""
    timeout_s: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    """Seconds after which unfinished forks end with an error."""

    def sampling_params(self) -> SamplingParams:
        """Raises `RequestError`, see `params`."""
        if self.prompt_logprobs is not None:
            raise RequestError("a fork's prompt is computed already; leave prompt_logprobs out", "prompt_logprobs")
        return self.params(self.max_tokens, logprobs=self.logprobs, prompt_logprobs=None)


class TextPart(StrictBody):
    type: Literal["text"]
    text: Text

    dropped = frozenset({"cache_control"})


Content = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[ListOf[Annotated[TextPart, only_text]], at_most(MAX_PARTS, "parts"), Tag("parts")],
    text_or("parts"),
]


class Message(StrictBody):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """`developer` is `system` by another name."""
    content: Content | None = None
    """Text, or a list of parts. An assistant's message may have `tool_calls` instead or as well."""
    name: str | None = None
    """Name of the speaker. Chat templates do not get it."""
    tool_calls: Annotated[ListOf[ToolCall] | None, at_most(MAX_PARTS, "calls"), none_if_empty] = None
    """The assistant's calls."""
    tool_call_id: Text | None = None
    """The call that a tool's message answers."""
    reasoning_content: Text | None = None
    """The assistant's reasoning. Chat templates decide how much of it the model sees again."""
    reasoning: Text | None = None
    """Another name of `reasoning_content`."""
    refusal: Annotated[
        None, unsupported_field("refusals have no field of their own here; put the text into content")
    ] = None
    """Null, as in OpenAI's answers."""
    annotations: Annotated[list[Any] | None, Field(max_length=0)] = None
    """Empty, as in OpenAI's answers."""
    audio: Annotated[None, unsupported_field("messages are text here; leave it out")] = None
    """Null, as in OpenAI's answers."""
    function_call: Annotated[None, unsupported_field("it is deprecated and not known here; use tool_calls")] = None
    """Null, as in OpenAI's answers."""

    # Added to answers by OpenAI's client and LiteLLM, and to messages for Anthropic's models.
    dropped = frozenset({"parsed", "provider_specific_fields", "cache_control"})

    @model_validator(mode="after")
    def _check_role(self) -> Message:
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError(f"only an assistant's message may have tool_calls; the role is {self.role}")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("a tool's message needs a tool_call_id, and no other message may have one")
        if self.reasoning_text is not None and self.role != "assistant":
            raise ValueError(f"only an assistant's message may have reasoning; the role is {self.role}")
        if self.content is None and self.tool_calls is None and self.reasoning_text is None:
            raise ValueError("content is missing")
        return self

    @property
    def reasoning_text(self) -> str | None:
        return self.reasoning if self.reasoning_content is None else self.reasoning_content


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class Thinking(StrictBody):
    """Whether the model reasons before it answers, where its chat template lets one choose."""

    type: Literal["enabled", "disabled"]
    budget_tokens: Annotated[int | None, Field(ge=0)] = None
    """Tokens of reasoning at most."""


Messages = Annotated[ListOf[Message], at_most(MAX_MESSAGES, "messages")]


class ChatCompletionRequest(GenerationBody, TokenFields, TemplateFields):
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
    """Number of alternatives for each token, between 0 and 20."""
    echo: bool | None = None
    """Begin the answer with the text of a last message of the assistant, for `continue_final_message`."""
    tools: Tools = None
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """"none": the prompt does not show tools; "auto", the default: the model decides; "required", or a function's name:
    the answer is a call."""
    parallel_tool_calls: bool | None = None
    """Whether a forced answer may have several calls. True by default."""
    response_format: ResponseFormat | None = None
    """The form of the answer: text, a JSON object, or JSON that follows a schema."""
    modalities: Annotated[ListOf[Literal["text"]] | None, unsupported_field("answers are text here", ["text"])] = None
    """Answers are text."""
    reasoning_effort: ReasoningEffort | None = None
    """How much the model reasons before it answers. The chat template gets it; "none" switches reasoning off where the
    template can."""
    thinking: Thinking | bool | None = None
    """Whether the model reasons, for templates that let one choose."""
    thinking_token_budget: Annotated[int | None, Field(ge=0)] = None
    """Tokens of reasoning at most; then its end is forced. Another name of `thinking.budget_tokens`."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """No effect: ask for a length in the prompt."""
    functions: Annotated[None, unsupported_field("it is deprecated and not known here; use tools")] = None
    """Refused: use `tools`."""
    function_call: Annotated[None, unsupported_field("it is deprecated and not known here; use tool_choice")] = None
    """Refused: use `tool_choice`."""
    audio: Annotated[None, unsupported_field("answers are text here; leave it out")] = None
    """Refused: answers are text."""
    prediction: JsonObject | None = None
    """No effect: the server's settings decide about speculation."""
    web_search_options: Annotated[None, unsupported_field("this server has no web search; leave it out")] = None
    """Refused: there is no web search."""

    def sampling_params(self, output: OutputPlan | None = None) -> SamplingParams:
        """Args: `output`: its structure is forced. Raises `RequestError`, see `params`."""
        return self.params(
            self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.prompt_logprobs,
            output=output,
            response_format=structure_of(self.response_format),
        )

    @property
    def template_settings(self) -> dict[str, Any]:
        """Variables of the chat template that decide about reasoning."""
        reasons: bool | None = None
        if self.reasoning_effort is not None:
            reasons = self.reasoning_effort != "none"
        if self.thinking is not None:
            reasons = self.thinking if isinstance(self.thinking, bool) else self.thinking.type == "enabled"
        settings: dict[str, Any] = {} if reasons is None else {"enable_thinking": reasons, "thinking": reasons}
        if self.reasoning_effort is not None:
            settings["reasoning_effort"] = self.reasoning_effort
        return settings

    @property
    def continued_text(self) -> str | None:
        """The text of the last message if the answer continues it."""
        return joined_text(self.messages[-1].content) if self.continue_final_message else None

    @property
    def reasoning_budget(self) -> int | None:
        """In tokens. Raises `RequestError` for two different ones."""
        budget = self.thinking.budget_tokens if isinstance(self.thinking, Thinking) else None
        if budget is None or self.thinking_token_budget in (None, budget):
            return self.thinking_token_budget if budget is None else budget
        raise RequestError(
            f"thinking_token_budget is {self.thinking_token_budget} and thinking.budget_tokens {budget}; leave one out",
            "thinking_token_budget",
        )

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives of each token; `None`: no log probabilities. Raises `RequestError`."""
        if self.top_logprobs is None:
            return 0 if self.logprobs else None
        if not self.logprobs and self.top_logprobs == 0:
            return None
        if not self.logprobs:
            raise RequestError(f"top_logprobs is {self.top_logprobs}, but logprobs is not true", "top_logprobs")
        if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError(
                f"top_logprobs is {self.top_logprobs}; it must be between 0 and {MAX_TOP_LOGPROBS}", "top_logprobs"
            )
        return self.top_logprobs


class PinRequest(StrictBody):
    """A prefix to pin under a name: a text that prompts begin with, or messages that conversations begin with."""

    name: Annotated[PinName, Field(examples=["rules"])]
    """Pinning the same prefix again has no effect; another prefix of the model under this name is an error."""
    model: Annotated[Text | None, Field(max_length=256, examples=["builtin"])] = None
    """The served model. Needed where there are several."""
    prompt: Text | TokenIds | None = None
    """Text or token ids that prompts begin with. At least one block of tokens."""
    messages: Messages | None = None
    """Messages that conversations begin with."""
    cache_salt: Name | None = None
    """Only requests with the same salt share the prefix."""
    tenant: Name | None = None
    """Only requests of the same tenant share the prefix, unless `isolate_tenants` is off."""


class LoadAdapterRequest(StrictBody):
    """`POST /v1/load_lora_adapter`, as vLLM has it."""

    lora_name: Annotated[PinName, Field(examples=["legal"])]
    """The name by which clients request the adapter as a model."""
    lora_path: Annotated[Text, Field(min_length=1, max_length=4096, examples=["legal-v2"])]
    """Its folder, in PEFT's format, below the setting `adapter_dir`, where relative paths begin."""
    load_inplace: bool | None = None
    """It may replace another adapter, or other files, of this name."""
    base_model_name: Annotated[Text | None, Field(max_length=256)] = None
    """Its model; by default the first one."""


class UnloadAdapterRequest(StrictBody):
    """`POST /v1/unload_lora_adapter`, as vLLM has it."""

    lora_name: Annotated[PinName, Field(examples=["legal"])]
    """The name of an adapter that has been loaded."""
    lora_int_id: int | None = None
    """Ignored: adapters have no numbers here."""


class SloFields(StrictBody):
    """Latency targets of a model."""

    ttft_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Time to first token."""
    tpot_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    """Time per output token after it."""


class AddModelRequest(StrictBody):
    """`POST /v1/models`: a model to serve. It is loaded at its first request."""

    name: Annotated[PinName, Field(examples=["qwen"])]
    """Its name in requests."""
    path: Annotated[Text, Field(min_length=1, max_length=4096, examples=["Qwen2.5-0.5B-Instruct"])]
    """Its folder below the setting `models_dir`, where relative paths begin."""
    keep: Literal["auto", "always"] | Annotated[float, Field(ge=0, allow_inf_nan=False)] = "auto"
    """When its weights leave the device: when other models can use the memory better, never, or after this time
    without a request."""
    weight: Annotated[float, Field(ge=LEAST_WEIGHT, le=MOST_WEIGHT)] = 1.0
    """Its share of the device's time while several models have work."""
    slo: SloFields = SloFields()
    """Its latency targets."""
    max_model_len: Annotated[int | None, Field(ge=1)] = None
    """Longest prompt plus output; by default the model's own limit."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and computation."""
    quantization: Literal["none", "int8"] = "none"
    """Of the weights of linear layers (CPU)."""
    tool_call_parser: ToolParserName = "auto"
    """How the model writes calls of functions."""
    reasoning_parser: ReasoningParserName = "auto"
    """How the model writes its reasoning."""


class BudgetRequest(StrictBody):
    """A budget for the KV cache of each engine replica."""

    budget_bytes: Annotated[int, Field(ge=1, examples=[1 << 30])]
    """At most `kv_memory_bytes`, at least what the longest sequence, the floor and pinned prefixes take."""
    revision: Annotated[int | None, Field(ge=1, le=1 << 53)] = None
    """Replicas ignore a request whose revision is not above that of the last one. By default the next one."""


class TokenizeRequest(TemplateFields):
    """`POST /tokenize`: either a text, or a conversation as in `/v1/chat/completions`."""

    model: Annotated[Text | None, Field(max_length=256, examples=["builtin"])] = None
    """A served model, or an adapter; by default the first model."""
    prompt: Annotated[Text | None, Field(examples=["What is Folio?"])] = None
    """A text."""
    messages: Messages | None = None
    """A conversation."""
    tools: Tools = None
    """With messages: functions that the model may call."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens, such as a first token. By default true for a text, false for a conversation,
    whose template writes them."""
    return_token_strs: bool | None = None
    """Return each token's text."""


class Tokens(BaseModel):
    """`count` tokens, and with `return_token_strs` their texts: an incomplete character is written `\\xe2\\x82`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: Omitted[list[str]] = None


class DetokenizeRequest(StrictBody):
    """`POST /detokenize`."""

    model: Annotated[Text | None, Field(max_length=256, examples=["builtin"])] = None
    """A served model, or an adapter; by default the first model."""
    tokens: Annotated[TokenIds, at_most(MAX_DETOKENIZED, "tokens"), Field(examples=[[76, 77]])]
    """262,144 at most."""


class DetokenizedText(BaseModel):
    """The text, special tokens included."""

    prompt: str
