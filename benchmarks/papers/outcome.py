"""Outcome of a run: one system at one rate of requests."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.papers.held import Observer
from benchmarks.papers.requests import Kind

# Tokens of the KV memory, as in the paper's table 1 for the smallest model, and of the longest request.
CAPACITY, LONGEST, BLOCK_TOKENS = 15_728, 2048, 16
FOLIO = "folio"


@dataclass(frozen=True, slots=True)
class Run:
    """One system at one rate.

    Attributes:
        system: "folio", or a key of `reserved.BASELINES`.
        rate: requests a second.
        duration_s: in which they arrive.
        repeat: number of an equal run.
    """

    system: str
    kind: Kind
    rate: float
    duration_s: float
    block_tokens: int = BLOCK_TOKENS
    seed: int = 0
    repeat: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has shown.

    Attributes:
        mean_s, median_s: normalised latency: from the arrival of a request to its end, over its output tokens.
        num_late: requests that had not ended when the run did; they count as if they ended then.
        batched: mean number of requests that run.
        throughput: requests a second that end while requests arrive.
        saved: share of blocks saved by sharing.
        preempted: preemptions a request.
        shares: of the KV memory while requests wait: state, reserved, unused, free.
    """

    mean_s: float
    median_s: float
    num_requests: int
    num_late: int
    batched: float
    throughput: float
    saved: float
    preempted: float
    shares: tuple[float, float, float, float] | None


def outcome(
    times: Sequence[tuple[float, float | None, int]], duration_s: float, ended_s: float, seen: Observer, preempted: int
) -> Outcome:
    """Args: times: of each request, arrival, end and output tokens; ended_s: the run's end."""
    latencies = [((ended_s if end is None else end) - at) / output for at, end, output in times]
    return Outcome(
        statistics.mean(latencies),
        statistics.median(latencies),
        len(times),
        sum(end is None for _, end, _ in times),
        seen.batched,
        sum(end is not None and end <= duration_s for _, end, _ in times) / duration_s,
        seen.saved,
        preempted / len(times),
        seen.mean_shares(),
    )


def described(run: Run, seen: Outcome) -> str:
    """A line."""
    late = f", {seen.num_late} late" if seen.num_late else ""
    return (
        f"{run.kind.name:18} {run.system:8} blocks of {run.block_tokens:3} {run.rate:9.2f} requests/s: "
        f"{seen.mean_s:7.3f} s a token, {seen.batched:6.1f} batched, {seen.throughput:6.2f}/s{late}"
    )
