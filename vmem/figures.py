"""Figures of a memory that every thread may ask for at any time, an event loop's thread too."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from vmem.accounts import Accounts
from vmem.report import MemoryReport
from vmem.summary import NO_KEYS, CachedKeys, PrefixSummary

# A reader waits for the lock no longer than this. It is held for bookkeeping only, so that microseconds are usual; more
# is a very long sequence, or a holder that the machine has no core for.
_PATIENCE_S = 0.02
# A published report is renewed when a call of the engine ends and the report is older than this: making one takes as
# long as the bookkeeping of a few calls.
_RENEWED_AFTER_S = 0.05


class Figures:
    """Reads the books under the lock if it is free soon, else returns the figures that were published last.

    Args:
        lock: the memory's.

    Attributes:
        writer: the thread that changed the books last, other than the mapper's. It waits for the lock in any case, so
            that it reads what it has written.
    """

    def __init__(self, lock: threading.Condition, accounts: Accounts, summary: PrefixSummary) -> None:
        self._lock = lock
        self._accounts = accounts
        self._summary = summary
        self._keys: dict[int, tuple[int, CachedKeys]] = {}  # by the most that were asked for, with `num_changes` then
        self.writer = threading.get_ident()
        self.publish()

    def report(self) -> MemoryReport:
        """Where memory is now, or was a little earlier, see `KVMemory.report`."""
        with self._soon() as held:
            if held:
                self.publish()
            return self._report

    def cached_keys(self, most: int) -> CachedKeys:
        """At most `most` keys of cached prefixes: those of now, or those last returned for the same `most`."""
        since, last = self._keys.get(most, (-1, NO_KEYS))
        if since == self._summary.num_changes:
            return last
        with self._soon() as held:
            since, last = self._keys.get(most, (-1, NO_KEYS))  # another thread may have asked meanwhile
            if held:
                last = self._summary.keys(most, last, since)
                self._keys[most] = self._summary.num_changes, last
            return last

    def publish(self) -> None:
        """Make a report for readers who cannot have the lock. With the lock held."""
        self._report = self._accounts.report()
        self._published_at = time.monotonic()

    def publish_if_old(self) -> None:
        """The same, unless there is one that is nearly new. With the lock held."""
        if time.monotonic() - self._published_at > _RENEWED_AFTER_S:
            self.publish()

    @contextmanager
    def _soon(self) -> Iterator[bool]:
        """Hold the lock if it can be had soon; says whether it is held."""
        held = self._lock.acquire(timeout=-1 if self.writer == threading.get_ident() else _PATIENCE_S)
        try:
            yield held
        finally:
            if held:
                self._lock.release()
