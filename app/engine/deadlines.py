"""When requests have to be finished."""

from __future__ import annotations

import heapq
import math

from app.errors import RequestError

# Entries of requests that have ended are dropped when there are more of them than of others, and than this.
_FEW = 64


def check_timeout(timeout_s: float) -> None:
    """Raise `RequestError` unless it is a time that can pass."""
    if not 0 < timeout_s < math.inf:
        raise RequestError(
            f"timeout_s is {timeout_s}; it must be above 0 and finite, or left out for no limit", "timeout_s"
        )


class Deadlines:
    """Deadlines of requests, on any clock that never goes back. O(log n) each, and O(1) when none has passed."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []  # has entries that `_at` has no more, too

    def add(self, request_id: str, at_s: float) -> None:
        """Set the deadline of a request, in place of one it may have."""
        self._at[request_id] = at_s
        heapq.heappush(self._heap, (at_s, request_id))
        if len(self._heap) > 2 * len(self._at) + _FEW:
            self._heap = [(at, name) for name, at in self._at.items()]
            heapq.heapify(self._heap)

    def discard(self, request_id: str) -> None:
        """Forget the deadline of a request, if it has one."""
        self._at.pop(request_id, None)

    def expired(self, now: float) -> list[str]:
        """Requests whose deadline has come, the earliest first. They are forgotten."""
        passed = []
        while self._heap and self._heap[0][0] <= now:
            at, request_id = heapq.heappop(self._heap)
            if self._at.get(request_id) == at:
                del self._at[request_id]
                passed.append(request_id)
        return passed
