"""An ingress's side of the limits, with books that answer late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from app.edge.limit_ledger import LimitLedger
from app.edge.limits import IngressLimits, LimitAnswer
from app.fleet.overload import LoadShedder
from app.serving import limits
from app.serving.limits import LimitReporter


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
    """The actor, for as long as `exchange.held` is a list one that has stopped."""

    def __init__(self) -> None:
        self.books = LimitLedger()
        self.exchange = _Call(self.books.settle_usage)


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    monkeypatch.setattr(limits, "ANSWER_TIMEOUT_S", 0.01)
    made = StandIn()
    monkeypatch.setattr(LimitReporter, "_find", lambda self, makes: made)
    return made


def test_what_is_answered_late_is_entered_once(actor: StandIn) -> None:
    """Regression: after a second without an answer the same was reported again, and counted twice."""

    async def run() -> None:
        shares = IngressLimits()
        shared = LimitReporter(shares, LoadShedder(), "a", "first", lambda: 2)
        limit = shares.add_limit("key/tokens", 1000)
        await shared._beat()
        limit.charge_usage(300)
        actor.exchange.held = []
        for _ in range(3):
            await shared._beat()
            assert not shares.connected
        [answer], actor.exchange.held = actor.exchange.held, None
        limit.charge_usage(100)
        answer()
        await shared._beat()
        assert shares.connected
        await shared._beat()
        assert limit.level == pytest.approx(600, abs=20)
        assert actor.books.level("key/tokens") == pytest.approx(600, abs=20)

    asyncio.run(run())


def test_books_that_have_forgotten_an_ingress_hear_all_of_it(actor: StandIn) -> None:
    """Regression: they said so in an answer that came too late, and nobody read it."""

    async def run() -> None:
        shares = IngressLimits()
        shared = LimitReporter(shares, LoadShedder(), "a", "first", lambda: 2)
        limit = shares.add_limit("key/running", 4, refills=False)
        limit.charge_usage(3)
        for _ in range(2):
            await shared._beat()
        actor.exchange.held = []
        await shared._beat()
        actor.books.remove_ingress("first")
        [answer], actor.exchange.held = actor.exchange.held, None
        answer()
        for _ in range(2):
            await shared._beat()
        assert actor.books.level("key/running") == 1

    asyncio.run(run())
