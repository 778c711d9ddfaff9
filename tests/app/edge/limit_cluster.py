"""Several ingresses with leased limits and one ledger, on one virtual clock."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

from folio.app.edge.limit_ledger import LimitLedger
from folio.app.edge.limits import EARLY_REPORT_S, REPORT_PERIOD_S, IngressLimits, LimitUsage

_MESSAGE_S = 0.005  # each way


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Cluster:
    """Ingresses that report as `folio.app.serving.limits` does: every `REPORT_PERIOD_S`, early after `EARLY_REPORT_S`.
    A test may take `ledger` away or replace it, and remove ingresses from `alive`."""

    def __init__(self, num_ingresses: int, seed: int = 0) -> None:
        self.clock = Clock()
        self.rng = random.Random(seed)
        self.ledger: LimitLedger | None = self.new_ledger()
        self.ingresses = [IngressLimits(self.clock) for _ in range(num_ingresses)]
        self.alive = set(range(num_ingresses))
        self.num_messages = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._due_at: dict[int, float] = {}
        self._waiting: set[int] = set()  # for an answer
        self._answered_at = dict.fromkeys(range(num_ingresses), 0.0)
        for i, ingress in enumerate(self.ingresses):
            ingress.num_ingresses = num_ingresses
            ingress.on_early_report = lambda i=i: self._report_early(i)  # type: ignore[misc]
            self._plan(i, self.rng.random() * REPORT_PERIOD_S)

    def new_ledger(self) -> LimitLedger:
        return LimitLedger(clock=self.clock, rng=self.rng)

    def at(self, time: float, call: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, call))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.clock.now, _, call = heapq.heappop(self._events)
            call()
        self.clock.now = until

    def run_for(self, seconds: float) -> None:
        self.run(self.clock.now + seconds)

    def _plan(self, i: int, in_s: float) -> None:
        due_at = self._due_at[i] = self.clock.now + in_s
        self.at(due_at, lambda: self._report(i) if self._due_at.get(i) == due_at else None)

    def _report_early(self, i: int) -> None:
        in_s = max(self._answered_at[i] + EARLY_REPORT_S - self.clock.now, 0.0)
        if i not in self._waiting and self._due_at[i] > self.clock.now + in_s:
            self._plan(i, in_s)

    def _report(self, i: int) -> None:
        if i in self.alive:
            self._waiting.add(i)
            usages = self.ingresses[i].take_reports()
            self.at(self.clock.now + _MESSAGE_S, lambda: self._settle(i, usages))

    def _settle(self, i: int, usages: dict[str, LimitUsage]) -> None:
        self.num_messages += 1
        answer = None if self.ledger is None else self.ledger.settle_usage(str(i), self.num_messages, usages)

        def receive() -> None:
            self._waiting.discard(i)
            self._answered_at[i] = self.clock.now
            self._plan(i, REPORT_PERIOD_S)
            if answer is None:
                self.ingresses[i].note_disconnected(len(self.ingresses))
            else:
                self.ingresses[i].apply_answer(answer)

        self.at(self.clock.now + _MESSAGE_S, receive)
