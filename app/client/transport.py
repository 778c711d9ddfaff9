"""Transport: the Protocol behind the client, connections per event loop, and errors that transports share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

from folio.app.errors import RequestError, UnavailableError

T = TypeVar("T")


class Transport(Protocol):
    """Calls of the ingress's methods by name, with the type of the answer, or of a stream's items. Both raise
    `FolioError`, and free the request's memory when the call is cancelled or the stream closed."""

    async def call(self, method: str, answer: type[T], *args: Any) -> T: ...
    def stream(self, method: str, item: Any, *args: Any) -> AsyncGenerator[Any, None]: ...
    async def close(self) -> None: ...


class PerLoop(Generic[T]):
    """One connection for each event loop: such objects are bound to the loop that made them."""

    def __init__(self, connect: Callable[[], T], close: Callable[[T], Awaitable[Any]]) -> None:
        self._connect = connect
        self._close = close
        self._open: dict[asyncio.AbstractEventLoop, T] = {}
        self._lock = threading.Lock()  # event loops run in several threads

    def get(self) -> T:
        """The running loop's connection, which the first call opens."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._open:
                self._open = {other: value for other, value in self._open.items() if not other.is_closed()}
                self._open[loop] = self._connect()
            return self._open[loop]

    async def close(self) -> None:
        with self._lock:
            value = self._open.pop(asyncio.get_running_loop(), None)
        if value is not None:
            await self._close(value)


def no_such_call(method: str, scheme: str) -> RequestError:
    return RequestError(f"{method} is not available over {scheme}; call the application by name in its Ray cluster")


def unreachable(callee: str, reason: object) -> UnavailableError:
    return UnavailableError(f"{callee} cannot be reached ({reason}); send the request again")


def connection_lost(callee: str) -> UnavailableError:
    return UnavailableError(f"the connection to {callee} was lost; send the request again")
