"""Prometheus metrics of a replica: engines, states of models, the device. Names: docs/reference/metrics.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, get_args

from ray.serve import metrics

from folio.app.engine.report import GpuMemory, ReplicaReport, Requests, StartTimes
from folio.app.fleet.status import ReplicaStatus
from folio.app.serving.metric_rows import Counter, Gauge, Histogram, MetricTable, Rows, Total
from folio.app.serving.metrics import FIRST_S
from folio.app.shelf.status import DeviceStatus, ModelState, ModelStatus
from folio.vmem import MemoryReport

if TYPE_CHECKING:
    from folio.app.engine.async_engine import AsyncEngine
    from folio.app.engine.schedule.load_report import Activity
    from folio.app.engine.speculation import SpeculationCounts

_QUEUE_S: list[float] = [0.001, *FIRST_S]
_STEP_S: list[float] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10]
_STEP_TOKENS: list[float] = [float(2**power) for power in range(18)]
_TOKENS: list[float] = [1, 16, 64, 256, 1024, 4096, 16_384, 65_536]
_WAKE_S: list[float] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300]


class EngineFigures(NamedTuple):
    """A model's engine. `speculation`: `None` without draft tokens."""

    load: ReplicaReport
    memory: MemoryReport
    activity: Activity
    start: StartTimes
    speculation: SpeculationCounts | None = None

    def drafts(self, count: str) -> dict[str, float]:
        """A count of draft tokens by proposer."""
        return {} if self.speculation is None else {self.speculation.proposer: getattr(self.speculation, count)}

    def stored(self, *counts: str) -> dict[str, float]:
        """Counts of prefixes on disk, by their names."""
        store = self.activity.store
        return {} if store is None else {name.removesuffix("_bytes"): getattr(store, name) for name in counts}


def _bytes(report: object, *kinds: str) -> dict[str, float]:
    return {kind: getattr(report, f"{kind}_bytes") for kind in kinds}


_KIND, _PROPOSER = ("model", "kind"), ("model", "proposer")
_KV_KINDS = ("budget", "physical", "anchor", "active", "cached", "pinned", "parked", "mapped", "swapped", "kept")

# Metrics of a model, loaded or not.
REQUESTS: Rows[Requests] = (
    Gauge("folio_running_sequences", "Sequences that have blocks.", lambda m: m.num_running),
    Gauge("folio_waiting_sequences", "Sequences without blocks: not begun yet, or preempted.", lambda m: m.num_waiting),
)
ENGINE: Rows[EngineFigures] = (
    Gauge("folio_kv_bytes", "Memory of the KV cache.", lambda e: _bytes(e.memory, *_KV_KINDS), _KIND),
    Gauge(
        "folio_kv_tokens",
        "Tokens of a block, and room in the KV cache.",
        lambda e: {"block": e.load.unit_tokens, "free": e.load.free_tokens, "total": e.load.total_tokens},
        _KIND,
    ),
    Total(
        "folio_prefix_queried_tokens",
        "Tokens of sequences that were looked up in the prefix cache.",
        lambda e: e.memory.queried_tokens,
    ),
    Total("folio_prefix_hit_tokens", "Tokens of sequences found in the prefix cache.", lambda e: e.memory.hit_tokens),
    Total("folio_evicted_blocks", "Evicted cached blocks.", lambda e: e.memory.evicted_blocks),
    Total(
        "folio_store_records",
        "Records of prefixes on disk: written, read, dropped before their turn, or refused because they were damaged.",
        lambda e: e.stored("written", "read", "dropped", "refused"),
        ("model", "outcome"),
    ),
    Gauge(
        "folio_store_bytes",
        "Files of prefixes on disk, of all models and replicas that share the folder.",
        lambda e: e.stored("disk_bytes"),
        _KIND,
    ),
    Total(
        "folio_received_bytes",
        "KV cache that came from replicas that had begun requests.",
        lambda e: e.activity.received_bytes,
    ),
    Total(
        "folio_preemptions",
        "Preempted requests, by swap or recompute.",
        lambda e: {str(way): number for way, number in e.activity.num_preempted.items()},
        ("model", "way"),
    ),
    Total(
        "folio_mapping_seconds",
        "Seconds of mapping work: exposed (steps waited) or hidden (beside steps).",
        lambda e: {"exposed": e.memory.exposed_us / 1e6, "hidden": e.memory.hidden_us / 1e6},
        ("model", "time"),
    ),
    Total(
        "folio_mapper_failures",
        "Units of mapping work that the device refused, and that are tried again.",
        lambda e: e.memory.mapper_failures,
    ),
    Total(
        "folio_failed_steps",
        "Steps that failed, and with them all requests in flight.",
        lambda e: e.activity.num_failed_steps,
    ),
    Histogram("folio_step_seconds", "Time of an engine step.", lambda e: list(e.activity.step_s), buckets=_STEP_S),
    Histogram(
        "folio_queue_seconds",
        "From a request's arrival at the engine to the step that computes its first tokens.",
        lambda e: list(e.activity.queue_s),
        buckets=_QUEUE_S,
    ),
    Histogram(
        "folio_prefill_seconds",
        "From the start of the step that computes a request's first tokens to the end of the step that samples its "
        "first token.",
        lambda e: list(e.activity.prefill_s),
        buckets=_QUEUE_S,
    ),
    Histogram(
        "folio_step_tokens",
        "Tokens computed by an engine step.",
        lambda e: list(e.activity.step_tokens),
        buckets=_STEP_TOKENS,
    ),
    # Accepted tokens are read first: the engine's thread keeps counting, and they must not exceed draft tokens. Their
    # quotient is the acceptance rate.
    Total(
        "folio_accepted_tokens", "Draft tokens that were accepted.", lambda e: e.drafts("accepted_tokens"), _PROPOSER
    ),
    Total("folio_draft_tokens", "Draft tokens that were verified.", lambda e: e.drafts("draft_tokens"), _PROPOSER),
    Total(
        "folio_verified_drafts",
        "Verifications of draft tokens, one a step and sequence.",
        lambda e: e.drafts("checks"),
        _PROPOSER,
    ),
    Gauge(
        "folio_ready_seconds",
        "Seconds that a phase of the engine's start took; phase all: the whole start.",
        lambda e: e.start.phases() | {"all": e.start.ready_s},
        ("model", "phase"),
    ),
)
# Metrics of a model on a device that models share.
MODEL: Rows[ModelStatus] = (
    Gauge(
        "folio_model_state",
        "1 for the present state of a model, 0 for each other state.",
        lambda m: {state: state == m.state for state in get_args(ModelState)},
        ("model", "state"),
    ),
    Gauge(
        "folio_model_bytes",
        "Memory of the device that a model has now.",
        lambda m: {"weights": m.device_weight_bytes, "kv": m.kv_bytes},
        _KIND,
    ),
    Total("folio_model_evictions", "Times that a model was put to sleep for another one.", lambda m: m.num_evictions),
)
DEVICE: Rows[DeviceStatus] = (
    Gauge(
        "folio_device_bytes",
        "Memory of the device that the models share.",
        lambda d: _bytes(d, "capacity", "used", "idle", "charged", "workspace"),
        ("kind",),
    ),
    Gauge(
        "folio_device_needed_bytes",
        "Memory with which no request of any model would wait.",
        lambda d: d.needed_bytes,
        (),
    ),
)
GPU: Rows[GpuMemory] = (
    Gauge("folio_gpu_bytes", "Memory of the GPU by part.", lambda g: dict(g.parts), ("part",)),
    Gauge("folio_pinned_bytes", "Host memory that the process has pinned for its GPU.", lambda g: g.pinned_bytes, ()),
)
# Metrics of the process. Each engine counts from its own load, so the least of their numbers is recorded.
PROCESS: Rows[int] = (
    Total(
        "folio_late_compilations",
        "Kernels compiled or loaded, and decode graphs captured, after the warm-up.",
        lambda num_late: num_late,
        (),
    ),
)
# Expected and found cached tokens of a request.
AUDIT: Rows[tuple[int, int]] = (
    Counter("folio_expected_cached_tokens", "Prompt tokens that routers expected to be cached.", lambda r: r[0], ()),
    Counter("folio_cached_tokens", "Prompt tokens that were cached, of the same requests.", lambda r: r[1], ()),
    Histogram(
        "folio_expected_cached_tokens_error",
        "Absolute difference of expected and found cached tokens of a request.",
        lambda r: abs(r[0] - r[1]),
        (),
        _TOKENS,
    ),
)


class ReplicaMeter:
    """Records a replica's status at each load report, so that no step is delayed. One thread at a time."""

    def __init__(self) -> None:
        self._requests, self._engine = MetricTable(REQUESTS), MetricTable(ENGINE)
        self._model, self._device, self._gpu = MetricTable(MODEL), MetricTable(DEVICE), MetricTable(GPU)
        self._process = MetricTable(PROCESS)
        self._wake_s = metrics.Histogram(
            "folio_model_wake_seconds",
            "Time to wake or load a model, once there was memory for it.",
            boundaries=_WAKE_S,
            tag_keys=("model",),
        )
        self._num_wakes: dict[str, int] = {}

    def note(self, replica: ReplicaStatus, engines: Mapping[str, AsyncEngine]) -> None:
        """Record a status.

        Args:
            engines: of the models, by name.
        """
        num_late: list[int] = []
        for model in replica.models:
            self._requests.note(model.load, model.name)
            engine = engines.get(model.name)
            if engine is not None and model.memory is not None:
                activity = engine.take_activity()
                num_late.append(activity.num_late_compilations)
                figures = EngineFigures(model.load, model.memory, activity, engine.start_times, engine.speculation)
                self._engine.note(figures, model.name)
            if replica.device is not None:
                self._note_state(model.status)
        # Compilations during a load are not late; each engine counts those of the process since its own load.
        if num_late and not any(model.status.state == "loading" for model in replica.models):
            self._process.note(min(num_late))
        if replica.device is not None:
            self._device.note(replica.device)
        if replica.gpu is not None:
            self._gpu.note(replica.gpu)

    def _note_state(self, status: ModelStatus) -> None:
        self._model.note(status, status.name)
        before = self._num_wakes.get(status.name, 0)
        # A model that was removed and added again counts from 0. Two wakes between two reports are too rare to keep
        # each one's time.
        for _ in range(status.num_wakes - before if status.num_wakes >= before else status.num_wakes):
            self._wake_s.observe(status.last_wake_s, {"model": status.name})
        self._num_wakes[status.name] = status.num_wakes


class RoutingAudit:
    """Expected and found cached tokens of each request: how well routers know this replica's prefix cache."""

    def __init__(self) -> None:
        self._table = MetricTable(AUDIT)

    def note(self, expected_tokens: int, cached_tokens: int) -> None:
        self._table.note((expected_tokens, cached_tokens))
