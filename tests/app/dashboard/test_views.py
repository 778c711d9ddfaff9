"""The dashboard's state has the figures of a replica's status."""

from __future__ import annotations

import itertools
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from folio.app.dashboard.state import Device, Load, Memory, ModelOnDevice, ReplicaState, State, figures_of
from folio.app.dashboard.views import WatchCall, view_replica
from folio.app.engine.report import GpuMemory, ReplicaReport, StepTimes
from folio.app.fleet.status import ModelReport, ReplicaStatus
from folio.app.shelf.status import DeviceStatus, ModelStatus
from folio.vmem import MemoryReport


def numbered(kind: type, **known: Any) -> Any:
    """Every figure is another number."""
    numbers = itertools.count(1)
    return kind(**{field.name: next(numbers) for field in fields(kind)} | known)


LOAD, MEMORY = numbered(ReplicaReport, step=StepTimes(1.0)), numbered(MemoryReport, pins=(), groups=())
NAMES: dict[str, Any] = {"state": "asleep", "evicted_for": "b", "error": "its weights are truncated"}
ASLEEP, AWAKE = (numbered(ModelStatus, **NAMES | {"name": n, "state": s}) for n, s in (("a", "asleep"), ("b", "awake")))
GPU = GpuMemory({"weights": 1, "free": 2}, 3)


@pytest.mark.parametrize("is_shared", [False, True])
def test_figures_are_those_of_the_status(is_shared: bool) -> None:
    """A busy memory has no figures of a single model, which would not fit the maps; a shelf's are of all its models."""
    device = DeviceStatus(1, 2, 3, 4, 5, 6, 7) if is_shared else None
    status = ReplicaStatus(
        "r", 1.0, tuple(ModelReport(m, LOAD, MEMORY) for m in (ASLEEP, AWAKE)[not is_shared :]), device, GPU
    )
    busy: Any = SimpleNamespace(look=lambda **_: SimpleNamespace(memory=None, sequences=[]), steps=lambda since: [])
    view = view_replica(status, {"b": busy}, WatchCall(None), 0.0, is_shared)
    found = ReplicaState.model_validate_json(view.state)
    assert (found.name, found.model, found.maps, view.detail, found.gpu.pinned_bytes) == ("r", "b", (), None, 3)
    assert found.load.model_dump() == {name: getattr(status.load, name) for name in Load.model_fields}
    assert found.is_draining == is_shared
    if not is_shared:
        assert (found.memory, found.device, found.models) == (None, None, ())
        return
    assert found.memory.model_dump() == {name: getattr(status.memory, name) for name in Memory.model_fields}
    for model, of in zip(found.models, (ASLEEP, AWAKE), strict=True):
        assert model.model_dump() == {name: getattr(of, name) for name in ModelOnDevice.model_fields}
    assert [model.device_weight_bytes > 0 for model in found.models] == [False, True]
    assert found.device.model_dump() == {name: getattr(device, name) for name in Device.model_fields}


def test_a_figure_that_a_status_does_not_have() -> None:
    with pytest.raises(KeyError, match="num_walking"):
        figures_of(ReplicaReport, "num_running num_walking")(State)
