"""Status of an engine replica: of its models, and of the device that they share. Operators, metrics, routers,
autoscaling and the dashboard read this one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from folio.app.engine.report import GpuMemory, ReplicaReport, StepTimes
from folio.app.shelf.status import DeviceStatus, ModelStatus
from folio.vmem import MemoryReport

# Bounds of a model that has not been loaded yet, of which only the order of magnitude matters to a router.
_STEP_TOKENS, _NUM_SEQS = 1024, 64
# Figures that are not sums over the models of a device.
_OF_ONE = frozenset({"made_at", "unit_tokens", "keys", "changes", "stride", "keys_version", "step", "step_tokens"}) | {
    "busy_share",
    "max_num_seqs",
    "wake_s",
    "is_waking",
    "others_s",
    "num_others",
}


@dataclass(frozen=True, slots=True)
class ModelReport:
    """One model of a replica. Without an engine `memory` is `None`, and these are empty: `outputs`, the fingerprint of
    the model's outputs, and `held_at`, where others get the blocks of requests (`EngineRequest.held_at`)."""

    status: ModelStatus
    load: ReplicaReport
    memory: MemoryReport | None = None
    outputs: str = ""
    held_at: str = ""

    @property
    def name(self) -> str:
        return self.status.name


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """An engine replica at one moment.

    Attributes:
        ready_s: seconds that its engines took to start.
        device: `None` for a single model, which has the device alone.
        gpu: `None` on a CPU.
    """

    name: str
    ready_s: float
    models: tuple[ModelReport, ...]
    device: DeviceStatus | None = None
    gpu: GpuMemory | None = None

    @property
    def outputs(self) -> dict[str, tuple[str, str]]:
        """What routers compare of each model: see `Departures.note_outputs`."""
        return {model.name: (model.outputs, model.held_at) for model in self.models}

    @property
    def load(self) -> ReplicaReport:
        """The load of all its models together."""
        return summed_load([model.load for model in self.models])

    @property
    def memory(self) -> MemoryReport:
        """The KV memory of all its models together."""
        return summed_memory([model.memory for model in self.models if model.memory is not None])


def unloaded_report(status: ModelStatus, now: float) -> ReplicaReport:
    """The load report of a model without an engine. `now`: of the replica's monotonic clock."""
    return ReplicaReport(
        made_at=now,
        step_tokens=_STEP_TOKENS,
        max_num_seqs=_NUM_SEQS,
        num_running=status.num_running,
        num_waiting=status.num_waiting,
    )


def summed_load(loads: Sequence[ReplicaReport]) -> ReplicaReport:
    """The load of all models together, without prefixes. Tokens of different models count alike; `max_num_seqs` and the
    step times are those of the models that have memory, or of all if none has."""
    if len(loads) == 1:
        return loads[0]
    names = [field.name for field in fields(ReplicaReport) if field.name not in _OF_ONE]
    sums: dict[str, Any] = {name: sum(getattr(load, name) for load in loads) for name in names}
    present = [load for load in loads if load.budget_bytes] or loads
    times = [(step.fixed_s, step.token_s, step.attended_s, step.verify_s) for step in (load.step for load in present)]
    return replace(
        present[0],
        **sums,
        max_num_seqs=sum(load.max_num_seqs for load in present),
        made_at=max(load.made_at for load in loads),
        keys=b"",
        changes=b"",
        keys_version=0,
        step=StepTimes(*map(max, zip(*times, strict=True))),
        busy_share=min(sum(load.busy_share for load in loads), 1.0),
    )


def summed_memory(reports: Sequence[MemoryReport]) -> MemoryReport:
    """The memory of all models together: numbers are added, pins and groups listed one after the other."""
    if len(reports) == 1:
        return reports[0]
    names = [field.name for field in fields(MemoryReport)]
    sums: dict[str, Any] = {
        name: sum((getattr(report, name) for report in reports), () if name in ("pins", "groups") else 0)
        for name in names
    }
    return MemoryReport(**sums)
