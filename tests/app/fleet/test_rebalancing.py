"""Calls that wait at a replica leave for one that is free."""

from __future__ import annotations

from typing import Any

import pytest

from folio.app.fleet.departures import DEPARTURES
from folio.app.fleet.rebalancing import calls_to_move
from tests.app.fleet.reports import fleet_with, report

BUSY = {"num_running": 8, "num_decodes": 8, "decode_s": 0.1}
QUEUE: dict[str, Any] = BUSY | {"num_waiting": 3, "queued_tokens": 6000, "queued_s": 6.0}


@pytest.fixture(autouse=True)
def _no_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DEPARTURES, "_outputs", {})


@pytest.mark.parametrize(
    ("first", "second", "moved"),
    [
        (QUEUE, {}, 3),
        (QUEUE | {"num_waiting": 40}, {}, 4),
        (QUEUE, BUSY, 3),
        (QUEUE, QUEUE, 0),
        (QUEUE, QUEUE | {"queued_tokens": 3000, "queued_s": 3.0}, 0),
        (QUEUE, {"wake_s": 10.0}, 0),
        (QUEUE, BUSY | {"free_tokens": 0, "total_tokens": 1000}, 0),
        (BUSY | {"num_waiting": 3, "queued_tokens": 300, "queued_s": 0.3}, {}, 0),  # too little to gain
        (BUSY, {}, 0),
        # Preempted, or refused for want of memory or of a place in the batch.
        (BUSY | {"num_waiting": 1, "queued_tokens": 100, "free_tokens": 0, "total_tokens": 1000}, {}, 1),
        (BUSY | {"num_waiting": 1, "queued_tokens": 100, "max_num_seqs": 8, "free_tokens": 50_000}, {}, 1),
    ],
)
def test_calls_move_where_they_wait_much_less(first: dict[str, Any], second: dict[str, Any], moved: int) -> None:
    fleet = fleet_with("a", "b")
    for name, load in (("a", first), ("b", second)):
        fleet.apply_report(name, report(1.0, **load), 1.0)
    assert [*calls_to_move(fleet, "", ["a"], ["a", "b"], 1.0)] == ([("a", moved)] if moved else [])
    assert not [*calls_to_move(fleet, "", ["b"], ["a"], 1.0)]  # what was true at the last report


def test_only_to_replicas_that_are_there_with_the_same_model() -> None:
    fleet = fleet_with("a", "b", "c")
    for name, load in (("a", QUEUE), ("b", {}), ("c", {})):
        fleet.apply_report(name, report(1.0, **load), 1.0)
    DEPARTURES.note_outputs("a", {"m": ("1", "")})
    DEPARTURES.note_outputs("b", {"m": ("2", "")})
    assert not [*calls_to_move(fleet, "m", ["a"], ["a", "b", "c"], 1.0)]  # "c" has not told
    DEPARTURES.note_outputs("c", {"m": ("1", "")})
    assert [*calls_to_move(fleet, "m", ["a"], ["a", "b", "c"], 1.0)]
    assert not [*calls_to_move(fleet, "m", ["a"], ["a", "b"], 1.0)]  # it drains
    assert not [*calls_to_move(fleet, "m", ["a"], ["a", "b", "c"], 100.0)]  # nobody has been heard of
