"""Who has refused requests lately, so that few are asked in vain: one ingress's view."""

from __future__ import annotations

import math
from dataclasses import dataclass

# A replica that was full is asked last for so long.
_ASKED_LAST_S = 0.25
# After all replicas have refused, the door lets in only as many as they can take, until so long has passed without all
# refusing again.
_CROWDED_S = 2.0
# More than begin: what is known of their number may be wrong by so much, and a queue must not run dry.
_MARGIN = 2.0
# Requests a second that a replica is offered in any case.
_LEAST_PER_S = 4.0


@dataclass(frozen=True, slots=True)
class _Refusal:
    """`room_at`: when about half of the queue will have begun; `begin_per_s`: requests of it."""

    at: float
    room_at: float
    begin_per_s: float


class Refusals:
    """Replicas whose queues were full a moment ago, and a door for when all were.

    A refusal by a replica costs a call, and many cost the time that the engines need. So while it is crowded the door
    lets in about twice as many requests a second as begin at the replicas, by their own word, and refuses all others
    by itself, before anything is done for them. Half of those let in fill the queues, and refusals of the other half
    say that it is still crowded.

    Times are seconds of one clock. One thread at a time.
    """

    def __init__(self) -> None:
        self._by_replica: dict[str, _Refusal] = {}
        self._crowded_until = -math.inf
        self._room_at = self._filled_at = -math.inf
        self._admitted_per_s = self._tickets = 0.0

    def note(self, replica: str, retry_after_s: float, num_queued: int, now: float) -> None:
        """A replica has refused a request: so many wait, and half of them begin within `retry_after_s`."""
        begin_per_s = num_queued / 2 / retry_after_s if retry_after_s > 0 else math.inf
        self._by_replica[replica] = _Refusal(now, now + retry_after_s, max(begin_per_s, _LEAST_PER_S))

    def lately(self, now: float) -> tuple[str, ...]:
        """Replicas to be asked last."""
        return tuple(r for r, refusal in self._by_replica.items() if now - refusal.at < _ASKED_LAST_S)

    def all_refused(self, now: float) -> float:
        """All replicas have refused, each as `note` has it; returns after how many seconds the first may have room."""
        self._by_replica = {r: refusal for r, refusal in self._by_replica.items() if now - refusal.at < _CROWDED_S}
        if now >= self._crowded_until:
            self._tickets, self._filled_at = 0.0, now
        self._crowded_until = now + _CROWDED_S
        refusals = self._by_replica.values()
        self._admitted_per_s = max(_MARGIN * sum(refusal.begin_per_s for refusal in refusals), _LEAST_PER_S)
        self._room_at = min((refusal.room_at for refusal in refusals), default=now)
        return max(self._room_at - now, 0.0)

    def refuse(self, now: float) -> float | None:
        """`None`: a request may come in. Else it is crowded, and that is when to come again, in seconds."""
        if now >= self._crowded_until:
            return None
        more = (now - self._filled_at) * self._admitted_per_s
        # Those of a moment at most: after a pause there shall be no rush.
        self._tickets = min(self._tickets + more, max(self._admitted_per_s * _ASKED_LAST_S, 1.0))
        self._filled_at = now
        if self._tickets >= 1:
            self._tickets -= 1
            return None
        return max(self._room_at - now, 0.0)
