"""The door of an ingress: what may come in, and how many are inside."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from app.edge.door import overloaded
from app.errors import UnavailableError
from app.fleet.overload import Refusals

# How long a client of a server that is stopped should wait: by then another one may answer at its address.
_DRAINED_AFTER_S = 5.0


@dataclass(slots=True)
class _Ticket:
    """Of a request that the door has let in when its head came."""

    is_used: bool = False


_TICKET: ContextVar[_Ticket | None] = ContextVar("ticket", default=None)


class Admission:
    """Refuses at once what would be refused anyhow: while replicas are full, and when the server is about to stop.

    Args:
        refusals: of the replicas.
    """

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._num_inside = 0
        self._is_draining = False

    @property
    def num_inside(self) -> int:
        """Requests that have been let in and have not ended."""
        return self._num_inside

    @contextmanager
    def knock(self) -> Iterator[float | None]:
        """See `app.edge.door.Gate`. Who `enter`s while this is open has been let in already."""
        retry_after_s = self._refusals.refuse(time.monotonic())
        if retry_after_s is not None:
            yield retry_after_s
            return
        ticket = _Ticket()
        token = _TICKET.set(ticket)
        try:
            yield None
        finally:
            _TICKET.reset(token)
            if not ticket.is_used:  # something was wrong with it: another may come instead
                self._refusals.give_back()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """A request is inside while this is open.

        Raises:
            UnavailableError: the server is about to stop.
            OverloadedError: all replicas are full, and as many as they can take have been let in.
        """
        self.check_open()
        ticket = _TICKET.get()
        if ticket is not None and not ticket.is_used:
            ticket.is_used = True
        elif (retry_after_s := self._refusals.refuse(time.monotonic())) is not None:
            raise overloaded(retry_after_s)
        self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1

    def drain(self) -> None:
        """From now on nothing comes in."""
        self._is_draining = True

    def check_open(self) -> None:
        """Raise `UnavailableError` when the server is about to stop."""
        if self._is_draining:
            raise UnavailableError(
                "this server is draining: it finishes what it has begun and takes nothing new; send the request again",
                _DRAINED_AFTER_S,
            )
