"""What an engine replica counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.serve import metrics

from app.engine.load_report import Activity
from app.engine.report import ReplicaReport
from app.engine.speculation import SpeculationCounts
from app.engine.startup import StartTimes
from vmem import MemoryReport

_TOKENS: list[float] = [1, 16, 64, 256, 1024, 4096, 16_384, 65_536]
_STEP_S: list[float] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5]
_QUEUE_S: list[float] = [0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60]


class EngineMeter:
    """What an engine does, told now and then, so that a step has nothing to do with it."""

    def __init__(self) -> None:
        self._running = metrics.Gauge("folio_running_sequences", "Sequences that have blocks.")
        self._waiting = metrics.Gauge("folio_waiting_sequences", "Sequences that have none yet, or were preempted.")
        self._bytes = metrics.Gauge("folio_kv_bytes", "Memory of the KV cache.", ("kind",))
        self._queried = metrics.Counter(
            "folio_prefix_queried_tokens", "Tokens of sequences that were looked up in the prefix cache."
        )
        self._hit = metrics.Counter("folio_prefix_hit_tokens", "Tokens that were found there.")
        self._evicted = metrics.Counter("folio_evicted_blocks", "Cached blocks whose content was given up.")
        self._preemptions = metrics.Counter(
            "folio_preemptions", "Requests that gave way, by what became of their blocks.", ("way",)
        )
        self._mapping_s = metrics.Counter(
            "folio_mapping_s", "Seconds of mapping work: exposed, steps waited for it; hidden, beside them.", ("time",)
        )
        self._failed = metrics.Counter(
            "folio_failed_steps", "Steps that failed, and with each of them all requests in flight."
        )
        self._step_s = metrics.Histogram("folio_step_s", "Time of an engine step.", boundaries=_STEP_S)
        self._queue_s = metrics.Histogram(
            "folio_queue_s",
            "From a request's arrival at the engine to the step that computes its first tokens.",
            boundaries=_QUEUE_S,
        )
        self._told: dict[tuple[str, str], float] = {}

    def note(self, load: ReplicaReport, memory: MemoryReport, activity: Activity) -> None:
        """How things are. One thread at a time."""
        self._running.set(load.num_running)
        self._waiting.set(load.num_waiting)
        sizes = {
            "budget": memory.budget_bytes,
            "physical": memory.physical_bytes,
            "anchor": memory.anchor_bytes,
            "active": memory.active_bytes,
            "cached": memory.cached_bytes,
            "pinned": memory.pinned_bytes,
            "parked": memory.parked_bytes,
            "mapped": memory.mapped_bytes,
            "swapped": memory.swapped_bytes,
        }
        for kind, num_bytes in sizes.items():
            self._bytes.set(num_bytes, {"kind": kind})
        self._count(self._queried, {"": memory.queried_tokens})
        self._count(self._hit, {"": memory.hit_tokens})
        self._count(self._evicted, {"": memory.evicted_blocks})
        self._count(self._preemptions, {str(way): number for way, number in activity.num_preempted.items()}, "way")
        seconds = {"exposed": memory.exposed_us / 1e6, "hidden": memory.hidden_us / 1e6}
        self._count(self._mapping_s, seconds, "time")
        self._count(self._failed, {"": activity.num_failed_steps})
        for step_s in activity.step_s:
            self._step_s.observe(step_s)
        for queue_s in activity.queue_s:
            self._queue_s.observe(queue_s)

    def _count(self, counter: metrics.Counter, sums: Mapping[Any, float], tag: str | None = None) -> None:
        """Add what sums since the start have gained; by 0 a counter may not be increased."""
        for value, total in sums.items():
            key = (counter.info["name"], value)
            if (gained := total - self._told.get(key, 0)) > 0:
                counter.inc(gained, {tag: value} if tag is not None else {})
                self._told[key] = total


class RoutingAudit:
    """How well routers know this replica's prefix cache: of each request, the cached tokens that were expected, and
    those that were found."""

    def __init__(self) -> None:
        self._expected = metrics.Counter(
            "folio_expected_cached_tokens", "Prompt tokens that routers expected to be cached."
        )
        self._cached = metrics.Counter("folio_cached_tokens", "Prompt tokens that were, of the same requests.")
        self._missed = metrics.Histogram(
            "folio_expected_cached_tokens_error",
            "Prompt tokens of a request by which both differ.",
            boundaries=_TOKENS,
        )

    def note(self, expected_tokens: int, cached_tokens: int) -> None:
        """A request has begun."""
        if expected_tokens:  # a counter may not be increased by 0
            self._expected.inc(expected_tokens)
        if cached_tokens:
            self._cached.inc(cached_tokens)
        self._missed.observe(abs(expected_tokens - cached_tokens))


class SpeculationMeter:
    """Guessed tokens that this replica has checked, and those that were right: the second by the first is the
    acceptance rate."""

    def __init__(self) -> None:
        self._draft = metrics.Counter("folio_draft_tokens", "Guessed tokens that were checked.", ("proposer",))
        self._accepted = metrics.Counter("folio_accepted_tokens", "Guessed tokens that were right.", ("proposer",))
        self._draft_tokens = self._accepted_tokens = 0

    def note(self, counts: SpeculationCounts | None) -> None:
        """The engine has come to these counts; `None`: it does not guess. One thread at a time."""
        if counts is None:
            return
        # The engine's thread goes on counting: accepted first, so that there are never more of them than guesses.
        accepted_tokens, draft_tokens = counts.accepted_tokens, counts.draft_tokens
        tags = {"proposer": counts.proposer}
        if draft_tokens > self._draft_tokens:
            self._draft.inc(draft_tokens - self._draft_tokens, tags)
        if accepted_tokens > self._accepted_tokens:
            self._accepted.inc(accepted_tokens - self._accepted_tokens, tags)
        self._draft_tokens, self._accepted_tokens = draft_tokens, accepted_tokens


class ReadyGauge:
    """How long this replica took to be ready, in all and phase by phase (`StartTimes`)."""

    def __init__(self) -> None:
        self._seconds = metrics.Gauge(
            "folio_ready_s", "Seconds of a phase of the start; of the engine's whole start: all.", ("phase",)
        )

    def note(self, times: StartTimes) -> None:
        for phase, seconds in times.phases().items():
            self._seconds.set(seconds, {"phase": phase})
        self._seconds.set(times.ready_s, {"phase": "all"})
