"""The calls of one request with several prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

# Between two offers of a call that has been refused.
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.05, 1.0


class Batch:
    """Lets so many of the calls be sent at once, and knows whether they make progress: all at once could be more than
    the queues take even when nobody else is there, and such a request would never succeed.

    Args:
        window: calls at once.
    """

    def __init__(self, window: int) -> None:
        self._places = asyncio.Semaphore(window)
        self._num_inside = self._num_paused = 0
        self._num_ended = 0

    @property
    def num_ended(self) -> int:
        """Calls that have had their turn."""
        return self._num_ended

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """A call may be sent while this is open."""
        async with self._places:
            self._num_inside += 1
            try:
                yield
            finally:
                self._num_inside -= 1
                self._num_ended += 1

    def may_offer_again(self, num_ended: int) -> bool:
        """Whether a call that has been refused may wait for room, because another one is under way, or more than
        `num_ended` are through: the replicas do take calls of this request."""
        return self._num_inside - self._num_paused > 1 or self._num_ended > num_ended

    async def pause(self, retry_after_s: float) -> None:
        """Until there may be room for a call that has been refused."""
        self._num_paused += 1
        try:
            await asyncio.sleep(min(max(retry_after_s, _LEAST_PAUSE_S), _MOST_PAUSE_S))
        finally:
            self._num_paused -= 1
