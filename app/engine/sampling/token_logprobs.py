"""Log probabilities of one token."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log probability by the model, before temperature and all other processing.

    Attributes:
        rank: 1 for the likeliest token.
        top: (token id, log probability) of the likeliest tokens, in order.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
