"""Engine: one model, its KV memory, and the loop that schedules, maps, computes and samples.

No Ray and no asyncio. One thread calls the engine; a method that any thread may call says so.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from operator import attrgetter
from typing import Any

from folio.app.config.engine import EngineConfig
from folio.app.engine.device.shared_device import SharedDevice
from folio.app.engine.lora.source import AdapterSource
from folio.app.engine.lora.weights import check_sources
from folio.app.engine.ranks.processes import Launch, spawn_ranks
from folio.app.engine.request.delta import Delta
from folio.app.engine.request.engine_request import EngineRequest
from folio.app.engine.request.faults import kernel_errors_as_config_errors
from folio.app.engine.request.prefix_keys import adapter_of
from folio.app.engine.request.request import Request
from folio.app.engine.request.text_prefix import encode_pinned
from folio.app.engine.sampling.beam import BeamSearch
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.schedule.pin_restorer import PinRestorer
from folio.app.engine.step.intake import BegunState, check_fork
from folio.app.engine.step.parts import Admit, EngineParts
from folio.app.errors import ConfigError, DeadlineError, RequestError, UnknownPinError, UnknownRequestError
from folio.vmem import BudgetAnswer, BudgetError, CachedPrefix, MemoryReport, PinError

logger = logging.getLogger(__name__)

# Queues a validated request under an id of the engine's own, in the engine's thread.
Begin = Callable[[str], None]

# A pin computes its prefix and samples nothing.
_PIN = SamplingParams(max_tokens=1)

TOO_LATE = "request {!r} has not finished within its timeout_s; raise it, or send the request later"


class Engine(EngineParts):
    """Queue requests with `submit`; compute their deltas with `step`.

    Args:
        launch: starts the processes of the other ranks, with tensor parallelism.
        admit: sets the KV memory's budget, or raises. Called with the memory before pages are created, and with the
            plan of a CUDA device that is not shared within this process.
        loaded: adapters loaded at run time, see `AdapterStore.set_loaded`.
        device: shared with other engines. The KV memory's budget may then be lowered to 0, requests wait while it is
            too small for them, and the engine can `sleep`.

    Attributes:
        max_model_len: longest prompt plus output, in tokens.
        load: load reports and the limit of the queue. From any thread.
        watch: views for the dashboard. From any thread.
        intake: validates requests. From any thread.
        requests: request id → requests that have not ended.
        footprint: device memory that the engine takes.
        asleep: whether weights and KV memory are given back.

    Raises:
        ConfigError, ModelError: the settings or the model cannot work; nothing is left behind.
        OutOfPages: other models occupy the shared device's memory now; nothing is left behind.
        UnavailableError: a rank died.
    """

    def __init__(
        self,
        config: EngineConfig,
        launch: Launch = spawn_ranks,
        admit: Admit | None = None,
        loaded: Collection[AdapterSource] = (),
        device: SharedDevice | None = None,
    ) -> None:
        check_sources(config.adapters, config.adapter_dir)
        self.asleep = False
        with ExitStack() as undo:
            super().__init__(config, launch, admit, loaded, device, undo)
            self._pin_restorer = PinRestorer(self.requests, self.footprint.pin_copy)
            self._next_deadline = math.inf  # the earliest; its request may have ended
            undo.callback(self.cancel_all)
            with kernel_errors_as_config_errors():
                self.recovery.try_swaps(self.memory, self.config.kv_view, self.model.module.device)
                self._pin_configured()
            self.start_times.lap("pins_s")
            self._undo = undo.pop_all()

    @property
    def has_work(self) -> bool:
        return bool(self.requests) or self._steps.has_deltas

    @property
    def can_step(self) -> bool:
        """Whether `step` has something to do now: not while all requests wait for `wake`, or for a larger budget."""
        if self.asleep or self._steps.starved:
            has_read = self.adapters.has_read and not self.asleep
            return has_read or self._steps.has_deltas or time.monotonic() >= self._next_deadline
        return self.has_work

    @property
    def starved(self) -> bool:
        """Whether the last step found too little memory for any request, on a shared device."""
        return self._steps.starved

    def prepare(self, request: EngineRequest) -> Begin:
        """Validate a request, and replay what another engine has generated of it; returns `add_request` for it. From
        any thread.

        Raises:
            RequestError: an empty prompt, an unknown token or adapter, or parameters that this model cannot serve.
            ContextLengthError: prompt and output do not fit.
        """
        self._with_adapter_id(request)
        if request.pooling is None:
            self.intake.check_generates()
        max_tokens = self.intake.validate_request(request)
        begun = self.intake.replay(request)
        return lambda request_id: self.add_request(request_id, request, max_tokens, begun=begun)

    def submit(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, **options: Any) -> None:
        """Validate and queue a request. If its adapter cannot be loaded, a delta says so.

        Args:
            options: further fields of `EngineRequest`.

        Raises:
            RequestError: see `prepare` and `add_request`.
            OverloadedError: the queue is full.
        """
        self.load.check_queue()
        self.prepare(EngineRequest(request_id, prompt_token_ids, params, **options))(request_id)

    def add_request(
        self,
        request_id: str,
        request: EngineRequest,
        max_tokens: int,
        *,
        begun: Collection[BegunState] = (),
        pin_name: str | None = None,
    ) -> None:
        """Queue a validated request, whatever the length of the queue.

        Args:
            request_id: the engine's id.
            max_tokens: most output tokens.
            begun: the states of `request.begun`.
            pin_name: compute a prefix (`RequestValidator.prefix_to_pin`) and pin it under this name.

        Raises:
            RequestError: the id is in use, or the adapter has been unloaded meanwhile.
        """
        self._check_id(request_id)
        asked = self._with_adapter_id(request)
        created = self.intake.create_request(request_id, asked, max_tokens, begun=begun, pin_name=pin_name)
        self._set_deadline(created, asked.timeout_s)
        self.adapters.add(created)
        self.requests[request_id] = created  # last: a failure before this leaves nothing behind

    def fork(
        self,
        request_id: str,
        fork_id: str,
        params: SamplingParams,
        *,
        index: int = 0,
        timeout_s: float | None = None,
    ) -> EngineRequest:
        """Continue output `index` of a request that runs, or has just ended, in `params.n` sequences. Returns the
        request that other engines would need for the same.

        Forks of a running output are a request of their own and share what is computed. Of an output that has ended,
        the prefix cache may still hold a part. Deltas and `max_tokens` of a fork begin with its own first token.

        Raises:
            UnknownRequestError: the output does not exist, or is no longer kept.
            RequestError: the id is in use, or the forks could not run beside the other outputs.
        """
        self._check_id(fork_id)
        self._steps.settle()
        request = self.requests.get(request_id)
        sequences = [] if request is None else request.sequences
        running = [sequence for sequence in sequences if sequence.index == index and sequence.pin_name is None]
        if request is not None and isinstance(request.selection, BeamSearch):
            raise RequestError(
                f"the beam search of {request_id!r} has not ended; fork it when it has ended", "request_id"
            )
        if running:
            asked, forks, states, most_tokens = self.intake.create_fork(fork_id, running[0], params)
            self.decoder.fork_running(running[0], forks, states, most_tokens)
            self._set_deadline(forks, timeout_s)
            if any(sequence.memory is not None for sequence in forks.sequences):
                self.scheduler.add_running(forks)
            else:  # the output has no memory now, or none could be shared
                self.adapters.add(forks)
            self.requests[fork_id] = forks
        elif (ended := self.decoder.ended.get(request_id, index)) is not None:
            check_fork(params)
            asked = replace(ended, request_id=fork_id, params=params, timeout_s=timeout_s)
            self.prepare(asked)(fork_id)
        else:
            raise UnknownRequestError(
                f"output {index} of request {request_id!r} is no longer kept; send its text as a prompt",
                "request_id",
            )
        return asked

    def pin(self, request_id: str, name: str, prompt_token_ids: Sequence[int], **options: Any) -> None:
        """Compute a prefix, unless it is cached, and keep it until `unpin`. Idempotent. The request has one delta.

        Args:
            options: `cache_salt` and `tenant` of the requests that will use the prefix.

        Raises:
            RequestError: see `RequestValidator.prefix_to_pin` and `add_request`.
        """
        self.prepare_pin(name, prompt_token_ids, **options)(request_id)

    def prepare_pin(self, name: str, prompt_token_ids: Sequence[int], **options: Any) -> Begin:
        """Validate a pin; returns `add_request` for it. From any thread; may block.

        Args:
            options: see `pin`, and `prefix_keys`.
        """
        request = self._with_adapter_id(EngineRequest(f"pin {name}", prompt_token_ids, _PIN, **options))
        to_pin = self.intake.prefix_to_pin(name, request)
        self._pin_restorer.check_same(name, to_pin.prompt_token_ids, self.intake.prefix_keys(to_pin))
        return lambda request_id: self.add_request(request_id, to_pin, 1, pin_name=name)

    def unpin(self, name: str) -> None:
        """Let a pinned prefix be evicted like others, between two steps. Raises `UnknownPinError` for another name."""
        request_id = self._pin_restorer.discard(name)
        if request_id is not None:
            self.cancel(request_id)
        try:
            self.memory.unpin(name)
        except PinError as error:
            if request_id is None:
                raise UnknownPinError(str(error), "name") from error

    def cancel(self, request_id: str) -> None:
        """Stop a request and free its memory. Idempotent."""
        request = self.requests.get(request_id)
        for sequence in [] if request is None else request.sequences.copy():
            self.decoder.end_sequence(sequence)
        self._steps.forget(request_id)
        self.adapters.release_retired()

    def cancel_all(self) -> None:
        for request_id in list(self.requests):
            self.cancel(request_id)

    def step(self) -> list[Delta]:
        """Compute one step; returns its deltas. With asynchronous scheduling, those of the step before.

        Raises:
            UnavailableError: a rank is lost; no step will succeed any more.
        """
        for request_id in self._pin_restorer.pin_copies():
            self.cancel(request_id)
        deltas = self._step()
        return self._pin_restorer.take_own(deltas) if self._pin_restorer.requests else deltas

    def _step(self) -> list[Delta]:
        self.executor.check_ranks()
        deltas = self._steps.take_applied()
        if time.monotonic() >= self._next_deadline and (late := self._expired()):
            return deltas + [self.decoder.fail(r, DeadlineError(TOO_LATE.format(r.request_id))) for r in late]
        if self.asleep:
            return deltas
        if not_loaded := self.adapters.advance():
            return deltas + [self.decoder.fail(self.requests[id_], error) for id_, error in not_loaded.items()]
        if self.adapters.restoring:
            self._steps.starved = True
            return deltas
        return deltas + self._steps.step()

    @property
    def step_s(self) -> float | None:
        """Seconds of the step whose tokens the latest call of `step` returned; `None` if there was none."""
        return self._steps.step_s

    def _expired(self) -> list[Request]:
        """The requests whose deadline has passed, the earliest first. Called only when the earliest deadline passes,
        even if its request has ended."""
        now = time.monotonic()
        late = sorted((r for r in self.requests.values() if r.deadline <= now), key=attrgetter("deadline"))
        self._next_deadline = min((r.deadline for r in self.requests.values() if r.deadline > now), default=math.inf)
        return late

    def _pin_configured(self) -> None:
        for name, token_ids in encode_pinned(self.config, self.model.tokenizer).items():
            try:
                self.pin(f"pin {name}", name, token_ids)
            except RequestError as error:
                raise ConfigError(f"the prompt {name!r} cannot be pinned: {error}") from error
        while self.has_work:
            for delta in self.step():
                if delta.error is not None:
                    raise ConfigError(f"{delta.request_id!r} failed: {delta.error}")
            if self.starved:
                raise ConfigError("the prompts to pin need more memory than this model has while it is loaded")
        for pin in self.report().pins:
            logger.info("pinned %r: %d tokens, %.1f MiB", pin.name, pin.num_tokens, pin.num_bytes / 2**20)

    def _with_adapter_id(self, request: EngineRequest) -> EngineRequest:
        """The request with its adapter's id. Raises `UnknownModelError`. From any thread."""
        adapter = request.adapter
        return request if adapter is None else replace(request, adapter=self.adapters.id_of(adapter))

    def _set_deadline(self, request: Request, timeout_s: float | None) -> None:
        if timeout_s is not None:
            request.deadline = time.monotonic() + timeout_s
            self._next_deadline = min(self._next_deadline, request.deadline)

    def _check_id(self, request_id: str) -> None:
        if request_id in self.requests:
            raise RequestError(f"request id {request_id!r} is in use", "request_id")

    def report(self) -> MemoryReport:
        """Report the state of the KV memory, and all pins. A pin takes no memory while the engine sleeps, and after it
        wakes until the prefix is computed again. From any thread."""
        return self._pin_restorer.added_to(self.memory.report())

    def pinned_prefixes(self) -> list[CachedPrefix]:
        """The prefixes of all pins, those that take no memory now included. From any thread."""
        return self._pin_restorer.joined_with(self.memory.pins.pinned_prefixes())

    # ---- on a shared device ----

    def sleep(self) -> None:
        """Give back all memory of the device, between two steps: preempt running requests, copy cached prefixes to host
        memory (`KeptPrefixes`), drop adapters and graphs, unmap weights. Until `wake` requests wait, or time out."""
        self._steps.settle()
        self.scheduler.preempt_all()
        if self.speculation is not None:
            self.speculation.forget_all()
        self.adapters.unload_all()
        self.asleep = True
        self._pin_restorer.keep(self.footprint.release())

    def wake(self) -> None:
        """Serve requests again, after `footprint` has mapped the weights. `step` first loads the adapters of requests
        that had begun. Graphs are captured again when steps need them. Pinned prefixes come back, computed if they were
        not kept; a pin that fails keeps its name until the next wake-up, or the next `pin` of that name."""
        self.asleep = self._steps.starved = False
        self._pin_restorer.restore(self._queue_pin)

    def _queue_pin(self, request_id: str, pin: CachedPrefix) -> None:
        request = EngineRequest(request_id, pin.token_ids, _PIN, adapter=adapter_of(pin.keys), prefix_keys=pin.keys)
        self.add_request(request_id, request, 1, pin_name=pin.pin_name)

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the shared device that adapters take."""
        return 0 if self.adapters.memory is None else self.adapters.memory.charged_bytes

    def set_room(self, num_bytes: int) -> None:
        """Set the most bytes that KV cache, pins and adapters can ever take together, a bound for requests and
        adapters. Adapters that no request uses give way to requests."""
        if self.adapters.memory is not None:
            self.adapters.memory.room_bytes = num_bytes
        self.footprint.set_attainable(max(num_bytes - self.adapters.used_bytes, 0))

    def limit_graphs(self, num_bytes: int) -> None:
        """Bound the memory of graphs, between two steps. Graphs beyond it are dropped, and captured again as far as
        they fit."""
        every = self.footprint.graphs
        for graphs in every:
            graphs.limit_bytes = num_bytes // len(every)
            if graphs.held_bytes > graphs.limit_bytes:
                self._steps.settle()
                graphs.release()

    @property
    def first(self) -> Request | None:
        """The request that gets memory first."""
        return self.scheduler.first or next(iter(self.adapters.held_requests), None)

    def set_kv_budget(self, budget_bytes: int) -> None:
        """Set the budget of KV memory, a draft model's included, as far as pins allow."""
        self._steps.starved = False
        self.footprint.set_budget(budget_bytes)

    def set_budget(self, budget_bytes: int, revision: int) -> BudgetAnswer:
        """Change the KV memory's budget. From any thread. Raises `RequestError` for a budget out of bounds."""
        try:
            return self.memory.set_budget(budget_bytes, revision)
        except BudgetError as error:
            raise RequestError(str(error), "budget_bytes") from error

    def reset_counts(self) -> None:
        """Forget the requests so far, which were not clients': no fork continues them, and no report counts them."""
        self.decoder.ended.clear()
        self._meter.reset_measurements()
        self.memory.prefixes.reset_counts()
        if self.speculation is not None:
            self.speculation.begin()

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless the memory is consistent and, without requests, all of it is free."""
        self.memory.check_integrity()
        self.footprint.check_integrity()
        if not self.requests:
            self.memory.check_idle()
        if self.speculation is not None:
            self.speculation.check_integrity(idle=not self.requests)

    def close(self) -> None:
        """Cancel all requests and free all memory."""
        self._undo.close()
