"""Reports of idle replicas, to be changed by tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from folio.app.engine.report import ReplicaReport, StepTimes
from folio.app.fleet.fleet import Fleet

UNIT = 16
STEP = StepTimes(fixed_s=0.01, token_s=0.001)

IDLE = ReplicaReport(
    made_at=0.0,
    unit_tokens=UNIT,
    step=STEP,
    step_tokens=1000,
    max_num_seqs=64,
    free_tokens=100_000,
    total_tokens=100_000,
    budget_bytes=1 << 30,
)


def keys_of(document: int, num_units: int) -> list[bytes]:
    """Keys of the prefixes of a document."""
    return [bytes([document, 0, 0, 0, 0, i]) for i in range(num_units)]


def report(made_at: float, keys: Sequence[bytes] = (), **changes: Any) -> ReplicaReport:
    joined = b"".join(keys)
    return replace(IDLE, made_at=made_at, keys=joined, keys_version=hash(joined), **changes)


def fleet_with(*names: str, reported: bool = True) -> Fleet:
    """Idle replicas."""
    fleet = Fleet()
    fleet.update(names)
    for name in names if reported else ():
        fleet.apply_report(name, report(0.0), 0.0)
    return fleet
