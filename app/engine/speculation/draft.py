"""Guesses of a smaller model.

What it has cached of a request may lag behind, and may end with guesses that turned out wrong:

    the request   | prompt and output                     | last |
    cached        | as the request's     | wrong guesses  |
                                         ^ it goes on here: first with what it has not seen, then with its own guesses

All requests of a step go through it together: one forward for what they have not seen, whose logits are the first
guesses, and one for each further guess, of those that want one.

A smaller model that guesses for a larger one: loaded, checked against it, with a KV memory of its own.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from app.config.engine import EngineConfig
from app.config.machine import num_threads
from app.engine.execution.batch import plan_step
from app.engine.execution.executor import Executor
from app.engine.execution.model_runner import ObservedLayers
from app.engine.execution.self_test import self_test
from app.engine.faults import SequenceFailure, attribute_failures
from app.engine.model.kv_plan import build_memory
from app.engine.model.loader import LoadedModel
from app.engine.preemption import LinearCost
from app.engine.report import StepTimes
from app.engine.request import Request, SequenceGroup
from app.engine.sampling.params import SamplingParams
from app.engine.sampling.sampler import Sampled, sample, sample_apart
from app.engine.scheduler import Scheduled
from app.engine.tensor_parallel.processes import spawn_ranks
from app.errors import ConfigError
from kernels import KernelError
from vmem import IntegrityError, KVMemory, MapError, OutOfPages, SequenceMemory, StepDemand, ViewPolicy, VmemError

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Draft:
    """What the draft model has of a request.

    Attributes:
        shadow: the request as the draft model sees it, its guesses included, with its own memory.
        num_agreed: tokens of it that are known to be the request's.
    """

    shadow: Request
    num_agreed: int

    @property
    def memory(self) -> SequenceMemory:
        assert self.shadow.memory is not None
        return self.shadow.memory


@dataclass(slots=True, eq=False)
class _Turn:
    """What a request gets in this step.

    Attributes:
        num_tokens: that it has not seen, and sees now.
        num_guesses: that follow; 0 as long as some are left that it has not seen.
        first: tokens that were cached before.
    """

    request: Request
    draft: _Draft
    num_tokens: int
    num_guesses: int
    first: int

    @property
    def end(self) -> int:
        """Tokens that are cached in the end: all but the last guess."""
        return self.first + self.num_tokens + max(self.num_guesses - 1, 0)


class DraftProposer:
    """Guesses by running a draft model.

    A guess is chosen as the model itself will choose: with the request's own parameters, and with the noise that
    the model will use for that token. So both often agree even where neither is sure.

    In a step it computes at most `step_tokens` tokens that it has not seen, those first that are soon done; until it
    has seen all of a request there are no guesses for it. That is a prefill chunk of a smaller model: decodes, which
    put up with the larger one's, put up with it.

    When its memory is full, sequences that got no turn lately are dropped, and new ones wait; they have no guesses
    then. So it is when the device refuses memory. Prompts that begin alike are computed once, as in the model's memory.

    Args:
        model: open, and closed by `close`.
        step_tokens: unseen tokens in a step at most.
        max_num_seqs: sequences at most.
        view: how its cache is read.
    """

    name = "draft"

    def __init__(self, model: DraftModel, *, step_tokens: int, max_num_seqs: int, view: ViewPolicy) -> None:
        self._model = model
        self._memory = model.memory
        self._step_tokens = step_tokens
        self._max_num_seqs = max_num_seqs
        self._view = view
        self._drafts: OrderedDict[Request, _Draft] = OrderedDict()  # the longest without a turn first
        self._times = LinearCost((1.0, 1e2, 1e5))

    @property
    def step_times(self) -> StepTimes:
        return StepTimes(*self._times.per_unit())

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        room = self._memory.max_tokens + 1  # the last guess is not cached
        wanted = {
            request: min(count, room - len(request.token_ids))
            for request, count in zip(requests, most, strict=True)
            if count > 0
        }
        for request in [request for request in wanted if wanted[request] < 1]:
            del wanted[request]  # beyond its context, for good
            self.forget_request(request)
        turns: list[_Turn] = []
        guesses: dict[Request, list[int]] = {}
        try:
            self._take_turns(wanted, turns)
            if turns:
                guesses = self._guess(turns)
        except MapError as error:
            logger.warning("no guesses in this step, the draft model's memory cannot be mapped: %s", error)
            self._abort(turns)
        except BaseException:
            self._abort(turns)
            raise
        return [guesses.get(request, []) for request in requests]

    def forget_request(self, request: Request) -> None:
        draft = self._drafts.pop(request, None)
        if draft is not None:
            self._memory.free(draft.memory)

    def check_integrity(self) -> None:
        self._memory.check_integrity()
        if not self._drafts:
            self._memory.check_idle()
        for request, draft in self._drafts.items():
            shadow = draft.shadow
            if shadow.token_ids[: draft.num_agreed] != request.token_ids[: draft.num_agreed]:
                raise IntegrityError(f"the draft model has other tokens of {request.request_id!r}")
            if not shadow.num_computed <= draft.memory.num_tokens or shadow.num_computed > len(shadow.token_ids):
                raise IntegrityError(
                    f"{request.request_id!r} has {shadow.num_computed} tokens in {draft.memory.num_tokens} places"
                )

    def close(self) -> None:
        for request in list(self._drafts):
            self.forget_request(request)
        self._model.close()

    # ---- who gets what ----

    def _take_turns(self, wanted: dict[Request, int], turns: list[_Turn]) -> None:
        """Give memory to as many as it has room for, those that are nearly there first, new ones last."""
        known = [request for request in wanted if request in self._drafts]
        for request in known:
            with attribute_failures(request):
                self._follow(self._drafts[request], request)
            self._drafts.move_to_end(request)
        known.sort(key=lambda request: self._drafts[request].shadow.num_uncomputed)
        idle = [request for request in self._drafts if request not in wanted]
        budget = self._step_tokens
        while known and budget > 0:
            request = known.pop(0)
            with attribute_failures(request):
                turn = self._turn(request, wanted[request], budget)
                # Who was without a turn for longest, then who has most to catch up with.
                while not (granted := self._grow(turn)) and (idle or known):
                    self.forget_request(idle.pop(0) if idle else known.pop())
                if granted:
                    budget -= turn.num_tokens
                    turns.append(turn)
        for request, count in wanted.items():
            if budget > 0 and request not in self._drafts:
                with attribute_failures(request):
                    if not self._open(request, count, idle, turns):
                        continue
                    turn = self._turn(request, count, budget)
                    if self._grow(turn):
                        budget -= turn.num_tokens
                        turns.append(turn)
                    else:
                        self.forget_request(request)

    def _turn(self, request: Request, count: int, budget: int) -> _Turn:
        draft = self._drafts[request]
        num_tokens = min(draft.shadow.num_uncomputed, budget)
        num_guesses = count if num_tokens == draft.shadow.num_uncomputed else 0
        return _Turn(request, draft, num_tokens, num_guesses, draft.shadow.num_computed)

    def _follow(self, draft: _Draft, request: Request) -> None:
        """Keep of its guesses what has come true, and add what has come otherwise."""
        shadow, token_ids = draft.shadow, request.token_ids
        agreed, end = draft.num_agreed, min(len(shadow.token_ids), len(token_ids))
        while agreed < end and shadow.token_ids[agreed] == token_ids[agreed]:
            agreed += 1
        shadow.token_ids[agreed:] = token_ids[agreed:]
        draft.num_agreed = len(token_ids)
        shadow.num_computed = min(shadow.num_computed, agreed, len(token_ids) - 1)  # logits of the last are needed
        if shadow.num_computed < draft.memory.num_tokens:
            self._memory.truncate(draft.memory, shadow.num_computed)

    def _grow(self, turn: _Turn) -> bool:
        """Give a sequence the blocks of its turn, and say that they are going to be computed; False if there are too
        few."""
        shadow, memory = turn.draft.shadow, turn.draft.memory
        try:
            # `start` stays where this turn begins: layers with a window must keep what the next turn goes back to.
            self._memory.append(memory, turn.end, start=turn.first)
        except (OutOfPages, MapError) as error:
            logger.debug("no room for the draft of %s: %s", turn.request.request_id, error)
            return False
        # Guesses are not announced: nobody should find them in the prefix cache.
        self._memory.prefixes.stage_prefix(memory, shadow.token_ids, turn.first, turn.first + turn.num_tokens)
        return True

    def _open(self, request: Request, count: int, idle: list[Request], turns: Sequence[_Turn]) -> bool:
        """A sequence for a new request, if the memory has room for it and for the rest of all others."""
        chain = self._memory.prefixes.chain(request.chain.keys)
        match = self._memory.prefixes.match(chain, request.token_ids)
        if match.is_being_computed and any(not turn.num_guesses for turn in turns):
            return False  # another one is computing the same prompt
        needed = self._memory.prefixes.pages_needed(match, len(request.token_ids) + count)
        while len(self._drafts) >= self._max_num_seqs or needed + self._reserve > self._memory.num_free_pages:
            if not idle:
                return False
            self.forget_request(idle.pop(0))
        shadow = Request(
            request.request_id,
            request.prompt_token_ids,
            SamplingParams(),  # guesses are chosen by the request's own
            request.max_tokens,
            None,
            chain,
            SequenceGroup(0, 0),
            request.token_ids.copy(),
        )
        memory = self._memory.create_sequence(self._view, expected_tokens=len(request.token_ids))
        try:
            shadow.num_computed = self._memory.share_prefix(memory, chain, request.token_ids)
        except BaseException as error:
            self._memory.free(memory)
            if isinstance(error, MapError | OutOfPages):
                return False
            raise
        shadow.memory = memory
        self._drafts[request] = _Draft(shadow, len(request.token_ids))  # from here on `forget` frees it
        self._memory.prefixes.announce_prefill(memory, len(request.token_ids))
        return True

    @property
    def _reserve(self) -> int:
        """Pages that the others may take: for what they have not seen yet, and a block each for what comes."""
        per_block = sum(group.layout.num_slices for group in self._memory.groups)
        return sum(
            max(self._memory.pages_still_needed(draft.memory, len(draft.shadow.token_ids)), per_block)
            for draft in self._drafts.values()
        )

    # ---- computing ----

    def _guess(self, turns: list[_Turn]) -> dict[Request, list[int]]:
        self._memory.ensure([StepDemand(turn.draft.memory, turn.first, turn.end) for turn in turns])
        turns.sort(key=lambda turn: turn.draft.memory.view)
        guesses: dict[Request, list[int]] = {turn.request: [] for turn in turns}
        logits = self._run([Scheduled(turn.draft.shadow, turn.num_tokens) for turn in turns])
        self._memory.prefixes.commit_prefixes()
        guessing = [turn for turn in turns if turn.num_guesses]
        position = 0
        while guessing:
            sampled = self._sample(guessing, logits, position)
            position += 1
            sound = [turn for turn, is_sound in zip(guessing, sampled.sound, strict=True) if is_sound]
            for turn, token_id, is_sound in zip(guessing, sampled.token_ids, sampled.sound, strict=True):
                if is_sound:
                    turn.draft.shadow.token_ids.append(token_id)
                    guesses[turn.request].append(token_id)
            guessing = [turn for turn in sound if turn.num_guesses > position]
            if guessing:
                logits = self._run([Scheduled(turn.draft.shadow, 1) for turn in guessing])
        self._memory.plan(self._next_demands(turns))
        return guesses

    def _sample(self, guessing: Sequence[_Turn], logits: torch.Tensor, position: int) -> Sampled:
        states, positions = [turn.request.sampling for turn in guessing], [position] * len(guessing)
        try:
            return sample(logits, states, positions)
        except BaseException:
            _, errors = sample_apart(logits, states, positions, [slice(i, i + 1) for i in range(len(states))])
            if not errors or len(errors) == len(states) > 1:
                raise
            i, error = errors.popitem()
            raise SequenceFailure(guessing[i].request) from error

    def _run(self, scheduled: list[Scheduled]) -> torch.Tensor:
        start = time.perf_counter()
        logits = self._model.run(scheduled)
        num_tokens, attended = sum(s.num_tokens for s in scheduled), sum(s.num_attended for s in scheduled)
        self._times.observe((1.0, num_tokens, attended), time.perf_counter() - start)
        for s in scheduled:
            s.request.num_computed += s.num_tokens
        return logits

    def _next_demands(self, turns: Sequence[_Turn]) -> list[StepDemand]:
        """What the next step will want if all guesses are right."""
        demands = []
        for turn in turns:
            start = turn.draft.shadow.num_computed
            end = min(start + max(turn.num_guesses + 1, turn.num_tokens), self._memory.max_tokens)
            if start < end:
                demands.append(StepDemand(turn.draft.memory, start, end))
        return demands

    def _abort(self, turns: Sequence[_Turn]) -> None:
        """Nobody knows what of the step was computed: its sequences begin again."""
        self._memory.prefixes.abort_prefixes()
        for turn in turns:
            self.forget_request(turn.request)


class DraftModel:
    """Runs on this rank alone, whatever the number of the model's ranks: it is small, and its guesses go to them with
    the step.

    Load it before the model's KV memory is made: `share` is what it takes of that. `open` makes its own.

    Args:
        config: the engine's.
        target: the model it guesses for, and `layers` of that, as this rank has them.

    Attributes:
        share: of the KV budget, so that both memories have room for as many tokens: its bytes a token, windows left
            aside, among those of both.

    Raises:
        ConfigError: it has another vocabulary, or states that cannot go back when a guess is wrong.
        ModelError: it cannot be loaded.
    """

    def __init__(self, config: EngineConfig, target: LoadedModel, layers: ObservedLayers) -> None:
        assert config.draft_model is not None
        self._num_ranks = config.tensor_parallel_size
        self._config = dataclasses.replace(
            config,
            model=config.draft_model,
            speculation="off",
            draft_model=None,
            tensor_parallel_size=1,
            num_threads=num_threads(config),
            max_model_len=None,
            max_num_batched_tokens=config.max_num_batched_tokens + config.max_draft_tokens,
            kv_memory_floor_bytes=0,
            block_tokens=None,
            swap_bytes=0,
            pinned_prompts={},
            pinned_system_prompts={},
            adapters={},
        )
        try:
            self._executor = Executor(self._config, spawn_ranks)
        except KernelError as error:
            raise ConfigError(f"draft_model {config.draft_model!r} cannot run here: {error}") from error
        try:
            _check(config.draft_model, self._executor, target)
        except ConfigError:
            self._executor.close()
            raise
        own = bytes_per_token(self._executor.layers, self._executor.model.dtype)
        self.share = own / (own + bytes_per_token(layers, target.dtype))
        self._memory: KVMemory | None = None

    @property
    def memory(self) -> KVMemory:
        """Its own, once it is open."""
        assert self._memory is not None
        return self._memory

    def open(self, max_model_len: int) -> None:
        """Make its memory and test the model on it.

        Args:
            max_model_len: context of the model it guesses for. It may itself have less.

        Raises:
            ConfigError: its share of the budget is too small for it, or its cache cannot be read here.
            ModelError: the self-test failed.
        """
        model = self._executor.model
        config = dataclasses.replace(
            self._config,
            max_model_len=min(max_model_len, model.max_positions),
            tensor_parallel_size=self._num_ranks,  # by which the machine's memory is divided
        )
        try:
            self._memory = build_memory(config, model, self._executor.layers, share=self.share)
            self_test(self._executor, self._memory.groups, config.kv_view)
            self._executor.bind_memory(self._memory)
            self._executor.enforce_step_timeout()
        except (KernelError, VmemError) as error:
            raise ConfigError(f"draft_model {config.model!r} cannot run with these settings: {error}") from error
        logger.info(
            "draft model %r: %.1f %% of the KV budget, up to %d tokens a request",
            config.model,
            self.share * 100,
            self._memory.max_tokens,
        )

    def run(self, scheduled: Sequence[Scheduled]) -> torch.Tensor:
        """Logits `[num_samples, vocab_size]` on the CPU; blocks must be owned and mapped."""
        return self._executor.run(plan_step(scheduled, self.memory), self.memory)

    def close(self) -> None:
        """Give everything back, opened or not. No sequence may be open."""
        try:
            if self._memory is not None:
                self._memory.close()
        finally:
            self._executor.close()


def bytes_per_token(layers: ObservedLayers, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers."""
    return sum(sum(spec.row_bytes(dtype)) for spec in layers.attention.values())


def _check(name: str, executor: Executor, target: LoadedModel) -> None:
    model = executor.model
    if executor.layers.states:
        raise ConfigError(
            f"draft_model {name!r} keeps a recurrent state in {len(executor.layers.states)} layers, which cannot go "
            "back when a guess is wrong; choose a draft model with attention only"
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
            f"draft_model {name!r} has as many tokens as the model, but not the same; choose a draft model of the "
            "same family"
        )
