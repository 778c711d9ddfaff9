"""A model on a shelf: its engine once it is loaded, its state, and the requests that wait for it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Collection
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from folio.app.config.shelf import ModelConfig
from folio.app.engine.async_engine import AsyncEngine, Pace
from folio.app.engine.engine import TOO_LATE
from folio.app.engine.lora.source import AdapterSource
from folio.app.engine.report import Progress
from folio.app.engine.request.delta import Delta
from folio.app.engine.request.engine_request import EngineRequest, check_timeout
from folio.app.errors import DeadlineError, OverloadedError, UnavailableError
from folio.app.shelf.arrivals import ArrivalHistory
from folio.app.shelf.status import ModelState, ModelStatus

# After a failed load, requests are refused for this long, doubled by each further failure up to the second number.
_FIRST_RETRY_S, _LONGEST_RETRY_S = 5.0, 300.0
# Expected seconds of a load or wake before one was measured, for each gigabyte of weights, and at least.
_LOAD_S_A_GB, _LEAST_LOAD_S = 3.0, 1.0
_LEAST_WAKE_S, _WAKE_BYTES_PER_S = 0.02, 8e9

# A model's turn can be put off for this long after its wake; reads that take longer probably hang.
_LONGEST_RESTORE_S = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes of a model before it is loaded: of its weights, and of the KV memory for its warm-up."""

    weight_bytes: int
    kv_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _FirstLoad:
    """A load, and the requests that wait for it: of any event loop."""

    outcome: Future[AsyncEngine] = field(default_factory=Future)
    waiting: set[asyncio.Future[AsyncEngine]] = field(default_factory=set)


class ShelvedModel:
    """Serves one model. A request to a model that is not loaded, or asleep, waits for it in a bounded queue.

    Args:
        changed: called when the model needs a decision of the shelf. From any thread.

    Attributes:
        arrivals: of its requests.
        engine: `None` until the model is loaded.
        state, weight_bytes, num_wakes, last_wake_s, num_evictions, evicted_for, error: see `ModelStatus`; changed by
            the shelf's thread only, as the following, until the model is no longer the shelf's.
        estimate: `None` until the model is measured.
        workspace_bytes: of its steps, once it is measured.
        load_s: seconds of the load.
        turn_wait_s: expected time until its requests have memory, as other models have it.
        load_after: not before this time, by `time.monotonic`.
        num_short: loads in a row that found too little memory although other models had none.
        turn_since: when the model woke, or, after all of its requests were preempted, had memory again.
        lost_at: when its turn ended while it had requests; `None` once it has memory again.
        worked_at: when it last had a request.
        preempted_at: since when requests with a first token have had no memory, by `time.perf_counter`.
        loaded_adapters: adapters to load with the engine.
    """

    def __init__(self, config: ModelConfig, changed: Callable[[], None]) -> None:
        self.config, self.name = config, config.name
        self.arrivals = ArrivalHistory()
        self.engine: AsyncEngine | None = None
        self.state: ModelState = "new"
        self.estimate: Estimate | None = None
        self.weight_bytes = self.num_wakes = self.num_evictions = 0
        self.evicted_for: str | None = None
        self.workspace_bytes = self.num_short = 0
        self.turn_wait_s = 0.0
        self.load_s = self.last_wake_s = self.load_after = 0.0
        self.turn_since = self._woken_at = -math.inf
        self.worked_at = time.monotonic()
        self.preempted_at: float | None = None
        self.lost_at: float | None = None
        self.error: str | None = None
        self.loaded_adapters: Collection[AdapterSource] = ()
        self._changed = changed
        self._wake_s = 0.0
        self._num_failures = 0
        self._retry_at = 0.0
        self._load = _FirstLoad()  # replaced when it fails
        self._pending_since = 0.0

    # ---- for the shelf ----

    @property
    def is_wanted(self) -> bool:
        """Whether requests wait for the model to be loaded."""
        return self.num_pending > 0

    @property
    def num_pending(self) -> int:
        """Requests that wait for the model to be loaded."""
        return len(self._load.waiting)

    @property
    def pending_s(self) -> float:
        """Seconds for which requests have waited for the model to be loaded."""
        return time.monotonic() - self._pending_since if self.is_wanted else 0.0

    @property
    def kept_bytes(self) -> int:
        """Memory of a model with `keep: always` that no other model can have: all but cached prefixes."""
        loaded, estimate = self.engine, self.estimate  # once: loads of other models ask, too, in their threads
        if loaded is not None:
            engine = loaded.driver.engine
            footprint = engine.footprint
            return self.weight_bytes + engine.adapter_bytes + footprint.pinned_bytes + footprint.graph_bytes
        is_coming = estimate is not None and (self.is_wanted or self.state == "loading")
        return estimate.weight_bytes if is_coming and estimate is not None else 0

    def try_again(self) -> None:
        """Let a failed model be loaded again, if requests wait for that: those that `ready` has not refused."""
        if self.state == "failed" and self.is_wanted and time.monotonic() >= self._retry_at:
            self.state = "new"

    def measured(self, estimate: Estimate) -> None:
        """Note the size of the model, which is not loaded yet."""
        self.state, self.estimate = "new", estimate

    def set_loaded(self, engine: AsyncEngine, seconds: float = 0.0) -> None:
        """Note that the model is loaded and awake."""
        self.engine, self.error, self._num_failures, self.load_s = engine, None, 0, seconds
        self.num_short = 0
        self.note_awake(seconds)
        self._load.outcome.set_result(engine)

    def note_awake(self, seconds: float) -> None:
        """Note that the model is awake."""
        self.state, self.last_wake_s, self.num_wakes = "awake", seconds, self.num_wakes + 1
        self.turn_since = self.worked_at = self._woken_at = time.monotonic()
        self.lost_at = None
        if self.num_wakes > 1:
            self._wake_s = seconds

    def put_off_turn(self, now: float) -> None:
        """Let the model's turn begin no sooner than now, while its requests wait for their adapters, for a time after
        its wake: others wait for its turn to end."""
        if now - self._woken_at < _LONGEST_RESTORE_S:
            self.turn_since = now

    def note_work(self, now: float, *, has_work: bool, has_preempted: bool) -> None:
        """Note whether the model has requests, and requests with a first token and without memory."""
        if has_work:
            self.worked_at = now
        else:
            self.lost_at = None
        if not has_preempted:
            self.preempted_at = None
        elif self.preempted_at is None:
            self.preempted_at = time.perf_counter()

    def refuse(self, error: UnavailableError) -> None:
        """End the next request, or those that wait for the model to be loaded: they can never have memory."""
        logger.warning("a request of %r is refused: %s", self.name, error)
        if self.engine is None:
            self.set_failed(error)
        else:
            self.engine.driver.fail_first(error)

    def fail_requests(self, error: UnavailableError) -> None:
        """End all requests, and those that wait for the model to be loaded."""
        if self.engine is None:
            self.set_failed(error)
        else:
            self.engine.driver.fail_all(error)

    def set_failed(self, error: Exception, retry_s: float | None = None) -> None:
        """Note that the model could not be loaded, or that its engine has stopped; requests that wait for it fail.

        Args:
            retry_s: for so long no request loads it again; by default for longer after each failure.
        """
        if retry_s is None:
            retry_s = min(_FIRST_RETRY_S * 2 ** min(self._num_failures, 30), _LONGEST_RETRY_S)
        self._retry_at = time.monotonic() + retry_s  # before the state, which others read
        self.engine = self.estimate = None
        self.state, self.error = "failed", str(error)
        self._num_failures += 1
        failed, self._load = self._load, _FirstLoad()
        if not failed.outcome.done():
            failed.outcome.set_exception(self._unavailable())

    @property
    def usual_wake_s(self) -> float:
        """Expected seconds of a wake once the model is loaded."""
        return self._wake_s or _LEAST_WAKE_S + self.weight_bytes / _WAKE_BYTES_PER_S

    @property
    def expected_wake_s(self) -> float:
        """Expected seconds until the model is awake and its requests have memory; 0 if they have."""
        if self.state == "awake":
            return self.turn_wait_s
        return max(self.turn_wait_s, self.usual_load_s if self.engine is None else self.usual_wake_s)

    @property
    def usual_load_s(self) -> float:
        """Expected seconds of a load."""
        num_bytes = 0 if self.estimate is None else self.estimate.weight_bytes
        return self.load_s or max(_LOAD_S_A_GB * num_bytes / 1e9, _LEAST_LOAD_S)

    @property
    def status(self) -> ModelStatus:
        """From any thread."""
        engine, kv_bytes, kept_bytes, num_running, num_waiting = self.engine, 0, 0, 0, self.num_pending
        if engine is not None:
            kv_bytes, kept_bytes = engine.held_bytes, engine.driver.engine.footprint.kept_bytes
            num_running, waiting = engine.num_requests
            num_waiting += waiting
        return ModelStatus(
            name=self.name,
            state=self.state,
            weight_bytes=self.weight_bytes,
            kv_bytes=kv_bytes,
            kept_bytes=kept_bytes,
            num_running=num_running,
            num_waiting=num_waiting,
            num_wakes=self.num_wakes,
            wake_s=self.expected_wake_s,
            last_wake_s=self.last_wake_s,
            num_evictions=self.num_evictions,
            evicted_for=self.evicted_for,
            error=self.error,
            idle_s=0.0 if num_running + num_waiting else self.arrivals.silence_s(time.monotonic()),
        )

    def progress(self, request_id: str, num_tokens: int) -> Progress | None:
        """A request of so many tokens before its first token (`AsyncEngine.progress`). While the model is loaded, its
        place is the last one."""
        wake_s, engine = max(self.expected_wake_s - self.pending_s, 0.0), self.engine
        if engine is None:
            return Progress(self.num_pending, wake_s, 0, num_tokens)
        found = engine.progress(request_id)
        return None if found is None else replace(found, expected_s=found.expected_s + wake_s)

    # ---- for callers ----

    async def ready(self) -> AsyncEngine:
        """Return once the model is loaded, which this call asks for.

        Raises:
            OverloadedError: too many requests wait for it.
            UnavailableError: it cannot be loaded; the message says why.
        """
        load = self._load  # before the state, which changes first
        if self.engine is not None:
            return self.engine
        if self.state == "failed" and time.monotonic() < self._retry_at:
            raise self._unavailable()
        most = self.config.engine.max_queued_requests
        if isinstance(most, int) and len(load.waiting) >= most:
            error = OverloadedError(
                f"queue full (max_queued_requests={most}) while {self.name!r} is loaded; try again in "
                f"{max(self.expected_wake_s, 1):.0f} s",
                self.expected_wake_s,
            )
            error.num_queued = len(load.waiting)
            raise error
        if not load.waiting:
            self._pending_since = time.monotonic()
        waiting = asyncio.wrap_future(load.outcome)
        waiting.add_done_callback(_retrieve)
        load.waiting.add(waiting)
        self._changed()
        try:
            return await asyncio.shield(waiting)
        finally:
            load.waiting.remove(waiting)

    def stream(self, request: EngineRequest, pace: Pace | None = None) -> AsyncGenerator[list[Delta], None]:
        """See `AsyncEngine.stream`, and `ready`."""
        self.arrivals.note(time.monotonic())
        engine = self.engine
        if engine is None:
            return self._stream_when_loaded(request, pace)
        if self.state != "awake":
            self._changed()
        return engine.stream(request, pace)

    async def _stream_when_loaded(self, request: EngineRequest, pace: Pace | None) -> AsyncGenerator[list[Delta], None]:
        began, timeout_s = time.monotonic(), request.timeout_s
        check_timeout(timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                engine = await self.ready()
        except TimeoutError:
            raise DeadlineError(TOO_LATE.format(request.request_id)) from None
        if timeout_s is not None:
            request = replace(request, timeout_s=max(timeout_s - (time.monotonic() - began), 0.001))
        async with aclosing(engine.stream(request, pace)) as deltas:
            async for some in deltas:
                yield some

    def _unavailable(self) -> UnavailableError:
        after_s = self._retry_at - time.monotonic()
        return UnavailableError(
            f"the model {self.name!r} cannot be served now: {self.error}", after_s if after_s < math.inf else None
        )


def _retrieve(outcome: asyncio.Future[AsyncEngine]) -> None:
    """Look at an error, which asyncio would report: no request waits for it any more once its shield is cancelled."""
    if not outcome.cancelled():
        outcome.exception()
