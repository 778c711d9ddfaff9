"""A replica's part of the state: engine views as JSON, made in the replica, so that ingresses only pass it on."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from folio.app.dashboard.state import (
    BlockMap,
    Device,
    Gpu,
    Load,
    Memory,
    ModelOnDevice,
    Parked,
    ReplicaDetail,
    ReplicaState,
    RunningSequence,
    Steps,
    Table,
    block_map,
    runs_of,
)
from folio.app.engine.report import ReplicaReport
from folio.app.engine.shelf.status import DeviceStatus, ModelStatus
from folio.app.engine.watch import EngineView, EngineWatch, StepRecord, WatchedSequence
from folio.vmem import MemoryReport, MemorySnapshot

if TYPE_CHECKING:
    from folio.app.engine.gpu_memory import GpuMemory

# Entries of `Steps`, and runs of a `Table`, at most.
MOST_STEPS, MOST_RUNS = 40, 128
_MOST_QUEUE_S = 256  # of `Steps`


@dataclass(frozen=True, slots=True)
class WatchCall:
    """An ingress's question to all replicas.

    Attributes:
        details: names of replicas whose details are wanted; `None`: all.
        requests: ids of requests whose sequences are wanted in the details.
        since: by name, the last step that the ingress knows; replicas that are not in it tell no steps.
    """

    details: frozenset[str] | None = frozenset()
    requests: frozenset[str] = frozenset()
    since: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica's answer. `state` is a `ReplicaState` and `detail` a `ReplicaDetail` as JSON."""

    name: str
    last_step: int
    state: str
    detail: str | None


@dataclass(frozen=True, slots=True)
class ShelfView:
    """Models that share a device, for `view_shelf`.

    Attributes:
        load, memory: of all of them together.
        watches: of those that have an engine.
        gpu: `None` on a CPU.
    """

    models: Sequence[ModelStatus]
    device: DeviceStatus
    load: ReplicaReport
    memory: MemoryReport
    watches: Mapping[str, EngineWatch]
    gpu: GpuMemory | None = None


def view_replica(
    watch: EngineWatch, call: WatchCall, *, name: str, model: str, ready_at: float, gpu: GpuMemory | None = None
) -> ReplicaView:
    """Look at an engine. From any thread; waits for 20 ms at most.

    Args:
        gpu: `None` on a CPU.
        ready_at: when the replica became ready, by `time.monotonic`.
    """
    view = _look(watch, call, name)
    report = None if view.memory is None else view.memory.report
    return _answer(view, view.load, report, view.steps, call, name=name, model=model, ready_at=ready_at, gpu=gpu)


def view_shelf(shelf: ShelfView, call: WatchCall, *, name: str, ready_at: float) -> ReplicaView:
    """Look at models that share a device: at the blocks of the one with the most requests. See `view_replica`."""
    loaded = [status for status in shelf.models if status.name in shelf.watches]
    busiest = max(loaded, key=lambda status: status.num_running + status.num_waiting, default=None)
    model = "" if busiest is None else busiest.name
    view = None if busiest is None else _look(shelf.watches[model], call, name)
    since = call.since.get(name) or 0
    steps = [step for other, watch in shelf.watches.items() if other != model for step in watch.steps(since)]
    steps = sorted([*steps, *(() if view is None else view.steps)])
    known: dict[str, Any] = {"name": name, "model": model, "ready_at": ready_at, "gpu": shelf.gpu}
    return _answer(view, shelf.load, shelf.memory, steps, call, shelf=shelf, **known)


def _look(watch: EngineWatch, call: WatchCall, name: str) -> EngineView:
    return watch.look(call.since.get(name) or 0, detailed=_is_detailed(call, name), wanted=call.requests)


def _is_detailed(call: WatchCall, name: str) -> bool:
    return call.details is None or name in call.details


def _answer(
    view: EngineView | None,
    load: ReplicaReport,
    report: MemoryReport | None,
    steps: Sequence[StepRecord],
    call: WatchCall,
    *,
    name: str,
    model: str,
    ready_at: float,
    gpu: GpuMemory | None,
    shelf: ShelfView | None = None,
) -> ReplicaView:
    """The answer with the blocks of a view."""
    since, memory = call.since.get(name), None if view is None else view.memory
    last_step = steps[-1].number if steps else since or 0
    state = ReplicaState(
        name=name,
        model=model,
        age_s=round(time.monotonic() - ready_at, 1),
        load=Load.model_validate(load, from_attributes=True),
        memory=None if report is None else Memory.model_validate(report, from_attributes=True),
        maps=() if memory is None else _maps(memory, detailed=False),
        # Not to a new ingress: others watched them, and a viewer whose stream goes on here has seen them there.
        steps=Steps() if since is None else _steps(steps, time.monotonic()),
        last_step=last_step,
        models=() if shelf is None else tuple(map(_on_device, shelf.models)),
        device=None if shelf is None else Device.model_validate(shelf.device, from_attributes=True),
        gpu=None if gpu is None else Gpu.model_validate(gpu, from_attributes=True),
    )
    detail = None
    if view is not None and memory is not None and _is_detailed(call, name):
        detail = _detail(view, memory).model_dump_json()
    return ReplicaView(name, last_step, state.model_dump_json(), detail)


def _on_device(status: ModelStatus) -> ModelOnDevice:
    return ModelOnDevice.model_validate(status, from_attributes=True)


def _maps(memory: MemorySnapshot, *, detailed: bool) -> tuple[BlockMap, ...]:
    return tuple(
        block_map(
            states,
            group=g,
            block_tokens=group.block_tokens,
            block_bytes=group.block_bytes,
            swapped=swapped,
            detailed=detailed,
        )
        for g, (states, group, swapped) in enumerate(
            zip(memory.states, memory.report.groups, memory.swapped_blocks, strict=True)
        )
    )


def _detail(view: EngineView, memory: MemorySnapshot) -> ReplicaDetail:
    return ReplicaDetail(
        maps=_maps(memory, detailed=True),
        sequences=tuple(map(_sequence, view.sequences)),
        num_sequences=memory.num_sequences,
        parked=tuple(
            Parked(group=g, slot=slot, num_mapped=num_mapped)
            for g, regions in enumerate(memory.parked)
            for slot, num_mapped in regions
        ),
        num_parked=sum(memory.num_parked),
        region_blocks=memory.region_blocks,
    )


def _sequence(sequence: WatchedSequence) -> RunningSequence:
    return RunningSequence(
        request_id=sequence.request_id,
        index=sequence.index,
        num_tokens=sequence.memory.num_tokens,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_cached_tokens=sequence.num_cached_tokens,
        tables=tuple(
            Table(
                group=g,
                first=table.first,
                num_blocks=len(table.block_ids),
                runs=runs_of(table.block_ids, MOST_RUNS),
                slot=table.slot,
                num_mapped=table.num_mapped,
            )
            for g, table in enumerate(sequence.memory.tables)
        ),
    )


def _steps(records: Sequence[StepRecord], now: float) -> Steps:
    """The steps in at most `MOST_STEPS` entries."""
    size = -(-len(records) // MOST_STEPS) or 1
    parts = [records[start : start + size] for start in range(0, len(records), size)]
    return Steps(
        ago_s=tuple(round(now - part[-1].at, 3) for part in parts),
        num=tuple(map(len, parts)),
        step_ms=tuple(round(max(step.seconds for step in part) * 1e3, 3) for part in parts),
        tokens=tuple(sum(step.num_tokens for step in part) for part in parts),
        outputs=tuple(sum(step.num_outputs for step in part) for part in parts),
        sequences=tuple(max(step.num_sequences for step in part) for part in parts),
        waiting=tuple(max(step.num_waiting for step in part) for part in parts),
        queue_s=tuple(round(seconds, 6) for step in records for seconds in step.queue_s)[-_MOST_QUEUE_S:],
    )
