"""A replica's side of the ledger, in one process with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from folio.app.engine.model.memory_profile import DevicePlan
from folio.app.errors import ConfigError
from folio.app.fleet.ledger import BudgetLedger, BudgetOrder, LedgerHeartbeat
from folio.app.serving import ledger as module
from folio.app.serving.ledger import BudgetMember
from tests.vmem.small_memory import FlakyHost, make_memory

CAPACITY = 1 << 22


class _Ledger:
    """The actor's handle."""

    def __init__(self) -> None:
        self._ledger = BudgetLedger(0.0)
        self.handle_heartbeat = SimpleNamespace(remote=self._handle)
        self.remove_member = SimpleNamespace(remote=self._ledger.remove_member)

    def _handle(self, beat: LedgerHeartbeat, pid: int) -> BudgetOrder:
        return self._ledger.handle_heartbeat(beat, 0.0)


@pytest.mark.parametrize(("device_bytes", "fits"), [(CAPACITY + 2000, True), (CAPACITY + 1999, False), (None, True)])
def test_a_replica_that_the_device_cannot_hold_does_not_start(
    device_bytes: int | None, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told before its memory has the budget, and takes a page."""
    context: Any = SimpleNamespace(app_name="app", replica_id=SimpleNamespace(unique_id="replica"))
    monkeypatch.setattr(module.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    monkeypatch.setattr(module.ray, "get", lambda order, timeout: order)
    monkeypatch.setattr(module, "STARTING_BEAT_S", 0.001)
    ledger = _Ledger()
    monkeypatch.setattr(BudgetMember, "_find", lambda _: ledger)
    memory, _ = make_memory(FlakyHost)
    plan = None if device_bytes is None else DevicePlan(device_bytes, 1.0, 900, 100, 0, 600, 400)
    member = BudgetMember(CAPACITY, "cuda:0")
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
