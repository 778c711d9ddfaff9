"""A request's deltas on their way from the engine's thread to whoever asked, a list at a time."""

from __future__ import annotations

import asyncio
import math

from app.engine.request import Delta


class DeltaQueue:
    """Deltas between one loop's callbacks, which put them, and one task of that loop, which takes them.

    A reader that is busy elsewhere, or does not want to be woken before a certain time, finds all that has come
    meanwhile: so what handing over costs does not depend on the number of steps. The end of a request wakes it at once.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._deltas: list[Delta] = []
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None
        self._not_before = 0.0

    def put(self, delta: Delta) -> None:
        """In the loop's thread."""
        self._deltas.append(delta)
        self._ended = self._ended or delta.ends_request
        if self._ended or self._loop.time() >= self._not_before:
            self._wake()

    async def take(self, not_before: float = 0.0) -> list[Delta]:
        """All deltas that are there, at least one, in order; waits for it.

        Args:
            not_before: on the loop's clock; sooner only if the request has ended.
        """
        self._not_before = not_before
        while not self._deltas or (not self._ended and self._loop.time() < not_before):
            self._waiter = self._loop.create_future()
            waits = self._loop.time() < not_before < math.inf
            timer = self._loop.call_at(not_before, self._wake) if waits else None
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        taken, self._deltas = self._deltas, []
        return taken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
