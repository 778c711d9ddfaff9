"""An ingress's side of the limits, with a ledger that answers late."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import pytest

from folio.app.edge.limit_ledger import LimitLedger
from folio.app.edge.limits import IngressLimits, LimitAnswer
from folio.app.fleet.overload import LoadShedder
from folio.app.serving import limits
from folio.app.serving.limits import LimitReporter


class _Call:
    def __init__(self, answer: Callable[..., LimitAnswer]) -> None:
        self._answer = answer
        self.held: list[Callable[[], None]] | None = None

    def remote(self, *args: object) -> _Call:
        self._future: Future[LimitAnswer] = Future()
        if self.held is None:
            self._future.set_result(self._answer(*args))
        else:
            future = self._future
            self.held.append(lambda: future.set_result(self._answer(*args)))
        return self

    def future(self) -> Future[LimitAnswer]:
        return self._future


class StandIn:
    """The actor; it does not answer while `settle_usage.held` is a list."""

    def __init__(self) -> None:
        self.ledger = LimitLedger()
        self.settle_usage = _Call(self.ledger.settle_usage)


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    monkeypatch.setattr(limits, "ANSWER_TIMEOUT_S", 0.01)
    made = StandIn()
    monkeypatch.setattr(LimitReporter, "_find", lambda self, creates: made)
    return made


async def test_usage_answered_late_counts_once(actor: StandIn) -> None:
    """Regression: after a second without an answer the same usage was reported again, and counted twice."""
    ingress = IngressLimits()
    reporter = LimitReporter(ingress, LoadShedder(), "a", "first", lambda: 2)
    limit = ingress.add_limit("key/tokens", 1000)
    await reporter.settle()
    limit.charge_usage(300)
    actor.settle_usage.held = []
    for _ in range(3):
        await reporter.settle()
        assert not ingress.connected
    [answer], actor.settle_usage.held = actor.settle_usage.held, None
    limit.charge_usage(100)
    answer()
    await reporter.settle()
    assert ingress.connected
    await reporter.settle()
    assert limit.level == pytest.approx(600, abs=20)
    assert actor.ledger.level("key/tokens") == pytest.approx(600, abs=20)


async def test_a_ledger_that_has_dropped_an_ingress_gets_all_of_its_usage(actor: StandIn) -> None:
    """Regression: the ledger said so in an answer that came too late, and was not read."""
    ingress = IngressLimits()
    reporter = LimitReporter(ingress, LoadShedder(), "a", "first", lambda: 2)
    limit = ingress.add_limit("key/running", 4, refills=False)
    limit.charge_usage(3)
    for _ in range(2):
        await reporter.settle()
    actor.settle_usage.held = []
    await reporter.settle()
    actor.ledger.remove_ingress("first")
    [answer], actor.settle_usage.held = actor.settle_usage.held, None
    answer()
    for _ in range(2):
        await reporter.settle()
    assert actor.ledger.level("key/running") == 1
