"""Async engine, for servers: a thread runs the step loop; coroutines submit requests and await their deltas."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar, Unpack

from app.config.engine import EngineConfig
from app.engine.delta import Delta, DeltaQueue, RequestOptions
from app.engine.engine import Engine
from app.engine.faults import start_error
from app.engine.load_report import MOST_KEYS, Activity
from app.engine.lora.source import AdapterSource, files_version, folder_below
from app.engine.model.pooling import Pooling
from app.engine.report import ReplicaReport, StartTimes
from app.engine.request import check_timeout
from app.engine.sampling.params import SamplingParams
from app.engine.speculation import SpeculationCounts
from app.engine.startup import PeerPrefixes, get_ready, hot_prefixes, prefix_fingerprint
from app.engine.tensor_parallel.processes import Launch, spawn_ranks
from app.engine.watch import EngineWatch
from app.errors import EngineError, FolioError, ModelError, RequestError, UnavailableError, UnknownRequestError
from vmem import BudgetAnswer, CachedPrefix, IntegrityError, KVMemory, MemoryReport

logger = logging.getLogger(__name__)

# Returns the seconds until a reader wants its next list of deltas.
Pace = Callable[[], float]
# Adds a validated request to the engine, under an id, in the engine's thread.
Begin = Callable[[str], None]

# The most callers' ids that are remembered, for forks.
_NAMES = 4000
# The engine stops after this many failed steps, or failures of single requests that are no client's fault, with nothing
# generated in between. A single client's requests may cause the latter.
_MOST_FAILED_STEPS, _MOST_FAILED_REQUESTS = 3, 10
# The engine is stalled when it has work and computes no step for the longest of: this time, twice `step_timeout_s`, and
# this multiple of its longest step, warm-up included. Compiling kernels and reading adapters takes less.
_STALLED_S, _STALLED_STEPS = 120.0, 10
T = TypeVar("T")

_STOPPED = "the engine has stopped; send the request again"


@dataclass(slots=True, eq=False)
class _Stream:
    """A request, and the queue of its deltas in its caller's event loop."""

    request_id: str
    begin: Begin
    load: tuple[int, int]  # tokens, expected cached tokens
    loop: asyncio.AbstractEventLoop
    deltas: DeltaQueue


@dataclass(slots=True, eq=False)
class _Act:
    """A function that the thread calls between two steps."""

    call: Callable[[], Any]
    outcome: Future[Any] = field(default_factory=Future)


# Of the thread: begin a request, cancel a request id, check the memory, call a function, or stop.
_Command = _Stream | str | Future[None] | _Act | None


class AsyncEngine:
    """An `Engine` with its own thread. Methods may be called from any event loop.

    A failed step fails the requests in flight and frees their memory. The engine stops, and requests in flight end with
    `UnavailableError`, when the memory is inconsistent afterwards, a rank is lost, steps fail repeatedly, or the engine
    is stalled.

    Args:
        launch, admit, loaded: see `Engine`.
        prefixes_of_others: returns the `hot_prefixes` of the peer engines with this `prefix_fingerprint`; called before
            the engine is ready.

    Raises:
        ConfigError, ModelError, UnavailableError: see `Engine`.
    """

    def __init__(
        self,
        config: EngineConfig,
        launch: Launch = spawn_ranks,
        admit: Callable[[KVMemory], None] | None = None,
        prefixes_of_others: PeerPrefixes | None = None,
        loaded: Collection[AdapterSource] = (),
    ) -> None:
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}  # used by the thread only
        self._arriving: dict[str, tuple[int, int]] = {}  # `_Stream.load` of requests sent and not begun
        # Caller's id → engine's id and owner of the latest requests.
        self._names: OrderedDict[str, tuple[str, str | None]] = OrderedDict()
        self._ids = itertools.count()
        self._sending = threading.Lock()  # no command is sent after the engine has stopped
        self._stopped = self._hangs = False
        self._working_since: float | None = None  # start of the current step; `None`: no work
        self._longest_s = 0.0  # of all steps
        self._stalled_s = max(_STALLED_S, 2 * config.step_timeout_s)
        self._num_failures = 0  # of steps and requests since the last generated token
        self._engine: Engine  # created by the thread
        started: Future[None] = Future()
        arguments = partial(Engine, config, launch, admit, loaded), prefixes_of_others, started
        self._thread = threading.Thread(target=self._run, args=arguments, name="folio-engine", daemon=True)
        self._thread.start()
        started.result()
        logger.info("ready after %s", self.start_times)

    @property
    def healthy(self) -> bool:
        """Whether the engine takes requests and makes progress. Does not block."""
        return not self._stopped and self._engine.executor.available and not self._stalled

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def pooling(self) -> Pooling | None:
        """How the model makes vectors of prompts; `None`: it makes none."""
        return self._engine.model.pooling

    @property
    def start_times(self) -> StartTimes:
        return self._engine.start_times

    @cached_property
    def prefix_fingerprint(self) -> str:
        """See `app.engine.startup.prefix_fingerprint`."""
        return prefix_fingerprint(self._engine.config, self._engine.model)

    def hot_prefixes(self) -> list[CachedPrefix]:
        """Prefixes for a new peer engine. Raises `UnavailableError` once the engine has stopped."""
        self.check()
        return hot_prefixes(self._engine)

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        pace: Pace | None = None,
        owner: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[list[Delta], None]:
        """Yield lists of deltas as they are generated. Closing or cancelling the iterator cancels the request.

        Args:
            pace: called after each list for the seconds until the next one, in which deltas add up. The first and the
                last list come at once. `None`: every list does.
            owner: the caller, for `fork`.

        Raises:
            RequestError: the request is invalid; raised before the first delta.
            OverloadedError: the queue is full; raised before the request is sent.
            DeadlineError: the request has not finished within its `timeout_s`.
            ModelError: its adapter cannot be loaded.
            EngineError: a step failed.
            UnavailableError: the engine has stopped.
        """

        def prepare() -> Begin:
            max_tokens = self._engine.validate(prompt_token_ids, params, options)
            return lambda unique_id: self._engine.add_request(unique_id, prompt_token_ids, params, max_tokens, options)

        load = len(prompt_token_ids), options.get("expected_cached_tokens") or 0
        name, compiles = request_id or "request", params.structure is not None
        return self._deltas(name, prepare, load, slow=compiles, check_queue=True, pace=pace, owner=owner)

    def fork(
        self,
        request_id: str,
        params: SamplingParams,
        fork_id: str | None = None,
        *,
        index: int = 0,
        timeout_s: float | None = None,
        pace: Pace | None = None,
        owner: str | None = None,
    ) -> AsyncGenerator[list[Delta], None]:
        """Continue an output of a request that runs, or has just ended, in `params.n` sequences (`Engine.fork`).

        Args:
            request_id: as given to `generate`; the latest of that name.
            timeout_s: of the forks.
            pace: see `generate`.
            owner: requests of others are as unknown; `None`: the caller may fork all.

        Raises:
            UnknownRequestError: there is no such output, or not any more; raised before the first delta.
            RequestError: the forks do not fit; raised before the first delta.
            DeadlineError: the forks have not finished within `timeout_s`.
            EngineError, UnavailableError: see `generate`.
        """

        def begin(unique_id: str) -> None:
            parent_id, parent_owner = self._names.get(request_id, (None, None))
            if parent_id is None or owner not in (None, parent_owner):
                raise UnknownRequestError(f"there is no request {request_id!r} here", "request_id")
            self._engine.fork(parent_id, unique_id, params, index=index, timeout_s=timeout_s)

        def prepare() -> Begin:
            check_timeout(timeout_s)
            self._engine.vocabulary.check_params(params)  # compiles the structure outside of the engine's thread
            return begin

        name, compiles = fork_id or f"fork of {request_id}", params.structure is not None
        return self._deltas(name, prepare, (0, 0), slow=compiles, pace=pace, owner=owner)

    async def pin(self, name: str, prompt_token_ids: Sequence[int], **options: Unpack[RequestOptions]) -> None:
        """Compute a prefix and keep it in the cache until `unpin`; returns when it is pinned. Idempotent.

        Arguments and errors: see `Engine.pin`, and `generate` for the failures of a running request.
        """
        prepare = partial(self._engine.prepare_pin, name, prompt_token_ids, options)
        async for _ in self._deltas(f"pin {name}", prepare, (len(prompt_token_ids), 0), slow=True):
            pass

    def unpin(self, name: str) -> None:
        """See `Engine.unpin`. May wait for the memory's lock. Raises `UnavailableError` once the engine has stopped."""
        self.check()
        self._engine.unpin(name)

    async def _deltas(
        self,
        name: str,
        prepare: Callable[[], Begin],
        load: tuple[int, int],
        *,
        slow: bool = False,
        check_queue: bool = False,
        pace: Pace | None = None,
        owner: str | None = None,
    ) -> AsyncGenerator[list[Delta], None]:
        """
        Args:
            name: the caller's id.
            prepare: validates the request.
            slow: `prepare` compiles, or may wait for the memory's lock; a thread calls it.
            check_queue: refuse the request if the queue is full.
        """
        begin = await asyncio.to_thread(prepare) if slow else prepare()
        unique_id = f"{name}-{next(self._ids)}"
        loop = asyncio.get_running_loop()
        stream = _Stream(unique_id, begin, load, loop, DeltaQueue())
        self._send(stream, name, owner, check_queue)
        finished, not_before = False, 0.0
        try:
            while not finished:
                deltas = await stream.deltas.get_all(not_before)
                finished, error = deltas[-1].ends_request, deltas[-1].error
                if error is not None:
                    deltas.pop()
                if deltas:
                    yield deltas
                if error is not None:
                    raise error
                if pace is not None:
                    not_before = loop.time() + pace()
        finally:
            if not finished:
                self._commands.put(unique_id)

    def report(self) -> MemoryReport:
        """Report the state of the KV memory. Raises `UnavailableError` once the engine has stopped."""
        self.check()
        return self._engine.report()

    @property
    def watch(self) -> EngineWatch:
        """Views for the dashboard. Raises `UnavailableError` once the engine has stopped."""
        self.check()
        return self._engine.watch

    @property
    def speculation(self) -> SpeculationCounts | None:
        """Counts of draft tokens; `None` without speculation."""
        speculation = self._engine.speculation
        return None if speculation is None else speculation.counts

    def load(self, *, most_keys: int = MOST_KEYS) -> ReplicaReport:
        """See `LoadReporter.report`. Raises `UnavailableError` once the engine has stopped."""
        self.check()
        return self._engine.load.report(tuple(self._arriving.values()), most_keys=most_keys)

    def take_activity(self) -> Activity:
        """The engine's work since the last call. From any one thread."""
        return self._engine.load.take_activity()

    def set_budget(self, budget_bytes: int, revision: int) -> BudgetAnswer:
        """See `Engine.set_budget`. Raises `UnavailableError` once the engine has stopped."""
        self.check()
        return self._engine.set_budget(budget_bytes, revision)

    async def check_adapter(self, name: str, path: str) -> AdapterSource:
        """Read an adapter on all ranks, to see whether it can be served; nothing of it is kept.

        Args:
            path: a folder below `adapter_dir`.

        Raises:
            RequestError: it cannot be served, or may not be.
            UnknownModelError: there is no such folder.
            EngineError: there is too little memory.
        """
        if (directory := self._engine.config.adapter_dir) is None:
            raise RequestError("adapters cannot be loaded at run time: the setting adapter_dir is not set", "lora_path")
        folder = await asyncio.to_thread(folder_below, directory, path)
        try:
            source = AdapterSource(name, str(folder), await asyncio.to_thread(files_version, folder))
        except OSError as error:
            raise RequestError(f"adapter {name!r} cannot be read: {error}", "lora_path") from error
        adapters = self._engine.adapters
        number, reading = await self._between_steps(partial(adapters.begin_check, source))
        try:
            await asyncio.wait([asyncio.wrap_future(reading)])
        finally:
            failure = await self._between_steps(partial(adapters.end_check, number, source))
        if isinstance(failure, ModelError):
            raise RequestError(str(failure), "lora_path") from failure
        if failure is not None:
            raise failure
        return source

    async def set_loaded(self, loaded: Collection[AdapterSource]) -> None:
        """Replace the adapters that were loaded at run time (`AdapterStore.set_loaded`)."""
        await self._between_steps(partial(self._engine.adapters.set_loaded, loaded))

    async def check_integrity(self) -> None:
        """Check between two steps that the memory is consistent and, without requests, free.

        Raises:
            IntegrityError: the memory is inconsistent; the engine stops.
            UnavailableError: the engine has stopped.
        """
        outcome: Future[None] = Future()
        self._put(outcome)
        await asyncio.wrap_future(outcome)

    async def _between_steps(self, call: Callable[[], T]) -> T:
        """Call a function in the thread. Raises what it raises, or `UnavailableError`."""
        act = _Act(call)
        self._put(act)
        result: T = await asyncio.wrap_future(act.outcome)
        return result

    def _put(self, command: _Command) -> None:
        """Raises `UnavailableError` once the engine has stopped."""
        self.check()
        with self._sending:
            if self._stopped:
                raise UnavailableError(_STOPPED)
            self._commands.put(command)

    def close(self) -> None:
        """Fail the requests in flight, stop the thread and free all memory. A thread that hangs is not waited for."""
        self._commands.put(None)
        self._thread.join(0 if self._hangs else None)

    def check(self) -> None:
        """Raise `UnavailableError` once the engine has stopped; stop a stalled engine. Does not block."""
        if self.healthy:
            return
        if not self._stopped and self._stalled:
            self._abandon()
        raise UnavailableError(_STOPPED)

    @property
    def _stalled(self) -> bool:
        since = self._working_since
        return since is not None and time.monotonic() - since > max(self._stalled_s, _STALLED_STEPS * self._longest_s)

    def _abandon(self) -> None:
        """Fail all requests in place of the stalled thread. If the thread comes back, it stops."""
        with self._sending:
            if self._stopped:
                return
            self._stopped = self._hangs = True
        logger.error("the engine stops: it has work and has computed no step for %.0f s or longer", self._stalled_s)
        for stream in [*self._streams.values(), *_refuse_commands(self._commands, _STOPPED)]:
            failure = Delta(stream.request_id, (), "", error=UnavailableError(_STOPPED))
            with suppress(RuntimeError):  # its event loop is closed
                stream.loop.call_soon_threadsafe(stream.deltas.put, failure)

    def _send(self, stream: _Stream, name: str, owner: str | None, check_queue: bool) -> None:
        self.check()
        with self._sending:
            if self._stopped:
                raise UnavailableError(_STOPPED)
            if check_queue:
                self._engine.load.check_queue(tuple(self._arriving.values()))
            self._arriving[stream.request_id] = stream.load
            self._names[name] = stream.request_id, owner
            self._names.move_to_end(name)
            if len(self._names) > _NAMES:
                self._names.popitem(last=False)
            self._commands.put(stream)

    # ---- the thread ----

    def _run(self, make: Callable[[], Engine], prefixes_of_others: PeerPrefixes | None, started: Future[None]) -> None:
        # The engine is created here, because OpenMP gives each thread that computes a team of threads. With two teams,
        # more threads than cores, none spins while it waits for the others, and a step takes a tenth longer.
        try:
            self._engine = make()
        except BaseException as error:  # noqa: BLE001 - the constructor raises it
            started.set_exception(start_error(error))
            return
        try:
            get_ready(self._engine, prefixes_of_others)
            self._longest_s = self.start_times.warm_up_s  # none of its steps was longer
        except BaseException as error:
            logger.exception("the engine cannot start")
            self._stopped = True
            try:
                self._engine.close()
            finally:
                started.set_exception(start_error(error))  # also when `close` fails: the constructor waits
            return
        started.set_result(None)
        reason = _STOPPED
        try:
            while not self._stopped and self._take_commands():
                self._step()
        except UnavailableError as error:
            logger.error("the engine stops: %s", error)
            reason = str(error)
        except BaseException:  # a panic of a Rust library is no Exception
            logger.exception("the engine stops")
            reason = "the engine failed and has stopped; send the request again"
        finally:
            with self._sending:
                self._stopped = True
            try:  # before the memory is freed, which clients need not wait for
                self._fail_all(UnavailableError(reason))
                self._streams = {stream.request_id: stream for stream in _refuse_commands(self._commands, reason)}
                self._fail_all(UnavailableError(reason))
            finally:
                self._engine.close()

    def _take_commands(self) -> bool:
        """Execute the commands since the last step; wait for one when there is nothing to compute. False to stop."""
        while True:
            if not self._engine.has_work:
                self._working_since = None
            try:
                command = self._commands.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if self._working_since is None:
                self._working_since = time.monotonic()
            match command:
                case _Stream():
                    self._begin(command)
                case str():
                    self._streams.pop(command, None)
                    self._engine.cancel(command)
                case Future():
                    self._check_integrity(command)
                case _Act():
                    _run_act(command)
                case None:
                    return False

    def _begin(self, stream: _Stream) -> None:
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
        finally:  # after `begin`: until here the load counts the request twice, but always at least once
            del self._arriving[request_id]

    def _check_integrity(self, outcome: Future[None]) -> None:
        if not outcome.set_running_or_notify_cancel():  # the caller no longer waits
            return
        try:
            self._engine.check_integrity()
            if self._streams and not self._engine.has_work:
                raise IntegrityError(f"{len(self._streams)} requests wait for an engine that has none")
        except IntegrityError as error:
            outcome.set_exception(error)
            raise
        outcome.set_result(None)

    def _step(self) -> None:
        try:
            deltas = self._engine.step()
        except (IntegrityError, UnavailableError):
            raise
        except BaseException as error:  # whatever failed, every request must end
            logger.exception("a step failed")
            self._engine.load.num_failed_steps += 1
            self._note_failures(1, _MOST_FAILED_STEPS, error)
            failed = list(self._streams)
            # A fixed sentence: the error may quote one request, and all get it.
            self._fail_all(EngineError("a step failed; the server's log says why"))
            for request_id in failed:
                self._engine.cancel(request_id)
            self._engine.check_integrity()
            return
        if (seconds := self._engine.step_s) is not None:
            self._working_since = time.monotonic()
            self._longest_s = max(self._longest_s, seconds)
        self._deliver(deltas)
        if any(delta.error is None for delta in deltas):
            self._num_failures = 0
        else:
            self._note_failures(sum(isinstance(d.error, EngineError) for d in deltas), _MOST_FAILED_REQUESTS)

    def _note_failures(self, count: int, most: int, cause: BaseException | None = None) -> None:
        """Raise `UnavailableError` after too many failures with nothing generated in between."""
        self._num_failures += count
        if count and self._num_failures >= most:
            raise UnavailableError(
                f"{self._num_failures} failures in a row; the engine is replaced, send the request again"
            ) from cause

    def _deliver(self, deltas: Sequence[Delta]) -> None:
        """Queue deltas with one call per event loop, because waking a loop takes longer than all else."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Delta]]] = {}
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
                    self._engine.cancel(stream.request_id)

    def _fail_all(self, error: FolioError) -> None:
        self._deliver([Delta(request_id, (), "", error=error) for request_id in self._streams])


def _refuse_commands(commands: queue.SimpleQueue[_Command], reason: str) -> list[_Stream]:
    """Empty the queue of commands after the stop; returns the requests in it, and fails audits and calls."""
    streams: list[_Stream] = []
    with suppress(queue.Empty):  # the thread that hangs may come back and take commands, too
        while True:
            command = commands.get_nowait()
            if isinstance(command, _Stream):
                streams.append(command)
            elif isinstance(command, Future | _Act):
                outcome = command.outcome if isinstance(command, _Act) else command
                if outcome.set_running_or_notify_cancel():
                    outcome.set_exception(UnavailableError(reason))
    return streams


def _run_act(act: _Act) -> None:
    if not act.outcome.set_running_or_notify_cancel():  # the caller no longer waits
        return
    try:
        act.outcome.set_result(act.call())
    except Exception as error:  # noqa: BLE001 - raised by the caller's coroutine
        act.outcome.set_exception(error)


def _put_all(arrived: Sequence[tuple[_Stream, Delta]]) -> None:
    for stream, delta in arrived:
        stream.deltas.put(delta)
