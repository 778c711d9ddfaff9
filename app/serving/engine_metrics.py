"""Prometheus metrics of an engine replica. Names: docs/reference/metrics.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ray.serve import metrics

from app.engine.report import ReplicaReport, StartTimes
from app.serving.metrics import FIRST_S
from vmem import MemoryReport

if TYPE_CHECKING:
    from app.engine.load_report import Activity
    from app.engine.speculation import SpeculationCounts

_QUEUE_S: list[float] = [0.001, *FIRST_S]
_STEP_S: list[float] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10]
_STEP_TOKENS: list[float] = [float(2**power) for power in range(18)]
_TOKENS: list[float] = [1, 16, 64, 256, 1024, 4096, 16_384, 65_536]


class EngineMeter:
    """An engine's activity, recorded with its load reports and not in its steps."""

    def __init__(self) -> None:
        self._running = metrics.Gauge("folio_running_sequences", "Sequences that have blocks.")
        self._waiting = metrics.Gauge(
            "folio_waiting_sequences", "Sequences without blocks: not begun yet, or preempted."
        )
        self._bytes = metrics.Gauge("folio_kv_bytes", "Memory of the KV cache.", ("kind",))
        self._tokens = metrics.Gauge("folio_kv_tokens", "Tokens of a block, and room in the KV cache.", ("kind",))
        self._queried = metrics.Counter(
            "folio_prefix_queried_tokens", "Tokens of sequences that were looked up in the prefix cache."
        )
        self._hit = metrics.Counter("folio_prefix_hit_tokens", "Tokens of sequences found in the prefix cache.")
        self._evicted = metrics.Counter("folio_evicted_blocks", "Evicted cached blocks.")
        self._preemptions = metrics.Counter("folio_preemptions", "Preempted requests, by swap or recompute.", ("way",))
        self._mapping_s = metrics.Counter(
            "folio_mapping_seconds",
            "Seconds of mapping work: exposed (steps waited) or hidden (beside steps).",
            ("time",),
        )
        self._mapper_failures = metrics.Counter(
            "folio_mapper_failures", "Units of mapping work that the device refused, and that are tried again."
        )
        self._failed = metrics.Counter("folio_failed_steps", "Steps that failed, and with them all requests in flight.")
        self._late = metrics.Counter(
            "folio_late_compilations", "Kernels compiled or loaded, and decode graphs captured, after the warm-up."
        )
        self._step_s = metrics.Histogram("folio_step_seconds", "Time of an engine step.", boundaries=_STEP_S)
        self._queue_s = metrics.Histogram(
            "folio_queue_seconds",
            "From a request's arrival at the engine to the step that computes its first tokens.",
            boundaries=_QUEUE_S,
        )
        self._prefill_s = metrics.Histogram(
            "folio_prefill_seconds",
            "From the start of the step that computes a request's first tokens to the end of the step that samples its "
            "first token.",
            boundaries=_QUEUE_S,
        )
        self._step_tokens = metrics.Histogram(
            "folio_step_tokens", "Tokens computed by an engine step.", boundaries=_STEP_TOKENS
        )
        self._drafts = metrics.Counter(
            "folio_verified_drafts", "Verifications of draft tokens, one a step and sequence.", ("proposer",)
        )
        self._draft = metrics.Counter("folio_draft_tokens", "Draft tokens that were verified.", ("proposer",))
        self._accepted = metrics.Counter("folio_accepted_tokens", "Draft tokens that were accepted.", ("proposer",))
        self._ready_s = metrics.Gauge(
            "folio_ready_seconds", "Seconds of a phase of the start; of the engine's whole start: all.", ("phase",)
        )
        self._totals: dict[tuple[str, str], float] = {}

    def note(self, load: ReplicaReport, memory: MemoryReport, activity: Activity) -> None:
        """Record a report. One thread at a time."""
        self._running.set(load.num_running)
        self._waiting.set(load.num_waiting)
        for kind in ("budget", "physical", "anchor", "active", "cached", "pinned", "parked", "mapped", "swapped"):
            self._bytes.set(getattr(memory, f"{kind}_bytes"), {"kind": kind})
        for kind, tokens in (("block", load.unit_tokens), ("free", load.free_tokens), ("total", load.total_tokens)):
            self._tokens.set(tokens, {"kind": kind})
        self._count(self._queried, {"": memory.queried_tokens})
        self._count(self._hit, {"": memory.hit_tokens})
        self._count(self._evicted, {"": memory.evicted_blocks})
        self._count(self._preemptions, {str(way): number for way, number in activity.num_preempted.items()}, "way")
        seconds = {"exposed": memory.exposed_us / 1e6, "hidden": memory.hidden_us / 1e6}
        self._count(self._mapping_s, seconds, "time")
        self._count(self._mapper_failures, {"": memory.mapper_failures})
        self._count(self._failed, {"": activity.num_failed_steps})
        self._count(self._late, {"": activity.num_late_compilations})
        for step_s in activity.step_s:
            self._step_s.observe(step_s)
        for queue_s in activity.queue_s:
            self._queue_s.observe(queue_s)
        for prefill_s in activity.prefill_s:
            self._prefill_s.observe(prefill_s)
        for tokens in activity.step_tokens:
            self._step_tokens.observe(tokens)

    def note_speculation(self, counts: SpeculationCounts | None) -> None:
        """Record draft and accepted tokens, whose quotient is the acceptance rate. `None`: no speculation."""
        if counts is not None:
            # Accepted first: the engine's thread goes on counting, and accepted tokens must not exceed draft tokens.
            accepted_tokens, draft_tokens, checks = counts.accepted_tokens, counts.draft_tokens, counts.checks
            self._count(self._drafts, {counts.proposer: checks}, "proposer")
            self._count(self._draft, {counts.proposer: draft_tokens}, "proposer")
            self._count(self._accepted, {counts.proposer: accepted_tokens}, "proposer")

    def note_start(self, times: StartTimes) -> None:
        """Set the seconds until this replica was ready, by phase and in all. Repeat it, as `RequestMeter.repeat`."""
        for phase, seconds in (*times.phases().items(), ("all", times.ready_s)):
            self._ready_s.set(seconds, {"phase": phase})

    def _count(self, counter: metrics.Counter, sums: Mapping[Any, float], tag: str | None = None) -> None:
        """Increase a counter to these totals since the start. Ray refuses an increase by 0."""
        for value, total in sums.items():
            key = (counter.info["name"], value)
            if (gained := total - self._totals.get(key, 0)) > 0:
                counter.inc(gained, {tag: value} if tag is not None else {})
                self._totals[key] = total


class RoutingAudit:
    """Expected and found cached tokens of each request: how well routers know this replica's prefix cache."""

    def __init__(self) -> None:
        self._expected = metrics.Counter(
            "folio_expected_cached_tokens", "Prompt tokens that routers expected to be cached."
        )
        self._cached = metrics.Counter("folio_cached_tokens", "Prompt tokens that were cached, of the same requests.")
        self._missed = metrics.Histogram(
            "folio_expected_cached_tokens_error",
            "Absolute difference of expected and found cached tokens of a request.",
            boundaries=_TOKENS,
        )

    def note(self, expected_tokens: int, cached_tokens: int) -> None:
        if expected_tokens:  # a counter may not be increased by 0
            self._expected.inc(expected_tokens)
        if cached_tokens:
            self._cached.inc(cached_tokens)
        self._missed.observe(abs(expected_tokens - cached_tokens))
