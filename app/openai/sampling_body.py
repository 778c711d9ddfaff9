"""How a request says that tokens are to be chosen.

What clients say of the output's form → `Structure`. Whether the engine can compile it, the engine says.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from app.engine.sampling.params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    EarlyStopping,
    SamplingParams,
    Structure,
)
from app.errors import RequestError
from app.openai.base import JsonObject, ListOf, StrictBody, Text, at_most, unsupported_field

MAX_CHOICES = 4096
_TOKEN_ID = re.compile(r"[0-9]{1,9}")


TokenIds = ListOf[Annotated[int, Field(ge=0, lt=2**31)]]


class StreamOptions(StrictBody):
    include_usage: bool | None = None
    """A last chunk has the token counts. The events of `/v1/responses` end with them anyway."""
    include_obfuscation: Annotated[
        Literal[False] | None, unsupported_field("chunks are not padded here; leave it out or send false", False)
    ] = None
    """Chunks are never padded with random characters: `true` is refused."""


class SamplingBody(StrictBody):
    """How to choose tokens, and when to stop. A null is the default of each field. Bounds are those of
    `app.engine.sampling.params.SamplingParams`."""

    model: Annotated[Text, Field(max_length=256, examples=["builtin"])]
    """The served model, or an adapter of it."""
    n: int | None = None
    """Outputs; their prompt is computed once."""
    best_of: int | None = None
    """So many outputs are generated, and the `n` whose tokens have the highest mean log probability returned."""
    temperature: float | None = None
    """0 is greedy; above, logits are divided by it. 1 by default."""
    top_p: float | None = None
    """Sample among the fewest tokens whose probability reaches p."""
    top_k: int | None = None
    """Sample among the k likeliest tokens; 0: all."""
    min_p: float | None = None
    """Sample among tokens at least so many times as likely as the likeliest; 0: all."""
    frequency_penalty: float | None = None
    """Taken from a token's logit, times how often it is in the output."""
    presence_penalty: float | None = None
    """Taken from the logits of tokens in the output."""
    repetition_penalty: float | None = None
    """Logits of tokens in prompt or output are divided by it if positive, else multiplied. 1 changes nothing."""
    logit_bias: Annotated[dict[str, float], at_most(MAX_LOGIT_BIAS, "tokens")] | None = None
    """Token id, as a string → what is added to its logit, between -100 and 100."""
    bad_words: Annotated[ListOf[Text], at_most(MAX_BAD_WORDS, "strings")] | None = None
    """Strings that are not to be in the output."""
    seed: int | None = None
    """The same seed and the same request give the same tokens, in any company."""
    stop: str | Annotated[ListOf[str], at_most(MAX_STOP_STRINGS, "strings")] | None = None
    """Strings that end the output."""
    stop_token_ids: Annotated[TokenIds, at_most(MAX_STOP_TOKENS, "tokens")] | None = None
    """Tokens that end the output, also with `ignore_eos`."""
    include_stop_str: bool | None = None
    """The output includes the stop string that ended it."""
    ignore_eos: bool | None = None
    """Go on after the end-of-sequence token."""
    min_tokens: int | None = None
    """Before so many tokens nothing that would end the output is chosen, but for `stop` strings."""
    use_beam_search: bool | None = None
    """The `n` likeliest of `best_of` beams instead of samples. Nothing else may then be said about sampling."""
    length_penalty: float | None = None
    """Of beams: a score is the sum of log probabilities over the length to this power. 1 by default."""
    early_stopping: EarlyStopping | None = None
    """Of beams: true: stop when `best_of` have ended; false: when a better one is unlikely; "never": impossible."""
    prompt_logprobs: int | None = None
    """Log probabilities of the prompt's tokens, and so many alternatives for each."""
    guided_json: str | JsonObject | None = None
    """A JSON schema that the output follows. At most one of the `guided_…` fields can be set."""
    guided_regex: Text | None = None
    """A regular expression that the whole output matches."""
    guided_choice: Annotated[ListOf[Text], at_most(MAX_CHOICES, "choices")] | None = None
    """The output is one of these."""
    guided_grammar: Text | None = None
    """A Lark grammar that the output follows."""
    stream: bool | None = None
    """Send the output as server-sent events while it is generated."""
    stream_options: StreamOptions | None = None
    """With `stream`."""

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def num_outputs(self) -> int:
        """Of each prompt."""
        return 1 if self.n is None else self.n

    def params(
        self,
        max_tokens: int | None,
        *,
        logprobs: int | None,
        prompt_logprobs: int | None,
        structure: Structure | None,
    ) -> SamplingParams:
        given: dict[str, Any] = {
            "n": self.n,
            "best_of": self.best_of,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty,
            "bad_words": self.bad_words,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "min_tokens": self.min_tokens,
            "length_penalty": self.length_penalty,
            "early_stopping": self.early_stopping,
        }
        return SamplingParams(
            max_tokens=max_tokens,
            logit_bias=_by_token_id(self.logit_bias or {}),
            seed=self.seed,
            include_stop_str=bool(self.include_stop_str),
            ignore_eos=bool(self.ignore_eos),
            use_beam_search=bool(self.use_beam_search),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structure=structure,
            **{name: value for name, value in given.items() if value is not None},
        )


def _by_token_id(logit_bias: dict[str, float]) -> dict[int, float]:
    for key in logit_bias:
        if not _TOKEN_ID.fullmatch(key):
            raise RequestError(f"logit_bias has the key {key!r}; keys are token ids", "logit_bias")
    return {int(key): bias for key, bias in logit_bias.items()}


class TextFormat(StrictBody):
    type: Literal["text"]


class JsonObjectFormat(StrictBody):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(StrictBody):
    """`name` and `description` are for people. `strict` is accepted: the output follows the schema in any case."""

    name: str
    description: str | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(StrictBody):
    """JSON that the schema describes; without a schema any object."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class HasGuides(Protocol):
    """The fields of a body that say what the output looks like, as vLLM calls them."""

    @property
    def guided_json(self) -> str | dict[str, Any] | None: ...
    @property
    def guided_regex(self) -> str | None: ...
    @property
    def guided_choice(self) -> list[str] | None: ...
    @property
    def guided_grammar(self) -> str | None: ...


def structure_of(response_format: ResponseFormat | None) -> Structure | None:
    """What OpenAI's `response_format` asks for; `None`: anything."""
    if isinstance(response_format, JsonObjectFormat):
        return Structure("json", "{}")
    if isinstance(response_format, JsonSchemaFormat):
        return Structure("json", json.dumps(response_format.json_schema.schema_ or {}))
    return None


def guided_structure(body: HasGuides) -> Structure | None:
    """What the extension fields ask for; `None`: nothing. Raises `RequestError` when more than one is given."""
    given: dict[str, Structure] = {}
    if body.guided_json is not None:
        schema = body.guided_json
        given["guided_json"] = Structure("json", schema if isinstance(schema, str) else json.dumps(schema))
    if body.guided_regex is not None:
        given["guided_regex"] = Structure("regex", body.guided_regex)
    if body.guided_choice is not None:
        given["guided_choice"] = Structure("choice", json.dumps(body.guided_choice))
    if body.guided_grammar is not None:
        given["guided_grammar"] = Structure("grammar", body.guided_grammar)
    return only_structure(given)


def only_structure(asked: dict[str, Structure]) -> Structure | None:
    """Of what fields ask for, the one; `None` when none does. Raises `RequestError` when several do."""
    if len(asked) > 1:
        raise RequestError(f"only one of {', '.join(asked)} can decide the output's form", next(iter(asked)))
    return next(iter(asked.values()), None)
