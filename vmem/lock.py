"""Lock of a memory's bookkeeping, and mutual exclusion of calls that change ownership."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# A reader waits for the lock no longer than this. The lock is held for bookkeeping only, microseconds as a rule; more
# means a very long sequence, or a holder without a processor core.
_PATIENCE_S = 0.02


class MemoryLock(threading.Condition):
    """One lock guards all bookkeeping of a memory. Not reentrant, so that `unlocked` really releases it.

        with lock:                  one piece of bookkeeping
        with lock.exclusive():      a call that changes ownership
        with lock.soon() as held:   a reader that must not wait, such as an event loop

    Blocks are copied, pages mapped and unmapped, and fences waited for without the lock, while the blocks concerned are
    owned or marked as moving. Calls that change ownership still exclude one another until they end, and any new work of
    the mapper. The mapper's work is announced and awaited on this condition.

    Attributes:
        exclusive_lock: held before the lock by calls that change ownership, until they end, and by the mapper's thread
            while it chooses work. While a call holds it, the thread finishes its work in hand and begins none.
        writer: the thread that changed ownership last, other than the mapper's.
        after_exclusive: called with the lock held when an exclusive call ends.
    """

    def __init__(self) -> None:
        super().__init__(threading.Lock())
        self.exclusive_lock = threading.Lock()
        self.writer = threading.get_ident()
        self.after_exclusive: Callable[[], None] = lambda: None

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock for a call that stays the only one of its kind while it releases the lock."""
        with self.exclusive_lock, self:
            self.writer = threading.get_ident()
            try:
                yield
            finally:
                self.after_exclusive()

    @contextmanager
    def unlocked(self) -> Iterator[None]:
        """Within `exclusive`, release the lock for slow work. The mapper may meanwhile free blocks and pages, never
        take any."""
        self.release()
        try:
            yield
        finally:
            self.acquire()

    @contextmanager
    def soon(self) -> Iterator[bool]:
        """Hold the lock if it is free within 20 ms; yields whether it is held. The last writer waits for as long as it
        takes, so that it reads what it wrote."""
        held = self.acquire(timeout=-1 if self.writer == threading.get_ident() else _PATIENCE_S)
        try:
            yield held
        finally:
            if held:
                self.release()
