"""The engine for servers: a thread runs the step loop, coroutines submit requests and await their deltas."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Unpack

from app.config.engine import EngineConfig
from app.engine.engine import Engine
from app.engine.load_report import MOST_KEYS, Activity
from app.engine.report import ReplicaReport
from app.engine.request import Delta, DeltaQueue, RequestOptions
from app.engine.sampling.params import SamplingParams
from app.engine.speculation import SpeculationCounts
from app.engine.startup import StartTimes
from app.engine.tensor_parallel.processes import Launch, spawn_ranks
from app.errors import EngineError, FolioError, OverloadedError, RequestError, UnavailableError, UnknownRequestError
from vmem import BudgetAnswer, CachedPrefix, IntegrityError, KVMemory, MemoryReport

logger = logging.getLogger(__name__)

# Seconds until a reader wants to hear again.
Pace = Callable[[], float]

# So many requests can be found by the ids that their senders gave them.
_NAMES = 4000
# An engine stops, and is replaced, when so many steps have failed and nothing was generated in between, or so many
# requests by no fault of their senders. The first are everybody's, and the others may be one sender's.
_MOST_FAILED_STEPS, _MOST_FAILED_REQUESTS = 3, 10
# An engine that has work and computes no step for so long hangs: at least this, twice `step_timeout_s`, and so many
# times its longest step so far, warm-up included. Kernels are compiled and adapters read in less, on slow machines too.
_STALLED_S, _STALLED_STEPS = 120.0, 10
_STOPPED = "the engine has stopped; send the request again"


@dataclass(slots=True, eq=False)
class _Stream:
    """Where a request's deltas go: a queue that lives in its caller's event loop.

    `begin` submits it to the engine, under its id.
    """

    request_id: str
    begin: Callable[[str], None]
    load: tuple[int, int]  # tokens, and those expected to be cached
    loop: asyncio.AbstractEventLoop
    deltas: DeltaQueue


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Audit:
    outcome: Future[None]


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class AsyncEngine:
    """An `Engine` behind a thread of its own. Its methods may be called from any event loop.

    A failed step fails the requests that are in flight with an error and frees their memory. If the books do not add
    up afterwards, a rank is lost, steps fail again and again, or none is computed for a long time although there is
    work, the engine stops and `healthy` is false: what is in flight then ends with `UnavailableError`.

    Args:
        launch, admit: see `Engine`.
        prefixes_of_others: asked, when this engine could serve, for what each of others tells (`hot_prefixes`) that
            has this `prefix_fingerprint`.

    Raises:
        ConfigError, ModelError, UnavailableError: see `Engine`.
    """

    def __init__(
        self,
        config: EngineConfig,
        launch: Launch = spawn_ranks,
        admit: Callable[[KVMemory], None] | None = None,
        prefixes_of_others: Callable[[str], Sequence[Sequence[CachedPrefix]]] | None = None,
    ) -> None:
        self._commands: queue.SimpleQueue[_Stream | _Cancel | _Audit | _Stop] = queue.SimpleQueue()
        self._prefixes_of_others = prefixes_of_others
        self._streams: dict[str, _Stream] = {}  # only the thread touches it
        self._arriving: dict[str, tuple[int, int]] = {}  # sent, not begun: tokens, and those expected to be cached
        self._names: OrderedDict[str, str] = OrderedDict()  # the callers' ids of the latest requests → the engine's
        self._ids = itertools.count()
        self._sending = threading.Lock()  # between "is it still taking commands?" and handing one over
        self._stopped = self._hangs = False
        self._working_since: float | None = None  # and no step computed; `None`: there is nothing to do
        self._longest_s = 0.0  # of a step
        self._stalled_s = max(_STALLED_S, 2 * config.step_timeout_s)
        self._num_failures = 0  # of steps and requests since anything was generated
        self._activity = Activity()  # what the meter is to be told next
        self._engine: Engine  # the thread makes it
        started: Future[None] = Future()
        make = partial(Engine, config, launch, admit)
        self._thread = threading.Thread(target=self._run, args=(make, started), name="folio-engine", daemon=True)
        self._thread.start()
        started.result()
        logger.info("ready after %s", self.start_times)

    @property
    def healthy(self) -> bool:
        """Whether it takes requests and gets on with them. Waits for nothing."""
        return not self._stopped and self._engine.available and not self._stalled

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def start_times(self) -> StartTimes:
        """What the start has taken."""
        return self._engine.start_times

    @property
    def prefix_fingerprint(self) -> str:
        """See `Engine.prefix_fingerprint`."""
        return self._engine.prefix_fingerprint

    def hot_prefixes(self) -> list[CachedPrefix]:
        """What an engine that begins beside this one should have (`Engine.hot_prefixes`). Raises `UnavailableError`
        once the engine has stopped."""
        self.check()
        return self._engine.hot_prefixes()

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        pace: Pace | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[list[Delta], None]:
        """Yield the outputs as they are generated, at least one delta at a time. Closing or cancelling the iterator
        cancels the request.

        Args:
            pace: asked after each list how many seconds shall pass until the next, in which deltas add up. The first
                and the last list come at once. None: every list does.

        Raises:
            RequestError: the request is invalid; raised before the first delta.
            OverloadedError: as many requests wait as may; raised before anything is sent.
            DeadlineError: it has not finished within its `timeout_s`.
            ModelError: its adapter cannot be loaded.
            EngineError: a step failed.
            UnavailableError: the engine has stopped.
        """

        def begin(unique_id: str) -> None:
            self._engine.submit(unique_id, prompt_token_ids, params, **options)

        def validate() -> None:
            self._engine.check_adapter(options.get("adapter"))
            self._engine.validate(prompt_token_ids, params)

        load = len(prompt_token_ids), options.get("expected_cached_tokens") or 0
        compiles = params.structure is not None
        return self._deltas(request_id or "request", begin, load, validate, slow=compiles, check_queue=True, pace=pace)

    def fork(
        self,
        request_id: str,
        params: SamplingParams,
        fork_id: str | None = None,
        *,
        index: int = 0,
        pace: Pace | None = None,
    ) -> AsyncGenerator[list[Delta], None]:
        """Go on with an output of a request that runs, or has just ended, in `params.n` more ways (`Engine.fork`).

        Args:
            request_id: as it was given to `generate`; the latest of that name.
            pace: as there.

        Raises:
            UnknownRequestError: there is no such output, or not any more; raised before the first delta.
            RequestError: the forks do not fit; the same.
            EngineError: a step failed.
            UnavailableError: the engine has stopped.
        """

        def begin(unique_id: str) -> None:
            parent_id = self._names.get(request_id)
            if parent_id is None:
                raise UnknownRequestError(f"there is no request {request_id!r} here", "request_id")
            self._engine.fork(parent_id, unique_id, params, index=index)

        name, compiles = fork_id or f"fork of {request_id}", params.structure is not None
        return self._deltas(name, begin, (0, 0), lambda: self._engine.check_params(params), slow=compiles, pace=pace)

    async def pin(self, name: str, prompt_token_ids: Sequence[int], **options: Unpack[RequestOptions]) -> None:
        """Compute a prefix and keep it in the cache until `unpin`; returns when that is done. It may be pinned already.

        Args:
            options: see `Engine.pin`.

        Raises:
            RequestError: the prompt cannot be pinned, the name is another prefix's, or the quota is used up.
            EngineError: a step failed.
            UnavailableError: the engine has stopped.
        """

        def begin(unique_id: str) -> None:
            self._engine.pin(unique_id, name, prompt_token_ids, **options)

        def validate() -> None:
            self._engine.validate_pin(name, prompt_token_ids, **options)

        async for _ in self._deltas(f"pin {name}", begin, (len(prompt_token_ids), 0), validate, slow=True):
            pass

    def unpin(self, name: str) -> None:
        """Let a pinned prefix go the way of others. May wait for a call of the engine's thread.

        Raises:
            UnknownPinError: there is none of that name.
            UnavailableError: the engine has stopped.
        """
        self.check()
        self._engine.unpin(name)

    async def _deltas(
        self,
        request_id: str,
        begin: Callable[[str], None],
        load: tuple[int, int],
        validate: Callable[[], object],
        *,
        slow: bool = False,
        check_queue: bool = False,
        pace: Pace | None = None,
    ) -> AsyncGenerator[list[Delta], None]:
        """
        Args:
            validate: raises `RequestError` if it is not worth sending.
            slow: it compiles, or may have to wait for the memory's lock.
            check_queue: refuse it if as many requests wait as may.
        """
        if slow:  # others' streams must not wait for it
            await asyncio.to_thread(validate)
        else:
            validate()
        unique_id = f"{request_id}-{next(self._ids)}"
        loop = asyncio.get_running_loop()
        stream = _Stream(unique_id, begin, load, loop, DeltaQueue())
        self._send(stream, request_id, check_queue)
        finished, not_before = False, 0.0
        try:
            while not finished:
                deltas = await stream.deltas.get_all(not_before)
                finished, error = deltas[-1].ends_request, deltas[-1].error
                if error is None:
                    yield deltas
                elif deltas[:-1]:
                    yield deltas[:-1]
                if error is not None:
                    raise error
                if pace is not None:
                    not_before = loop.time() + pace()
        finally:
            if not finished:
                self._commands.put(_Cancel(unique_id))

    def report(self) -> MemoryReport:
        """Where KV memory is. Raises `UnavailableError` once the engine has stopped."""
        self.check()
        return self._engine.report()

    @property
    def speculation(self) -> SpeculationCounts | None:
        """What has come of guessed tokens so far; `None` without speculation."""
        return self._engine.speculation

    def load(self, *, most_keys: int = MOST_KEYS) -> ReplicaReport:
        """How busy the engine is, and what its prefix cache has, by at most `most_keys` keys. Raises `UnavailableError`
        once it has stopped."""
        self.check()
        return self._engine.load(tuple(self._arriving.values()), most_keys=most_keys)

    def take_activity(self) -> Activity:
        """What the engine has done since this was last asked for. From any one thread."""
        return self._activity.take()

    def set_budget(self, budget_bytes: int, revision: int) -> BudgetAnswer:
        """Change how much memory the KV cache may take. Requests that no longer fit are computed again later.

        Raises:
            RequestError: the budget is out of bounds.
            UnavailableError: the engine has stopped.
        """
        self.check()
        return self._engine.set_budget(budget_bytes, revision)

    async def check_integrity(self) -> None:
        """Between two steps: that memory adds up, and without requests that all of it is free.

        Raises:
            IntegrityError: it does not; the engine stops.
            UnavailableError: the engine has stopped.
        """
        audit = _Audit(Future())
        self.check()
        with self._sending:
            if self._stopped:
                raise UnavailableError(_STOPPED)
            self._commands.put(audit)
        await asyncio.wrap_future(audit.outcome)

    def close(self) -> None:
        """Fail what is in flight, stop the thread and give all memory back. A thread that hangs is left to do so."""
        self._commands.put(_Stop())
        self._thread.join(0 if self._hangs else None)

    def check(self) -> None:
        """Raise `UnavailableError` once the engine has stopped. Waits for nothing. An engine that hangs is stopped
        here."""
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
        """Fail what is in flight in place of the thread. Should that come back, it finds that it has to stop."""
        with self._sending:
            if self._stopped:
                return
            self._stopped = self._hangs = True
        logger.error("the engine stops: it has work and has computed no step for %.0f s or longer", self._stalled_s)
        streams = list(self._streams.values())
        while not self._commands.empty():
            with suppress(queue.Empty):
                command = self._commands.get_nowait()
                if isinstance(command, _Stream):
                    streams.append(command)
                elif isinstance(command, _Audit):
                    command.outcome.set_exception(UnavailableError(_STOPPED))
        for stream in streams:
            failure = Delta(stream.request_id, (), "", error=UnavailableError(_STOPPED))
            with suppress(RuntimeError):  # its event loop has been closed
                stream.loop.call_soon_threadsafe(stream.deltas.put, failure)

    def _send(self, stream: _Stream, name: str, check_queue: bool) -> None:
        self.check()
        with self._sending:
            if self._stopped:
                raise UnavailableError(_STOPPED)
            if check_queue:
                self._engine.check_queue(tuple(self._arriving.values()))
            self._arriving[stream.request_id] = stream.load
            self._names[name] = stream.request_id
            self._names.move_to_end(name)
            if len(self._names) > _NAMES:
                self._names.popitem(last=False)
            self._commands.put(stream)

    # ---- the thread ----

    def _run(self, make: Callable[[], Engine], started: Future[None]) -> None:
        # Made here, since OpenMP gives each thread that computes threads of its own; with more of them than cores, none
        # spins any more while it waits for the others, and a step takes a tenth longer.
        try:
            self._engine = make()
        except BaseException as error:  # noqa: BLE001 - whoever makes this engine hears of it
            started.set_exception(_as_start_error(error))
            return
        try:
            self._get_ready()
        except BaseException as error:
            logger.exception("the engine cannot get ready")
            self._stopped = True
            try:
                self._engine.close()
            finally:
                started.set_exception(_as_start_error(error))  # the same, and does not wait for ever
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
            try:  # first of all: nobody has to wait until memory is in order
                self._fail_all(UnavailableError(reason))
                self._refuse_commands(reason)
            finally:
                self._engine.close()

    def _get_ready(self) -> None:
        """Whatever has to be there before the first request."""
        config = self._engine.config
        if config.warm_up:
            start = time.monotonic()
            self._engine.warm_up()
            self._longest_s = time.monotonic() - start  # no step of it was longer
        if self._prefixes_of_others is not None and config.prefix_cache and config.restore_prefixes_s:
            told = self._prefixes_of_others(self._engine.prefix_fingerprint)
            if any(told):
                logger.info("%s", self._engine.warm_prefixes(told, config.restore_prefixes_s))
            self._engine.note_restored()

    def _take_commands(self) -> bool:
        """Do what was asked since the last step, waiting when there is nothing to compute; False to stop."""
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
                case _Stream(request_id):
                    self._streams[request_id] = command
                    try:
                        command.begin(request_id)
                    except (RequestError, OverloadedError) as error:
                        self._deliver([Delta(request_id, (), "", error=error)])
                    except BaseException:  # this request's fault, not the others'
                        logger.exception("cannot begin %s", request_id)
                        failure = EngineError("the request cannot begin; the server's log says why")
                        self._deliver([Delta(request_id, (), "", error=failure)])
                    finally:  # only now: meanwhile it counts twice, but never not at all
                        del self._arriving[request_id]
                case _Cancel(request_id):
                    self._streams.pop(request_id, None)
                    self._engine.cancel(request_id)
                case _Audit(outcome):
                    self._check_integrity(outcome)
                case _Stop():
                    return False

    def _check_integrity(self, outcome: Future[None]) -> None:
        if not outcome.set_running_or_notify_cancel():  # who asked does not wait any more
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
        except BaseException as error:  # whatever went wrong, no request may wait for ever
            logger.exception("a step failed")
            self._activity.num_failed_steps += 1
            self._note_failures(1, _MOST_FAILED_STEPS, error)
            failed = list(self._streams)
            # Not what it says: that may quote a request, and goes to all.
            self._fail_all(EngineError("a step failed; the server's log says why"))
            for request_id in failed:
                self._engine.cancel(request_id)
            self._engine.check_integrity()
            return
        self._note_progress()
        self._deliver(deltas)
        if any(delta.error is None for delta in deltas):
            self._num_failures = 0
        else:
            self._note_failures(sum(isinstance(d.error, EngineError) for d in deltas), _MOST_FAILED_REQUESTS)

    def _note_failures(self, count: int, most: int, cause: BaseException | None = None) -> None:
        """Raise `UnavailableError` if there have been too many without anything generated in between."""
        self._num_failures += count
        if count and self._num_failures >= most:
            raise UnavailableError(
                f"{self._num_failures} failures one after the other; the engine is replaced, send the request again"
            ) from cause

    def _note_progress(self) -> None:
        recent = self._engine.take_activity()
        self._activity.add(recent)
        if recent.step_s:
            self._working_since = time.monotonic()
            self._longest_s = max(self._longest_s, *recent.step_s)

    def _deliver(self, deltas: Sequence[Delta]) -> None:
        """Put deltas into their queues: one call into each event loop, since waking one takes longer than the rest."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Delta]]] = {}
        for delta in deltas:
            stream = self._streams[delta.request_id]
            if delta.ends_request:
                del self._streams[delta.request_id]
            by_loop.setdefault(stream.loop, []).append((stream, delta))
        for loop, arrived in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, arrived)
            except RuntimeError:  # its event loop has been closed: nobody is listening
                for stream, _ in arrived:
                    self._streams.pop(stream.request_id, None)
                    self._engine.cancel(stream.request_id)

    def _fail_all(self, error: FolioError) -> None:
        self._deliver([Delta(request_id, (), "", error=error) for request_id in self._streams])

    def _refuse_commands(self, reason: str) -> None:
        """Answer what was sent before the stop and never begun."""
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, _Stream):
                self._streams[command.request_id] = command
            elif isinstance(command, _Audit) and command.outcome.set_running_or_notify_cancel():
                command.outcome.set_exception(UnavailableError(reason))
        self._fail_all(UnavailableError(reason))


def _as_start_error(error: BaseException) -> Exception:
    """As an error that whoever waits for the start, Serve too, takes for one: a library may call `sys.exit`, or panic
    in Rust."""
    if isinstance(error, Exception):
        return error
    told = EngineError(f"the engine cannot start: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told


def _put_all(arrived: Sequence[tuple[_Stream, Delta]]) -> None:
    for stream, delta in arrived:
        stream.deltas.put(delta)
