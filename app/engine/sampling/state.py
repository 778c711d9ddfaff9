"""What choosing a sequence's next token depends on beside its logits."""

from __future__ import annotations

import secrets
from typing import Protocol

import numpy as np

from app.engine.sampling.noise import noise_key
from app.engine.sampling.params import SamplingParams
from app.engine.sampling.penalties import BadWords, TokenCounts
from app.errors import FolioError, RequestError

# Dividing logits by less than this overflows, and the result is greedy anyway.
_GREEDY_BELOW = 1e-5


class GrammarMatcher(Protocol):
    """Where an output is in the structure that it has to have."""

    def fill(self, mask: np.ndarray) -> None:
        """Set the bits of all tokens that may follow, and clear the others: `[ceil(vocab_size / 32)]` int32."""
        ...

    def accept(self, token_id: int) -> None:
        """Go on by a token that may follow."""
        ...

    def fork(self) -> GrammarMatcher:
        """Another one at the same place."""
        ...

    @property
    def finished(self) -> bool:
        """Whether nothing can follow any more."""
        ...

    @property
    def error(self) -> FolioError | None:
        """Why the output cannot go on."""
        ...


class SamplingState:
    """A sequence's parameters and what they need to remember: a random key, counts of tokens, a place in a structure.

    Args:
        prompt_token_ids: not copied.
        index: of the output among those of the request; each has noise of its own.
        matcher: for `params.structure`.
        bad_words: the tokens of `params.bad_words` (`encode_bad_words`).
        eos_token_ids: of the model; only `params.min_tokens` needs them.

    Attributes:
        is_greedy: nothing is drawn.
        takes_likeliest: its token is the likeliest by the model alone.
        is_plain_greedy: that, and nothing else is asked for.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: list[int],
        *,
        index: int = 0,
        matcher: GrammarMatcher | None = None,
        bad_words: BadWords | None = None,
        eos_token_ids: frozenset[int] | None = None,
    ) -> None:
        self.params = params
        self.matcher = matcher
        self.is_greedy = params.temperature < _GREEDY_BELOW
        self.bias_ids = np.fromiter(params.logit_bias.keys(), np.int64)
        self.bias = np.fromiter(params.logit_bias.values(), np.float32)
        self._index = index
        self._bad_words = bad_words
        self._eos_token_ids = eos_token_ids
        self._prompt_token_ids = prompt_token_ids
        self._output: list[int] = []
        self._counts: TokenCounts | None = None
        self._choice_is_free = not (
            params.penalises or params.logit_bias or params.bad_words or params.structure or matcher is not None
        )
        self._note_length()
        self._seed = secrets.randbits(64) if params.seed is None else params.seed % 2**64

    @property
    def num_output_tokens(self) -> int:
        return len(self._output)

    @property
    def can_look_ahead(self) -> bool:
        """Whether the tokens after the next can be chosen before it is noted: only their number matters, not which."""
        in_words = self._bad_words is not None and self._bad_words.depend_on_output
        return self.matcher is None and not in_words and not self.params.penalises

    @property
    def counts(self) -> TokenCounts:
        """Tokens to penalise: of the output, and if they count as repetitions, of the prompt."""
        if self._counts is None:
            prompt = self._prompt_token_ids if self.params.repetition_penalty != 1 else []
            self._counts = TokenCounts(prompt, self._output)
        return self._counts

    def noise_key(self, position: int = 0) -> int:
        """Of the noise by which the output token after `position` more is drawn: what else is in the batch, or has been
        drawn before, cannot matter."""
        return noise_key(self._seed, self._index, len(self._output) + position)

    def forbidden(self, position: int = 0) -> list[int]:
        """Tokens that may not be chosen after `position` more: they complete a bad word, or end the output too soon."""
        tokens: list[int] = []
        if self.params.bad_words:
            assert self._bad_words is not None, "bad words without their tokens"
            tokens += self._bad_words.single
            tokens += self._bad_words.completing(self._output)
        if len(self._output) + position < self.params.min_tokens:
            tokens += self.params.stop_token_ids
            if not self.params.ignore_eos:
                assert self._eos_token_ids is not None, "min_tokens without the tokens that end an output"
                tokens += self._eos_token_ids
        return tokens

    def append(self, token_id: int) -> None:
        """Take note of a token that has been chosen."""
        self._output.append(token_id)
        if self._counts is not None:
            self._counts.add(token_id)
        if self.matcher is not None:
            self.matcher.accept(token_id)
        if len(self._output) == self.params.min_tokens:
            self._note_length()

    def fork(
        self,
        params: SamplingParams | None = None,
        index: int | None = None,
        *,
        matcher: GrammarMatcher | None = None,
        bad_words: BadWords | None = None,
    ) -> SamplingState:
        """Another state with the same output so far.

        Its noise is what an output of that seed and index has from here on.

        Args:
            params: by default the same.
            index: by default the same; without a seed the noise is other nevertheless.
            matcher, bad_words: for other `params`; by default this one's, if they are for the same.
        """
        params = params or self.params
        if matcher is None and self.matcher is not None and params.structure == self.params.structure:
            matcher = self.matcher.fork()
        if bad_words is None and params.bad_words == self.params.bad_words:
            bad_words = self._bad_words
        other = SamplingState(
            params,
            self._prompt_token_ids,
            index=self._index if index is None else index,
            matcher=matcher,
            bad_words=bad_words,
            eos_token_ids=self._eos_token_ids,
        )
        other._output = self._output.copy()
        same = (params.repetition_penalty == 1) == (self.params.repetition_penalty == 1)
        if params.penalises and self.params.penalises and same:
            other._counts = self.counts.fork()  # a long prompt is counted once, however many outputs it has
        other._note_length()
        return other

    def _note_length(self) -> None:
        self.takes_likeliest = self.is_greedy and self._choice_is_free and len(self._output) >= self.params.min_tokens
        self.is_plain_greedy = self.takes_likeliest and self.params.logprobs is None


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise `RequestError` if parameters name tokens that the model does not have."""
    for name, token_ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        unknown = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
        if unknown:
            raise RequestError(f"{name} has token {unknown[0]}; the model's are between 0 and {vocab_size - 1}", name)
