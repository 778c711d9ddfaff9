"""The engine: one model, its KV memory, and the loop that schedules, maps, computes and samples.

No Ray and no asyncio here; one thread calls it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Unpack

import torch

from app.config.engine import EngineConfig
from app.engine.decoding import Decoder
from app.engine.execution.batch import demands, memory_of, next_demands, plan_step
from app.engine.execution.executor import Executor
from app.engine.execution.self_test import self_test
from app.engine.faults import SequenceFailure, attribute_failures, failure_of
from app.engine.generation import Generation
from app.engine.intake import RequestValidator, check_fork
from app.engine.load_report import MOST_KEYS, Activity, LoadMeter, free_tokens, make_report, retry_after_s
from app.engine.lora.queue import AdapterQueue
from app.engine.lora.store import AdapterReport, AdapterStore
from app.engine.lora.weights import check_sources
from app.engine.model.kv_plan import build_memory
from app.engine.model.loader import LoadedModel
from app.engine.preemption import PreemptionCostModel
from app.engine.prefix_keys import adapter_of
from app.engine.report import ReplicaReport
from app.engine.request import Deadlines, Delta, Request, RequestOptions, SequenceGroup, check_timeout
from app.engine.sampling.beam import BeamSearch
from app.engine.sampling.params import SamplingParams
from app.engine.scheduler import Scheduled, Scheduler
from app.engine.speculation import Speculation, SpeculationCounts
from app.engine.startup import KEYS as WARM_UP_KEYS
from app.engine.startup import (
    MOST_TOLD_PREFIXES,
    MOST_TOLD_TOKENS,
    Restored,
    StartClock,
    StartTimes,
    merge_hot_prefixes,
    prefix_fingerprint,
    warm_up,
    warm_up_rounds,
)
from app.engine.tensor_parallel.processes import Launch, spawn_ranks
from app.engine.vocabulary import Vocabulary, encode_pinned
from app.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    FolioError,
    OverloadedError,
    RequestError,
    UnavailableError,
    UnknownPinError,
    UnknownRequestError,
)
from kernels import KernelError
from vmem import (
    BudgetAnswer,
    BudgetError,
    CachedPrefix,
    IntegrityError,
    KVMemory,
    MemoryReport,
    PinError,
    VmemError,
)

logger = logging.getLogger(__name__)

# How long a step without memory waits before it looks again.
_WAIT_FOR_PAGES_S = 0.01
# A request that cannot begin although nothing else runs is failed after this long.
_GIVE_UP_S = 5.0


class Engine:
    """Requests in by `submit`, deltas out by `step`.

    Args:
        launch: how the other ranks are started, if there are to be some.
        admit: called with the memory before anything is taken from it: it may set its budget, or refuse with an error.

    Raises:
        ConfigError, ModelError: the settings or the model cannot work; nothing is left behind.
        UnavailableError: a rank died.
    """

    def __init__(
        self, config: EngineConfig, launch: Launch = spawn_ranks, admit: Callable[[KVMemory], None] | None = None
    ) -> None:
        self.config = config
        check_sources(config.adapters)
        self._clock = StartClock()
        with ExitStack() as undo, _config_errors():
            self._executor = Executor(config, launch)
            undo.callback(self._executor.close)
            self.model = self._executor.model
            self._clock.lap("model_s")
            self._speculation = Speculation.load(config, self.model, self._executor.layers)
            share = 1.0
            if self._speculation is not None:
                undo.callback(self._speculation.close)
                share = self._speculation.memory_share
            try:
                self.memory = build_memory(config, self.model, self._executor.layers, self._executor.ranks, share=share)
            except VmemError as error:
                raise ConfigError(f"these settings do not work here: {error}") from error
            undo.callback(self.memory.close)
            self._clock.lap("memory_s")
            if admit is not None:
                admit(self.memory)
                self._clock.lap("budget_s")
            self.max_model_len = _max_model_len(config, self.model, self.memory)
            self_test(self._executor, self.memory.groups, config.kv_view)
            self._executor.bind_memory(self.memory)
            self._executor.enforce_step_timeout()
            self._clock.lap("self_test_s")
            self._recovery = PreemptionCostModel(config.max_num_batched_tokens)
            if self._speculation is not None:
                self._speculation.open(self.max_model_len, lambda: self._recovery.step_times)
            self._scheduler = Scheduler(
                self.memory,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                view=config.kv_view,
                recovery=self._recovery,
                policy=config.preemption,
                fair_tenants=config.fair_tenants,
            )
            self._deadlines = Deadlines()
            self._adapters = AdapterQueue(self._open_adapters(), self._scheduler)
            undo.callback(self._adapters.close)
            self._meter = LoadMeter()
            self._generations: dict[str, Generation] = {}
            self._vocabulary = Vocabulary(self.model)
            self._intake = RequestValidator(
                self.model,
                self.memory,
                self._vocabulary,
                self._scheduler,
                self.max_model_len,
                isolate_tenants=config.isolate_tenants,
            )
            self._decoding = Decoder(
                self.memory, self._scheduler, self._vocabulary, self._generations, self._meter, self._speculation
            )
            self._stalled_since: float | None = None
            undo.callback(self._cancel_all)
            self._recovery.try_swaps(self.memory, config.kv_view, self.model.module.device)
            self._pin_configured()
            self._clock.lap("pins_s")
            self._undo = undo.pop_all()

    @property
    def available(self) -> bool:
        """Whether all ranks are there. From any thread."""
        return self._executor.available

    @property
    def has_work(self) -> bool:
        return bool(self._generations)

    @property
    def start_times(self) -> StartTimes:
        """What the engine's start has taken so far."""
        return self._clock.times

    def warm_up(self) -> None:
        """Run what the first requests would otherwise wait for (`app.engine.startup`), in the thread that will call
        `step`. Nothing is left of it but step times, with which reports then begin.

        Raises:
            ConfigError: a kernel that was asked for cannot do what is asked of it.
        """
        rounds = warm_up_rounds(
            vocab_size=self.model.vocab_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self._scheduler.max_num_seqs,
            step_tokens=self.config.max_num_batched_tokens,
            has_structures=self._vocabulary.has_structures,
            fits=self._has_room,
        )
        with _config_errors():
            warm_up(self._run_warm_up, rounds, self._recovery.forget_steps)
        self.memory.prefixes.evict_prefixes(WARM_UP_KEYS)
        self._begin_counting()
        self._clock.lap("warm_up_s")

    @cached_property
    def prefix_fingerprint(self) -> str:
        """Only prefixes of engines that have the same are worth `restore`."""
        return prefix_fingerprint(self.config, self.model)

    def hot_prefixes(self) -> list[CachedPrefix]:
        """What an engine that begins beside this one should have: what was pinned since the start, and what is asked
        for most. From any thread."""
        configured = self.config.pinned_prompts.keys() | self.config.pinned_system_prompts.keys()
        pinned = [prefix for prefix in self.memory.pins.pinned_prefixes() if prefix.pin_name not in configured]
        return pinned + self.memory.prefixes.hot_prefixes(MOST_TOLD_TOKENS)[:MOST_TOLD_PREFIXES]

    def warm_prefixes(self, told: Sequence[Sequence[CachedPrefix]], limit_s: float) -> Restored:
        """Compute the prefixes that other engines tell of (`hot_prefixes`), and pin those that are pinned there. They
        must have the same `prefix_fingerprint`. No other request may be there. A failed step ends it early.

        Args:
            limit_s: whatever is not computed by then is left out.

        Raises:
            UnavailableError: a rank is lost.
            IntegrityError: after a failed step memory does not add up.
        """
        deadline = time.monotonic() + limit_s
        capacity = self.load(most_keys=0).total_tokens
        ids: dict[str, str | None] = {}
        failed = 0
        for i, prefix in enumerate(merge_hot_prefixes(told, capacity // 2)):
            request_id = f"restore {i}"
            try:
                self._submit_restored(request_id, prefix)
            except RequestError as error:  # adapter, context or quota are others here
                failed += 1
                logger.warning("a prefix of %d tokens is not restored: %s", len(prefix.token_ids), error)
            else:
                ids[request_id] = prefix.pin_name
        done: list[str | None] = []
        try:
            while self.has_work and time.monotonic() < deadline:
                for delta in self.step():
                    if delta.error is not None:
                        failed += 1
                        logger.warning("a prefix is not restored: %s", delta.error)
                    elif delta.ends_request:
                        done.append(ids[delta.request_id])
        except (IntegrityError, UnavailableError):
            raise
        except Exception:  # what others have cached is no reason not to start
            logger.exception("a step failed; the prefixes that are left are not restored")
            failed += len(self._generations)
            self._cancel_all()
            self.check_integrity()
        late = [ids[request_id] for request_id in self._generations]
        self._cancel_all()
        if names := [name for name in late if name is not None]:
            logger.warning("there was no time to restore %s; pin them again", ", ".join(map(repr, names)))
        self._begin_counting()
        num_hot = done.count(None)
        return Restored(len(done) - num_hot, num_hot, failed, len(late))

    def note_restored(self) -> None:
        """The prefixes of other engines are there, as far as they will be."""
        self._clock.lap("prefixes_s")

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> int:
        """Check a request against the model; returns its `max_tokens`. Safe to call from any thread.

        Raises:
            RequestError: an empty prompt, an unknown token, or what this model cannot do.
            ContextLengthError: prompt and output do not fit.
        """
        return self._intake.validate_request(prompt_token_ids, params)

    def check_params(self, params: SamplingParams) -> None:
        """Raise `RequestError` unless the model can do what parameters ask for. From any thread."""
        self._vocabulary.check_params(params)

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> None:
        """Queue a request.

        Raises:
            RequestError: as `validate` and `check_adapter` do, and for an id that is in use. An adapter that cannot be
                loaded is told by a delta.
            OverloadedError: as many requests wait as may.
        """
        self.check_queue()
        self._add(request_id, prompt_token_ids, params, options)

    def check_queue(self, arriving: Sequence[tuple[int, int]] = ()) -> None:
        """Raise `OverloadedError` if as many requests wait as may. From any thread.

        Args:
            arriving: as in `load`.
        """
        most = self.config.max_queued_requests
        held = self._adapters.waiting_groups
        if most is None or most == "auto":
            return
        # Until the next step even those wait for whom there is a place among the running.
        begin_at_once = max(self._scheduler.max_num_seqs - self._scheduler.num_running, 0)
        if self._scheduler.num_queued + len(held) + len(arriving) < most + begin_at_once:
            return
        queued = [
            *self._scheduler.queued_tokens,
            *(len(request.token_ids) for request in held),
            *(tokens for tokens, _ in arriving),
        ]
        seconds = retry_after_s(
            queued,
            self._recovery.step_times,
            self._meter,
            step_tokens=self.config.max_num_batched_tokens,
            free_tokens=free_tokens(self.memory.report(), self.memory),
            now=time.monotonic(),
        )
        error = OverloadedError(
            f"{most} requests wait, which is as many as may (max_queued_requests); try again in "
            f"{max(seconds, 1):.0f} s",
            seconds,
        )
        error.num_queued = len(queued)
        raise error

    def check_adapter(self, name: str | None) -> None:
        """Raise `UnknownModelError` unless there is such an adapter, or none is wanted. From any thread."""
        self._adapters.check_adapter(name)

    def fork(self, request_id: str, fork_id: str, params: SamplingParams, *, index: int = 0) -> None:
        """Go on with an output of a request that has not ended, or has just ended, in `params.n` more ways, from its
        present state. What is computed is not computed again; of a request that has ended, that is as much as the
        prefix cache still has.

        What they have in common is shared; forks of a running sequence are preempted together with it. Their deltas
        begin with their own first tokens; `max_tokens` counts these.

        Args:
            index: which output.

        Raises:
            UnknownRequestError: there is no such output, or not any more.
            RequestError: the id is in use, or all of the group could not run together.
        """
        self._check_id(fork_id)
        generation = self._generations.get(request_id)
        running = [request for request in generation or () if request.index == index and request.pin_name is None]
        if generation is not None and isinstance(generation.selection, BeamSearch):
            raise RequestError(
                f"the beams of {request_id!r} are still searching; fork it when it has ended", "request_id"
            )
        if running:
            states, most_tokens = self._intake.fork_states(running[0], params)
            forks = self._decoding.fork_running(running[0], fork_id, params, states, most_tokens)
            self._generations[fork_id] = forks
        elif (ended := self._decoding.ended.get(request_id, index)) is not None:
            check_fork(params)
            self._add(fork_id, list(ended.token_ids), params, ended.options, keys=ended.keys)
        else:
            raise UnknownRequestError(
                f"output {index} of request {request_id!r} is not here, so it cannot be forked", "request_id"
            )

    def pin(
        self, request_id: str, name: str, prompt_token_ids: Sequence[int], **options: Unpack[RequestOptions]
    ) -> None:
        """Compute a prefix, unless it is cached, and keep it until `unpin`. To pin the same under the same name once
        more changes nothing.

        The only delta of the request says when it is pinned, or why not.

        Args:
            options: whom it is for: `cache_salt` and `tenant` as theirs who will use it.

        Raises:
            RequestError: as `validate_pin` does, and for an id that is in use.
        """
        prefix = self.validate_pin(name, prompt_token_ids, **options)
        self._add(request_id, prefix, SamplingParams(max_tokens=1), options).pin_name = name

    def validate_pin(
        self, name: str, prompt_token_ids: Sequence[int], **options: Unpack[RequestOptions]
    ) -> Sequence[int]:
        """What of a prompt would be pinned: whole blocks. Safe to call from any thread.

        Raises:
            RequestError: the prompt is invalid or shorter than a block, the name is another prefix's, or prefixes are
                not cached.
        """
        return self._intake.prefix_to_pin(name, prompt_token_ids, self._intake.prefix_keys(options))

    def unpin(self, name: str) -> None:
        """Let a pinned prefix go the way of others. From any thread. Raises `UnknownPinError` if there is none of that
        name."""
        try:
            self.memory.unpin(name)
        except PinError as error:
            raise UnknownPinError(str(error), "name") from error

    def cancel(self, request_id: str) -> None:
        """Stop a request and free its memory; nothing happens if it is not there any more."""
        self._deadlines.discard(request_id)
        for request in list(self._generations.get(request_id, ())):
            self._decoding.end_sequence(request)

    def step(self) -> list[Delta]:
        """Compute one step; returns what it added.

        Raises:
            UnavailableError: a rank is lost; no step will succeed any more.
        """
        self._executor.check_ranks()
        if late := [name for name in self._deadlines.expired(time.monotonic()) if name in self._generations]:
            return [self._expire(request_id) for request_id in late]
        if refused := self._take_adapters():
            return refused
        drafts = self._propose()
        start = time.perf_counter()  # guesses are not among the step's times: these say what checking them costs
        try:
            scheduled = self._scheduler.schedule(drafts)
            if hopeless := self._scheduler.take_unschedulable():
                return self._give_up(hopeless)
            if not scheduled:
                return self._wait_for_pages()
            logits = self._compute(scheduled)
            choice = self._decoding.choose(scheduled, logits)
            num_tokens, attended = sum(s.num_tokens for s in scheduled), sum(s.num_attended for s in scheduled)
            queue_s: list[float] = []
            for s in scheduled:
                if (
                    s.request.num_computed == s.request.num_cached_tokens and not s.request.max_computed
                ):  # its first chunk
                    with attribute_failures(s.request):
                        self._meter.note_begun(s.request)
                    queue_s.append(start - s.request.submitted_at)
        except SequenceFailure as failure:  # the others go on in the next step
            self._scheduler.abort_step()
            request_id = failure.request.request_id
            return self._fail(request_id, failure_of(request_id, failure))
        except BaseException:
            self._scheduler.abort_step()
            raise
        if self._scheduler.commit_step():
            self._stalled_since = None
        deltas = self._decoding.apply(choice)
        for delta in deltas:
            if delta.ends_request:
                self._deadlines.discard(delta.request_id)
        for request in [s.request for s in scheduled if s.request.pin_name is not None]:
            if not request.num_uncomputed:
                deltas.append(self._pin(request))
        seconds = time.perf_counter() - start
        self._recovery.observe_step(num_tokens, attended, seconds)
        self._meter.note_times(seconds, queue_s)
        if num_tokens > sum(s.samples for s in scheduled):  # not only decodes
            self._meter.note_step(seconds, time.monotonic())
        return deltas

    def _propose(self) -> dict[Request, list[int]]:
        """Guesses of what follows the last tokens of sequences that decode."""
        if self._speculation is None:
            return {}
        decoding = self._scheduler.decoding()
        guesses = self._speculation.propose(decoding, self.config.max_num_batched_tokens - len(decoding))
        return {request: tokens for request, tokens in zip(decoding, guesses, strict=True) if tokens}

    def _compute(self, scheduled: list[Scheduled]) -> torch.Tensor:
        """Map, lay out and run the step; returns the logits of the rows that sample."""
        self.memory.ensure(demands(scheduled))
        slots = self._adapters.slots
        if slots:
            scheduled.sort(key=lambda s: (memory_of(s).view, slots.get(s.request.group.adapter or "", -1)))
        else:
            scheduled.sort(key=lambda s: memory_of(s).view)
        plan = plan_step(scheduled, self.memory, adapter_slots=slots)
        self.memory.plan(next_demands(scheduled))
        return self._executor.run(plan, self.memory)

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
        for pin in self.report().pins:
            logger.info("pinned %r: %d tokens, %.1f MiB", pin.name, pin.num_tokens, pin.num_bytes / 2**20)

    def _has_room(self, lengths: Sequence[int]) -> bool:
        return sum(map(self.memory.pages_for, lengths)) <= self.memory.num_free_pages

    def _run_warm_up(self, prompts: Sequence[tuple[list[int], SamplingParams]]) -> None:
        for i, (token_ids, params) in enumerate(prompts):
            self._add(f"warm-up {i}", token_ids, params, {}, keys=WARM_UP_KEYS)
        while self.has_work:
            for delta in self.step():
                if delta.error is not None:  # random tokens may be too much for a model, and requests fine
                    logger.warning("%s: %s", delta.request_id, delta.error)

    def _submit_restored(self, request_id: str, prefix: CachedPrefix) -> None:
        if prefix.pin_name is None:
            options: RequestOptions = {"adapter": adapter_of(prefix.keys)}
            self._add(request_id, prefix.token_ids, SamplingParams(max_tokens=1), options, keys=prefix.keys)
        else:
            token_ids = self._intake.prefix_to_pin(prefix.pin_name, prefix.token_ids, prefix.keys)
            request = self._add(request_id, token_ids, SamplingParams(max_tokens=1), {}, keys=prefix.keys)
            request.pin_name = prefix.pin_name

    def _begin_counting(self) -> None:
        """What has run so far were no requests: nobody may fork them, and load reports do not speak of them."""
        self._decoding.ended.clear()
        self._meter.reset_measurements()
        self.memory.prefixes.reset_counts()
        if self._speculation is not None:
            self._speculation.begin()

    def _pin(self, request: Request) -> Delta:
        """Keep what a request has computed, which ends with that."""
        assert request.memory is not None
        assert request.pin_name is not None
        try:
            self.memory.pin(request.pin_name, request.memory, request.num_computed)
            delta = Delta(request.request_id, (), "", "stop", num_cached_tokens=request.num_cached_tokens or 0)
        except PinError as error:
            delta = Delta(request.request_id, (), "", error=RequestError(str(error), "name"))
        except BaseException as error:  # noqa: BLE001 - raised again unless it is the request's
            delta = Delta(request.request_id, (), "", error=failure_of(request.request_id, error))
        self.cancel(request.request_id)
        return delta

    def _add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        *,
        keys: tuple[str, ...] | None = None,
    ) -> Request:
        """
        Args:
            keys: of its prefixes, if not those of the options.
        """
        self._check_id(request_id)
        timeout_s = options.get("timeout_s")
        if timeout_s is not None:
            check_timeout(timeout_s)
        self.check_adapter(options.get("adapter"))
        generation = self._intake.create_request(request_id, prompt_token_ids, params, options, keys)
        [request] = generation.sequences
        request.submitted_at = time.perf_counter()
        if timeout_s is None:
            self._deadlines.discard(request_id)
        else:
            self._deadlines.add(request_id, time.monotonic() + timeout_s)
        try:
            self._adapters.add(request.group)
        except BaseException:
            self._deadlines.discard(request_id)
            raise
        self._generations[request_id] = generation  # last: what fails before leaves nothing behind
        return request

    def _check_id(self, request_id: str) -> None:
        if request_id in self._generations:
            raise RequestError(f"request id {request_id!r} is in use", "request_id")

    def _expire(self, request_id: str) -> Delta:
        self.cancel(request_id)
        error = DeadlineError(
            f"request {request_id!r} has not finished within its timeout_s; allow more, or send it later"
        )
        return Delta(request_id, (), "", error=error)

    def _give_up(self, hopeless: list[SequenceGroup]) -> list[Delta]:
        """End groups that the budget has no room for any more, and cannot go on one by one."""
        self._scheduler.abort_step()
        error = EngineError("the KV cache has become too small for the beams of this request")
        generations = [self._generations[group.members[0].request_id] for group in hopeless if group.members]
        return [delta for generation in generations for delta in self._decoding.fail(generation, error)]

    def _open_adapters(self) -> AdapterStore | None:
        config, layers = self.config, self.model.adapters
        if layers is None:
            return None
        return AdapterStore(config.adapters, layers, config.max_loaded_adapters, self._executor.ranks)

    def _take_adapters(self) -> list[Delta]:
        """Let those begin whose adapters have been loaded; whoever waits for one that cannot be is told why."""
        return [
            delta for request_id, error in self._adapters.advance().items() for delta in self._fail(request_id, error)
        ]

    def _fail(self, request_id: str, error: FolioError) -> list[Delta]:
        self._deadlines.discard(request_id)
        return list(self._decoding.fail(self._generations[request_id], error))

    def _wait_for_pages(self) -> list[Delta]:
        """Nothing runs and nothing can begin: the device has less memory than the budget says, for now or for good."""
        if not self.has_work:
            return []
        if self._adapters.wait(_WAIT_FOR_PAGES_S):
            self._stalled_since = None
            return []
        now = time.monotonic()
        self._stalled_since = self._stalled_since or now
        if now - self._stalled_since < _GIVE_UP_S:
            self.memory.wait_for_progress(_WAIT_FOR_PAGES_S)
            return []
        self._stalled_since = None
        request_id = self._scheduler.first_blocked.request_id
        self.cancel(request_id)
        error = EngineError("the device has no memory for this request, although the budget has")
        return [Delta(request_id, (), "", error=error)]

    def adapters(self) -> AdapterReport:
        """Which adapters are loaded. From any thread."""
        return self._adapters.report

    def report(self) -> MemoryReport:
        """Where KV memory is. From any thread."""
        return self.memory.report()

    def load(self, arriving: Sequence[tuple[int, int]] = (), *, most_keys: int = MOST_KEYS) -> ReplicaReport:
        """How busy this engine is, and what its prefix cache has. From any thread.

        Args:
            arriving: requests that will be submitted: their tokens, and how many of them are expected to be cached.
            most_keys: of cached prefixes.
        """
        held = [(len(r.token_ids), r.expected_cached_tokens or 0) for r in self._adapters.waiting_groups]
        return make_report(
            self.memory,
            self._scheduler,
            self._recovery,
            self._meter,
            arriving=(*arriving, *held),
            step_tokens=self.config.max_num_batched_tokens,
            now=time.monotonic(),
            most_keys=most_keys,
        )

    def take_activity(self) -> Activity:
        """What this engine has done since this was last asked for. From any one thread."""
        return self._meter.take_activity(self._scheduler.num_preempted)

    @property
    def speculation(self) -> SpeculationCounts | None:
        """What has come of guesses; `None` without speculation. From any thread."""
        return None if self._speculation is None else self._speculation.counts

    def set_budget(self, budget_bytes: int, revision: int) -> BudgetAnswer:
        """Change how much memory the KV cache may take (`KVMemory.set_budget`). From any thread.

        Raises:
            RequestError: the budget is out of bounds.
        """
        try:
            return self.memory.set_budget(budget_bytes, revision)
        except BudgetError as error:
            raise RequestError(str(error), "budget_bytes") from error

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless memory adds up; without requests, unless all of it is free."""
        self.memory.check_integrity()
        if self._speculation is not None:
            self._speculation.check_integrity()
        if not self._generations:
            self.memory.check_idle()
            if self._speculation is not None:
                self._speculation.check_idle()

    def close(self) -> None:
        """Cancel everything and give all memory back."""
        self._undo.close()

    def _cancel_all(self) -> None:
        for request_id in list(self._generations):
            self.cancel(request_id)


def _max_model_len(config: EngineConfig, model: LoadedModel, memory: KVMemory) -> int:
    """The context: what was asked for, else what the model has, as far as the KV cache can hold one whole sequence."""
    if config.max_model_len is not None and config.max_model_len > memory.max_tokens:
        raise ConfigError(
            f"max_model_len {config.max_model_len} does not fit into the KV cache of {memory.max_tokens} tokens; "
            "raise kv_memory_bytes or lower max_model_len"
        )
    if config.max_model_len is None and model.max_positions > memory.max_tokens:
        logger.warning("the KV cache limits the context from %d to %d tokens", model.max_positions, memory.max_tokens)
    return memory.max_tokens


@contextmanager
def _config_errors() -> Iterator[None]:
    """A kernel that was asked for and is not there, or cannot read such a cache, is the settings' fault."""
    try:
        yield
    except Exception as error:
        cause = error if isinstance(error, KernelError) else error.__cause__
        if isinstance(cause, KernelError) and not isinstance(error, ConfigError):
            raise ConfigError(f"these settings do not work here: {error}") from error
        raise
