"""Load shedding: an ingress's view of the replicas' refusals, and its rate of admission while all are full."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Time for which a replica that was full is ranked last.
_RANKED_LAST_S = 0.25
# Shedding ends this long after the last time that all replicas have refused.
_SHEDDING_S = 2.0
# The rate of admission starts at this multiple of the requests that begin, is multiplied by `_SLOWER` when all replicas
# refuse again (at most once in `_SLOWER_AFTER_S`: several refusals may have one cause), and grows every second by a
# share of the requests that begin.
_FIRST_SHARE, _SLOWER, _SLOWER_AFTER_S, _FASTER_PER_S = 1.25, 0.8, 0.25, 0.5
# The next shedding starts at the last rate, but at most at this multiple of the requests that begin.
_MOST_SHARE = 4.0
# Least requests a second that are admitted.
_LEAST_PER_S = 1.0
# Least time in which half of a queue begins, against infinite rates.
_SHORTEST_S = 1e-3


@dataclass(frozen=True, slots=True)
class _FullQueue:
    """A refusal. `room_at`: when about half of the queue will have begun; `begin_per_s`: rate at which it begins."""

    at: float
    room_at: float
    begin_per_s: float


class LoadShedder:
    """Tracks replicas with full queues, and sheds load while all are full.

    A refusal by a replica costs a call, and many of them cost engines compute time. So while all queues are full, the
    ingress admits about as many requests a second as begin at the replicas, and refuses the others from their heads
    alone. Replicas tell the rate at which requests begin, but not the share of other ingresses: the rate of admission
    rises steadily and drops when all replicas refuse again (additive increase, multiplicative decrease, as in TCP).

    Each of several ingresses admits its share of the rate, `arrival_share`. The rate rises with the square root of the
    share, because only the ingress that meets a refusal slows down: at the full speed of a lone ingress, 16 ingresses
    make 16 times as many calls in vain; at a sixteenth of it, short queues run dry.

    Times are seconds of one clock. One thread at a time.

    Attributes:
        num_arrived: requests that have arrived so far, refused ones included.
    """

    def __init__(self) -> None:
        self.num_arrived = 0
        self._share = 1.0
        self._by_replica: dict[str, _FullQueue] = {}
        self._shedding_until = -math.inf
        self._room_at = self._filled_at = self._slowed_at = -math.inf
        self._all_begin_per_s = self._admitted_per_s = self._tickets = 0.0

    def note_refusal(self, replica: str, retry_after_s: float, num_queued: int, now: float) -> None:
        """Note a replica's refusal: `num_queued` requests wait, and half of them begin within `retry_after_s`."""
        begin_per_s = num_queued / 2 / max(retry_after_s, _SHORTEST_S)
        self._by_replica[replica] = _FullQueue(now, now + retry_after_s, begin_per_s)

    def recent_refusers(self, now: float) -> tuple[str, ...]:
        """Replicas to be ranked last."""
        return tuple(r for r, refusal in self._by_replica.items() if now - refusal.at < _RANKED_LAST_S)

    def note_all_refused(self, now: float) -> float:
        """Note that all replicas have refused (`note_refusal`); returns the seconds until the first may have room."""
        self._by_replica = {r: refusal for r, refusal in self._by_replica.items() if now - refusal.at < _SHEDDING_S}
        refusals = self._by_replica.values()
        self._all_begin_per_s = sum(refusal.begin_per_s for refusal in refusals)
        if now >= self._shedding_until:
            self._tickets, self._filled_at, self._slowed_at = 0.0, now, now
            # The last rate may be better than the replicas' figures.
            last_per_s = min(self._admitted_per_s, _MOST_SHARE * self._begin_per_s)
            self._admitted_per_s = max(_FIRST_SHARE * self._begin_per_s, last_per_s, self._least_per_s)
        elif now - self._slowed_at >= _SLOWER_AFTER_S:
            self._fill(now)
            self._admitted_per_s = max(_SLOWER * self._admitted_per_s, self._least_per_s)
            self._slowed_at = now
        self._shedding_until = now + _SHEDDING_S
        self._room_at = min((refusal.room_at for refusal in refusals), default=now)
        return max(self._room_at - now, 0.0)

    def admission_delay_s(self, now: float) -> float | None:
        """`None`: the request is admitted. Otherwise the seconds after which to send it again."""
        self.num_arrived += 1
        if now >= self._shedding_until:
            return None
        self._fill(now)
        if self._tickets >= 1:
            self._tickets -= 1
            return None
        return max(self._room_at - now, 0.0)

    def return_admission(self) -> None:
        """Give an admission back: the request was refused for another reason."""
        self._tickets += 1

    def is_shedding(self, now: float) -> bool:
        return now < self._shedding_until

    @property
    def arrival_share(self) -> float:
        """This ingress's share of the requests that arrive at all ingresses: above 0."""
        return self._share

    @arrival_share.setter
    def arrival_share(self, share: float) -> None:
        self._admitted_per_s *= share / self._share
        self._share = share

    @property
    def _begin_per_s(self) -> float:
        """This ingress's share of the requests that begin at the replicas each second."""
        return self._all_begin_per_s * self._share

    @property
    def _least_per_s(self) -> float:
        return _LEAST_PER_S * self._share

    def _fill(self, now: float) -> None:
        passed_s = now - self._filled_at
        rising_per_s = min(self._admitted_per_s, self._begin_per_s)
        self._admitted_per_s += _FASTER_PER_S * self._share**0.5 * rising_per_s * passed_s
        # Bounded, so that no burst follows a pause.
        most = max(self._admitted_per_s * _RANKED_LAST_S, 1.0)
        self._tickets = min(self._tickets + self._admitted_per_s * passed_s, most)
        self._filled_at = now
