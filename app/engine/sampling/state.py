"""Sampling state: the parameters and the history that a sequence's next token depends on, beside its logits."""

from __future__ import annotations

import functools
import math
import secrets

import numpy as np

from folio.app.engine.sampling.bad_words import BadWords
from folio.app.engine.sampling.noise import noise_key
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.sampling.penalties import TokenCounts
from folio.app.engine.sampling.reasoning import Matcher
from folio.app.engine.sampling.settings import BIASED, FORBIDDING, GREEDY, MASKED, MIN_P, PENALISED, SETTINGS, TRUNCATED
from folio.app.errors import RequestError

# Division of logits by a lower temperature overflows, and the result is greedy in any case.
_GREEDY_BELOW = 1e-5


class SamplingState:
    """A sequence's parameters with their state: random seed, token counts, position in a structure.

    Args:
        prompt_token_ids: not copied.
        index: number of the output within its request; each output has its own noise.
        matcher: matcher of `params.structure`.
        structure_from: tokens of the output before the structure begins.
        bad_words: automaton of `params.bad_words`.
        eos_token_ids: the model's end-of-sequence tokens; only `params.min_tokens` needs them.

    Attributes:
        settings: a `SETTINGS` record as bytes; its key is the output's, from which each token's key is made.
        is_greedy: no noise is drawn.
        takes_likeliest: the next token is the likeliest by the unprocessed logits.
        is_plain_greedy: the same, and no log probabilities are requested.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: list[int],
        *,
        index: int = 0,
        matcher: Matcher | None = None,
        structure_from: int = 0,
        bad_words: BadWords | None = None,
        eos_token_ids: frozenset[int] | None = None,
    ) -> None:
        self.params = params
        self.matcher = matcher
        self.structure_from = structure_from
        self.is_greedy = params.temperature < _GREEDY_BELOW
        self.bias_ids = np.fromiter(params.logit_bias.keys(), np.int64)
        self.bias = np.fromiter(params.logit_bias.values(), np.float32)
        self._allowed: np.ndarray | None = None  # `allowed`, for one vocabulary
        self._index = index
        self._bad_words = bad_words
        self._word_state = 0  # of `bad_words`
        self._eos_token_ids = eos_token_ids
        self._prompt_token_ids = prompt_token_ids
        self._output: list[int] = []
        self._counts: TokenCounts | None = None
        self._choice_is_free = not (
            params.penalises
            or params.logit_bias
            or params.bad_words
            or params.allowed_token_ids
            or params.structure
            or matcher is not None
        )
        seed = secrets.randbits(64) if params.seed is None else params.seed % 2**64
        self._key = noise_key(seed, index)
        self._note_length()

    @property
    def num_output_tokens(self) -> int:
        return len(self._output)

    @property
    def can_look_ahead(self) -> bool:
        """Whether later tokens can be sampled before the next one is appended: they depend on its position, not on its
        value."""
        in_words = self._bad_words is not None and self._bad_words.depend_on_output
        return self.matcher is None and not in_words and not self.params.penalises

    @property
    def counts(self) -> TokenCounts:
        """Tokens to penalise: of the output, and of the prompt for a repetition penalty."""
        if self._counts is None:
            prompt = self._prompt_token_ids if self.params.repetition_penalty != 1 else []
            self._counts = TokenCounts(prompt, self._output)
        return self._counts

    def allowed(self, vocab_size: int) -> np.ndarray | None:
        """Bits of `params.allowed_token_ids`, without tokens that have a bad word in them: `[ceil(vocab_size / 32)]`
        int32; `None`: all are allowed."""
        if self._bad_words is None and not self.params.allowed_token_ids:
            return None
        if self._allowed is None or len(self._allowed) != -(-vocab_size // 32):
            mask = np.full(-(-vocab_size // 32), -1, "<i4")
            if self.params.allowed_token_ids:
                bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
                bits[list(self.params.allowed_token_ids)] = 1
                mask = np.packbits(bits, bitorder="little").view("<i4")
            if self._bad_words is not None:
                mask = mask & self._bad_words.mask(vocab_size)
            self._allowed = mask
        return self._allowed

    def forbidden(self, position: int = 0) -> np.ndarray:
        """Tokens that would complete a bad word that has begun, or end the output before `min_tokens`, after `position`
        further tokens."""
        tokens: list[int] = []
        if len(self._output) + position < self.params.min_tokens:
            tokens += self.params.stop_token_ids
            if not self.params.ignore_eos:
                assert self._eos_token_ids is not None, "min_tokens without the tokens that end an output"
                tokens += self._eos_token_ids
        if self._bad_words is None:
            assert not self.params.bad_words, "bad words without their tokens"
            return np.array(tokens, np.int64)
        return np.concatenate([self._bad_words.completing(self._word_state), np.array(tokens, np.int64)])

    def append(self, token_id: int) -> None:
        """Add a sampled token."""
        self._output.append(token_id)
        if self._bad_words is not None:
            self._word_state = self._bad_words.advance(self._word_state, token_id)
        if self._counts is not None:
            self._counts.add(token_id)
        if self.matcher is not None and len(self._output) > self.structure_from:
            self.matcher.accept(token_id)
        if len(self._output) == self.params.min_tokens:
            self._note_length()

    def fork(
        self,
        params: SamplingParams | None = None,
        index: int | None = None,
        *,
        matcher: Matcher | None = None,
        bad_words: BadWords | None = None,
    ) -> SamplingState:
        """Another state with the same output so far, and the noise of its own seed and index from here on.

        Args:
            params, index: by default this state's; without a seed the noise differs in any case.
            matcher, bad_words: by default this state's, if `params` has the same structure and bad words.
        """
        params = params or self.params
        structure_from = len(self._output)
        if matcher is None and self.matcher is not None and params.structure == self.params.structure:
            matcher, structure_from = self.matcher.fork(), self.structure_from
        if bad_words is None and params.bad_words == self.params.bad_words:
            bad_words = self._bad_words
        other = SamplingState(
            params,
            self._prompt_token_ids,
            index=self._index if index is None else index,
            matcher=matcher,
            structure_from=structure_from,
            bad_words=bad_words,
            eos_token_ids=self._eos_token_ids,
        )
        other._output = self._output.copy()
        if bad_words is self._bad_words:
            other._word_state = self._word_state
        elif bad_words is not None:
            other._word_state = functools.reduce(bad_words.advance, self._output, 0)
        same = (params.repetition_penalty == 1) == (self.params.repetition_penalty == 1)
        if params.penalises and self.params.penalises and same:
            other._counts = self.counts.fork()  # so that outputs of one prompt count it once
        other._note_length()
        return other

    def _note_length(self) -> None:
        self.takes_likeliest = self.is_greedy and self._choice_is_free and len(self._output) >= self.params.min_tokens
        self.is_plain_greedy = self.takes_likeliest and self.params.logprobs is None
        params = self.params
        features = (
            (GREEDY if self.is_greedy else 0)
            | (TRUNCATED if params.top_k > 0 or params.top_p < 1 else 0)
            | (MIN_P if params.min_p else 0)
            | (
                MASKED
                if params.structure or self.matcher is not None or params.allowed_token_ids or params.bad_words
                else 0
            )
            | (FORBIDDING if params.bad_words or len(self._output) < params.min_tokens else 0)
            | (BIASED if params.logit_bias else 0)
            | (PENALISED if params.penalises else 0)
        )
        settings = (
            self._key,
            params.top_p,
            0.0 if self.is_greedy else params.temperature,
            math.log(params.min_p) if params.min_p else -math.inf,
            params.top_k,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
            features,
        )
        self.settings = np.array([settings], SETTINGS).tobytes()


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise `RequestError` for token ids outside of the model's vocabulary."""
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        token_ids = getattr(params, name)
        unknown = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
        if unknown:
            raise RequestError(f"{name} has token {unknown[0]}; it must be between 0 and {vocab_size - 1}", name)
