"""Metrics of a shelf."""

from __future__ import annotations

from dataclasses import replace

from folio.app.engine.shelf.status import DeviceStatus, ModelStatus
from folio.app.serving.shelf_metrics import ShelfMeter
from tests.app.serving.conftest import Recorded

DEVICE = DeviceStatus(capacity_bytes=100, used_bytes=30, idle_bytes=5, charged_bytes=40, workspace_bytes=10)
AWAKE = ModelStatus(name="a", state="awake", weight_bytes=40, kv_bytes=30, num_wakes=1, last_wake_s=2.0)
ASLEEP = replace(AWAKE, name="b", state="asleep", kv_bytes=0)


def values(recorded: Recorded, name: str) -> dict[tuple[str, ...], float]:
    return {tuple(tags.values()): value for found, value, tags in recorded if found == name}


def test_a_model_has_one_state_and_the_bytes_that_it_has_now(recorded: Recorded) -> None:
    ShelfMeter().note([AWAKE, ASLEEP], replace(DEVICE, needed_bytes=120))
    states = values(recorded, "folio_model_state")
    assert len(states) == 12
    assert [key for key, value in states.items() if value] == [("a", "awake"), ("b", "asleep")]
    assert values(recorded, "folio_model_bytes") == {
        ("a", "weights"): 40,
        ("a", "kv"): 30,
        ("b", "weights"): 0,
        ("b", "kv"): 0,
    }
    assert values(recorded, "folio_device_bytes") == {
        ("capacity",): 100,
        ("used",): 30,
        ("idle",): 5,
        ("charged",): 40,
        ("workspace",): 10,
    }
    assert values(recorded, "folio_device_needed_bytes") == {(): 120}


def test_the_former_state_is_0(recorded: Recorded) -> None:
    """Both were 1 until Ray dropped the former one."""
    meter = ShelfMeter()
    meter.note([AWAKE], DEVICE)
    recorded.clear()
    meter.note([replace(AWAKE, state="asleep", num_evictions=1, evicted_for="b")], DEVICE)
    assert values(recorded, "folio_model_state") == {("a", "awake"): 0, ("a", "asleep"): 1}
    assert values(recorded, "folio_model_evictions") == {("a",): 1}


def test_each_wake_is_counted_once(recorded: Recorded) -> None:
    meter = ShelfMeter()
    for num_wakes, last_wake_s in ((0, 0.0), (1, 2.0), (1, 2.0), (2, 0.1), (4, 0.2), (1, 3.0)):
        meter.note([replace(AWAKE, num_wakes=num_wakes, last_wake_s=last_wake_s)], DEVICE)
    wakes = [value for name, value, _ in recorded if name == "folio_model_wake_seconds"]
    assert wakes == [2.0, 0.1, 0.2, 0.2, 3.0]  # the model was added again
