"""Pin restorer: remembers pinned prefixes while the engine sleeps; after it wakes they are pinned again, from copies in
host memory, or computed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace

from folio.app.engine.request.delta import Delta
from folio.app.errors import RequestError, UnknownModelError
from folio.vmem import CachedPrefix, MemoryReport, PinReport

logger = logging.getLogger(__name__)


class PinRestorer:
    """The pins that `sleep` took from the memory and that are not there again yet. Called between two steps; a method
    that any thread may call says so.

    Args:
        running: ids of the engine's requests that have not ended.
        pin_copy: pins a prefix that has been kept; false if that is not possible now.

    Attributes:
        requests: request id → name of the pin that the request computes again.
    """

    def __init__(self, running: Container[str], pin_copy: Callable[[CachedPrefix], bool]) -> None:
        self.requests: dict[str, str] = {}
        self._running, self._pin_copy = running, pin_copy
        self._due: dict[str, CachedPrefix] = {}  # by name

    def keep(self, pins: Iterable[CachedPrefix]) -> None:
        """Keep pins whose memory has been given back."""
        for pin in pins:
            assert pin.pin_name is not None
            self._due[pin.pin_name] = pin

    def restore(self, queue: Callable[[str, CachedPrefix], None]) -> None:
        """Compute the pins again, except those that a request computes already.

        Args:
            queue: queues the computation of a pin under a request id; raises `UnknownModelError` if its adapter has
                been unloaded; the pin is then dropped.
        """
        for name, pin in list(self._due.items()):
            request_id = _request_id(name)
            if request_id in self._running:
                continue
            try:
                queue(request_id, pin)
            except UnknownModelError as error:
                logger.warning("the pin %r is dropped: %s", name, error)
                del self._due[name]
            else:
                self.requests[request_id] = name

    def pin_copies(self) -> list[str]:
        """Pin the prefixes that have been kept, as far as there is memory now; returns the requests that need not
        compute theirs any more."""
        pinned = [r for r, name in self.requests.items() if name in self._due and self._pin_copy(self._due[name])]
        for request_id in pinned:
            del self._due[self.requests.pop(request_id)]
        return pinned

    def take_own(self, deltas: list[Delta]) -> list[Delta]:
        """Take the outcome of `requests` from a step's deltas; returns those of clients' requests. A pin that could not
        be computed is kept for the next `restore`."""
        for delta in deltas:
            if delta.request_id in self.requests:
                if delta.error is None:
                    self._due.pop(self.requests[delta.request_id], None)
                else:
                    logger.warning("%s failed, and is retried at the next wake-up: %s", delta.request_id, delta.error)
        others = [delta for delta in deltas if delta.request_id not in self.requests]
        self.requests = {request_id: name for request_id, name in self.requests.items() if request_id in self._running}
        return others

    def check_same(self, name: str, token_ids: Sequence[int], keys: tuple[str, ...]) -> None:
        """Raise `RequestError` if another prefix is kept under this name. From any thread."""
        due = self._due.get(name)
        if due is not None and (list(due.token_ids), due.keys) != (list(token_ids), keys):
            raise RequestError(f"another prefix named {name!r} is pinned already; unpin it first", "name")

    def discard(self, name: str) -> str | None:
        """Drop a pin; returns the id of the request to cancel, `None` if there is no such pin."""
        return None if self._due.pop(name, None) is None else _request_id(name)

    def joined_with(self, pinned: Sequence[CachedPrefix]) -> list[CachedPrefix]:
        """These pins, which are in memory, and the kept ones. From any thread."""
        due = self._due.copy()
        for pin in pinned:
            assert pin.pin_name is not None
            due.pop(pin.pin_name, None)
        return [*pinned, *due.values()]

    def added_to(self, report: MemoryReport) -> MemoryReport:
        """The report with the kept pins, which take no memory. From any thread."""
        if not self._due:
            return report
        due = self._due.copy()
        for pin in report.pins:
            due.pop(pin.name, None)
        absent = tuple(PinReport(name, len(pin.token_ids), 0) for name, pin in due.items())
        return replace(report, pins=report.pins + absent)


def _request_id(pin_name: str) -> str:
    return f"pin {pin_name} after a wake"
