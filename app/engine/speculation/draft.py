"""Draft model: a smaller model that proposes draft tokens, with a KV memory of its own.

Its cached tokens of a sequence may lag behind, and may end with rejected draft tokens:

    the sequence  | prompt and output                     | last |
    cached        | as the sequence's    | rejected       |
                                         ^ it continues here: first with tokens that it lacks, then with its own drafts

All sequences of a step are computed together: one forward for tokens that the draft model lacks, whose logits give the
first draft tokens, and one forward for each further draft token.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import OrderedDict, abc, deque
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from folio.app.config.engine import ResolvedConfig
from folio.app.config.machine import num_threads
from folio.app.engine.execution.captured_graphs import CapturedGraphs
from folio.app.engine.execution.model_runner import ObservedLayers
from folio.app.engine.memory.kv_plan import build_memory, bytes_per_token
from folio.app.engine.memory.memory_profile import DevicePlan
from folio.app.engine.model.loader import LoadedModel
from folio.app.engine.ranks.executor import Executor
from folio.app.engine.ranks.processes import spawn_ranks
from folio.app.engine.ranks.self_test import self_test
from folio.app.engine.report import StepTimes
from folio.app.engine.request.faults import SequenceFailure, attribute_failures
from folio.app.engine.request.request import Request, Sequence
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.sampling.sampler import Sampled, sample, sample_apart
from folio.app.engine.schedule.preemption import LinearCost
from folio.app.engine.schedule.scheduled import Scheduled
from folio.app.errors import ConfigError
from folio.app.models.weights.store import WeightStore
from folio.kernels import KernelError
from folio.vmem import (
    DevicePages,
    IntegrityError,
    KVMemory,
    MapError,
    OutOfPages,
    SequenceMemory,
    StepDemand,
    VmemError,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _DraftState:
    """The draft model's state of a sequence.

    Attributes:
        shadow: a copy of the sequence with the draft tokens and the draft model's memory.
        num_agreed: tokens of the shadow that are known to equal the sequence's.
    """

    shadow: Sequence
    num_agreed: int

    @property
    def memory(self) -> SequenceMemory:
        assert self.shadow.memory is not None
        return self.shadow.memory


@dataclass(slots=True, eq=False)
class _Task:
    """A sequence's work in this step.

    Attributes:
        num_tokens: uncomputed tokens to compute.
        num_drafts: draft tokens to propose; 0 while uncomputed tokens remain.
        first: tokens cached before.
    """

    sequence: Sequence
    draft: _DraftState
    num_tokens: int
    num_drafts: int
    first: int

    @property
    def end(self) -> int:
        """Tokens cached afterwards: all but the last draft token."""
        return self.first + self.num_tokens + max(self.num_drafts - 1, 0)


class DraftProposer:
    """Proposes by running a draft model, on rank 0 only, whatever the number of the target model's ranks.

    A draft token is sampled with the sequence's own parameters and with the noise that the model will use for that
    token, so that both often agree even at high temperatures.

    A step computes at most `max_num_batched_tokens` tokens that the draft model lacks, fewest remaining first; a
    sequence gets no draft tokens before it has caught up. That is a prefill chunk of a smaller model, and delays
    decodes no more than the larger model's chunks.

    When memory is full, idle sequences are dropped, and new sequences wait without draft tokens; the same applies when
    the device refuses memory. Common prefixes are computed once, as in the model's memory.

    Args:
        config: the engine's.
        target: the target model, with this rank's `layers`.
        weights: see `load_model`.

    Attributes:
        share: part of the KV budget, proportional to bytes per token without regard to windows, so that both memories
            have room for equally many tokens.
        memory: the draft model's KV memory, after `open`.

    Raises:
        ConfigError: the vocabularies differ, or the model has recurrent states, which cannot be rolled back.
        ModelError: the model cannot be loaded.
    """

    def __init__(
        self, config: ResolvedConfig, target: LoadedModel, layers: ObservedLayers, weights: WeightStore | None = None
    ) -> None:
        assert config.draft_model is not None
        self._num_ranks = config.tensor_parallel_size
        self._step_tokens = config.max_num_batched_tokens
        self._config = dataclasses.replace(
            config,
            model=config.draft_model,
            speculation="off",
            draft_model=None,
            tensor_parallel_size=1,
            async_scheduling="off",  # proposals are needed at once
            num_threads=num_threads(config),
            max_model_len=None,
            max_num_batched_tokens=config.max_num_batched_tokens + config.max_draft_tokens,
            kv_memory_floor_bytes=0,
            block_tokens=None,
            swap_bytes=0,
            pinned_prompts={},
            pinned_system_prompts={},
            adapters={},
            adapter_dir=None,
        )
        self._states: OrderedDict[Sequence, _DraftState] = OrderedDict()  # least recently used first
        self._times = LinearCost((1.0, 1e2, 1e5))
        self.memory: KVMemory
        with ExitStack() as undo:
            try:
                self._executor = Executor(self._config, spawn_ranks, weights)
            except KernelError as error:
                raise ConfigError(f"draft_model {config.draft_model!r} cannot run here: {error}") from error
            undo.callback(self._executor.close)
            _check_compatible(config.draft_model, self._executor, target)
            own = bytes_per_token(self._executor.layers, self._executor.model.cache_dtype)
            self.share = own / (own + bytes_per_token(layers, target.cache_dtype))
            self._undo = undo.pop_all()

    def open(self, max_model_len: int, plan: DevicePlan | None = None, pages: DevicePages | None = None) -> None:
        """Create the memory, after the target's KV memory, and run the self-test on it.

        Args:
            max_model_len: the target's context; the draft model's may be shorter.
            plan: plan of a CUDA device's memory, of which this model's cache gets its share.
            pages: pages of a shared device.

        Raises:
            ConfigError: the share of the budget is too small, or no kernel reads the cache.
            ModelError: the self-test failed.
            OutOfPages: other models occupy the shared device's memory now.
        """
        model = self._executor.model
        config = dataclasses.replace(
            self._config,
            max_model_len=min(max_model_len, model.max_positions),
            tensor_parallel_size=self._num_ranks,  # divides the machine's memory
        )
        try:
            self.memory = build_memory(config, model, self._executor.layers, share=self.share, plan=plan, pages=pages)
            self._undo.callback(self.memory.close)
            self_test(self._executor, self.memory.groups, config.kv_view)
            self._executor.bind_memory(self.memory, pages)
            self._executor.enforce_step_timeout()
        except (KernelError, VmemError) as error:
            if pages is not None and isinstance(error, OutOfPages):
                raise
            raise ConfigError(f"draft_model {config.model!r} cannot run with these settings: {error}") from error
        logger.info(
            "draft model %r: %.1f %% of the KV budget, up to %d tokens for each request",
            config.model,
            self.share * 100,
            self.memory.max_tokens,
        )

    @property
    def models(self) -> tuple[LoadedModel, ...]:
        return (self._executor.model,)

    @property
    def graphs(self) -> CapturedGraphs | None:
        return self._executor.graphs

    @property
    def step_times(self) -> StepTimes:
        return StepTimes(*self._times.per_unit())

    def propose(self, sequences: abc.Sequence[Sequence], most: abc.Sequence[int]) -> list[list[int]]:
        room = self.memory.max_tokens + 1  # the last draft token is not cached
        lengths = {
            sequence: min(count, room - len(sequence.token_ids))
            for sequence, count in zip(sequences, most, strict=True)
            if count > 0
        }
        for sequence in [sequence for sequence in lengths if lengths[sequence] < 1]:
            del lengths[sequence]  # beyond the draft model's context, for good
            self.forget_sequence(sequence)
        tasks: list[_Task] = []
        drafts: dict[Sequence, list[int]] = {}
        try:
            self._plan_tasks(lengths, tasks)
            if tasks:
                drafts = self._run_tasks(tasks)
        except MapError as error:
            logger.warning("no draft tokens in this step: the draft model's memory cannot be mapped: %s", error)
            self._abort(tasks)
        except BaseException:
            self._abort(tasks)
            raise
        return [drafts.get(sequence, []) for sequence in sequences]

    def forget_sequence(self, sequence: Sequence) -> None:
        draft = self._states.pop(sequence, None)
        if draft is not None:
            self.memory.free(draft.memory)

    def forget_all(self) -> None:
        for sequence in list(self._states):
            self.forget_sequence(sequence)

    def check_integrity(self) -> None:
        self.memory.check_integrity()
        if not self._states:
            self.memory.check_idle()
        for sequence, draft in self._states.items():
            shadow = draft.shadow
            if shadow.token_ids[: draft.num_agreed] != sequence.token_ids[: draft.num_agreed]:
                raise IntegrityError(f"the draft model's tokens of {sequence.request_id!r} differ")
            if not shadow.num_computed <= draft.memory.num_tokens or shadow.num_computed > len(shadow.token_ids):
                raise IntegrityError(
                    f"{sequence.request_id!r} has {shadow.num_computed} tokens in {draft.memory.num_tokens} places"
                )

    def close(self) -> None:
        self.forget_all()
        self._undo.close()

    # ---- planning ----

    def _plan_tasks(self, lengths: dict[Sequence, int], tasks: list[_Task]) -> None:
        """Allocate memory for as many sequences as possible: fewest uncomputed tokens first, new sequences last."""
        known = [sequence for sequence in lengths if sequence in self._states]
        for sequence in known:
            with attribute_failures(sequence):
                self._follow(self._states[sequence], sequence)
            self._states.move_to_end(sequence)
        known.sort(key=lambda sequence: self._states[sequence].shadow.num_uncomputed)
        idle = list(self._states)[: len(self._states) - len(known)]
        # From the left the next to plan; from the right the next to drop: least recently used, then longest to compute.
        queue = deque(known + idle[::-1])
        budget = self._step_tokens
        while budget > 0 and queue and queue[0] in lengths:
            sequence = queue.popleft()
            with attribute_failures(sequence):
                while not (taken := self._add_task(sequence, lengths[sequence], budget, tasks)) and queue:
                    self.forget_sequence(queue.pop())
            budget -= taken
        for sequence, count in lengths.items():
            if budget > 0 and sequence not in self._states:
                with attribute_failures(sequence):
                    if self._open(sequence, count, queue, tasks):
                        budget -= (taken := self._add_task(sequence, count, budget, tasks))
                        if not taken:
                            self.forget_sequence(sequence)

    def _follow(self, draft: _DraftState, sequence: Sequence) -> None:
        """Keep the accepted draft tokens, and replace the others by the sequence's tokens."""
        shadow, token_ids = draft.shadow, sequence.token_ids
        agreed, end = draft.num_agreed, min(len(shadow.token_ids), len(token_ids))
        while agreed < end and shadow.token_ids[agreed] == token_ids[agreed]:
            agreed += 1
        shadow.token_ids[agreed:] = token_ids[agreed:]
        draft.num_agreed = len(token_ids)
        shadow.num_computed = min(shadow.num_computed, agreed, len(token_ids) - 1)  # the last token's logits are needed
        if shadow.num_computed < draft.memory.num_tokens:
            self.memory.truncate(draft.memory, shadow.num_computed)

    def _add_task(self, sequence: Sequence, count: int, budget: int, tasks: list[_Task]) -> int:
        """Append a task, with its blocks allocated and announced; returns its tokens, 0 if there are too few blocks."""
        draft = self._states[sequence]
        shadow, memory = draft.shadow, draft.memory
        num_tokens = min(shadow.num_uncomputed, budget)
        num_drafts = count if num_tokens == shadow.num_uncomputed else 0
        task = _Task(sequence, draft, num_tokens, num_drafts, shadow.num_computed)
        try:
            # `start` is where this task begins: layers with a window must keep the tokens that the next task rolls back
            # to.
            self.memory.append(memory, task.end, start=task.first)
        except (OutOfPages, MapError) as error:
            logger.debug("no room for the draft of %s: %s", sequence.request_id, error)
            return 0
        # Draft tokens are not announced: they must not enter the prefix cache.
        self.memory.prefixes.stage_prefix(memory, shadow.token_ids, task.first, task.first + num_tokens)
        tasks.append(task)
        return num_tokens

    def _open(self, sequence: Sequence, count: int, idle: deque[Sequence], tasks: abc.Sequence[_Task]) -> bool:
        """Begin to draft for a new sequence, if it and the remainder of all others fit into memory."""
        chain = self.memory.prefixes.chain(sequence.chain.keys)
        match = self.memory.prefixes.match(chain, sequence.token_ids)
        if match.is_being_computed and any(not task.num_drafts for task in tasks):
            return False  # another sequence is computing the same prefix
        needed = self.memory.prefixes.pages_needed(match, len(sequence.token_ids) + count)
        while len(self._states) >= self._config.max_num_seqs or needed + self._reserve > self.memory.num_free_pages:
            if not idle:
                return False
            self.forget_sequence(idle.pop())
        params = SamplingParams()  # unused: drafts are sampled with the sequence's
        request = Request(sequence.request_id, params)
        prompt, token_ids = sequence.prompt_token_ids, sequence.token_ids.copy()
        shadow = Sequence(request, prompt, params, sequence.max_tokens, None, chain, token_ids)
        memory = self.memory.create_sequence(self._config.kv_view, expected_tokens=len(sequence.token_ids))
        try:
            shadow.num_computed = self.memory.share_prefix(memory, chain, sequence.token_ids)
        except BaseException as error:
            self.memory.free(memory)
            if isinstance(error, MapError | OutOfPages):
                return False
            raise
        shadow.memory = memory
        self._states[sequence] = _DraftState(shadow, len(sequence.token_ids))  # from here on `forget_sequence` frees it
        self.memory.prefixes.announce_prefill(memory, len(sequence.token_ids))
        return True

    @property
    def _reserve(self) -> int:
        """Pages that present sequences may still take: for lacking tokens, and at least a block each."""
        per_block = sum(group.layout.num_slices for group in self.memory.groups)
        return sum(
            max(self.memory.pages_still_needed(draft.memory, len(draft.shadow.token_ids)), per_block)
            for draft in self._states.values()
        )

    # ---- computing ----

    def _run_tasks(self, tasks: list[_Task]) -> dict[Sequence, list[int]]:
        self.memory.ensure([StepDemand(task.draft.memory, task.first, task.end) for task in tasks])
        drafts: dict[Sequence, list[int]] = {task.sequence: [] for task in tasks}
        logits = self._run(tasks, [task.num_tokens for task in tasks])
        self.memory.prefixes.commit_prefixes()
        drafting = [task for task in tasks if task.num_drafts]
        position = 0
        while drafting:
            sampled = self._sample(drafting, logits, position)
            position += 1
            sound = [task for task, is_sound in zip(drafting, sampled.sound, strict=True) if is_sound]
            for task, token_id, is_sound in zip(drafting, sampled.token_ids, sampled.sound, strict=True):
                if is_sound:
                    task.draft.shadow.token_ids.append(token_id)
                    drafts[task.sequence].append(token_id)
            drafting = [task for task in sound if task.num_drafts > position]
            if drafting:
                logits = self._run(drafting, [1] * len(drafting))
        self.memory.plan(self._next_demands(tasks))
        return drafts

    def _sample(self, drafting: abc.Sequence[_Task], logits: torch.Tensor, position: int) -> Sampled:
        states, positions = [task.sequence.sampling for task in drafting], [position] * len(drafting)
        try:
            return sample(logits, states, positions)
        except BaseException:
            _, errors = sample_apart(logits, states, positions, [slice(i, i + 1) for i in range(len(states))])
            if not errors or len(errors) == len(states) > 1:
                raise
            i, error = errors.popitem()
            raise SequenceFailure(drafting[i].sequence) from error

    def run(self, scheduled: list[Scheduled]) -> torch.Tensor:
        """Logits `[num_samples, vocab_size]` on the CPU, in the order to which it sorts `scheduled`; blocks must be
        owned and mapped."""
        return self._executor.run(self._executor.planner.plan(scheduled), self.memory)

    def _run(self, tasks: list[_Task], counts: abc.Sequence[int]) -> torch.Tensor:
        """Compute the next `counts` tokens of the tasks, which are sorted like the logits."""
        start = time.perf_counter()
        scheduled = [Scheduled(task.draft.shadow, count) for task, count in zip(tasks, counts, strict=True)]
        logits = self.run(scheduled)
        num_tokens, attended = sum(s.num_tokens for s in scheduled), sum(s.num_attended for s in scheduled)
        self._times.observe((1.0, num_tokens, attended), time.perf_counter() - start)
        for s in scheduled:
            s.sequence.num_computed += s.num_tokens
        places = {s.sequence: place for place, s in enumerate(scheduled)}
        tasks.sort(key=lambda task: places[task.draft.shadow])
        return logits

    def _next_demands(self, tasks: abc.Sequence[_Task]) -> list[StepDemand]:
        """The next step's demands if all draft tokens are accepted."""
        demands = []
        for task in tasks:
            start = task.draft.shadow.num_computed
            end = min(start + max(task.num_drafts + 1, task.num_tokens), self.memory.max_tokens)
            if start < end:
                demands.append(StepDemand(task.draft.memory, start, end))
        return demands

    def _abort(self, tasks: abc.Sequence[_Task]) -> None:
        """Drop the sequences of a failed step, whose caches are undefined."""
        self.memory.prefixes.abort_prefixes()
        for task in tasks:
            self.forget_sequence(task.sequence)


def _check_compatible(name: str, executor: Executor, target: LoadedModel) -> None:
    model = executor.model
    if executor.layers.states:
        raise ConfigError(
            f"draft_model {name!r} keeps a recurrent state in {len(executor.layers.states)} layers, which cannot be "
            "rolled back after a rejected draft; choose a draft model with attention only"
        )
    if model.vocab_size != target.vocab_size:
        raise ConfigError(
            f"draft_model {name!r} has a vocabulary of {model.vocab_size} tokens and the model one of "
            f"{target.vocab_size}; choose a draft model of the same family"
        )
    if target.tokenizer is None or model.tokenizer is None:
        return
    if model.tokenizer.get_vocab() != target.tokenizer.get_vocab():
        raise ConfigError(
            f"draft_model {name!r} has as many tokens as the model, but not the same; choose a draft model of "
            "the same family"
        )
