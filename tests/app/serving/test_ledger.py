"""A replica's membership in the ledger."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from folio.app.engine.memory.memory_profile import DevicePlan
from folio.app.errors import ConfigError
from folio.app.fleet import ledger as fleet_ledger
from folio.app.fleet.ledger import BudgetLedger
from folio.app.fleet.ledger_file import LedgerFile
from folio.app.serving import ledger as module
from folio.app.serving.ledger import BudgetMember
from tests.processes import until
from tests.vmem.small_memory import FlakyHost, make_memory

CAPACITY = 1 << 22


class Ledger(LedgerFile):
    """On a disk that may be full."""

    is_full = False

    def _write(self, ledger: BudgetLedger) -> None:
        if self.is_full:
            raise OSError("disk full")
        super()._write(ledger)


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for interval in ("BEAT_S", "STARTING_BEAT_S"):
        monkeypatch.setattr(module, interval, 0.01)
    return Ledger("ledger")


@pytest.mark.parametrize(("device_bytes", "fits"), [(CAPACITY + 2000, True), (CAPACITY + 1999, False), (None, True)])
def test_a_replica_that_the_device_cannot_hold_does_not_start(
    device_bytes: int | None, fits: bool, ledger: LedgerFile
) -> None:
    """It is told before its memory has the budget, and takes a page."""
    memory, _ = make_memory(FlakyHost)
    plan = None if device_bytes is None else DevicePlan(device_bytes, 1.0, 900, 100, 0, 600, 400)
    member = BudgetMember(ledger, "replica", CAPACITY)
    try:
        member.wait_for_budget()
        if fits:
            member.attach(memory, plan)
            assert memory.report().budget_revision > 0
        else:
            with pytest.raises(ConfigError, match=f"a replica takes 2000 bytes .* of the device's {device_bytes}:"):
                member.attach(memory, plan)
            assert memory.report().budget_revision == 0
    finally:
        member.close()
        memory.close()
    with ledger.locked() as left:
        assert not left.members


def test_two_replicas_share_and_the_one_that_stays_gets_all(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While the ledger cannot be used, budgets stay as they are: that is logged once."""
    monkeypatch.setattr(fleet_ledger, "REBALANCE_S", 0.0)
    memories = [make_memory(FlakyHost)[0] for _ in range(2)]
    shared_bytes = memories[0].most_budget_bytes
    members = [BudgetMember(ledger, name, shared_bytes) for name in "ab"]

    def budgets() -> list[int]:
        return [memory.report().budget_bytes for memory in memories]

    try:
        for member, memory in zip(members, memories, strict=True):
            member.wait_for_budget()
            member.attach(memory, None)
        until(lambda: budgets() == [shared_bytes // 2] * 2)
        ledger.is_full = True
        until(lambda: caplog.text.count("the budget stays as it is: disk full") == 2)
        ledger.is_full = False
        members[1].close()
        until(lambda: budgets()[0] == shared_bytes)
        assert caplog.text.count("the budget stays as it is") == 2
        assert members[0].healthy
    finally:
        for member in members:
            member.close()
        for memory in memories:
            memory.close()
