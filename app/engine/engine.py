"""The engine: one model, its KV memory, and the loop that schedules, maps, computes and samples.

No Ray and no asyncio here; one thread calls it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from app.config import EngineConfig
from app.engine.batch import demands, memory_of, next_demands, num_attended, plan_step
from app.engine.detokenizer import TextStream
from app.engine.executor import Executor
from app.engine.kv_plan import build_memory
from app.engine.load import MOST_KEYS, LoadMeter, make_report
from app.engine.model_loader import LoadedModel
from app.engine.params import SamplingParams
from app.engine.pinned import encode_pinned
from app.engine.recovery import RecoveryModel
from app.engine.request import Delta, Request, SequenceGroup
from app.engine.sampler import NOTHING, sample
from app.engine.scheduler import Scheduled, Scheduler
from app.engine.self_test import self_test
from app.engine.tensor_parallel.processes import spawn_ranks
from app.engine.tensor_parallel.spec import Launch
from app.errors import ConfigError, ContextLengthError, EngineError, RequestError
from app.fleet.keys import extra_keys
from app.fleet.report import ReplicaReport
from kernels import KernelError
from vmem import BudgetAnswer, BudgetError, KVMemory, MemoryReport, PinError, VmemError

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
        try:
            self._executor = Executor(config, launch)
        except KernelError as error:
            raise ConfigError(f"these settings do not work here: {error}") from error
        self.model = self._executor.model
        try:
            self.memory = build_memory(config, self.model, self._executor.layers, self._executor.ranks)
        except BaseException as error:
            self._executor.close()
            if isinstance(error, VmemError):
                raise ConfigError(f"these settings do not work here: {error}") from error
            raise
        try:
            if admit is not None:
                admit(self.memory)
            self.max_model_len = _max_model_len(config, self.model, self.memory)
            self_test(self._executor, self.memory.groups, config.kv_view)
            self._executor.open(self.memory)
            self._executor.started()
        except BaseException as error:
            try:
                self.memory.close()
            finally:
                self._executor.close()
            if isinstance(error, KernelError) or isinstance(
                error.__cause__, KernelError
            ):  # the kernel asked for cannot read such a cache
                raise ConfigError(f"these settings do not work here: {error}") from error
            raise
        self._recovery = RecoveryModel(config.max_num_batched_tokens)
        self._scheduler = Scheduler(
            self.memory,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            view=config.kv_view,
            recovery=self._recovery,
            policy=config.preemption,
        )
        self._meter = LoadMeter()
        self._requests: dict[str, Request] = {}
        self._num_arrivals = 0
        self._stalled_since: float | None = None
        try:
            self._recovery.try_swaps(self.memory, config.kv_view, self.model.module.device)
            self._pin_configured()
        except BaseException:
            self.close()
            raise

    @property
    def available(self) -> bool:
        """Whether all ranks are there. From any thread."""
        return self._executor.available

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> int:
        """Check a request against the model; returns its `max_tokens`. Safe to call from any thread.

        Raises:
            RequestError: an empty prompt, an unknown token, or stop strings without a tokenizer.
            ContextLengthError: prompt and output do not fit.
        """
        if not prompt_token_ids:
            raise RequestError("the prompt is empty; it needs at least one token", "prompt")
        if not (min(prompt_token_ids) >= 0 and max(prompt_token_ids) < self.model.vocab_size):
            raise RequestError(
                f"token ids must be between 0 and {self.model.vocab_size - 1}, "
                f"got {min(prompt_token_ids)} to {max(prompt_token_ids)}",
                "prompt",
            )
        if params.stop and self.model.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this engine runs without one", "stop")
        room = self.max_model_len - len(prompt_token_ids)
        if room < 1 or (params.max_tokens or 1) > room:
            raise ContextLengthError(
                f"the context is {self.max_model_len} tokens, but the prompt has {len(prompt_token_ids)} "
                f"and {params.max_tokens or 1} are to be generated",
                "prompt" if room < 1 else "max_tokens",
            )
        return params.max_tokens or room

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        expected_cached_tokens: int | None = None,
    ) -> None:
        """Queue a request.

        Args:
            priority: the lower goes first, and is preempted last.
            cache_salt: only requests with the same one share cached prefixes.
            expected_cached_tokens: how much of the prompt the sender thinks is cached here; it changes nothing but
                `load`.

        Raises:
            RequestError: as `validate` does, and for an id that is in use.
        """
        request = self._add(request_id, prompt_token_ids, params, priority, cache_salt)
        request.expected_cached_tokens = expected_cached_tokens

    def fork(self, request_id: str, fork_id: str, params: SamplingParams) -> None:
        """Continue a request that has not finished a second time, from its present state, without computing it again.

        What both have is shared; they are preempted together. The fork's deltas begin with its own first token.

        Raises:
            RequestError: there is no such request, the id is in use, or all of the group could not run together.
        """
        parent = self._requests.get(request_id)
        if parent is None or parent.pin_name is not None:
            raise RequestError(f"request {request_id!r} is not running, so it cannot be forked", "request_id")
        self._check_id(fork_id)
        num_tokens = len(parent.token_ids)
        max_tokens = parent.num_output_tokens + self.validate(parent.token_ids, params)
        most = [r.most_tokens for r in parent.group.members]
        most.append(len(parent.prompt_token_ids) + max_tokens)
        if not self.memory.fit_together(most):
            raise RequestError(
                f"{len(most)} sequences of up to {max(most)} tokens do not fit into the KV cache together", "n"
            )
        if max(self._scheduler.num_running, len(most) - 1) + 1 > self._scheduler.max_num_seqs:
            raise RequestError(
                f"{self._scheduler.max_num_seqs} sequences run at once; there is no room for a fork", "n"
            )
        text = self._text(parent.prompt_token_ids, params)
        if text is not None:
            for token_id in parent.token_ids[len(parent.prompt_token_ids) :]:
                text.push(token_id)
            text.flush()  # what the parent holds back is the parent's
        chain = parent.chain.fork(num_tokens)
        memory = None
        if parent.memory is not None and parent.num_computed:
            try:
                memory = self.memory.fork(parent.memory, parent.num_computed, chain=chain)
            except VmemError as error:
                raise RequestError(f"{request_id!r} cannot be forked now: {error}", "request_id") from error
        child = Request(
            fork_id, parent.prompt_token_ids, params, max_tokens, text, chain, parent.group, parent.token_ids.copy()
        )
        child.num_cached_tokens = parent.num_cached_tokens
        if memory is not None:
            child.memory, child.num_computed, child.stops_at = memory, parent.num_computed, parent.stops_at
        self._requests[fork_id] = child

    def pin(
        self, request_id: str, name: str, prompt_token_ids: Sequence[int], *, cache_salt: str | None = None
    ) -> None:
        """Compute a prefix, unless it is cached, and keep it until `unpin`.

        The only delta of the request says when it is pinned, or why not.

        Raises:
            RequestError: as `validate_pin` does, and for an id that is in use.
        """
        prefix = self.validate_pin(name, prompt_token_ids)
        request = self._add(request_id, prefix, SamplingParams(max_tokens=1), 0, cache_salt)
        request.pin_name = name

    def validate_pin(self, name: str, prompt_token_ids: Sequence[int]) -> Sequence[int]:
        """What of a prompt would be pinned: whole blocks. Safe to call from any thread.

        Raises:
            RequestError: the prompt is invalid or shorter than a block, the name is taken, or prefixes are not cached.
        """
        if not self.config.prefix_cache:
            raise RequestError("nothing can be pinned: prefix_cache is off", "name")
        unit = self.memory.unit_tokens
        prefix = prompt_token_ids[: len(prompt_token_ids) // unit * unit]
        if not prefix:
            raise RequestError(
                f"a prefix of {len(prompt_token_ids)} tokens is shorter than the {unit} that are shared at least",
                "prompt",
            )
        self.validate(prefix, SamplingParams(max_tokens=1))
        try:
            self.memory.check_pin(name, len(prefix))
        except PinError as error:
            raise RequestError(str(error), "name") from error
        return prefix

    def unpin(self, name: str) -> None:
        """Let a pinned prefix go the way of others. From any thread. Raises `RequestError` if there is none of that
        name."""
        try:
            self.memory.unpin(name)
        except PinError as error:
            raise RequestError(str(error), "name") from error

    def cancel(self, request_id: str) -> None:
        """Stop a request and free its memory; nothing happens if it is not there any more."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._scheduler.remove(request)
            self._meter.note_ended(request, time.monotonic())

    def step(self) -> list[Delta]:
        """Compute one step; returns what it added, at most one delta a request.

        Raises:
            UnavailableError: a rank is lost; no step will succeed any more.
        """
        self._executor.check()
        start = time.perf_counter()
        try:
            scheduled = self._scheduler.schedule()
            if not scheduled:
                return self._wait_for_pages()
            logits = self._compute(scheduled)
            sampling = [s.request for s in scheduled if s.samples]
            sampled = sample(logits, [request.sampling for request in sampling]) if sampling else NOTHING
            num_tokens, attended = sum(s.num_tokens for s in scheduled), num_attended(scheduled)
        except BaseException:
            self._scheduler.abort()
            raise
        for s in scheduled:
            if s.request.num_computed == s.request.num_cached_tokens and not s.request.furthest:  # its first chunk
                self._meter.note_begun(s.request)
        if self._scheduler.done():
            self._stalled_since = None
        deltas = []
        for request, token, is_sound in zip(sampling, sampled.token_ids, sampled.sound, strict=True):
            if is_sound:
                delta = request.append(token, self.model.eos_token_ids)
            else:
                delta = Delta(
                    request.request_id, (), "", error=EngineError("the model's logits are not finite numbers")
                )
            deltas.append(delta)
            if delta.finished:
                self.cancel(request.request_id)
        for request in [s.request for s in scheduled if s.request.pin_name is not None]:
            if not request.num_uncomputed:
                deltas.append(self._pin(request))
        seconds = time.perf_counter() - start
        self._recovery.observe_step(num_tokens, attended, seconds)
        if num_tokens > len(sampling):  # not only decodes
            self._meter.note_step(seconds, time.monotonic())
        return deltas

    def _compute(self, scheduled: list[Scheduled]) -> torch.Tensor:
        """Map, lay out and run the step; returns the logits of the rows that sample."""
        self.memory.ensure(demands(scheduled))
        scheduled.sort(key=lambda s: memory_of(s).view)
        plan = plan_step(scheduled, self.memory)
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

    def _pin(self, request: Request) -> Delta:
        """Keep what a request has computed, which ends with that."""
        assert request.memory is not None
        assert request.pin_name is not None
        try:
            self.memory.pin(request.pin_name, request.memory, request.num_computed)
            delta = Delta(request.request_id, (), "", "stop", num_cached_tokens=request.num_cached_tokens or 0)
        except PinError as error:
            delta = Delta(request.request_id, (), "", error=RequestError(str(error), "name"))
        self.cancel(request.request_id)
        return delta

    def _add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        priority: int,
        cache_salt: str | None,
    ) -> Request:
        self._check_id(request_id)
        max_tokens = self.validate(prompt_token_ids, params)
        chain = self.memory.chain(extra_keys(cache_salt))
        group = SequenceGroup(priority, self._num_arrivals)
        self._num_arrivals += 1
        prompt = list(prompt_token_ids)
        request = Request(
            request_id, prompt, params, max_tokens, self._text(prompt, params), chain, group, prompt.copy()
        )
        self._requests[request_id] = request
        self._scheduler.add(group)
        return request

    def _check_id(self, request_id: str) -> None:
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use", "request_id")

    def _text(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> TextStream | None:
        if self.model.tokenizer is None:
            return None
        return TextStream(self.model.tokenizer.backend_tokenizer, prompt_token_ids, params.stop)

    def _wait_for_pages(self) -> list[Delta]:
        """Nothing runs and nothing can begin: the device has less memory than the budget says, for now or for good."""
        if not self.has_work:
            return []
        now = time.monotonic()
        self._stalled_since = self._stalled_since or now
        if now - self._stalled_since < _GIVE_UP_S:
            self.memory.wait_for_progress(_WAIT_FOR_PAGES_S)
            return []
        self._stalled_since = None
        request_id = self._scheduler.next_waiting.request_id
        self.cancel(request_id)
        error = EngineError("the device has no memory for this request, although the budget has")
        return [Delta(request_id, (), "", error=error)]

    def report(self) -> MemoryReport:
        """Where KV memory is. From any thread."""
        return self.memory.report()

    def load(self, arriving: Sequence[tuple[int, int]] = (), *, most_keys: int = MOST_KEYS) -> ReplicaReport:
        """How busy this engine is, and what its prefix cache has. From any thread.

        Args:
            arriving: requests that will be submitted: their tokens, and how many of them are expected to be cached.
            most_keys: of cached prefixes.
        """
        return make_report(
            self.memory,
            self._scheduler,
            self._recovery,
            self._meter,
            arriving=arriving,
            step_tokens=self.config.max_num_batched_tokens,
            now=time.monotonic(),
            made_at=time.time(),
            most_keys=most_keys,
        )

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
        if not self._requests:
            self.memory.check_idle()

    def close(self) -> None:
        """Cancel everything and give all memory back."""
        for request_id in list(self._requests):
            self.cancel(request_id)
        try:
            self.memory.close()
        finally:
            self._executor.close()


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
