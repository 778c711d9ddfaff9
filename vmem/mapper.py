"""The thread that changes mappings while a step computes.

It knows nothing of blocks: it asks for the next unit of work, runs it, and asks again. What there is to do follows from
the state of the memory alone, so nothing is queued that could grow stale.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from vmem.backends.base import Backend
from vmem.errors import IntegrityError, OutOfPages, VmemError
from vmem.mapping_work import MappingCounts, MappingWork

logger = logging.getLogger(__name__)

# After a failed call the thread rests, so that a device in trouble is not asked thousands of times a second …
_REST_AFTER_FAILURE_S = 0.05
# … and after so many failures in a row the next step is told, unless they were in giving memory back: that the report
# and the log say, and requests go on.
_FAILURES_TO_SURFACE = 3


@dataclass(slots=True)
class MappingTimes:
    """Seconds, and calls, that steps waited for (exposed), and that passed beside them (hidden)."""

    exposed_s: float = 0.0
    hidden_s: float = 0.0
    num_exposed: int = 0
    num_hidden: int = 0


@dataclass(slots=True)
class Mapper:
    """One background thread, and the same work done at once for the engine when it cannot wait.

    Neither holds the lock while the device maps, copies or is waited for: that takes milliseconds, or as long as a
    step. Even one `mmap` of 20 µs goes without it: letting go of the lock and taking it again costs about 1 µs.

    Args:
        next_work: the next unit of work, or `None`; called with the lock held.
        wait_s: how long until there may be work without anybody saying so; called with the lock held.
        forget: called with the lock held after a failure: what steps were going to need they will ask for themselves.

    Attributes:
        lock: guards all the books. Also the condition on which work is announced and awaited. Not reentrant, so that
            `unlocked` really lets go of it.
        turn: taken before the lock by calls that change what is owned, until they end, and by the thread while it
            chooses. While somebody else has it, the thread finishes what it has in hand and begins nothing, so that the
            lock may be let go of.
    """

    next_work: Callable[[], MappingWork | None]
    wait_s: Callable[[], float | None]
    clear_step_demand: Callable[[], None]
    lock: threading.Condition = field(default_factory=lambda: threading.Condition(threading.Lock()))
    turn_lock: threading.Lock = field(default_factory=threading.Lock)
    counts: MappingCounts = field(default_factory=MappingCounts)
    times: MappingTimes = field(default_factory=MappingTimes)
    num_failures: int = 0
    _working: bool = False
    _stopping: bool = False
    _failures_in_a_row: int = 0
    _failure: VmemError | None = None
    _death: BaseException | None = None
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="folio-mapper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread once it has finished the work in hand."""
        with self.lock:
            self._stopping = True
            self.lock.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def is_working(self) -> bool:
        """Whether the thread is at work on something now, without the lock."""
        return self._working

    def wake(self) -> None:
        """There may be work. With the lock held."""
        self.lock.notify_all()

    @contextmanager
    def unlocked(self) -> Iterator[None]:
        """With turn and lock held, let go of the lock for what takes long. Nothing that the caller has looked at is
        taken meanwhile; there may be more to take."""
        self.lock.release()
        try:
            yield
        finally:
            self.lock.acquire()

    def wait_while(self, condition: Callable[[], bool]) -> None:
        """With turn and lock held, wait until what the thread has in hand has made the condition false. It begins
        nothing else meanwhile: a step must not wait for the whole of a long list."""
        if not condition():
            return
        start = time.perf_counter()
        try:
            while condition():
                self.raise_death()
                self.lock.wait()
        finally:
            self.times.exposed_s += time.perf_counter() - start

    def wait_for(self, backend: Backend, fence: int) -> None:
        """With turn and lock held, wait until the device has passed the fence."""
        start = time.perf_counter()
        with self.unlocked():
            backend.wait(fence)
        self.times.exposed_s += time.perf_counter() - start

    def run_now(self, work: MappingWork) -> None:
        """Do the work in the calling thread, with turn and lock held. Raises what the work raises, its effects
        undone."""
        self.times.num_exposed += 1
        start = time.perf_counter()
        failed = True
        try:
            with self.unlocked():
                work.call()
            failed = False
        finally:
            work.finish(self.counts, time.monotonic(), failed=failed)
            self.times.exposed_s += time.perf_counter() - start

    def raise_failure(self) -> None:
        """Raise what ended the thread, or what it failed at again and again. With the lock held."""
        self.raise_death()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def raise_death(self) -> None:
        """Raise `IntegrityError` if the thread has died. With the lock held."""
        if self._death is not None:
            raise IntegrityError(f"the mapper thread has died: {self._death!r}") from self._death

    def wait_until_idle(self) -> None:
        """With turn and lock held, wait until the thread has nothing in hand."""
        while self._working:
            self.raise_death()
            self.lock.wait()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self.turn_lock.acquire()
                with self.lock:
                    try:
                        work, wait_s = self._choose()
                    finally:
                        self.turn_lock.release()  # and still with the lock, or a wake-up might come before the wait
                    if work is not None:
                        self._do(work)
                    elif not self._stopping:
                        self.lock.wait(wait_s)
        except BaseException as error:
            logger.exception("the mapper thread dies")
            with self.lock:
                self._death = error
                self._working = False
                self.lock.notify_all()

    def _choose(self) -> tuple[MappingWork | None, float | None]:
        """The next unit of work, else how long to wait for some: when the device does not even say what may be changed,
        for a while."""
        try:
            work = None if self._stopping else self.next_work()
            return work, self.wait_s() if work is None else None
        except IntegrityError:
            raise
        except VmemError as failure:
            self._note_failure(failure, gives_back=True)
            return None, _REST_AFTER_FAILURE_S

    def _do(self, work: MappingWork) -> None:
        """Run the work without the lock, which is held before and after."""
        self._working = True
        failure: VmemError | None = None
        self.lock.release()
        start = time.perf_counter()
        try:
            work.call()
        except VmemError as error:
            if isinstance(error, IntegrityError):
                raise
            failure = error
        finally:
            elapsed = time.perf_counter() - start
            self.lock.acquire()
            self._working = False
        work.finish(self.counts, time.monotonic(), failed=failure is not None)
        self.times.hidden_s += elapsed
        self.times.num_hidden += 1
        self.lock.notify_all()
        if failure is None:
            self._failures_in_a_row = 0
            self._failure = None
            return
        self.clear_step_demand()
        self._note_failure(failure, gives_back=work.gives_back)
        rested_at = time.monotonic() + _REST_AFTER_FAILURE_S
        while not self._stopping and (left := rested_at - time.monotonic()) > 0:
            self.lock.wait(left)

    def _note_failure(self, failure: VmemError, *, gives_back: bool) -> None:
        if isinstance(failure, OutOfPages):  # others use the device too; whoever needs the pages hears it then
            return
        self.num_failures += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row & (self._failures_in_a_row - 1) == 0:  # the first, and ever fewer of the next
            logger.warning("failure %d in a row, the mapper will try again: %s", self._failures_in_a_row, failure)
        if self._failures_in_a_row >= _FAILURES_TO_SURFACE and not gives_back:
            self._failure = failure
