"""Loads of models that share a device: as routers and autoscaling see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from folio.app.engine.report import ReplicaReport, StepTimes
from folio.app.fleet.autoscaling import AutoscalingLoad
from folio.app.fleet.cost import CostWeights, request_cost
from folio.app.fleet.fleet import Fleet, RoutedRequest
from folio.app.fleet.policies import PrefixAware
from folio.app.fleet.shelf_load import reports_for_routers
from folio.app.fleet.status import ModelReport, summed_load, summed_memory, unloaded_report
from folio.app.shelf.status import DeviceStatus, ModelState, ModelStatus
from folio.vmem import GroupReport, MemoryReport, PinReport
from tests.app.fleet.reports import IDLE, report


def status(name: str, state: ModelState = "awake", wake_s: float = 0.0, **figures: int) -> ModelStatus:
    return ModelStatus(name=name, state=state, wake_s=wake_s, **figures)


def for_routers(
    loads: Mapping[str, ReplicaReport], statuses: Sequence[ModelStatus], device: DeviceStatus | None = None
) -> dict[str, ReplicaReport]:
    return reports_for_routers([ModelReport(model, loads[model.name]) for model in statuses], device)


def test_a_single_model_is_reported_as_it_is() -> None:
    loads = {"m": report(1.0, num_running=3)}
    assert for_routers(loads, [status("m")]) == loads
    assert summed_load([IDLE]) is IDLE


def test_a_model_meets_the_others_on_its_device() -> None:
    decoding = replace(IDLE, num_running=2, num_decodes=2, decode_s=0.005)
    queued = replace(IDLE, num_waiting=3, queued_s=0.7, queued_tokens=700)
    loads = {"a": decoding, "b": queued, "c": IDLE}
    reports = for_routers(loads, [status(name) for name in loads])
    assert [load.decode_s for load in reports.values()] == pytest.approx([0.005, 0.015, 0.015])  # 10 ms a step
    assert [load.others_s for load in reports.values()] == pytest.approx([0.7, 0.0, 0.7])
    assert [load.num_others for load in reports.values()] == [1, 1, 2]
    assert {load.wake_s for load in reports.values()} == {0.0}


def test_a_budget_grows_into_what_no_request_uses() -> None:
    """Regression: requests waited, in the router's estimate, for room in a budget that the arbiter had just not raised
    yet, for up to a minute, and woke the model on another replica."""
    tight = replace(IDLE, budget_bytes=1000, total_tokens=100, free_tokens=10)  # 10 bytes a token
    running = replace(tight, num_running=1)
    loads = {"busy": running, "idle": replace(tight, free_tokens=100), "asleep": running}
    loads["asleep"] = replace(loads["asleep"], budget_bytes=0, total_tokens=0, free_tokens=0, num_running=0)
    statuses = [status(n, s, weight_bytes=5000) for n, s in zip(loads, ("awake", "awake", "asleep"), strict=True)]
    device = DeviceStatus(20_009, 0, 0, 0, workspace_bytes=1000)
    reports = for_routers(loads, statuses, device)
    # 19,009 bytes without the busy model's weights and 900 bytes of its requests; the idle one has weights, too.
    assert [(r.free_tokens, r.total_tokens) for r in reports.values()][:2] == [(1310, 1400), (810, 810)]
    apart = for_routers(loads, statuses)
    assert [(r.free_tokens, r.total_tokens) for r in apart.values()][:2] == [(10, 100), (100, 100)]
    fleet = Fleet()
    fleet.update(["awake", "asleep"])
    fleet.apply_report("awake", reports["busy"], 1.0)
    fleet.apply_report("asleep", replace(reports["asleep"], wake_s=0.3), 1.0)
    ranked = PrefixAware(fleet).rank_replicas(RoutedRequest("r", 1000), ["asleep", "awake"], 1.1)
    assert ranked == ["awake", "asleep"]


def test_models_wake_where_memory_is_unused() -> None:
    """Regression: all devices were alike, and wakes displaced models that others would have kept."""
    running = replace(IDLE, num_running=1, budget_bytes=1000, total_tokens=100, free_tokens=0)
    statuses = [status("busy", weight_bytes=8000), status("asleep", "asleep", 0.2, weight_bytes=2000)]
    loads = {"busy": running, "asleep": unloaded_report(statuses[1], 1.0)}
    wakes = {
        capacity: for_routers(loads, statuses, DeviceStatus(capacity, 0, 0, 0, 0))["asleep"].wake_s
        for capacity in (8000, 9000, 12_000, 15_000, 40_000)
    }
    assert list(wakes.values()) == pytest.approx([0.4, 0.4, 0.3, 0.2, 0.2])


def test_wakes() -> None:
    states: dict[ModelState, float] = {"awake": 0.0, "asleep": 0.3, "waking": 0.2, "loading": 4.0, "failed": 1.0}
    statuses = [status(state, state, wake_s) for state, wake_s in states.items()]
    loads = {s.name: unloaded_report(s, 1.0) for s in statuses}
    reports = for_routers(loads, statuses)
    assert {name: load.wake_s for name, load in reports.items()} == states | {"failed": 61.0}
    assert [name for name, load in reports.items() if load.is_waking] == ["waking", "loading"]
    fleet = Fleet()
    fleet.update(reports)
    for name, load in reports.items():
        fleet.apply_report(name, load, 1.0)
    request = RoutedRequest("r", 3000)
    ranked = PrefixAware(fleet).rank_replicas(request, list(reports), 1.1)
    assert ranked[-1] == "failed"
    ttft_s, _ = request_cost(fleet.loads(list(reports), 1.1), 3000, np.zeros(5), CostWeights())
    waits = ttft_s - ttft_s[0]
    assert waits.tolist() == pytest.approx([0.0, 0.3, 0.2, 4.0, 61.0]), "no wait for a cache that comes with the wake"


def test_sums_for_autoscaling() -> None:
    """A shelf is one replica: its models' requests, tokens and times add up."""
    busy = report(5.0, num_running=8, num_waiting=2, queued_s=0.5, queued_tokens=500, num_decodes=8, decode_s=0.02)
    busy = replace(busy, busy_share=0.7, free_tokens=40_000, step=StepTimes(0.02, 0.001))
    other = replace(IDLE, made_at=5.1, num_waiting=1, busy_share=0.6, max_num_seqs=16)
    asleep = unloaded_report(status("c", "asleep", num_waiting=4), 5.2)
    total = summed_load([busy, other, asleep])
    assert (total.num_running, total.num_waiting, total.num_decodes) == (8, 7, 8)
    assert (total.queued_s, total.queued_tokens, total.decode_s) == (0.5, 500, 0.02)
    assert (total.free_tokens, total.total_tokens) == (140_000, 200_000)
    assert (total.busy_share, total.max_num_seqs, total.made_at) == (1.0, 80, 5.2)
    assert (total.step, total.keys) == (StepTimes(0.02, 0.001), b"")
    load = AutoscalingLoad.from_report(total)
    assert (load.num_requests, load.used_tokens) == (15, 60_000)
    alone = summed_load([asleep, unloaded_report(status("d", "new"), 5.0)])
    assert (alone.num_waiting, alone.max_num_seqs, alone.total_tokens) == (4, 128, 0)


def test_sums_of_memory() -> None:
    group = GroupReport(16, 1 << 16, 1, 2, 3, 0, 0)
    zeros: dict[str, Any] = {field.name: 0 for field in fields(MemoryReport)}
    memory = MemoryReport(**zeros | {"pins": (PinReport("a", 16, 64),), "groups": (group,), "budget_bytes": 5})
    total = summed_memory([memory, memory])
    assert (total.budget_bytes, len(total.pins), len(total.groups)) == (10, 2, 2)
    assert summed_memory([memory]) is memory
    assert summed_memory([]).budget_bytes == 0
