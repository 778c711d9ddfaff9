"""Work queue: runs the work that the host submits, in order, while the host goes on.

A CUDA device has such a queue itself: calls return before their work is done. Calls on a CPU return when their work is
done; `ThreadQueue` lets another thread make them.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from folio.vmem import BlockContents

T = TypeVar("T")


class WorkQueue(ABC):
    """Calls submitted functions, in the order of submission."""

    @abstractmethod
    def submit(self, work: Callable[[], T]) -> Callable[[], T]:
        """Submit work; returns a function that waits for its result, and raises its error. If the work is done at once,
        its error is raised here."""

    @abstractmethod
    def wait_until_idle(self) -> None:
        """Return when all submitted calls have returned."""

    @abstractmethod
    def close(self) -> None:
        """Finish the submitted work, and end."""


class InlineQueue(WorkQueue):
    """Calls the work at once: for a CPU without overlap, and for CUDA, where calls only launch."""

    def submit(self, work: Callable[[], T]) -> Callable[[], T]:
        result = work()
        return lambda: result

    def wait_until_idle(self) -> None:
        pass

    def close(self) -> None:
        pass


class ThreadQueue(WorkQueue):
    """Calls the work in a thread of its own. Its `fence`, `completed` and `wait` are those of a memory backend.

    Args:
        num_threads: torch's threads in that thread.
    """

    def __init__(self, num_threads: int) -> None:
        self._thread = ThreadPoolExecutor(1, "folio-steps", torch.set_num_threads, (num_threads,))
        self._submitted = self._done = 0
        self._changed = threading.Condition()

    def submit(self, work: Callable[[], T]) -> Callable[[], T]:
        self._submitted += 1
        return self._thread.submit(self._call, work).result

    def _call(self, work: Callable[[], T]) -> T:
        try:
            return work()
        finally:
            with self._changed:
                self._done += 1
                self._changed.notify_all()

    def fence(self) -> int:
        """The number of calls submitted so far."""
        return self._submitted

    def completed(self, fence: int) -> bool:
        """Whether the calls submitted before the fence have returned."""
        return self._done >= fence

    def wait(self, fence: int) -> None:
        """Return once `completed(fence)` is true."""
        with self._changed:
            self._changed.wait_for(lambda: self._done >= fence)

    def wait_until_idle(self) -> None:
        self.wait(self._submitted)

    def close(self) -> None:
        self._thread.shutdown()


class QueuedContents:
    """`BlockContents` whose copies come after all submitted work."""

    def __init__(self, contents: BlockContents, queue: WorkQueue) -> None:
        self._contents, self._queue = contents, queue

    def copy(self, g: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._queue.wait_until_idle()
        self._contents.copy(g, sources, targets)

    def save(self, key: int, g: int, block_ids: Sequence[int]) -> None:
        self._queue.wait_until_idle()
        self._contents.save(key, g, block_ids)

    def restore(self, key: int, rows: Sequence[int], block_ids: Sequence[int]) -> None:
        self._queue.wait_until_idle()
        self._contents.restore(key, rows, block_ids)

    def discard(self, key: int) -> None:
        self._contents.discard(key)
