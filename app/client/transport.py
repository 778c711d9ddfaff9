"""How a client's calls get to a Folio application."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

from app.errors import RequestError, UnavailableError

T = TypeVar("T")


class Transport(Protocol):
    """Calls of the ingress's methods, by name and with their arguments. Both raise `FolioError`s, and free what the
    request has when they are cancelled or, a stream, closed."""

    async def call(self, method: str, *args: Any) -> Any: ...
    def stream(self, method: str, *args: Any) -> AsyncGenerator[Any, None]: ...
    async def close(self) -> None: ...


class PerLoop(Generic[T]):
    """A connection for each event loop that uses one: such objects are bound to theirs."""

    def __init__(self, connect: Callable[[], T], close: Callable[[T], Awaitable[Any]]) -> None:
        self._connect = connect
        self._close = close
        self._open: dict[asyncio.AbstractEventLoop, T] = {}
        self._lock = threading.Lock()  # loops run in threads of their own

    def get(self) -> T:
        """That of the running loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._open:
                self._open = {other: value for other, value in self._open.items() if not other.is_closed()}
                self._open[loop] = self._connect()
            return self._open[loop]

    async def close(self) -> None:
        """That of the running loop."""
        with self._lock:
            value = self._open.pop(asyncio.get_running_loop(), None)
        if value is not None:
            await self._close(value)


def no_such_call(method: str, scheme: str) -> RequestError:
    return RequestError(f"{method} is not to be had over {scheme}; call it within the Ray cluster, by the name")


def unreachable(where: str, why: object) -> UnavailableError:
    return UnavailableError(f"{where} cannot be reached ({why}); send the request again")


def connection_lost(where: str) -> UnavailableError:
    return UnavailableError(f"{where} has broken off; send the request again")
