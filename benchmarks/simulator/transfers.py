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
        parts: layer groups that are sent while the next ones are computed; 1: steps, which compute all layers. 0:
            nothing is sent before the first token.
    """

    bytes_per_s: float
    token_bytes: int
    parts: int = 1


class Transfers:
    """Times of transfers. A link carries one after the other, in the order in which their prompts are computed."""

    def __init__(self, link: Link, step_tokens: int) -> None:
        self._link, self._step_tokens = link, step_tokens
        self._free_at: defaultdict[tuple[str, str], float] = defaultdict(float)  # by direction and replica

    @property
    def overlap(self) -> bool:
        """Whether blocks are sent while a prompt is computed."""
        return self._link.parts > 0

    def end(self, served: Served, giver: str, receiver: str, num_cached: int) -> float:
        """When all blocks of a prompt, computed just now, are at the receiver, which has cached so many tokens of
        it."""
        link, done_at = self._link, served.first_token_at
        assert served.begun_at is not None
        assert done_at is not None
        num_tokens = served.arrival.num_tokens - num_cached
        seconds = num_tokens * link.token_bytes / link.bytes_per_s
        begins_at, last_s = done_at, 0.0
        if link.parts:  # the first part of the first step is computed; the last part of the last step is left
            begins_at = served.begun_at + (done_at - served.begun_at) / link.parts * min(
                1.0, self._step_tokens / num_tokens
            )
            last_s = seconds * min(1.0, self._step_tokens / num_tokens) / link.parts
        keys = ("from", giver), ("to", receiver)
        sent_at = max(begins_at, *(self._free_at[key] for key in keys)) + seconds
        self._free_at |= dict.fromkeys(keys, sent_at)
        return max(sent_at, done_at + last_s)
