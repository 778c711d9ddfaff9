"""Load of a shelf: what one model's requests meet on a device that several models share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from folio.app.engine.report import ReplicaReport
from folio.app.fleet.status import ModelReport
from folio.app.shelf.status import DeviceStatus, ModelStatus

# Time for which a replica is avoided by requests for a model that could not be loaded there.
_FAILED_S = 60.0
# Tokens of cache that routers expect of a model without memory: more than any request waits for.
_ROOM_TOKENS = 1 << 40
# A wake displaces other models' weights, or waits for a turn, the sooner the less memory no request uses. Below this
# multiple of the model's weights it counts for more, up to twice. Without that, wakes spread over all devices: in
# `benchmarks.shelf_replicas`, four of them had 0.56 wakes a request instead of 0.37.
_ROOMY = 3.0


def reports_for_routers(models: Sequence[ModelReport], device: DeviceStatus | None = None) -> dict[str, ReplicaReport]:
    """Each model's load as its requests meet it: with its wake, and with the other models on the device.

    The device gives turns to all models that have work. So each step of one model waits for a decode step of every
    other model that decodes; and its prompts share the time with the queued prompts of others. Its KV budget grows
    without delay into memory that no requests use: idle weights, cached prefixes, spare memory.

    Args:
        device: `None`: models do not share memory.
    """
    if len(models) == 1 and models[0].status.state == "awake":
        return {models[0].name: models[0].load}
    loads = [model.load for model in models]
    step_s = sum(map(_decode_step_s, loads))
    queued_s, num_busy = sum(load.queued_s for load in loads), sum(load.has_work for load in loads)
    unused_bytes = 0 if device is None else device.capacity_bytes - device.workspace_bytes
    unused_bytes -= sum(
        model.status.weight_bytes + _used_kv_bytes(model.load) for model in models if model.load.has_work
    )
    reports = {}
    for model in models:
        status, load = model.status, model.load
        if not load.total_tokens:  # it gets a cache when it wakes
            free_tokens = total_tokens = _ROOM_TOKENS
        else:  # its budget grows into memory that no request uses
            room_bytes = unused_bytes - (0 if load.has_work else status.weight_bytes)
            more_tokens = max(room_bytes * load.total_tokens // load.budget_bytes - load.free_tokens, 0)
            free_tokens, total_tokens = load.free_tokens + more_tokens, load.total_tokens + more_tokens
        reports[model.name] = replace(
            load,
            free_tokens=free_tokens,
            total_tokens=total_tokens,
            decode_s=load.decode_s + step_s - _decode_step_s(load),
            wake_s=_wake_s(status, unused_bytes if device is not None else math.inf),
            is_waking=status.state in ("waking", "loading"),
            others_s=queued_s - load.queued_s,
            num_others=num_busy - load.has_work,
        )
    return reports


def _decode_step_s(load: ReplicaReport) -> float:
    return load.step.fixed_s + load.decode_s if load.num_decodes else 0.0


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
