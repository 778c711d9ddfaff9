"""Prometheus metrics of a replica's engines. Names: docs/reference/metrics.md."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ray.serve import metrics

from folio.app.engine.report import ReplicaReport, StartTimes
from folio.app.replica.figures import Figures
from folio.app.serving.metrics import FIRST_S
from folio.vmem import MemoryReport

if TYPE_CHECKING:
    from folio.app.engine.async_engine import AsyncEngine
    from folio.app.engine.load_report import Activity
    from folio.app.engine.speculation import SpeculationCounts

_QUEUE_S: list[float] = [0.001, *FIRST_S]
_STEP_S: list[float] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10]
_STEP_TOKENS: list[float] = [float(2**power) for power in range(18)]
# Half of the time between two exports of Ray, so that a gauge is in each of them.
_REPEAT_S = 5.0
_TOKENS: list[float] = [1, 16, 64, 256, 1024, 4096, 16_384, 65_536]


class SteadyGauge:
    """A gauge that is set again only where its value has changed, or after `_REPEAT_S`: Ray drops a gauge 20 s after it
    was last set."""

    def __init__(self, gauge: metrics.Gauge) -> None:
        self._gauge = gauge
        self._set: dict[tuple[str, ...], tuple[float, float]] = {}  # values of the tags → (value, time)

    def set(self, value: float, tags: Mapping[str, str]) -> None:
        key, now = tuple(tags.values()), time.monotonic()
        before = self._set.get(key)
        if before is None or before[0] != value or now - before[1] >= _REPEAT_S:
            self._gauge.set(value, dict(tags))
            self._set[key] = value, now


class TotalCounter:
    """A counter that is increased to totals, which begin again at 0 with a new engine."""

    def __init__(self, counter: metrics.Counter) -> None:
        self._counter = counter
        self._totals: dict[tuple[str, ...], float] = {}

    def rise_to(self, total: float, tags: Mapping[str, str]) -> None:
        key = tuple(tags.values())
        before = self._totals.get(key, 0)
        gained = total - before if total >= before else total
        self._totals[key] = total
        if gained > 0:  # Ray refuses an increase by 0
            self._counter.inc(gained, dict(tags))


class EngineMeter:
    """The activity of a replica's engines, recorded with their load reports and not in their steps. Each metric has the
    tag `model`, but for late compilations and the GPU's memory, which are the process's."""

    def __init__(self) -> None:
        self._running = SteadyGauge(metrics.Gauge("folio_running_sequences", "Sequences that have blocks.", ("model",)))
        self._waiting = SteadyGauge(
            metrics.Gauge(
                "folio_waiting_sequences", "Sequences without blocks: not begun yet, or preempted.", ("model",)
            )
        )
        self._bytes = SteadyGauge(
            metrics.Gauge("folio_kv_bytes", "Memory of the KV cache.", ("model", "kind"))  # type: ignore[arg-type]
        )
        self._tokens = SteadyGauge(
            metrics.Gauge(
                "folio_kv_tokens",
                "Tokens of a block, and room in the KV cache.",
                ("model", "kind"),  # type: ignore[arg-type]
            )
        )
        self._queried = TotalCounter(
            metrics.Counter(
                "folio_prefix_queried_tokens",
                "Tokens of sequences that were looked up in the prefix cache.",
                ("model",),
            )
        )
        self._hit = TotalCounter(
            metrics.Counter("folio_prefix_hit_tokens", "Tokens of sequences found in the prefix cache.", ("model",))
        )
        self._evicted = TotalCounter(metrics.Counter("folio_evicted_blocks", "Evicted cached blocks.", ("model",)))
        self._preemptions = TotalCounter(
            metrics.Counter(
                "folio_preemptions",
                "Preempted requests, by swap or recompute.",
                ("model", "way"),  # type: ignore[arg-type]
            )
        )
        self._mapping_s = TotalCounter(
            metrics.Counter(
                "folio_mapping_seconds",
                "Seconds of mapping work: exposed (steps waited) or hidden (beside steps).",
                ("model", "time"),  # type: ignore[arg-type]
            )
        )
        self._mapper_failures = TotalCounter(
            metrics.Counter(
                "folio_mapper_failures",
                "Units of mapping work that the device refused, and that are tried again.",
                ("model",),
            )
        )
        self._failed = TotalCounter(
            metrics.Counter(
                "folio_failed_steps", "Steps that failed, and with them all requests in flight.", ("model",)
            )
        )
        self._late = TotalCounter(
            metrics.Counter(
                "folio_late_compilations",
                "Kernels compiled or loaded, and decode graphs captured, after the warm-up.",
            )
        )
        self._gpu_bytes = SteadyGauge(metrics.Gauge("folio_gpu_bytes", "Memory of the GPU by part.", ("part",)))
        self._pinned_bytes = SteadyGauge(
            metrics.Gauge("folio_pinned_bytes", "Host memory that the process has pinned for its GPU.")
        )
        self._step_s = metrics.Histogram(
            "folio_step_seconds", "Time of an engine step.", boundaries=_STEP_S, tag_keys=("model",)
        )
        self._queue_s = metrics.Histogram(
            "folio_queue_seconds",
            "From a request's arrival at the engine to the step that computes its first tokens.",
            boundaries=_QUEUE_S,
            tag_keys=("model",),
        )
        self._prefill_s = metrics.Histogram(
            "folio_prefill_seconds",
            "From the start of the step that computes a request's first tokens to the end of the step that samples its "
            "first token.",
            boundaries=_QUEUE_S,
            tag_keys=("model",),
        )
        self._step_tokens = metrics.Histogram(
            "folio_step_tokens", "Tokens computed by an engine step.", boundaries=_STEP_TOKENS, tag_keys=("model",)
        )
        self._drafts = TotalCounter(
            metrics.Counter(
                "folio_verified_drafts",
                "Verifications of draft tokens, one a step and sequence.",
                ("model", "proposer"),  # type: ignore[arg-type]
            )
        )
        self._draft = TotalCounter(
            metrics.Counter(
                "folio_draft_tokens",
                "Draft tokens that were verified.",
                ("model", "proposer"),  # type: ignore[arg-type]
            )
        )
        self._accepted = TotalCounter(
            metrics.Counter(
                "folio_accepted_tokens",
                "Draft tokens that were accepted.",
                ("model", "proposer"),  # type: ignore[arg-type]
            )
        )
        self._ready_s = SteadyGauge(
            metrics.Gauge(
                "folio_ready_seconds",
                "Seconds of a phase of the start; of the engine's whole start: all.",
                ("model", "phase"),  # type: ignore[arg-type]
            )
        )

    def note_models(self, engines: Mapping[str, AsyncEngine], figures: Figures, *, is_loading: bool) -> None:
        """Record the figures of all models.

        Args:
            engines: those that the figures are of.
            is_loading: a model is being loaded, whose compilations are no late ones.
        """
        if figures.gpu is not None:
            for part, num_bytes in figures.gpu.parts.items():
                self._gpu_bytes.set(num_bytes, {"part": part})
            self._pinned_bytes.set(figures.gpu.pinned_bytes, {})
        num_late: list[int] = []
        for name, load in figures.loads.items():
            engine, memory = engines.get(name), figures.memories.get(name)
            if engine is None or memory is None:
                self.note_load(name, load)
                continue
            activity = engine.take_activity()
            num_late.append(activity.num_late_compilations)
            self.note(name, load, memory, activity)
            self.note_speculation(name, engine.speculation)
            self.note_start(name, engine.start_times)
        if num_late and not is_loading:
            self.note_compilations(min(num_late))  # each engine counts those of the process since its own load

    def note_load(self, model: str, load: ReplicaReport) -> None:
        """Record the requests of a model, loaded or not. One thread at a time, as all methods."""
        tags = {"model": model}
        self._running.set(load.num_running, tags)
        self._waiting.set(load.num_waiting, tags)

    def note(self, model: str, load: ReplicaReport, memory: MemoryReport, activity: Activity) -> None:
        """Record a report of a model's engine."""
        tags = {"model": model}
        self.note_load(model, load)
        for kind in ("budget", "physical", "anchor", "active", "cached", "pinned", "parked", "mapped", "swapped"):
            self._bytes.set(getattr(memory, f"{kind}_bytes"), tags | {"kind": kind})
        for kind, tokens in (("block", load.unit_tokens), ("free", load.free_tokens), ("total", load.total_tokens)):
            self._tokens.set(tokens, tags | {"kind": kind})
        self._queried.rise_to(memory.queried_tokens, tags)
        self._hit.rise_to(memory.hit_tokens, tags)
        self._evicted.rise_to(memory.evicted_blocks, tags)
        for way, number in activity.num_preempted.items():
            self._preemptions.rise_to(number, tags | {"way": str(way)})
        for time_, us in (("exposed", memory.exposed_us), ("hidden", memory.hidden_us)):
            self._mapping_s.rise_to(us / 1e6, tags | {"time": time_})
        self._mapper_failures.rise_to(memory.mapper_failures, tags)
        self._failed.rise_to(activity.num_failed_steps, tags)
        for step_s in activity.step_s:
            self._step_s.observe(step_s, tags)
        for queue_s in activity.queue_s:
            self._queue_s.observe(queue_s, tags)
        for prefill_s in activity.prefill_s:
            self._prefill_s.observe(prefill_s, tags)
        for tokens in activity.step_tokens:
            self._step_tokens.observe(tokens, tags)

    def note_compilations(self, num_late: int) -> None:
        """Record late compilations: those since the warm-up of the engine that was loaded last."""
        self._late.rise_to(num_late, {})

    def note_speculation(self, model: str, counts: SpeculationCounts | None) -> None:
        """Record draft and accepted tokens, whose quotient is the acceptance rate. `None`: no speculation."""
        if counts is not None:
            # Accepted first: the engine's thread goes on counting, and accepted tokens must not exceed draft tokens.
            accepted_tokens, draft_tokens, checks = counts.accepted_tokens, counts.draft_tokens, counts.checks
            tags = {"model": model, "proposer": counts.proposer}
            self._drafts.rise_to(checks, tags)
            self._draft.rise_to(draft_tokens, tags)
            self._accepted.rise_to(accepted_tokens, tags)

    def note_start(self, model: str, times: StartTimes) -> None:
        """Set the seconds until a model's engine was ready, by phase and in all."""
        for phase, seconds in (*times.phases().items(), ("all", times.ready_s)):
            self._ready_s.set(seconds, {"model": model, "phase": phase})


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
