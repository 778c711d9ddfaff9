"""Several ingresses that share limits, on one virtual clock."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

from app.edge.shares import BEAT_S, HURRY_S, IngressLimits, LimitAnswer, LimitLedger, LimitUsage


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Cluster:
    """Ingresses that beat as `app.serving.limits` has it: every `BEAT_S`, in a hurry after `HURRY_S`; a message takes
    5 ms each way. `books` may be taken away, and be others."""

    def __init__(self, num_ingresses: int, clock: Clock, seed: int = 0) -> None:
        self.clock = clock
        self.rng = random.Random(seed)
        self.books: LimitLedger | None = LimitLedger(clock=clock, rng=self.rng)
        self.shares = [IngressLimits(clock) for _ in range(num_ingresses)]
        self.alive = set(range(num_ingresses))
        self.num_messages = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._beats: dict[int, float] = {}
        self._busy: set[int] = set()
        self._last = dict.fromkeys(range(num_ingresses), 0.0)
        for i, shares in enumerate(self.shares):
            shares.num_ingresses = num_ingresses
            shares.on_hurry = lambda i=i: self._hurry(i)  # type: ignore[misc]
            self._plan(i, self.rng.random() * BEAT_S)

    def at(self, time: float, call: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, call))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.clock.now, _, call = heapq.heappop(self._events)
            call()
        self.clock.now = until

    def _plan(self, i: int, in_s: float) -> None:
        when = self._beats[i] = self.clock.now + in_s

        def beat() -> None:
            if self._beats.get(i) == when:
                self._beat(i)

        self.at(when, beat)

    def _hurry(self, i: int) -> None:
        soon = max(self._last[i] + HURRY_S - self.clock.now, 0.0)
        if i not in self._busy and self._beats[i] > self.clock.now + soon:
            self._plan(i, soon)

    def _beat(self, i: int) -> None:
        if i not in self.alive:
            return
        self._busy.add(i)
        uses = self.shares[i].reports()
        self.at(self.clock.now + 0.005, lambda: self._arrive(i, uses))

    def _arrive(self, i: int, uses: dict[str, LimitUsage]) -> None:
        self.num_messages += 1
        if self.books is None:
            self.at(self.clock.now + 0.005, lambda: self._end(i, uses, None))
            return
        answer = self.books.settle_usage(str(i), uses)
        self.at(self.clock.now + 0.005, lambda: self._end(i, uses, answer))

    def _end(self, i: int, uses: dict[str, LimitUsage], answer: LimitAnswer | None) -> None:
        self._busy.discard(i)
        self._last[i] = self.clock.now
        self._plan(i, BEAT_S)
        if answer is None:
            self.shares[i].lost(uses, len(self.shares))
        else:
            self.shares[i].apply_answer(answer)
