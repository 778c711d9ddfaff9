"""Blocks on their way from the replicas that compute prompts to those that decode."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from benchmarks.simulator.replica import Served


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Each replica's link to the others, in both directions at once.

    Attributes:
        bytes_per_s: of one direction.
        token_bytes: of a token's keys and values.
        overlaps: a step's blocks are sent while the next step is computed; else nothing is before the first token.
    """

    bytes_per_s: float
    token_bytes: int
    overlaps: bool = True


class Transfers:
    """Times of transfers. A link carries one after the other, in the order in which their prompts are computed."""

    def __init__(self, link: Link, step_tokens: int) -> None:
        self._link, self._step_tokens = link, step_tokens
        self._free_at: defaultdict[tuple[str, str], float] = defaultdict(float)  # by direction and replica

    @property
    def overlap(self) -> bool:
        """Whether blocks are sent while a prompt is computed."""
        return self._link.overlaps

    def end(self, served: Served, giver: str, receiver: str, num_cached: int) -> float:
        """When all blocks of a prompt, computed just now, are at the receiver, which has cached so many tokens of
        it."""
        link, done_at = self._link, served.first_token_at
        assert served.begun_at is not None
        assert done_at is not None
        num_tokens = served.arrival.num_tokens - num_cached
        seconds = num_tokens * link.token_bytes / link.bytes_per_s
        begins_at, last_s = done_at, 0.0
        if link.overlaps:  # from the end of the first step on; the last step's blocks are left
            of_step = min(1.0, self._step_tokens / num_tokens)
            begins_at = served.begun_at + (done_at - served.begun_at) * of_step
            last_s = seconds * of_step
        keys = ("from", giver), ("to", receiver)
        sent_at = max(begins_at, *(self._free_at[key] for key in keys)) + seconds
        self._free_at |= dict.fromkeys(keys, sent_at)
        return max(sent_at, done_at + last_s)
