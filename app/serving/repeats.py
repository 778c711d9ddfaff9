"""Requests that come twice: never two at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.errors import UnavailableError

# That a request which is cancelled takes to end, at most: a step, and the way of the cancellation.
_ENDS_WITHIN_S = 2.0


class Repeats:
    """The requests that run here, by their senders' keys.

    A request is sent again when its ingress died before any answer. So the first one's caller is dead, and it is about
    to be cancelled: the second waits for that, instead of running beside it. In one event loop.
    """

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Event] = {}

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """The request with this key runs while this is open.

        Raises:
            UnavailableError: another one with this key does not end.
        """
        try:
            async with asyncio.timeout(_ENDS_WITHIN_S):
                while (other := self._running.get(key)) is not None:
                    await other.wait()
                # No other can come in between: this does not wait any more.
                ended = self._running[key] = asyncio.Event()
        except TimeoutError:
            raise UnavailableError(
                f"this request came before, and has not ended within {_ENDS_WITHIN_S:g} s; send it again later"
            ) from None
        try:
            yield
        finally:
            del self._running[key]
            ended.set()
