"""Request bodies that generate text: fields that they share, completions and forks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from folio.app.api.base import ClientFields, ListOf, Name, StrictBody, Text, at_most, unsupported_field
from folio.app.api.openai.sampling_body import ResponseFormat, SamplingBody, TokenIds, structure_of
from folio.app.engine.sampling.params import SamplingParams
from folio.app.errors import RequestError

MAX_PROMPTS = 256


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
    output in a conversation; at most `max_cache_ttl_s`. Kept prefixes take at most `retain_quota` of the cache, and
    running requests take precedence. 0: the prefix is kept like any other."""
    user: Text | None = None
    """The end user. With `fair_tenants` it is also the tenant of a request that names none."""
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
    """Fields about tokens in prompts and answers, under vLLM's names."""

    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens to the prompt, such as a first token. By default true for a text, false for a
    conversation, whose template writes them."""
    return_token_ids: bool | None = None
    """Return `prompt_token_ids`, in a stream with the first chunk, and `token_ids` of each output."""
    return_tokens_as_token_ids: bool | None = None
    """Write tokens of log probabilities as `token_id:5`."""


class CompletionRequest(GenerationBody, TokenFields):
    """`POST /v1/completions`."""

    prompt: Annotated[Prompt, Field(examples=["The key of room 417 is 93. The key of room 417 is"])]
    """Text or token ids, or a list of one kind. The answer has all outputs of the first prompt, then those of the
    second, and so on."""
    max_tokens: int | None = 16
    """The most tokens to generate; null: as many as the context has room for. 0 with `echo`: only the prompt."""
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
        """The sampling parameters. Raises `RequestError`, see `params`."""
        of_prompt = self.prompt_logprobs, self.logprobs if self.echo else None
        return self.params(
            1 if self.echo and self.max_tokens == 0 else self.max_tokens,  # one token, which is not shown
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
    """The most tokens to generate, beyond the existing ones."""
    logprobs: int | None = None
    """Log probabilities of each token, with this number of alternatives."""
    timeout_s: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    """Seconds after which unfinished forks end with an error."""

    def sampling_params(self) -> SamplingParams:
        """The sampling parameters. Raises `RequestError`, see `params`."""
        if self.prompt_logprobs is not None:
            raise RequestError("a fork's prompt is computed already; leave prompt_logprobs out", "prompt_logprobs")
        return self.params(self.max_tokens, logprobs=self.logprobs, prompt_logprobs=None)
