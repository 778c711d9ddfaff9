"""Engine driver: runs one engine in a step thread: executes commands, computes steps, delivers deltas."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from folio.app.engine.engine import Begin, Engine
from folio.app.engine.report import Progress
from folio.app.engine.request.delta import Delta, DeltaQueue
from folio.app.engine.request.faults import device_fault, is_hardware_fault
from folio.app.engine.step.step_thread import StepThread, run_call
from folio.app.errors import EngineError, FolioError, RequestError, UnavailableError
from folio.vmem import IntegrityError

logger = logging.getLogger(__name__)

# Most callers' ids that are kept, so that their requests can be forked.
_NAMES = 4000
# The engine stops after this many failed steps, or failures of single requests that are not the client's fault, with
# nothing generated in between. More of the latter are allowed, because one client's requests may cause them all.
_MOST_FAILED_STEPS, _MOST_FAILED_REQUESTS = 3, 10
# The engine is stalled when it has work and computes no step for the longest of: this time, twice `step_timeout_s`, and
# this multiple of its longest step, warm-up included. Compiling kernels and reading adapters takes less.
_STALLED_S, _STALLED_STEPS = 120.0, 10

# On a shared device: pause after a step that found no memory.
STARVED_S = 0.01

STOPPED = "the engine has stopped; send the request again"


@dataclass(slots=True, eq=False)
class Stream:
    """A request, and the queue of its deltas in its caller's event loop.

    Attributes:
        load: number of its prompt tokens, and of those that are expected to be cached.
    """

    request_id: str
    begin: Begin
    load: tuple[int, int]
    loop: asyncio.AbstractEventLoop
    deltas: DeltaQueue


@dataclass(slots=True, eq=False)
class Act:
    """A function that the thread calls between two steps."""

    call: Callable[[], Any]
    outcome: Future[Any] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Stop:
    """The order to stop; requests in flight end with the reason."""

    reason: str


# Commands to the thread: begin a request, cancel a request id, check the memory, call a function, or stop.
Command = Stream | str | Future[None] | Act | Stop


class EngineDriver:
    """Runs an engine in a step thread, as one of its members.

    A failed step fails the requests in flight and frees their memory. The engine stops, and requests in flight end with
    `UnavailableError`, when the memory is inconsistent afterwards, a rank or the device is lost, steps fail repeatedly,
    or the engine is stalled.

    Attributes:
        engine: ready for requests; closed by the thread when it stops.
        closed: done when the engine has stopped and its memory is free.
        share: see `Member`.
        step_gap_s: seconds between the ends of the last two steps.
        names: caller's id → engine's id and owner of the latest requests.
    """

    def __init__(self, engine: Engine, thread: StepThread) -> None:
        self.engine = engine
        self.share = 1.0
        self.step_gap_s = 0.0
        self.closed: Future[None] = Future()
        self.names: OrderedDict[str, tuple[str, str | None]] = OrderedDict()
        self._thread = thread
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}  # used by the thread only
        self._arriving: dict[str, tuple[int, int]] = {}  # `Stream.load` of requests sent and not begun
        self._sending = threading.Lock()  # no command is sent after the engine has stopped
        self._stopped = False
        self.hangs = False
        self._working_since: float | None = None  # start of the current step; `None`: no work
        self._longest_s = engine.start_times.warm_up_s  # of the longest step; the whole warm-up bounds its steps
        self._stalled_s = max(_STALLED_S, 2 * engine.config.step_timeout_s)
        self._retry_at = 0.0  # when a step that found no memory is tried again
        self._num_failures = 0  # of steps and requests since the last generated token
        engine.adapters.on_read = thread.wake
        thread.add(self)

    # ---- from any thread ----

    @property
    def healthy(self) -> bool:
        """Whether the engine takes requests and makes progress. Does not block."""
        return not self._stopped and self.engine.executor.available and not self.stalled

    def check(self) -> None:
        """Raise `UnavailableError` once the engine has stopped; stop a stalled engine. Does not block."""
        if self.healthy:
            return
        if not self._stopped and self.stalled:
            self._abandon()
        raise UnavailableError(STOPPED)

    @property
    def arriving(self) -> tuple[tuple[int, int], ...]:
        """`Stream.load` of the requests that the engine takes before its next step."""
        # The step thread removes requests meanwhile. A copy is atomic; making a tuple may run the garbage collector and
        # with it other threads.
        return tuple(self._arriving.copy().values())

    def progress(self) -> dict[str, Progress]:
        """See `LoadReporter.progress`."""
        return self.engine.load.progress(self._arriving.copy())

    def send(self, stream: Stream, name: str, owner: str | None, *, check_queue: bool) -> None:
        """Send a request.

        Args:
            name: the caller's id.
            check_queue: refuse the request if the queue is full.

        Raises:
            OverloadedError: the queue is full.
            UnavailableError: the engine has stopped.
        """
        self.check()
        with self._sending:
            if self._stopped:
                raise UnavailableError(STOPPED)
            if check_queue:
                self.engine.load.check_queue(self.arriving)
            self._arriving[stream.request_id] = stream.load
            self.names[name] = stream.request_id, owner
            self.names.move_to_end(name)
            if len(self.names) > _NAMES:
                self.names.popitem(last=False)
            self._commands.put(stream)
        self._thread.wake()

    def put(self, command: Command) -> None:
        """Send another command. Raises `UnavailableError` once the engine has stopped."""
        self.check()
        with self._sending:
            if self._stopped:
                raise UnavailableError(STOPPED)
            self._commands.put(command)
        self._thread.wake()

    def cancel(self, request_id: str) -> None:
        self._commands.put(request_id)
        self._thread.wake()

    def stop(self, reason: str = STOPPED) -> None:
        """Fail the requests in flight with the reason, and free all memory: `closed` says when."""
        self._commands.put(Stop(reason))
        self._thread.wake()

    @property
    def stalled(self) -> bool:
        """Whether the engine has work and its thread makes no progress, with this engine or another. Does not block."""
        since = self._working_since
        if since is None:
            return False
        since = max(since, self._thread.progress_at)
        return time.monotonic() - since > max(self._stalled_s, _STALLED_STEPS * self._longest_s)

    def _abandon(self) -> None:
        """Fail all requests in place of the stalled thread. If the thread comes back, the engine stops."""
        with self._sending:
            if self._stopped:
                return
            self._stopped = self.hangs = True
        logger.error("the engine stops: it has work and has computed no step for %.0f s or longer", self._stalled_s)
        for stream in [*self._streams.values(), *_refuse_commands(self._commands, STOPPED)]:
            failure = Delta(stream.request_id, (), "", error=UnavailableError(STOPPED))
            with suppress(RuntimeError):  # its event loop is closed
                stream.loop.call_soon_threadsafe(stream.deltas.put, failure)

    # ---- the thread ----

    def take_commands(self) -> bool:
        """Execute the commands since the last step. False once the engine has stopped."""
        try:
            while not self._stopped:
                try:
                    command = self._commands.get_nowait()
                except queue.Empty:
                    break
                if self._working_since is None:
                    self._working_since = time.monotonic()
                match command:
                    case Stream():
                        self._begin(command)
                    case str():
                        self._streams.pop(command, None)
                        self.engine.cancel(command)
                    case Future():
                        self._check_integrity(command)
                    case Act():
                        run_call(command.call, command.outcome)
                    case Stop():
                        self._close(command.reason)
        except BaseException as error:  # noqa: BLE001 - a panic of a Rust library is not an Exception
            self._fail(error)
        if self._stopped:
            self._close(STOPPED)
            return False
        if not self.engine.can_step:
            self._working_since = None
        elif self._working_since is None:
            self._working_since = time.monotonic()
        return True

    @property
    def is_ready(self) -> bool:
        return self.engine.can_step or (self.engine.starved and time.monotonic() >= self._retry_at)

    def step(self) -> None:
        """Compute a step and deliver its deltas."""
        try:
            self._step()
        except BaseException as error:  # noqa: BLE001 - as above
            self._fail(error)
        if self.engine.starved:
            self._retry_at = time.monotonic() + STARVED_S

    def _fail(self, error: BaseException) -> None:
        """Stop because of an error."""
        if isinstance(error, UnavailableError):
            logger.error("the engine stops: %s", error)
            self._close(str(error))
        else:
            logger.error("the engine stops", exc_info=error)
            self._close("the engine failed and has stopped; send the request again")

    def _close(self, reason: str) -> None:
        """Fail all requests, and close the engine, once."""
        if self.closed.done():
            return
        with self._sending:
            self._stopped = True
        try:
            try:  # before the memory is freed, which clients need not wait for
                self._fail_all(UnavailableError(reason))
                self._streams = {stream.request_id: stream for stream in _refuse_commands(self._commands, reason)}
                self._fail_all(UnavailableError(reason))
            finally:
                self.engine.close()
        except BaseException:
            logger.exception("the engine's memory could not be freed")
        finally:
            self.closed.set_result(None)

    def _begin(self, stream: Stream) -> None:
        request_id = stream.request_id
        self._streams[request_id] = stream
        try:
            stream.begin(request_id)
        except RequestError as error:
            self._deliver([Delta(request_id, (), "", error=error)])
        except BaseException:  # other requests go on
            logger.exception("cannot begin %s", request_id)
            failed = EngineError("the request cannot begin; the server's log says why")
            self._deliver([Delta(request_id, (), "", error=failed)])
            self._check_device()
        finally:  # after `begin`: until here the load counts the request twice, but always at least once
            del self._arriving[request_id]

    def _check_integrity(self, outcome: Future[None]) -> None:
        if not outcome.set_running_or_notify_cancel():  # the caller no longer waits
            return
        try:
            self.engine.check_integrity()
            if self._streams and not self.engine.has_work:
                raise IntegrityError(f"{len(self._streams)} streams wait for requests that the engine does not have")
        except IntegrityError as error:
            outcome.set_exception(error)
            raise
        outcome.set_result(None)

    def _step(self) -> None:
        try:
            deltas = self.engine.step()
        except (IntegrityError, UnavailableError):
            raise
        except BaseException as error:  # every request must end, after any kind of failure
            logger.exception("a step failed")
            self.engine.load.num_failed_steps += 1
            self._check_device()
            self._note_failures(1, _MOST_FAILED_STEPS, error)
            # A fixed sentence: the error may quote one request, and all get it.
            self.fail_all(EngineError("a step failed; the server's log says why"))
            self.engine.check_integrity()
            return
        if (seconds := self.engine.step_s) is not None:
            now = time.monotonic()
            if self._working_since is not None:
                self.step_gap_s = now - self._working_since
            self._working_since = now
            self._longest_s = max(self._longest_s, seconds)
        self._deliver(deltas)
        if any(delta.error is None for delta in deltas):
            self._num_failures = 0
        else:
            # A lack of memory does not count: a new engine would have no more.
            num_failed = sum(
                isinstance(d.error, EngineError) and not isinstance(d.error, UnavailableError) for d in deltas
            )
            if num_failed:
                self._check_device()
            self._note_failures(num_failed, _MOST_FAILED_REQUESTS)

    def _check_device(self) -> None:
        """Raise `UnavailableError` after a failure that has lost the device: no step will succeed any more."""
        fault = device_fault(self.engine.model.module.device)
        if fault is None:
            return
        logger.error("the device is lost", exc_info=fault)
        self._thread.device_lost = True
        if not is_hardware_fault(fault):
            # A request in flight may be the cause. `EngineError` is not retried: the next replica would fail, too.
            self._fail_all(EngineError("a step failed; the server's log says why"))
        raise UnavailableError("the engine's device has failed; the engine is replaced, send the request again")

    def _note_failures(self, count: int, most: int, cause: BaseException | None = None) -> None:
        """Raise `UnavailableError` after too many failures with nothing generated in between."""
        self._num_failures += count
        if count and self._num_failures >= most:
            raise UnavailableError(
                f"{self._num_failures} failures in a row; the engine is replaced, send the request again"
            ) from cause

    def _deliver(self, deltas: Sequence[Delta]) -> None:
        """Queue deltas with one call per event loop, because waking a loop takes most of the time."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Delta]]] = {}
        for delta in deltas:
            stream = self._streams[delta.request_id]
            if delta.ends_request:
                del self._streams[delta.request_id]
            by_loop.setdefault(stream.loop, []).append((stream, delta))
        for loop, arrived in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, arrived)
            except RuntimeError:  # the event loop is closed
                for stream, _ in arrived:
                    self._streams.pop(stream.request_id, None)
                    self.engine.cancel(stream.request_id)

    def fail_all(self, error: FolioError) -> None:
        """End all requests with an error, in the thread."""
        failed = list(self._streams)
        self._fail_all(error)
        for request_id in failed:
            self.engine.cancel(request_id)

    def fail_first(self, error: FolioError) -> None:
        """In the thread, fail the request that is next to get memory; all requests if none is queued."""
        first = self.engine.first
        if first is None:
            self.fail_all(error)
            return
        request_id = first.request_id
        if request_id in self._streams:  # not a pin that is being restored
            self._deliver([Delta(request_id, (), "", error=error)])
        self.engine.cancel(request_id)

    def _fail_all(self, error: FolioError) -> None:
        self._deliver([Delta(request_id, (), "", error=error) for request_id in self._streams])


def _refuse_commands(commands: queue.SimpleQueue[Command], reason: str) -> list[Stream]:
    """Empty the queue of commands after the stop; returns the requests in it, and fails integrity checks and calls."""
    streams: list[Stream] = []
    with suppress(queue.Empty):  # the thread that hangs may come back and take commands, too
        while True:
            command = commands.get_nowait()
            if isinstance(command, Stream):
                streams.append(command)
            elif isinstance(command, Future | Act):
                outcome = command.outcome if isinstance(command, Act) else command
                if outcome.set_running_or_notify_cancel():
                    outcome.set_exception(UnavailableError(reason))
    return streams


def _put_all(arrived: Sequence[tuple[Stream, Delta]]) -> None:
    for stream, delta in arrived:
        stream.deltas.put(delta)
