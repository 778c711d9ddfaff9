"""A replica's part of the state: engine views as JSON, made in the replica, so that ingresses only pass it on."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from folio.app.dashboard.state import (
    BlockMap,
    Parked,
    ReplicaDetail,
    ReplicaState,
    RunningSequence,
    Steps,
    Table,
    block_map,
    runs_of,
)
from folio.app.engine.step.watch import EngineView, EngineWatch, StepRecord, WatchedSequence
from folio.app.fleet.status import ReplicaStatus
from folio.vmem import MemoryReport, MemorySnapshot

# Entries of `Steps`, and runs of a `Table`, at most.
MOST_STEPS, MOST_RUNS = 40, 128
_MOST_QUEUE_S = 256  # of `Steps`


@dataclass(frozen=True, slots=True)
class WatchCall:
    """An ingress's question to all replicas.

    Attributes:
        details: names of replicas whose details are wanted; `None`: all.
        requests: ids of requests whose sequences are wanted in the details.
        since: name of a replica → the last step that the ingress knows; other replicas report no steps.
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


def _report_of(status: ReplicaStatus, memory: MemorySnapshot | None) -> MemoryReport | None:
    if status.device is not None:
        return status.memory
    return None if memory is None else memory.report  # the figures of the same moment as the maps


def view_replica(
    status: ReplicaStatus,
    watches: Mapping[str, EngineWatch],
    call: WatchCall,
    ready_at: float,
    is_draining: bool,
) -> ReplicaView:
    """A replica's answer, with the blocks of the model with the most requests. From any thread; waits 20 ms at most.

    Args:
        watches: of the models that have an engine, by name.
        ready_at: when the replica became ready, by `time.monotonic`.
    """
    loaded = [model.status for model in status.models if model.name in watches]
    busiest = max(loaded, key=lambda model: model.num_requests, default=None)
    known_step, is_detailed = call.since.get(status.name), call.details is None or status.name in call.details
    view = None
    if busiest is not None:
        view = watches[busiest.name].look(detailed=is_detailed, wanted=call.requests)
    memory = None if view is None else view.memory
    since = known_step or 0
    steps = sorted(step for watch in watches.values() for step in watch.steps(since))
    last_step = max((step.number for step in steps), default=since)
    parts = {
        "name": status.name,
        "model": "" if busiest is None else busiest.name,
        "age_s": round(time.monotonic() - ready_at, 1),
        "is_draining": is_draining,
        "load": status.load,
        "memory": _report_of(status, memory),
        "maps": () if memory is None else _maps(memory, detailed=False),
        # None for an ingress that asks the first time: a viewer whose stream moved here has seen them at another one.
        "steps": Steps() if known_step is None else _steps(steps, time.monotonic()),
        "last_step": last_step,
        "models": () if status.device is None else tuple(model.status for model in status.models),
        "device": status.device,
        "gpu": status.gpu,
    }
    state = ReplicaState.model_validate(parts, from_attributes=True)
    detail = None
    if view is not None and memory is not None and is_detailed:
        detail = _detail(view, memory).model_dump_json()
    return ReplicaView(status.name, last_step, state.model_dump_json(), detail)


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
