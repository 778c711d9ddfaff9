"""The door of an ingress: what may come in, and how many are inside."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from app.errors import OverloadedError, UnavailableError
from app.fleet.overload import Refusals

# How long a client of a server that is stopped should wait: by then another one may answer at its address.
_DRAINED_AFTER_S = 5.0


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
    def enter(self) -> Iterator[None]:
        """A request is inside while this is open.

        Raises:
            UnavailableError: the server is about to stop.
            OverloadedError: all replicas are full, and as many as they can take have been let in.
        """
        self.check_open()
        now = time.monotonic()
        retry_after_s = self._refusals.refuse(now)
        if retry_after_s is not None:
            raise OverloadedError(
                f"all engine replicas have as many requests waiting as may; try again in {max(retry_after_s, 1):.0f} s",
                retry_after_s,
                self._refusals.closed_s(now),
            )
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
