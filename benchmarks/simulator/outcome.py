"""Outcome of a simulated run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.simulator.replica import Served


@dataclass(slots=True)
class Lifetime:
    """A replica and its work.

    Attributes:
        ordered_at, ended_at: the time that it costs.
        busy_s, prefill_tokens: seconds in steps, and computed prompt tokens.
    """

    name: str
    ordered_at: float
    ended_at: float
    busy_s: float
    prefill_tokens: int


@dataclass(slots=True)
class Outcome:
    """Outcome of a run.

    Attributes:
        served: all requests, in the order of sending.
        lifetimes: of all replicas.
        ended_at: end of the last request.
        num_steps: of all replicas.
        missed_tokens: sum over requests of the difference between expected and actual cached tokens.
        num_resyncs: of all routers.
        fleet_sizes: (time, replicas ordered, replicas that take requests), at each change.
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
        """Share of all prompt tokens that was found in a cache."""
        return sum(s.cached_tokens for s in self.served) / sum(s.arrival.num_tokens for s in self.served)

    @property
    def ttft_s(self) -> list[float]:
        return [s.ttft_s for s in self.served]

    def ttft_percentile_s(self, percentile: float) -> float:
        return float(np.percentile(self.ttft_s, percentile))

    @property
    def busy_max_over_mean(self) -> float:
        """Seconds in steps of the busiest replica over the mean."""
        return _max_over_mean([life.busy_s for life in self.lifetimes])

    @property
    def prefill_max_over_mean(self) -> float:
        """Computed prompt tokens of the replica with the most, over the mean."""
        return _max_over_mean([life.prefill_tokens for life in self.lifetimes])

    @property
    def replica_s(self) -> float:
        return sum(life.ended_at - life.ordered_at for life in self.lifetimes)


def _max_over_mean(values: Sequence[float]) -> float:
    return max(values) * len(values) / sum(values)
