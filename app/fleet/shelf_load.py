"""Load of a shelf: what one model's requests meet on a device that several models share, and sums over its models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from folio.app.engine.report import ReplicaReport, StepTimes
from folio.app.engine.shelf.status import DeviceStatus, ModelStatus
from folio.vmem import MemoryReport

# Time for which a replica is avoided by requests for a model that could not be loaded there.
_FAILED_S = 60.0
# Bounds of a model that has not been loaded yet, of which only the order of magnitude matters to a router.
_STEP_TOKENS, _NUM_SEQS = 1024, 64
# Room in the cache that a model will have, for routers: nothing waits for it there.
_ROOM_TOKENS = 1 << 40
# A wake displaces other models' weights, or waits for a turn, the sooner the less memory no request uses. Below this
# multiple of the model's weights it counts for more, up to twice. Without that, wakes spread over all devices: in
# `benchmarks.shelf_replicas`, four of them had 0.56 wakes a request instead of 0.37.
_ROOMY = 3.0
# Figures that are no sums over the models of a device.
_OF_ONE = frozenset({"made_at", "unit_tokens", "keys", "changes", "stride", "keys_version", "step", "step_tokens"}) | {
    "busy_share",
    "max_num_seqs",
    "wake_s",
    "is_waking",
    "others_s",
    "num_others",
}


def unloaded_report(status: ModelStatus, now: float) -> ReplicaReport:
    """The load report of a model without an engine. `now`: of the replica's monotonic clock."""
    return ReplicaReport(
        made_at=now,
        unit_tokens=0,
        keys=b"",
        changes=b"",
        stride=1,
        keys_version=0,
        step=StepTimes(),
        step_tokens=_STEP_TOKENS,
        max_num_seqs=_NUM_SEQS,
        num_running=status.num_running,
        num_waiting=status.num_waiting,
        queued_tokens=0,
        queued_s=0.0,
        num_decodes=0,
        decode_s=0.0,
        free_tokens=0,
        total_tokens=0,
        freed_tokens_per_s=0.0,
        busy_share=0.0,
        budget_bytes=0,
        expected_cached_tokens=0,
        cached_tokens=0,
        missed_tokens=0,
    )


def reports_for_routers(
    loads: Mapping[str, ReplicaReport], statuses: Sequence[ModelStatus], device: DeviceStatus | None = None
) -> dict[str, ReplicaReport]:
    """Each model's load as its requests meet it: with its wake, and with the other models on the device.

    The device gives turns to all models that have work. So each step of one model waits for a decode step of every
    other model that decodes; and its prompts share the time with the queued prompts of others. Its KV budget grows
    without delay into memory that no requests use: idle weights, cached prefixes, spare memory.

    Args:
        device: `None`: models do not share memory.
    """
    if len(statuses) == 1 and statuses[0].state == "awake":
        return dict(loads)
    steps = {name: load.step.fixed_s + load.decode_s if load.num_decodes else 0.0 for name, load in loads.items()}
    step_s, queued_s = sum(steps.values()), sum(load.queued_s for load in loads.values())
    num_busy = sum(map(_is_busy, loads.values()))
    unused_bytes = 0 if device is None else device.capacity_bytes - device.workspace_bytes
    unused_bytes -= sum(
        status.weight_bytes + _used_kv_bytes(load)
        for status in statuses
        if (load := loads.get(status.name)) is not None and _is_busy(load)
    )
    reports = {}
    for status in statuses:
        if (load := loads.get(status.name)) is None:  # added a moment ago
            continue
        if not load.total_tokens:  # it gets a cache when it wakes
            load = replace(load, free_tokens=_ROOM_TOKENS, total_tokens=_ROOM_TOKENS)
        else:  # its budget is no bound of it
            room_bytes = unused_bytes - (0 if _is_busy(load) else status.weight_bytes)
            more_tokens = max(room_bytes * load.total_tokens // load.budget_bytes - load.free_tokens, 0)
            load = replace(
                load, free_tokens=load.free_tokens + more_tokens, total_tokens=load.total_tokens + more_tokens
            )
        reports[status.name] = replace(
            load,
            decode_s=load.decode_s + step_s - steps[status.name],
            wake_s=_wake_s(status, unused_bytes if device is not None else math.inf),
            is_waking=status.state in ("waking", "loading"),
            others_s=queued_s - load.queued_s,
            num_others=num_busy - _is_busy(load),
        )
    return reports


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


def _wake_s(status: ModelStatus, unused_bytes: float) -> float:
    """Expected seconds of a wake, and what it displaces."""
    if status.state == "awake":
        return 0.0
    if status.state == "failed":
        return status.wake_s + _FAILED_S
    if status.state != "asleep":
        return status.wake_s
    roomy_bytes = max(_ROOMY * status.weight_bytes, 1.0)
    return status.wake_s * (2 - min(max(unused_bytes / roomy_bytes, 0.0), 1.0))


def _used_kv_bytes(load: ReplicaReport) -> int:
    """KV memory of requests."""
    used_tokens = load.total_tokens - load.free_tokens
    return load.budget_bytes * used_tokens // load.total_tokens if used_tokens else 0


def _is_busy(load: ReplicaReport) -> bool:
    return load.num_running + load.num_waiting > 0
