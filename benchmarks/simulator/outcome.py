"""Outcome of a simulated run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.simulator.replica import Served


@dataclass(slots=True)
class Lifetime:
    """A replica and what it did.

    Attributes:
        ordered_at, ended_at: between these it has to be paid for.
        busy_s, prefill_tokens: in steps, and of prompts, computed.
    """

    name: str
    ordered_at: float
    ended_at: float
    busy_s: float
    prefill_tokens: int


@dataclass(slots=True)
class Outcome:
    """
    Attributes:
        served: all requests, in the order in which they were sent.
        lifetimes: all replicas that there have been.
        ended_at: when the last request ended.
        num_steps: of all replicas.
        missed_tokens: by how much expected and actual cached tokens differed, summed over requests.
        num_resyncs: how often a router has forgotten what it expected.
        fleet_sizes: (when, replicas ordered, replicas that take requests), whenever one has changed.
    """

    served: list[Served]
    lifetimes: list[Lifetime]
    ended_at: float
    num_steps: int
    missed_tokens: int
    num_resyncs: int
    fleet_sizes: list[tuple[float, int, int]]

    @property
    def hit_share(self) -> float:
        """Of all prompt tokens, those found in a cache."""
        return sum(s.cached_tokens for s in self.served) / sum(s.arrival.num_tokens for s in self.served)

    @property
    def ttft_s(self) -> list[float]:
        return [s.ttft_s for s in self.served]

    def ttft_percentile_s(self, percentile: float) -> float:
        return float(np.percentile(self.ttft_s, percentile))

    @property
    def busy_max_over_mean(self) -> float:
        """Seconds in steps, of the busiest replica over the mean."""
        return _max_over_mean([life.busy_s for life in self.lifetimes])

    @property
    def prefill_max_over_mean(self) -> float:
        """Prompt tokens computed, of the replica with the most over the mean."""
        return _max_over_mean([life.prefill_tokens for life in self.lifetimes])

    @property
    def replica_s(self) -> float:
        return sum(life.ended_at - life.ordered_at for life in self.lifetimes)


def _max_over_mean(values: Sequence[float]) -> float:
    return max(values) * len(values) / sum(values)
