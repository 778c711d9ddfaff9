"""Async engine, for servers: a thread runs the step loop; coroutines submit requests and await their deltas."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from folio.app.config.engine import EngineConfig
from folio.app.engine.device.shared_device import SharedDevice
from folio.app.engine.driver import STOPPED, Act, EngineDriver, Stream
from folio.app.engine.engine import Begin, Engine
from folio.app.engine.lora.source import AdapterSource, files_version, folder_below
from folio.app.engine.model.device import resolve
from folio.app.engine.model.fingerprints import Fingerprints
from folio.app.engine.model.loader import read_weights
from folio.app.engine.model.pooling import Pooling
from folio.app.engine.ranks.processes import Launch, spawn_ranks
from folio.app.engine.report import Progress, ReplicaReport, StartTimes
from folio.app.engine.request.delta import Delta, DeltaQueue
from folio.app.engine.request.engine_request import EngineRequest, check_timeout
from folio.app.engine.request.faults import start_error
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.schedule.load_report import MOST_KEYS, Activity
from folio.app.engine.speculation import SpeculationCounts
from folio.app.engine.startup import PeerPrefixes, get_ready, hot_prefixes
from folio.app.engine.step.parts import Admit
from folio.app.engine.step.step_thread import StepThread
from folio.app.engine.step.watch import EngineWatch
from folio.app.errors import ModelError, RequestError, UnknownRequestError
from folio.vmem import BudgetAnswer, CachedPrefix, MemoryReport

logger = logging.getLogger(__name__)

# The progress of requests is counted again when the last count is older than this.
_PROGRESS_S = 0.5
# Returns the seconds until a reader wants its next list of deltas.
Pace = Callable[[], float]
T = TypeVar("T")


class AsyncEngine:
    """An `Engine` in a thread (`EngineDriver`). Methods may be called from any event loop.

    Args:
        launch, admit, loaded: see `Engine`.
        prefixes_of_others: returns the `hot_prefixes` of the peers with these `Fingerprints.prefixes`; called before
            the engine is ready.
        thread: computes the steps of this engine and of others. On a CPU the caller's thread creates the engine, so
            that the others go on; on CUDA the caller's thread reads the weight files into the page cache, then `thread`
            creates the engine. `None`: the engine starts its own thread.
        device: see `Engine`; given together with `thread`.
        most_s: longest time for which the start may hold up the `thread`.
        new_engine: makes the engine, from the arguments of `Engine`.

    Attributes:
        driver: runs the engine in its thread.

    Raises:
        ConfigError, ModelError, UnavailableError: see `Engine`.
    """

    def __init__(
        self,
        config: EngineConfig,
        launch: Launch = spawn_ranks,
        admit: Admit | None = None,
        prefixes_of_others: PeerPrefixes | None = None,
        loaded: Collection[AdapterSource] = (),
        thread: StepThread | None = None,
        device: SharedDevice | None = None,
        most_s: float = 0.0,
        new_engine: Callable[..., Engine] = Engine,
    ) -> None:
        self._ids = itertools.count()
        self._progress: dict[str, Progress] = {}
        self._progress_at = -math.inf

        def start(on_thread: StepThread) -> EngineDriver:
            try:
                engine = new_engine(config, launch, admit, loaded, device)
                try:
                    get_ready(engine, prefixes_of_others)
                except BaseException:
                    logger.exception("the engine cannot start")
                    with suppress(Exception):  # the first error says why
                        engine.close()
                    raise
            except Exception:
                raise
            except BaseException as error:
                raise start_error(error) from error
            return EngineDriver(engine, on_thread)

        self._own_thread: StepThread | None = None
        if thread is not None:
            resolved = resolve(config)
            # Kernels of other engines must not be launched while graphs are captured.
            captures = resolved.device == "cuda"
            if captures and device is not None:  # the slow part, outside of the step thread
                read_weights(resolved, device.weights)
            self.driver = thread.call(partial(start, thread), most_s).result() if captures else start(thread)
        else:
            # The engine is created in its own thread, because OpenMP starts a team of threads for each thread that
            # computes. Two teams have more threads than the machine has cores: waiting threads then sleep instead of
            # spinning, and a step takes a tenth longer.
            self._own_thread = StepThread()
            try:
                self.driver = self._own_thread.call(partial(start, self._own_thread)).result()
            except Exception:
                self._own_thread.close()
                raise
        self._engine = self.driver.engine
        logger.info("ready after %s", self.start_times)

    @property
    def healthy(self) -> bool:
        """Whether the engine takes requests and makes progress. Does not block."""
        return self.driver.healthy

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def context_tokens(self) -> int:
        """Longest sequence that fits this model's memory; at most `max_model_len`."""
        return self._engine.memory.context_tokens

    @property
    def pooling(self) -> Pooling | None:
        """How the model pools prompts into vectors; `None`: it does not."""
        return self._engine.model.pooling

    @property
    def start_times(self) -> StartTimes:
        return self._engine.start_times

    @property
    def fingerprints(self) -> Fingerprints:
        """See `folio.app.engine.model.fingerprints`."""
        return self._engine.fingerprints()

    def held_at(self, host: str) -> str:
        """Where other engines get what this one has begun (`EngineRequest.held_at`); `host`: this machine's address."""
        return "" if self._engine.handover is None else self._engine.handover.address(host)

    def hot_prefixes(self) -> list[CachedPrefix]:
        """Prefixes that a new peer engine should compute. Raises `UnavailableError` once the engine has stopped."""
        self.check()
        return hot_prefixes(self._engine)

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        pace: Pace | None = None,
        **options: Any,
    ) -> AsyncGenerator[list[Delta], None]:
        """`stream` of the request with these fields. `options`: further fields of `EngineRequest`."""
        return self.stream(EngineRequest(request_id or "request", prompt_token_ids, params, **options), pace)

    def stream(self, request: EngineRequest, pace: Pace | None = None) -> AsyncGenerator[list[Delta], None]:
        """Yield lists of deltas as they are generated. Closing or cancelling the iterator cancels the request.

        Args:
            pace: called after each list; returns the seconds until the next one, in which deltas accumulate. The first
                and the last list are sent immediately. `None`: every list is.

        Raises:
            RequestError: the request is invalid; raised before the first delta.
            OverloadedError: the queue is full; raised before the request is sent.
            DeadlineError: the request has not finished within its `timeout_s`.
            ModelError: its adapter cannot be loaded.
            EngineError: a step failed.
            UnavailableError: the engine has stopped.
        """

        return self._deltas(
            request.request_id,
            partial(self._engine.prepare, request),
            (len(request.prompt_token_ids), request.expected_cached_tokens or 0),
            slow=request.params.compiles or bool(request.begun),
            check_queue=not request.begun,  # its client waits for the rest
            pace=pace,
            owner=request.owner,
        )

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
        note: Callable[[EngineRequest], None] | None = None,
    ) -> AsyncGenerator[list[Delta], None]:
        """Continue an output of a request that runs, or has just ended, in `params.n` sequences (`Engine.fork`).

        Args:
            request_id: the id given to `generate`; of several requests with this id, the latest is meant.
            timeout_s: seconds until the forks end with `DeadlineError`.
            pace: see `stream`.
            owner: only requests of this owner can be forked; `None`: all requests can.
            note: called, before the first delta, with the request that other engines would need for the same.

        Raises:
            UnknownRequestError: the output does not exist, or is no longer kept; raised before the first delta.
            RequestError: the forks do not fit; raised before the first delta.
            DeadlineError: the forks have not finished within `timeout_s`.
            EngineError, UnavailableError: see `stream`.
        """

        def begin(unique_id: str) -> None:
            parent_id, parent_owner = self.driver.names.get(request_id, (None, None))
            if parent_id is None or owner not in (None, parent_owner):
                raise UnknownRequestError(f"there is no request {request_id!r} here", "request_id")
            asked = self._engine.fork(parent_id, unique_id, params, index=index, timeout_s=timeout_s)
            if note is not None:
                note(asked)

        def prepare() -> Begin:
            check_timeout(timeout_s)
            self._engine.vocabulary.check_params(params)  # compiles the structure outside of the engine's thread
            return begin

        name, compiles = fork_id or f"fork of {request_id}", params.compiles
        return self._deltas(name, prepare, (0, 0), slow=compiles, pace=pace, owner=owner)

    def has_output(self, request_id: str, index: int) -> bool:
        """Whether `fork` would find that output."""
        unique_id, _ = self.driver.names.get(request_id, ("", None))
        return unique_id in self._engine.requests or self._engine.decoder.ended.get(unique_id, index) is not None

    async def pin(self, name: str, prompt_token_ids: Sequence[int], **options: Any) -> None:
        """Compute a prefix and keep it in the cache until `unpin`; returns when it is pinned. Idempotent.

        Arguments and errors: see `Engine.pin`, and `stream` for the failures of a running request.
        """
        prepare = partial(self._engine.prepare_pin, name, prompt_token_ids, **options)
        async for _ in self._deltas(f"pin {name}", prepare, (len(prompt_token_ids), 0), slow=True):
            pass

    def unpin(self, name: str) -> None:
        """See `Engine.unpin`. Waits until the step in progress ends, because sleep and wake-up move pins between the
        memory and the list of pins to restore. Raises `UnavailableError` once the engine has stopped."""
        act = Act(partial(self._engine.unpin, name))
        self.driver.put(act)
        act.outcome.result()

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
            slow: `prepare` compiles, or may wait for the memory's lock; a worker thread calls it.
            check_queue: refuse the request if the queue is full.
        """
        begin = await asyncio.to_thread(prepare) if slow else prepare()
        unique_id = f"{name}-{next(self._ids)}"
        loop = asyncio.get_running_loop()
        stream = Stream(unique_id, begin, load, loop, DeltaQueue())
        self.driver.send(stream, name, owner, check_queue=check_queue)
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
                self.driver.cancel(unique_id)

    def report(self) -> MemoryReport:
        """Report the state of the KV memory. Raises `UnavailableError` once the engine has stopped."""
        self.check()
        return self._engine.report()

    @property
    def held_bytes(self) -> int:
        """Bytes of KV memory that exist. Does not wait for a call in progress."""
        return self._engine.footprint.seen_bytes

    @property
    def num_requests(self) -> tuple[int, int]:
        """Sequences that run, and those that wait, forks included."""
        scheduler = self._engine.scheduler
        return scheduler.num_running, scheduler.num_waiting + len(self.driver.arriving)

    def progress(self, request_id: str) -> Progress | None:
        """Progress of a request of `generate` until its first token; else `None`. Computed for all requests at once, at
        most every `_PROGRESS_S`. May wait for the memory's lock."""
        now = time.monotonic()
        if now - self._progress_at > _PROGRESS_S:
            self._progress_at, self._progress = now, self.driver.progress()
        unique_id, _ = self.driver.names.get(request_id, ("", None))
        return self._progress.get(unique_id)

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
        return self._engine.load.report(self.driver.arriving, most_keys=most_keys)

    def take_activity(self) -> Activity:
        """The engine's work since the last call. Always call it from the same thread."""
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
            RequestError: the adapter cannot be served, or the settings forbid it.
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
        self.driver.put(outcome)
        await asyncio.wrap_future(outcome)

    async def _between_steps(self, call: Callable[[], T]) -> T:
        """Call a function in the step thread between two steps. Raises the function's error, or `UnavailableError`."""
        act = Act(call)
        self.driver.put(act)
        result: T = await asyncio.wrap_future(act.outcome)
        return result

    def stop(self, reason: str = STOPPED) -> None:
        """Begin `close`; return at once. Requests in flight end with the reason."""
        self.driver.stop(reason)

    def close(self) -> None:
        """Fail the requests in flight, free all memory, and end the thread. Does not wait for a thread that hangs."""
        if self._engine.store is not None:
            self._engine.store.flush()  # here, and not in the thread of the steps of all models
        self.driver.stop()
        if not self.driver.hangs:
            self.driver.closed.result()
        if self._own_thread is not None:
            self._own_thread.close(0 if self.driver.hangs else None)

    def check(self) -> None:
        """Raise `UnavailableError` once the engine has stopped; stop a stalled engine. Does not block."""
        self.driver.check()
