"""Models that share devices in the view of `folio top`."""

from __future__ import annotations

from typing import Any

import pytest

from folio.app.cli.top.models import model_rows
from folio.app.dashboard.state import ModelOnDevice, ReplicaState
from tests.app.cli.test_top import MIB, replica, shown, state_of


def model(name: str, state: str = "awake", **figures: Any) -> dict[str, Any]:
    zeros = dict.fromkeys(ModelOnDevice.model_fields, 0) | {"evicted_for": None, "error": None}
    return zeros | {"name": name, "state": state} | figures


def shelf(name: str, *models: dict[str, Any], needed_bytes: int = 200 * MIB) -> dict[str, Any]:
    device = {"used_bytes": 100 * MIB, "charged_bytes": 300 * MIB, "workspace_bytes": 112 * MIB, "idle_bytes": 5 * MIB}
    found = replica(name) | {"models": list(models), "device": device | {"capacity_bytes": 1024 * MIB}}
    found["device"] |= {"needed_bytes": needed_bytes}
    ReplicaState.model_validate(found)  # the view reads what the dashboard's state has
    return found


CHAT = model(
    "chat",
    device_weight_bytes=256 * MIB,
    kv_bytes=64 * MIB,
    num_running=3,
    num_waiting=4,
    num_wakes=2,
    last_wake_s=0.25,
)
CODER = model(
    "coder\x1b[2J",
    "asleep",
    num_waiting=1,
    num_wakes=7,
    num_evictions=6,
    evicted_for="chat",
    wake_s=1.5,
    last_wake_s=0.5,
)
BROKEN = model("broken", "failed", error="its weights\nare truncated", wake_s=1.0)


@pytest.mark.parametrize("width", [40, 60, 84, 120, 200])
def test_the_models_fit_any_width(width: int) -> None:
    lines = shown(state_of(shelf("r1", CODER, BROKEN, CHAT)), width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert "\x1b" not in text
    assert lines[0].startswith("folio  3 models  1 replica")
    assert "device memory 512 MiB of 1 GiB" in text
    assert "broken has failed: its weights are"[: width - 1] in text
    names = [
        line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in ("chat", "coder[2J", "broken")
    ]
    assert names[:3] == ["chat", "coder[2J", "broken"], "those with the most requests first"
    if width >= 84:
        rows = {line.split()[0]: line.split()[1:] for line in lines if "MiB" in line or "asleep" in line}
        assert rows["chat"][:11] == ["awake", "3", "4", "256", "MiB", "64", "MiB", "2", "250", "0", "0"]
        assert rows["coder[2J"][:9] == ["asleep", "0", "1", "-", "-", "7", "500", "1500", "6"]
        assert ("chat" in rows["coder[2J"]) == (width >= 120)
    if width == 200:
        drawn = next(line for line in lines if line.startswith("chat"))
        assert abs(drawn.count("█") - 94 / 4) <= 1
        assert abs(drawn.count("▒") - 94 / 16) <= 1


def test_replicas_are_added_up() -> None:
    asleep = CHAT | {"state": "asleep", "device_weight_bytes": 0, "kv_bytes": 0, "wake_s": 3.0, "last_wake_s": 0.5}
    [row] = model_rows([shelf("r1", CHAT), shelf("r2", asleep)])
    assert (row.sums["num_running"], row.sums["num_wakes"], row.num_bytes) == (6, 4, 320 * MIB)
    assert (row.wait_s, row.last_wake_s) == (0.0, 0.5)
    text = "\n".join(shown(state_of(shelf("r1", CHAT), shelf("r2", asleep)), 120))
    assert "1 awake 1 asleep" in text
    assert "device memory 1 GiB of 2 GiB" in text


def test_memory_that_is_needed_is_seen_beside_the_budget() -> None:
    """Regression: an operator saw that a replica was added, and not that its models needed more than one has."""
    one, two = shelf("r1", CHAT), shelf("r2", CODER, needed_bytes=1536 * MIB)
    for replicas, said in (
        ([one], "of 1 GiB   needed 200 MiB   "),
        ([two], "of 1 GiB   needed 1.5 GiB, more than there is   "),
        ([one, two], "of 2 GiB   needed 1.695 GiB, more than there is at 1 of 2   "),
    ):
        assert said in "\n".join(shown(state_of(*replicas), 120))


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("num_replicas", [1, 20])
def test_a_low_terminal_shows_the_models_with_requests(width: int, num_replicas: int) -> None:
    models = [model(f"m{number}", num_running=number) for number in range(60)]
    lines = shown(state_of(*(shelf(f"r{number}", *models) for number in range(num_replicas))), width, height=30)
    assert len(lines) <= 30
    assert any("m59" in line for line in lines)
    assert any("models with less to do" in line for line in lines)
    assert any(line.startswith("r") for line in lines)


def test_a_single_model_has_no_table_of_models() -> None:
    assert model_rows([replica("r1")]) == []
    assert not any("device memory" in line for line in shown(state_of(replica("r1")), 120))
