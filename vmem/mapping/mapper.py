"""Mapper: the thread that changes mappings while a step computes.

The thread asks the policy for the next unit of work, runs it, and asks again. Work follows from the state of the memory
alone, so that no queue can grow stale.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from folio.vmem.backends.base import Backend
from folio.vmem.budget import MemoryCounts
from folio.vmem.errors import IntegrityError, OutOfPages, VmemError
from folio.vmem.lock import MemoryLock
from folio.vmem.mapping.mapper_policy import MappingPolicy
from folio.vmem.mapping.mapping_work import MappingWork
from folio.vmem.mapping.region import Region

logger = logging.getLogger(__name__)

# After a failed call the thread rests, so that a device in trouble is not asked thousands of times a second …
_REST_AFTER_FAILURE_S = 0.05
# … and after so many failures in a row the next step raises the error. Failures to give memory back are only reported
# and logged: requests go on.
_FAILURES_TO_SURFACE = 3


class Mapper:
    """One background thread, and the same work in the engine's thread when a step cannot wait.

    The lock is released while the device maps, copies or is waited for, which takes milliseconds or as long as a step.
    Releasing and taking it again costs about 1 µs, one `mmap` 20 µs.

    Methods other than `start`, `stop`, `call` and `paused` are called with the lock held, and those that change
    something within `MemoryLock.exclusive`.

    Attributes:
        clock: of all times of blocks and regions.
        fence: of the last launched step, which may still read what is freed now.
        is_working: whether the thread has work in hand.
        death: the error that ended the thread.
    """

    def __init__(
        self,
        backend: Backend,
        lock: MemoryLock,
        policy: MappingPolicy,
        counts: MemoryCounts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._lock = lock
        self._policy = policy
        self._counts = counts
        self.clock = clock
        self.is_working = False
        self.fence = backend.fence()
        self._stopping = False
        self._failures_in_a_row = 0
        self._failure: VmemError | None = None
        self.death: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="folio-mapper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread once it has finished the work in hand."""
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @contextmanager
    def call(self) -> Iterator[None]:
        """`MemoryLock.exclusive` for a call that needs a live mapper. Waiting for it counts as exposed time."""
        start = time.perf_counter()
        with self._lock.exclusive():
            self._note_exposed(start)
            self._raise_death()
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep this thread, and exclusive calls of others, from the backend, without holding the lock. For work that
        must not run beside the driver's calls; not within an exclusive call."""
        with self.call():
            self.wait_for_work()
            with self._lock.unlocked():
                yield

    # ---- within `MemoryLock.exclusive` ----

    def set_fence(self) -> None:
        """Mark the device's work so far: it may still read what is freed from now on."""
        with self._lock.unlocked():  # a device without an event for the mark is waited for
            fence = self._backend.fence()
        self.fence = fence

    def wait_for_fence(self, fence: int) -> None:
        """Wait until the device has passed the fence."""
        start = time.perf_counter()
        with self._lock.unlocked():
            self._backend.wait(fence)
        self._note_exposed(start)

    def wait_for_region(self, region: Region) -> None:
        """Wait until the thread no longer changes the region."""
        self._wait_while(lambda: region.busy)

    def wait_for_work(self) -> bool:
        """Wait until the thread has finished its work in hand; False if it had none."""
        if not self.is_working:
            return False
        self._wait_while(lambda: self.is_working)
        return True

    def wait_until_idle(self) -> None:
        """As `wait_for_work`, for an audit, whose time is not exposed."""
        while self.is_working:
            self._raise_death()
            self._lock.wait()

    def run_now(self, work: MappingWork) -> None:
        """Do the work in the calling thread. A failure is raised, its effects undone."""
        self._counts.num_exposed += 1
        start = time.perf_counter()
        failed = True
        try:
            in_flight = not self._backend.completed(self.fence)
            with self._lock.unlocked():
                called = time.perf_counter()
                work.call()
                elapsed = time.perf_counter() - called
            self._note_in_flight(elapsed, in_flight)
            failed = False
        finally:
            work.finish(self._counts, self.clock(), failed=failed)
            self._note_exposed(start)

    def raise_failure(self) -> None:
        """Raise the error that ended the thread, or that keeps coming back."""
        self._raise_death()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _raise_death(self) -> None:
        if self.death is not None:
            raise IntegrityError(f"the mapper thread has died: {self.death!r}") from self.death

    def _note_in_flight(self, elapsed: float, in_flight: bool) -> None:
        """Count the time of calls that began while a launched step was under way."""
        if in_flight:
            self._counts.in_flight_us += elapsed * 1e6

    def _note_exposed(self, start: float) -> None:
        self._counts.exposed_us += (time.perf_counter() - start) * 1e6

    def _wait_while(self, condition: Callable[[], bool]) -> None:
        """Wait for the work in hand. The thread begins no other until then: a step must not wait for a long list."""
        if not condition():
            return
        start = time.perf_counter()
        try:
            while condition():
                self._raise_death()
                self._lock.wait()
        finally:
            self._note_exposed(start)

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._lock.exclusive_lock.acquire()
                with self._lock:
                    try:
                        work, wait_s = self._choose()
                    finally:
                        # With the lock still held, or a notification might come before the wait.
                        self._lock.exclusive_lock.release()
                    if work is not None:
                        self._do(work)
                    elif not self._stopping:
                        self._lock.wait(wait_s)
        except BaseException as error:
            logger.exception("the mapper thread has died; calls that change KV memory fail from now on")
            with self._lock:
                self.death = error
                self.is_working = False
                self._lock.notify_all()

    def _choose(self) -> tuple[MappingWork | None, float | None]:
        """Return the next unit of work, else how long to wait for some."""
        try:
            now = self.clock()
            work = None if self._stopping else self._policy.next_work(now)
            return work, self._policy.wait_s(now) if work is None else None
        except IntegrityError:
            raise
        except VmemError as failure:  # the device does not even say which fences it has passed
            self._note_failure(failure, gives_back=True)
            return None, _REST_AFTER_FAILURE_S

    def _do(self, work: MappingWork) -> None:
        self.is_working = True
        failure: VmemError | None = None
        in_flight = False
        self._lock.release()
        start = time.perf_counter()
        try:
            in_flight = not self._backend.completed(self.fence)
            work.call()
        except VmemError as error:
            if isinstance(error, IntegrityError):
                raise
            failure = error
        finally:
            elapsed = time.perf_counter() - start
            self._lock.acquire()
            self.is_working = False
        work.finish(self._counts, self.clock(), failed=failure is not None)
        self._counts.hidden_us += elapsed * 1e6
        self._note_in_flight(elapsed, in_flight)
        self._counts.num_hidden += 1
        self._lock.notify_all()
        if failure is None:
            self._failures_in_a_row = 0
            self._failure = None
            return
        self._policy.clear_step_demand()
        self._note_failure(failure, gives_back=work.gives_back)
        self._lock.wait_for(lambda: self._stopping, _REST_AFTER_FAILURE_S)

    def _note_failure(self, failure: VmemError, *, gives_back: bool) -> None:
        if isinstance(failure, OutOfPages):  # the device has other users; the step that needs the pages raises it
            return
        self._counts.mapper_failures += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row & (self._failures_in_a_row - 1) == 0:  # failures 1, 2, 4, 8 …
            logger.warning("failure %d in a row, the mapper will try again: %s", self._failures_in_a_row, failure)
        if self._failures_in_a_row >= _FAILURES_TO_SURFACE and not gives_back:
            self._failure = failure
