"""One replica and the future: sessions that go on when their turn before has ended."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.simulator.device import Device
from benchmarks.simulator.replica import Served, SimulatedReplica
from benchmarks.simulator.traffic import Arrival
from folio.vmem import EvictionOrder


class Schedule:
    """The requests of all sessions in simulated time.

    Attributes:
        now: simulated time.
    """

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self.now = 0.0
        self._followers = {arrival.follows: arrival for arrival in arrivals if arrival.follows is not None}
        self._events: list[tuple[float, int, Arrival]] = [
            (arrival.at, arrival.number, arrival) for arrival in arrivals if arrival.follows is None
        ]
        heapq.heapify(self._events)
        self._sessions: dict[bytes, set[str]] = {}  # of each prefix
        for arrival in arrivals:
            for digest in arrival.digests:
                self._sessions.setdefault(digest, set()).add(arrival.session or "")
        self._next: dict[str, tuple[float, Arrival]] = {}  # session → its next request
        self._running: dict[str, Arrival] = {}

    def next_use(self, digest: bytes) -> float:
        """When the prefix is used next, as far as that is certain: for one of several sessions now; for a request in
        progress as if it ended now."""
        sessions = self._sessions.get(digest, set())
        if len(sessions) > 1:
            return self.now
        session = next(iter(sessions), "")
        if session in self._next:
            at, arrival = self._next[session]
        elif session in self._running and (follower := self._followers.get(self._running[session].number)):
            at, arrival = self.now + follower.pause_s, follower
        else:
            return math.inf
        return at if digest in arrival.digests else math.inf

    @property
    def next_at(self) -> float:
        """Time of the next arrival."""
        return self._events[0][0] if self._events else math.inf

    def take(self) -> Arrival:
        """The next request, which begins now."""
        self.now, _, arrival = heapq.heappop(self._events)
        self._next.pop(arrival.session or "", None)
        self._running[arrival.session or ""] = arrival
        return replace(arrival, at=self.now)

    def end(self, arrival: Arrival, now: float) -> None:
        """Note that a request has ended; the session's next one arrives after the pause."""
        self.now = now
        del self._running[arrival.session or ""]
        if (follower := self._followers.get(arrival.number)) is not None:
            at = now + follower.pause_s
            self._next[arrival.session or ""] = at, follower
            heapq.heappush(self._events, (at, follower.number, follower))


def run(schedule: Schedule, device: Device, eviction: EvictionOrder | None) -> list[Served]:
    """Serve all requests; returns them in order of arrival."""
    replica = SimulatedReplica(0, device, eviction=eviction)
    served: list[Served] = []
    while True:
        wakes_at = math.inf if replica.wakes_at is None else replica.wakes_at
        if math.inf == wakes_at == schedule.next_at:
            break
        if schedule.next_at <= wakes_at:
            arrival = schedule.take()
            served.append(replica.submit(arrival, 0, schedule.now))
        else:
            schedule.now = wakes_at
            for ended in replica.advance(wakes_at):
                schedule.end(ended.arrival, wakes_at)
    replica.close()
    return served
