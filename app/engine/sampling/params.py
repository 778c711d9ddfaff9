"""Sampling parameters: sampling and stopping of one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import MappingProxyType
from typing import Literal

from folio.app.errors import RequestError

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
MAX_SEQUENCES = 128
MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH = 256, 256
MAX_STOP_TOKENS = 128
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKENS = 4096
# Positive logits are divided by the penalty: 1e-38 makes them overflow.
LEAST_REPETITION_PENALTY = 0.001

_NOT_WITH_BEAMS: tuple[str, ...] = (
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)
_NOT_WITH_BEAMS += ("bad_words", "allowed_token_ids", "min_tokens", "stop", "logprobs", "structure", "temperature")

_FRACTIONS = frozenset(
    ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "length_penalty")
)
_OPTIONAL = frozenset({"best_of", "max_tokens", "seed", "logprobs", "prompt_logprobs"})

StructureKind = Literal["json", "regex", "choice", "grammar", "calls", "tags", "any"]
EarlyStopping = Literal["never"] | bool


@dataclass(frozen=True, slots=True)
class ReasoningBudget:
    """A bound on the reasoning with which an output begins.

    Attributes:
        max_tokens: tokens of reasoning after which `end` is forced.
        begin: text before the reasoning; empty: the prompt has begun it.
        end: text after the reasoning.
    """

    max_tokens: int
    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class Structure:
    """A structure for the output.

    Attributes:
        kind: "json": `spec` is a JSON schema as text, "{}" for any object; "regex": a regular expression for the
            complete output; "choice": a JSON array of strings, one of which is the output; "grammar": a grammar, in
            Lark's syntax or in GBNF; "calls": a grammar in Lark's syntax, made from the request's tools; "tags": free
            text in which a trigger begins one of the structures, as the JSON `{"triggers": [text, …], "structures":
            [{"begin", "schema", "end"}, …]}`; "any": any output, for its `budget`.
        frame: Lark grammar of the output, in which `@answer` is the structure that kind and spec describe.
        budget: bound on the reasoning; its end must be part of `frame` or of the grammar.
        begun: text at the end of the prompt that belongs to the structure; ignored if the structure cannot begin so.
    """

    kind: StructureKind
    spec: str
    frame: str | None = None
    budget: ReasoningBudget | None = None
    begun: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request.

    Attributes:
        n: outputs; their prompt is computed once.
        best_of: number of generated outputs, of which the `n` with the highest mean log probability are returned; by
            default `n`.
        use_beam_search: return the `n` likeliest of `best_of` beams, as `transformers` does; other sampling parameters
            must keep their defaults.
        length_penalty: beam search: a score is the sum of log probabilities over the length to this power.
        early_stopping: beam search: True: stop as soon as `best_of` beams have finished; False: when a better one is
            unlikely; "never": when a better one is impossible.
        max_tokens: most generated tokens; `None`: up to the end of the context.
        min_tokens: stop tokens are not sampled before this many; `stop` strings still end the output.
        temperature: divisor of logits; 0 is greedy.
        top_k: sample among the k likeliest tokens; 0: all.
        top_p: sample among the fewest tokens whose probability reaches p; 1: all.
        min_p: least probability of a token relative to the likeliest; 0: all.
        repetition_penalty: divisor of positive logits, factor of negative ones, for tokens in prompt or output.
        presence_penalty: subtracted from the logits of tokens in the output.
        frequency_penalty: subtracted once for each occurrence in the output.
        logit_bias: token id → addend of its logit.
        bad_words: strings that the output's text never contains, however it is cut into tokens.
        allowed_token_ids: the only tokens that may occur; empty: all.
        seed: the same seed and request give the same tokens; `None`: a random seed.
        stop: strings that end the output; not part of it unless `include_stop_str`.
        stop_token_ids: tokens that end the output like the end-of-sequence token, also with `ignore_eos`.
        ignore_eos: continue after the end-of-sequence token.
        logprobs: number of alternatives to return with each token's log probability; `None`: no log probabilities.
        prompt_logprobs: the same for each token of the prompt but the first.
        kept_token_ids: special tokens to keep in the text; tool calls may begin with one.
        skip_special_tokens: leave other special tokens out of the text.

    Raises:
        RequestError: a value is not a number or out of bounds, or two contradict each other.
    """

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    bad_words: tuple[str, ...] | list[str] = ()
    allowed_token_ids: tuple[int, ...] | list[int] = ()
    seed: int | None = None
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    include_stop_str: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structure: Structure | None = None
    kept_token_ids: tuple[int, ...] | list[int] = ()
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        for name in ("stop_token_ids", "bad_words", "allowed_token_ids", "kept_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # a picklable copy
        for name, least, most in (
            ("n", 1, MAX_SEQUENCES),
            ("best_of", self.n, MAX_SEQUENCES),
            ("max_tokens", 1, None),
            ("min_tokens", 0, self.max_tokens),
            ("temperature", 0, 100),
            ("top_k", 0, 2**31 - 1),
            ("top_p", 0, 1),
            ("min_p", 0, 1),
            ("repetition_penalty", LEAST_REPETITION_PENALTY, 100),
            ("presence_penalty", -2, 2),
            ("frequency_penalty", -2, 2),
            ("length_penalty", -10, 10),
            ("seed", -(2**63), 2**64 - 1),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
        ):
            self._check_bounds(name, least, most)
        if self.top_p == 0:
            raise RequestError("top_p is 0; it must be above 0", "top_p")
        self._check_strings()
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise RequestError(f"stop_token_ids takes at most {MAX_STOP_TOKENS} tokens", "stop_token_ids")
        if len(self.allowed_token_ids) > MAX_ALLOWED_TOKENS:
            raise RequestError(f"allowed_token_ids takes at most {MAX_ALLOWED_TOKENS} tokens", "allowed_token_ids")
        if len(self.logit_bias) > MAX_LOGIT_BIAS or not all(-100 <= bias <= 100 for bias in self.logit_bias.values()):
            raise RequestError(
                f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens, with values between -100 and 100", "logit_bias"
            )
        if self.early_stopping not in (True, False, "never"):
            raise RequestError(
                f"early_stopping is {self.early_stopping!r}; it must be true, false or 'never'", "early_stopping"
            )
        if self.use_beam_search:
            self._check_beams()

    def _check_strings(self) -> None:
        for name, most in (("stop", MAX_STOP_STRINGS), ("bad_words", MAX_BAD_WORDS)):
            if len(getattr(self, name)) > most or not all(getattr(self, name)):
                raise RequestError(f"{name} takes at most {most} strings, none of them empty", name)
        if any(len(word) > MAX_BAD_WORD_LENGTH for word in self.bad_words):
            raise RequestError(f"each of bad_words has at most {MAX_BAD_WORD_LENGTH} characters", "bad_words")

    def _check_bounds(self, name: str, least: float, most: float | None) -> None:
        value = getattr(self, name)
        if value is None and name in _OPTIONAL:
            return
        is_fraction = name in _FRACTIONS
        is_number = isinstance(value, Real if is_fraction else Integral)
        if not is_number or isinstance(value, bool):
            raise RequestError(f"{name} is {value!r}; it must be a {'' if is_fraction else 'whole '}number", name)
        if not isinstance(value, int | float):  # of numpy
            value = float(value) if is_fraction else int(value)
            object.__setattr__(self, name, value)
        if not (least <= value and (most is None or value <= most)):  # NaN is not
            bounds = f"at least {least}" if most is None else f"between {least} and {most}"
            raise RequestError(f"{name} is {value}; it must be {bounds}", name)

    def _check_beams(self) -> None:
        """Beams are scored by the model's probabilities alone."""
        neutral = SamplingParams()
        for name in _NOT_WITH_BEAMS:
            if getattr(self, name) != getattr(neutral, name) and not (name == "temperature" and self.temperature == 0):
                raise RequestError(f"{name} cannot be set together with use_beam_search", name)

    @property
    def num_sequences(self) -> int:
        """Sequences of the request: samples or beams."""
        return self.best_of or self.n

    @property
    def penalises(self) -> bool:
        """Whether a repetition, presence or frequency penalty is set."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def compiles(self) -> bool:
        """Whether the first validation of these parameters may take long: it compiles."""
        return self.structure is not None or bool(self.bad_words)
