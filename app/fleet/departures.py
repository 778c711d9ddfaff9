"""Departures: replicas that leave, whose calls in this process move to others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from threading import Lock

from folio.app.errors import UnavailableError

# Replicas that have left and are remembered, for calls whose first output comes later.
_MOST_LEFT = 1000


class CallMovedError(UnavailableError):
    """The call has been ended at a replica that leaves, to continue at another one."""


@dataclass(eq=False)
class PlacedCall:
    """A call with output at a replica. `leave` ends it there; called in `loop`, once."""

    replica: str
    leave: Callable[[], None]
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    is_leaving: bool = False


class Departures:
    """The calls of this process, and the replicas that leave, as its routers see them. From any thread.

    A replica that stops gets no requests any more, and ends when its last one has ended; with a long stream, after
    minutes. Its calls leave it as soon as another replica is there. One that has died breaks its calls off itself.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._calls: dict[str, set[PlacedCall]] = {}  # by replica
        self._left: dict[str, None] = {}  # the latest is the last
        self._has_others = False  # replicas that stay

    def update(self, before: Collection[str], now: Collection[str]) -> None:
        """Take a router's replicas, before a change and after it."""
        with self._lock:
            for name in now:
                self._left.pop(name, None)
            for name in before:
                if name not in now:
                    self._left[name] = None
            while len(self._left) > _MOST_LEFT:
                del self._left[next(iter(self._left))]
            self._has_others = bool(now)
            for name in self._left.keys() & self._calls.keys():
                for call in self._calls[name]:
                    self._end_if_others(call)

    def place(self, call: PlacedCall) -> PlacedCall:
        """Note a call at the replica that has begun it, until `remove`."""
        with self._lock:
            self._calls.setdefault(call.replica, set()).add(call)
            if call.replica in self._left:
                self._end_if_others(call)
            return call

    def remove(self, call: PlacedCall) -> None:
        """Forget a call that has ended."""
        with self._lock:
            of_replica = self._calls[call.replica]
            of_replica.discard(call)
            if not of_replica:
                del self._calls[call.replica]

    def __reduce__(self) -> tuple[Callable[[], Departures], tuple[()]]:
        return _of_this_process, ()  # Serve pickles the router's module by value, and the router needs no copy

    def _end_if_others(self, call: PlacedCall) -> None:
        if self._has_others and not call.is_leaving:
            call.is_leaving = True
            call.loop.call_soon_threadsafe(call.leave)


def _of_this_process() -> Departures:
    return DEPARTURES


# Serve makes a process's routers. What they see reaches the process's calls through this.
DEPARTURES = Departures()
