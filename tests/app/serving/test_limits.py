"""An ingress's side of the limits, with a ledger that answers late."""

from __future__ import annotations

import pytest

from folio.app.edge.limit_ledger import LimitLedger
from folio.app.edge.limits import IngressLimits
from folio.app.fleet.overload import LoadShedder
from folio.app.serving import limits
from folio.app.serving.limits import LimitReporter
from tests.app.serving.shared_actors import Actor, Actors, patched_actors


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> Actors:
    monkeypatch.setattr(limits, "ANSWER_TIMEOUT_S", 0.01)
    return patched_actors(monkeypatch, LimitLedger)


@pytest.fixture
def actor(actors: Actors) -> Actor:
    return actors.of("folio-limits:a")


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


@pytest.mark.parametrize("has_effect", [False, True])
async def test_a_new_ledger_learns_what_the_dead_one_knew(actors: Actors, actor: Actor, has_effect: bool) -> None:
    """From both ingresses: earlier usage, and that of the report during which the process died."""
    edges = [IngressLimits() for _ in range(2)]
    reporters = [LimitReporter(edge, LoadShedder(), "a", str(i), lambda: 2) for i, edge in enumerate(edges)]
    first, second = (edge.add_limit("key/tokens", 1000) for edge in edges)
    for used, other in ((300, 200), (100, 50)):
        first.charge_usage(used)
        second.charge_usage(other)
        if used == 100:
            actor.dies = {"settle_usage": has_effect}
        for reporter in (*reporters, *reporters, *reporters):
            await reporter.settle()
    assert actors.of("folio-limits:a") is not actor
    level = actors.of("folio-limits:a").table.level("key/tokens")
    assert level == pytest.approx(350, abs=20)
    assert first.level == pytest.approx(350, abs=20)


async def test_a_single_ingress_needs_no_ledger(actors: Actors) -> None:
    edge, num_ingresses = IngressLimits(), [1]
    reporter = LimitReporter(edge, LoadShedder(), "a", "0", lambda: num_ingresses[0])
    await reporter.settle()
    assert not edge.connected
    num_ingresses[0] = 2
    await reporter.settle()
    assert edge.connected
    assert edge.num_ingresses == 2  # the ledger does not know the other one yet
