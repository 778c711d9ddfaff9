"""Guesses of a smaller model.

What it has cached of a request may lag behind, and may end with guesses that turned out wrong:

    the request   | prompt and output                     | last |
    cached        | as the request's     | wrong guesses  |
                                         ^ it goes on here: first with what it has not seen, then with its own guesses

All requests of a step go through it together: one forward for what they have not seen, whose logits are the first
guesses, and one for each further guess, of those that want one.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from app.engine.faults import SequenceFailure, serving
from app.engine.params import SamplingParams
from app.engine.recovery import LinearCost
from app.engine.request import Request, SequenceGroup
from app.engine.sampler import Sampled, sample, sample_apart
from app.engine.scheduler import Scheduled
from app.engine.speculation.draft_model import DraftModel
from app.fleet.report import StepTimes
from vmem import Demand, IntegrityError, MapError, OutOfPages, SequenceMemory, ViewPolicy

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
            self.forget(request)
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

    def forget(self, request: Request) -> None:
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
            self.forget(request)
        self._model.close()

    # ---- who gets what ----

    def _take_turns(self, wanted: dict[Request, int], turns: list[_Turn]) -> None:
        """Give memory to as many as it has room for, those that are nearly there first, new ones last."""
        known = [request for request in wanted if request in self._drafts]
        for request in known:
            with serving(request):
                self._follow(self._drafts[request], request)
            self._drafts.move_to_end(request)
        known.sort(key=lambda request: self._drafts[request].shadow.num_uncomputed)
        idle = [request for request in self._drafts if request not in wanted]
        budget = self._step_tokens
        while known and budget > 0:
            request = known.pop(0)
            with serving(request):
                turn = self._turn(request, wanted[request], budget)
                # Who was without a turn for longest, then who has most to catch up with.
                while not (granted := self._grow(turn)) and (idle or known):
                    self.forget(idle.pop(0) if idle else known.pop())
                if granted:
                    budget -= turn.num_tokens
                    turns.append(turn)
        for request, count in wanted.items():
            if budget > 0 and request not in self._drafts:
                with serving(request):
                    if not self._open(request, count, idle, turns):
                        continue
                    turn = self._turn(request, count, budget)
                    if self._grow(turn):
                        budget -= turn.num_tokens
                        turns.append(turn)
                    else:
                        self.forget(request)

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
        self._memory.begin(memory, shadow.token_ids, turn.first, turn.first + turn.num_tokens)
        return True

    def _open(self, request: Request, count: int, idle: list[Request], turns: Sequence[_Turn]) -> bool:
        """A sequence for a new request, if the memory has room for it and for the rest of all others."""
        chain = self._memory.chain(request.chain.keys)
        match = self._memory.match(chain, request.token_ids)
        if match.awaited and any(not turn.num_guesses for turn in turns):
            return False  # another one is computing the same prompt
        needed = self._memory.pages_needed(match, len(request.token_ids) + count)
        while len(self._drafts) >= self._max_num_seqs or needed + self._reserve > self._memory.num_free_pages:
            if not idle:
                return False
            self.forget(idle.pop(0))
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
        memory = self._memory.open(self._view, expected_tokens=len(request.token_ids))
        try:
            shadow.num_computed = self._memory.reuse(memory, chain, request.token_ids)
        except BaseException as error:
            self._memory.free(memory)
            if isinstance(error, MapError | OutOfPages):
                return False
            raise
        shadow.memory = memory
        self._drafts[request] = _Draft(shadow, len(request.token_ids))  # from here on `forget` frees it
        self._memory.promise(memory, len(request.token_ids))
        return True

    @property
    def _reserve(self) -> int:
        """Pages that the others may take: for what they have not seen yet, and a block each for what comes."""
        per_block = sum(group.layout.num_slices for group in self._memory.groups)
        return sum(
            max(self._memory.pages_to_come(draft.memory, len(draft.shadow.token_ids)), per_block)
            for draft in self._drafts.values()
        )

    # ---- computing ----

    def _guess(self, turns: list[_Turn]) -> dict[Request, list[int]]:
        self._memory.ensure([Demand(turn.draft.memory, turn.first, turn.end) for turn in turns])
        turns.sort(key=lambda turn: turn.draft.memory.view)
        guesses: dict[Request, list[int]] = {turn.request: [] for turn in turns}
        logits = self._run([Scheduled(turn.draft.shadow, turn.num_tokens) for turn in turns])
        self._memory.commit()
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

    def _next_demands(self, turns: Sequence[_Turn]) -> list[Demand]:
        """What the next step will want if all guesses are right."""
        demands = []
        for turn in turns:
            start = turn.draft.shadow.num_computed
            end = min(start + max(turn.num_guesses + 1, turn.num_tokens), self._memory.max_tokens)
            if start < end:
                demands.append(Demand(turn.draft.memory, start, end))
        return demands

    def _abort(self, turns: Sequence[_Turn]) -> None:
        """Nobody knows what of the step was computed: its sequences begin again."""
        self._memory.abort()
        for turn in turns:
            self.forget(turn.request)
