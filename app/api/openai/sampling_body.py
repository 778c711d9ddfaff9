"""Sampling fields of bodies: the choice of tokens, the form of the output, and both as `SamplingParams`."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Tag, model_validator
from pydantic_core import from_json

from folio.app.api.base import JsonObject, ListOf, StrictBody, Text, at_most, text_or
from folio.app.api.output.plan import OutputPlan
from folio.app.api.output.schemas import enforceable, enforceable_json
from folio.app.engine.sampling.params import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    EarlyStopping,
    SamplingParams,
    Structure,
)
from folio.app.errors import RequestError

MAX_CHOICES = 4096
MAX_TAGS = 128
_TOKEN_ID = re.compile(r"[0-9]{1,9}")

TokenIds = ListOf[Annotated[int, Field(ge=0, lt=2**31)]]


class StreamOptions(StrictBody):
    include_usage: bool | None = None
    """Send the token counts in a last chunk. The events of `/v1/responses` always end with them."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: send the token counts so far in every chunk."""
    include_obfuscation: bool | None = None
    """No effect: chunks are never padded with random characters."""
    include_progress: bool | None = None
    """Until the first token of the only prompt, send comments with its place in the queue, the expected seconds until
    that token, and the number of its computed tokens. The events of `/v1/responses` and `/v1/messages` have none."""


class StructuralTag(StrictBody):
    """A part of the text: `begin`, JSON that follows the schema, and `end`."""

    begin: Text
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    end: Text


class StructuralTags(StrictBody):
    """Free text in which every trigger begins one of the structures."""

    type: Literal["structural_tag"] = "structural_tag"
    triggers: Annotated[ListOf[Text], Field(min_length=1), at_most(MAX_TAGS, "triggers")]
    structures: Annotated[ListOf[StructuralTag], Field(min_length=1), at_most(MAX_TAGS, "structures")]

    def structure(self) -> Structure:
        structures = [
            {"begin": tag.begin, "schema": enforceable(tag.schema_ or {}, "structures[].schema"), "end": tag.end}
            for tag in self.structures
        ]
        return Structure("tags", json.dumps({"triggers": self.triggers, "structures": structures}))


def _parsed(value: Any) -> Any:
    return from_json(value) if isinstance(value, str) else value


class StructuredOutputs(StrictBody):
    """vLLM's choice of a structure: exactly one of these."""

    json_: Annotated[str | JsonObject | None, Field(alias="json")] = None
    """A JSON schema, as an object or as text."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: Text | None = None
    """A regular expression that the whole output matches."""
    choice: Annotated[ListOf[Text], at_most(MAX_CHOICES, "choices")] | None = None
    """The output is one of these."""
    grammar: Text | None = None
    """A grammar in Lark's syntax or in GBNF."""
    structural_tag: Annotated[StructuralTags | None, BeforeValidator(_parsed)] = None
    """`StructuralTags`, as an object or as text."""

    @model_validator(mode="after")
    def _check_one(self) -> StructuredOutputs:
        if len(self.structures()) != 1:
            raise ValueError("exactly one of json, json_object, regex, choice, grammar and structural_tag is needed")
        return self

    def structures(self) -> list[Structure]:
        """The structures of the fields that are set."""
        found = _structures(self.json_, self.regex, self.choice, self.grammar)
        if self.json_object:
            found.append(Structure("json", "{}"))
        if self.structural_tag is not None:
            found.append(self.structural_tag.structure())
        return found


def _structures(
    schema: str | dict[str, Any] | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> list[Structure]:
    found = []
    if schema is not None:
        found.append(Structure("json", schema if isinstance(schema, str) else json.dumps(schema)))
    if regex is not None:
        found.append(Structure("regex", regex))
    if choice is not None:
        found.append(Structure("choice", json.dumps(choice)))
    if grammar is not None:
        found.append(Structure("grammar", grammar))
    return found


class SamplingBody(StrictBody):
    """How to choose tokens, and when to stop. Null stands for a field's default. Bounds are those of
    `folio.app.engine.sampling.params.SamplingParams`."""

    model: Annotated[Text, Field(max_length=256, examples=["builtin"])]
    """The served model, or an adapter of it."""
    n: int | None = None
    """Number of outputs; the prompt is computed once for all."""
    best_of: int | None = None
    """Number of outputs to generate, of which the `n` with the highest mean log probability are returned."""
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    """Logits are divided by it; 0 is greedy. 1 by default."""
    top_p: float | None = None
    """Sample among the fewest tokens whose probability reaches p."""
    top_k: Annotated[int | None, AfterValidator(lambda k: 0 if k == -1 else k)] = None
    """Sample among the k likeliest tokens; 0 or -1: all."""
    min_p: float | None = None
    """Sample among tokens of at least this share of the likeliest token's probability; 0: all."""
    frequency_penalty: float | None = None
    """Subtracted from a token's logit once for each time that it is in the output."""
    presence_penalty: float | None = None
    """Subtracted from the logits of tokens in the output."""
    repetition_penalty: float | None = None
    """Divides positive logits of tokens in prompt or output, and multiplies negative ones. 1 has no effect."""
    logit_bias: Annotated[dict[str, float], at_most(MAX_LOGIT_BIAS, "tokens")] | None = None
    """Token id, as a string → number added to its logit, between -100 and 100."""
    bad_words: Annotated[ListOf[Text], at_most(MAX_BAD_WORDS, "strings")] | None = None
    """Strings that the text of the output never contains, however it is cut into tokens. Case counts."""
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1), at_most(MAX_ALLOWED_TOKENS, "tokens")] | None = None
    """The only tokens that the output may contain. It ends by itself only if the end-of-sequence token is one."""
    seed: int | None = None
    """The same seed and request give the same tokens, whatever else is in the batch."""
    stop: (
        Annotated[
            Annotated[str, Tag("text")] | Annotated[ListOf[str], at_most(MAX_STOP_STRINGS, "strings"), Tag("strings")],
            text_or("strings"),
        ]
        | None
    ) = None
    """Strings that end the output."""
    stop_token_ids: Annotated[TokenIds, at_most(MAX_STOP_TOKENS, "tokens")] | None = None
    """Tokens that end the output, also with `ignore_eos`."""
    include_stop_str: bool | None = None
    """The output includes the stop string, or the text of the token, that ended it."""
    include_stop_str_in_output: bool | None = None
    """vLLM's name of `include_stop_str`."""
    skip_special_tokens: bool | None = None
    """false: special tokens appear in the output's text. True by default."""
    spaces_between_special_tokens: bool | None = None
    """No effect: no spaces are added."""
    ignore_eos: bool | None = None
    """Continue after the end-of-sequence token."""
    min_tokens: int | None = None
    """Number of tokens before which no token that ends the output is chosen. `stop` strings still end it."""
    use_beam_search: bool | None = None
    """The `n` likeliest of `best_of` beams instead of samples. No other sampling field can then be set."""
    length_penalty: float | None = None
    """Of beams: the score is the sum of log probabilities, divided by the length to this power. 1 by default."""
    early_stopping: EarlyStopping | None = None
    """Of beams: stop when `best_of` have ended (true), a better one is unlikely (false), or impossible ("never")."""
    prompt_logprobs: int | None = None
    """Log probabilities of the prompt's tokens, with this number of alternatives for each."""
    guided_json: str | JsonObject | None = None
    """A JSON schema that the output follows. At most one of the `guided_…` fields can be set."""
    guided_regex: Text | None = None
    """A regular expression that the whole output matches."""
    guided_choice: Annotated[ListOf[Text], at_most(MAX_CHOICES, "choices")] | None = None
    """The output is one of these."""
    guided_grammar: Text | None = None
    """A grammar that the output follows, in Lark's syntax or in GBNF."""
    structured_outputs: StructuredOutputs | None = None
    """The newer form of the `guided_…` fields."""
    stream: bool | None = None
    """Send the output as server-sent events while it is generated."""
    stream_options: StreamOptions | None = None
    """Options of `stream`."""

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk has the usage so far."""
        return (
            self.include_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
        )

    @property
    def include_progress(self) -> bool:
        return bool(self.stream and self.stream_options is not None and self.stream_options.include_progress)

    @property
    def num_outputs(self) -> int:
        """Outputs of each prompt."""
        return 1 if self.n is None else self.n

    def params(
        self,
        max_tokens: int | None,
        *,
        logprobs: int | None,
        prompt_logprobs: int | None,
        output: OutputPlan | None = None,
        **forms: Structure | None,
    ) -> SamplingParams:
        """The parameters that the fields give.

        Args:
            output: frames the structure, and keeps its special tokens in the text.
            forms: the structures that other fields ask for, by the field's name.

        Raises:
            RequestError: a value is out of bounds, or several fields decide the output's form.
        """
        given = {name: value for name in _SHARED if (value := getattr(self, name)) is not None}
        given |= {
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
            "logit_bias": _by_token_id(self.logit_bias or {}),
            "structure": self._structure(forms) if output is None else output.structure(self._structure(forms)),
            "kept_token_ids": [] if output is None else sorted(output.kept_token_ids),
            "include_stop_str": bool(self.include_stop_str or self.include_stop_str_in_output),
        }
        return SamplingParams(**given)

    def _structure(self, forms: dict[str, Structure | None]) -> Structure | None:
        found = {name: structure for name, structure in forms.items() if structure is not None}
        guided = _structures(self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        found |= {f"guided_{structure.kind}": structure for structure in guided}
        if self.structured_outputs is not None:
            [found["structured_outputs"]] = self.structured_outputs.structures()
        if len(found) > 1:
            raise RequestError(f"only one of {', '.join(found)} can decide the output's form", next(iter(found)))
        for name, structure in found.items():
            if structure.kind == "json":
                return replace(structure, spec=enforceable_json(structure.spec, name))
        return next(iter(found.values()), None)


# Fields of the same name in both classes. Null stands for the default of `SamplingParams`.
_SHARED = sorted(SamplingBody.model_fields.keys() & SamplingParams.__dataclass_fields__.keys())


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
    """`name`, `description` and `strict` are accepted and ignored: the output always follows the schema."""

    name: str
    description: str | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(StrictBody):
    """JSON that follows the schema; without a schema any object."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class StructuralTagFormat(StructuralTags):
    """The format of vLLM and xgrammar: free text in which every trigger begins one of the structures."""

    type: Literal["structural_tag"]


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat, Field(discriminator="type")
]


def structure_of(response_format: ResponseFormat | None) -> Structure | None:
    """The structure of OpenAI's `response_format`; `None`: any text."""
    if isinstance(response_format, JsonObjectFormat):
        return Structure("json", "{}")
    if isinstance(response_format, JsonSchemaFormat):
        return Structure("json", json.dumps(response_format.json_schema.schema_ or {}))
    if isinstance(response_format, StructuralTagFormat):
        return response_format.structure()
    return None
