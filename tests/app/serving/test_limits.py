"""An ingress's side of the limits, with a ledger that answers late."""

from __future__ import annotations

import asyncio

import pytest

from folio.app.edge.limit_ledger import LimitLedger
from folio.app.edge.limits import IngressLimits
from folio.app.fleet.overload import LoadShedder
from folio.app.serving import limits
from folio.app.serving.limits import LimitReporter
from folio.app.serving.shared_table import SharedTable
from tests.app.serving.shared_actors import Actor, patched_actors
from tests.processes import until_async


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Actor:
    monkeypatch.setattr(limits, "ANSWER_TIMEOUT_S", 0.01)
    return patched_actors(monkeypatch, LimitLedger).of("folio-limits:a")


async def test_usage_answered_late_counts_once(actor: Actor) -> None:
    """Regression: after a second without an answer the same usage was reported again, and counted twice."""
    ingress = IngressLimits()
    reporter = LimitReporter(ingress, LoadShedder(), "a", "first", lambda: 2)
    limit = ingress.add_limit("key/tokens", 1000)
    await reporter.settle()
    limit.charge_usage(300)
    actor.late = late = []
    for _ in range(3):
        await reporter.settle()
        assert not ingress.connected
    actor.late = None
    limit.charge_usage(100)
    for answer in late:
        answer()
    for _ in range(2):
        await reporter.settle()
        assert ingress.connected
    assert limit.level == pytest.approx(600, abs=20)
    assert actor.table.level("key/tokens") == pytest.approx(600, abs=20)


async def test_a_ledger_that_has_dropped_an_ingress_gets_all_of_its_usage(actor: Actor) -> None:
    """Regression: the ledger said so in an answer that came too late, and was not read."""
    ingress = IngressLimits()
    reporter = LimitReporter(ingress, LoadShedder(), "a", "first", lambda: 2)
    limit = ingress.add_limit("key/running", 4, refills=False)
    limit.charge_usage(3)
    for _ in range(2):
        await reporter.settle()
    actor.late = late = []
    await reporter.settle()
    actor.table.remove_ingress("first")
    actor.late = None
    for answer in late:
        answer()
    for _ in range(2):
        await reporter.settle()
    assert actor.table.level("key/running") == 1


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancellation_that_comes_with_an_answer_is_kept(turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the task that reports usage went on, and its event loop could not end."""
    actor = patched_actors(monkeypatch, list).of("table")
    actor.late = late = []
    table = SharedTable(list, "table", "tables", "nothing is shared", 60.0)

    async def call_twice() -> None:
        await table.call("copy")
        await table.call("copy")

    task = asyncio.ensure_future(call_twice())
    await until_async(lambda: len(late) == 1)
    late[0]()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task}, timeout=5.0)
    assert task.cancelled()
