"""Admission of batches' requests: a limit on those in flight, and round robin over their owners."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

from folio.app.api.operators.replies import LoadReport

# Share that batches leave to others: of the sequences that replicas can run, and of the KV cache without pins.
_LEFT_SHARE = 0.25


class LineGate:
    """Admits requests, round robin over their owners, up to a limit at a time. For one event loop.

    Attributes:
        num_inside: requests that are being computed.
    """

    def __init__(self) -> None:
        self.num_inside = 0
        self._limit = 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the first owner is next
        self._paused: set[str] = set()
        self._num_closed = 0

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def set_limit(self, limit: int) -> None:
        self._limit = limit
        self._let_in()

    async def enter(self, owner: str, *, again: bool = False) -> None:
        """Wait for admission, which `leave` gives back. `again`: ahead of the owner's other requests."""
        place = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(owner, deque())
        queue.insert(0 if again else len(queue), place)
        self._let_in()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.leave()
            elif place in queue:
                queue.remove(place)
                if not queue:
                    del self._waiting[owner]
            raise

    def leave(self) -> None:
        assert self.num_inside > 0
        self.num_inside -= 1
        self._let_in()

    def pause(self, seconds: float, owner: str | None = None) -> None:
        """Admit no request of an owner for a time; with `None`, of any owner."""
        loop = asyncio.get_running_loop()
        if owner is None:
            self._num_closed += 1
            loop.call_later(seconds, self._reopen)
        elif owner not in self._paused:
            self._paused.add(owner)
            loop.call_later(seconds, self._resume, owner)

    def _reopen(self) -> None:
        self._num_closed -= 1
        self._let_in()

    def _resume(self, owner: str) -> None:
        self._paused.discard(owner)
        self._let_in()

    def _let_in(self) -> None:
        while self.num_inside < self._limit and not self._num_closed:
            owner = next((owner for owner in self._waiting if owner not in self._paused), None)
            if owner is None:
                return
            queue = self._waiting[owner]
            place = queue.popleft()
            self._waiting.move_to_end(owner)
            if not queue:
                del self._waiting[owner]
            if not place.done():  # else it was cancelled just now
                place.set_result(None)
                self.num_inside += 1


def spare_lines(load: LoadReport, num_inside: int, most: int) -> int:
    """How many requests of batches may be computed now, so that a share of the replicas stays free for others.

    Without a replica it is one request, for which a replica is started.

    Args:
        num_inside: requests of batches that the load includes.
    """
    slots = sum(replica.max_num_seqs for replica in load.replicas)
    if not slots:
        return 0 if load.num_silent else 1
    others = max(load.total.num_running + load.total.num_waiting - num_inside, 0)
    unpinned = load.total.total_tokens * (1 - load.total.pinned_bytes / max(load.total.budget_bytes, 1))
    spare = max(int(slots * (1 - _LEFT_SHARE)), 1) - others
    if load.total.free_tokens < _LEFT_SHARE * unpinned:
        spare = min(spare, num_inside)  # those inside go on, and no further ones begin
    return max(min(spare, most), 0)
