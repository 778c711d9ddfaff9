"""What choosing a sequence's next token depends on beside its logits."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from app.engine.params import SamplingParams

# Random numbers are drawn so many at once.
_DRAWN_AT_ONCE = 64


class Matcher(Protocol):
    """Where an output is in the structure that it has to have."""

    def fill(self, mask: np.ndarray) -> None:
        """Set the bits of all tokens that may follow, and clear the others: `[ceil(vocab_size / 32)]` int32."""
        ...

    def accept(self, token_id: int) -> None:
        """Go on by a token that may follow."""
        ...

    def fork(self) -> Matcher:
        """Another one at the same place."""
        ...

    @property
    def finished(self) -> bool:
        """Whether nothing can follow any more."""
        ...


class SamplingState:
    """A sequence's parameters and what they need to remember: random numbers, counts of tokens, a place in a structure.

    Args:
        prompt_token_ids: not copied.
        index: of the output among those of the request; each has random numbers of its own.
        matcher: for `params.structure`.
    """

    def __init__(
        self, params: SamplingParams, prompt_token_ids: list[int], *, index: int = 0, matcher: Matcher | None = None
    ) -> None:
        self.params = params
        self.matcher = matcher
        self.num_output_tokens = 0
        self._prompt_token_ids = prompt_token_ids
        # One uniform number a token from a generator of its own: what else is in the batch cannot matter.
        seed = None if params.seed is None else [params.seed % 2**64, index] if index else params.seed % 2**64
        self._random = np.random.default_rng(seed)
        self._uniform: list[float] = []

    def uniform(self, position: int = 0) -> float:
        """The random number, in [0, 1), for the output token after `position` more."""
        at = self.num_output_tokens + position
        while at >= len(self._uniform):
            self._uniform += self._random.random(_DRAWN_AT_ONCE).tolist()
        return self._uniform[at]

    def append(self, token_id: int) -> None:
        """Take note of a token that has been chosen."""
        self.num_output_tokens += 1
        if self.matcher is not None:
            self.matcher.accept(token_id)

    def fork(self, params: SamplingParams | None = None, index: int | None = None) -> SamplingState:
        """The state of a sequence that goes on from here: with random numbers of its own, if it is another output."""
        state = SamplingState(
            params or self.params,
            self._prompt_token_ids,
            index=index or 0,
            matcher=None if self.matcher is None else self.matcher.fork(),
        )
        state.num_output_tokens = self.num_output_tokens
        return state

    @property
    def can_look_ahead(self) -> bool:
        """Whether the tokens after the next can be chosen before it is noted: nothing but logits depends on it."""
        return self.matcher is None
