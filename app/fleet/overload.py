"""Who has refused requests lately, so that few are asked in vain: one ingress's view."""

from __future__ import annotations

import math
from dataclasses import dataclass

# A replica that was full is asked last for so long.
_ASKED_LAST_S = 0.25
# After all replicas have refused, the door lets in only as many as they can take, until so long has passed without all
# refusing again.
_CROWDED_S = 2.0
# At first a little more than begin. Then less by so much when all refuse again, which may say the same thing several
# times within a moment; and more every second, by a share of those that begin.
_FIRST_SHARE, _SLOWER, _SLOWER_AFTER_S, _FASTER_PER_S = 1.25, 0.8, 0.25, 0.5
# When it becomes crowded again: as much as before, but not more than so many times as many.
_MOST_SHARE = 4.0
# Requests a second that the replicas are offered in any case.
_LEAST_PER_S = 1.0
# In which half of a queue may begin, for the sake of finite numbers.
_SHORTEST_S = 1e-3


@dataclass(frozen=True, slots=True)
class _FullQueue:
    """`room_at`: when about half of the queue will have begun; `begin_per_s`: requests of it."""

    at: float
    room_at: float
    begin_per_s: float


class LoadShedder:
    """Replicas whose queues were full a moment ago, and a door for when all were.

    A refusal by a replica costs a call, and many cost the time that the engines need. So while it is crowded the door
    lets in about as many requests a second as begin at the replicas, and refuses all others by itself, before anything
    is done for them. How many begin the replicas say, but not how many come through other doors: so the door opens
    wider all the time, and less wide when all refuse again (additive increase, multiplicative decrease, as TCP).

    Doors of several ingresses let in their share each: of all requests that come, as many come to this one. They open
    wider more slowly, too, by the root of it: a refusal makes only that door slower that hears it. If they opened as
    fast as one alone, 16 times as many calls would be in vain; 16 times as slowly, and short queues would run dry.

    Times are seconds of one clock. One thread at a time.

    Attributes:
        num_arrived: requests that have come to the door so far.
    """

    def __init__(self) -> None:
        self.num_arrived = 0
        self._share = 1.0
        self._by_replica: dict[str, _FullQueue] = {}
        self._crowded_until = -math.inf
        self._room_at = self._filled_at = self._slowed_at = -math.inf
        self._all_begin_per_s = self._admitted_per_s = self._tickets = 0.0

    def note_refusal(self, replica: str, retry_after_s: float, num_queued: int, now: float) -> None:
        """A replica has refused a request: so many wait, and half of them begin within `retry_after_s`."""
        begin_per_s = num_queued / 2 / max(retry_after_s, _SHORTEST_S)
        self._by_replica[replica] = _FullQueue(now, now + retry_after_s, begin_per_s)

    def recent_refusers(self, now: float) -> tuple[str, ...]:
        """Replicas to be asked last."""
        return tuple(r for r, refusal in self._by_replica.items() if now - refusal.at < _ASKED_LAST_S)

    def note_all_refused(self, now: float) -> float:
        """All replicas have refused, each as `note` has it; returns after how many seconds the first may have room."""
        self._by_replica = {r: refusal for r, refusal in self._by_replica.items() if now - refusal.at < _CROWDED_S}
        refusals = self._by_replica.values()
        self._all_begin_per_s = sum(refusal.begin_per_s for refusal in refusals)
        if now >= self._crowded_until:
            self._tickets, self._filled_at, self._slowed_at = 0.0, now, now
            # Or as wide as it was: they may say too little.
            learnt = min(self._admitted_per_s, _MOST_SHARE * self._begin_per_s)
            self._admitted_per_s = max(_FIRST_SHARE * self._begin_per_s, learnt, self._least_per_s)
        elif now - self._slowed_at >= _SLOWER_AFTER_S:
            self._fill(now)
            self._admitted_per_s = max(_SLOWER * self._admitted_per_s, self._least_per_s)
            self._slowed_at = now
        self._crowded_until = now + _CROWDED_S
        self._room_at = min((refusal.room_at for refusal in refusals), default=now)
        return max(self._room_at - now, 0.0)

    def admission_delay_s(self, now: float) -> float | None:
        """`None`: a request may come in. Else it is crowded, and that is when to come again, in seconds."""
        self.num_arrived += 1
        if now >= self._crowded_until:
            return None
        self._fill(now)
        if self._tickets >= 1:
            self._tickets -= 1
            return None
        return max(self._room_at - now, 0.0)

    def return_admission(self) -> None:
        """A request that was let in came to nothing."""
        self._tickets += 1

    def is_shedding(self, now: float) -> bool:
        """Whether the door may refuse somebody."""
        return now < self._crowded_until

    @property
    def arrival_share(self) -> float:
        """Of all requests that come to all doors, those that come to this one: more than 0."""
        return self._share

    @arrival_share.setter
    def arrival_share(self, share: float) -> None:
        self._admitted_per_s *= share / self._share
        self._share = share

    @property
    def _begin_per_s(self) -> float:
        """Requests for which the replicas have room, of those that come to this door."""
        return self._all_begin_per_s * self._share

    @property
    def _least_per_s(self) -> float:
        return _LEAST_PER_S * self._share

    def _fill(self, now: float) -> None:
        passed_s = now - self._filled_at
        self._admitted_per_s += (
            _FASTER_PER_S * self._share**0.5 * min(self._admitted_per_s, self._begin_per_s) * passed_s
        )
        # Those of a moment at most: after a pause there shall be no rush.
        most = max(self._admitted_per_s * _ASKED_LAST_S, 1.0)
        self._tickets = min(self._tickets + self._admitted_per_s * passed_s, most)
        self._filled_at = now
