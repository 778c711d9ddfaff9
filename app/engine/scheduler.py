"""Which tokens the next step computes."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from app.config.engine import PreemptionPolicy
from app.engine.faults import SequenceFailure, is_request_failure
from app.engine.preemption import PreemptionCostModel, PreemptionMode
from app.engine.report import attended_tokens
from app.engine.request import Request, SequenceGroup
from app.engine.waiting_queue import WaitingQueue
from vmem import KVMemory, OutOfPages, OutOfSwap, PrefixMatch, ViewPolicy

logger = logging.getLogger(__name__)

# A step computes so many tokens of prompts whose logits are all wanted: a row of them takes up to a megabyte.
_PROMPT_LOGITS = 128


class Scheduled:
    """The next `num_tokens` tokens of a sequence, `drafts` behind its last one included. It does not change.

    Attributes:
        samples: whether they are its last, so that the one that follows is chosen.
        num_logits: of how many tokens, the last ones, the logits are needed.
    """

    __slots__ = ("drafts", "num_logits", "num_tokens", "request", "samples")

    def __init__(self, request: Request, num_tokens: int, drafts: tuple[int, ...] = ()) -> None:
        self.request = request
        self.num_tokens = num_tokens
        self.drafts = drafts
        num_certain = num_tokens - len(drafts)
        self.samples = request.num_computed + num_certain == len(request.token_ids) and request.pin_name is None
        self.num_logits = 1 + len(drafts) if self.samples else 0
        if request.params.prompt_logprobs is not None and request.num_computed < len(request.prompt_token_ids):
            self.num_logits = num_tokens

    @property
    def num_attended(self) -> int:
        """Cached tokens that its queries see, all together, windows left aside."""
        return attended_tokens(self.num_tokens, self.request.num_computed)


class Scheduler:
    """Iteration-level batching, first come first served within priority.

    One token budget a step: decodes first, then chunks of prompts already admitted, then new requests. A request is
    admitted when its whole prompt fits; blocks are taken chunk by chunk. What the prefix cache has of it is shared;
    when somebody who runs is computing what it wants, it waits for that.

    When blocks run out, the latest arrived group of the lowest priority is preempted, all or nothing: its blocks go to
    host memory, or are given up and computed again, whichever is expected to cost less (PagedAttention §4.5). As long
    as a preempted group waits nobody is admitted, whatever the priority. The same happens while sequences own more than
    a budget that was lowered.

    A step has at most `max_num_batched_tokens` tokens, of at most `max_num_seqs` sequences. The groups that run have a
    place for each sequence that they are going to have, forks included, so each of these can decode in every step.

    Args:
        recovery: what either way back costs.
        policy: "auto", or the way that is always taken; without room in the swap space groups are computed again.
        fair_tenants: new requests begin by turns of their tenants (`WaitingQueue`).
    """

    def __init__(
        self,
        memory: KVMemory,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        view: ViewPolicy,
        recovery: PreemptionCostModel,
        policy: PreemptionPolicy,
        fair_tenants: bool = False,
    ) -> None:
        self._memory = memory
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)  # each running sequence decodes in every step
        self._max_num_batched_tokens = max_num_batched_tokens
        self._view = view
        self._recovery = recovery
        self._policy = policy
        self._waiting = WaitingQueue(max_num_batched_tokens if fair_tenants else None)
        # Both in order of rank.
        self._preempted: list[SequenceGroup] = []
        self._running: list[SequenceGroup] = []
        self._scheduled: list[Scheduled] = []
        # The group that was last not admitted, its sequences, and the free pages that it needs; `None`: it waits for a
        # prefix that somebody computes.
        self._refused: tuple[SequenceGroup, int, int | None] | None = None
        # Pages that a sequence may take in a step that computes its next token.
        self._per_sequence = sum(group.layout.num_slices for group in memory.groups)
        self._opened: list[SequenceGroup] = []  # groups that share what the coming step computes, perhaps
        self._hopeless: list[SequenceGroup] = []
        self._serving: Request | None = None  # for whom the memory was called last, while a step is scheduled
        self._prompt_logits_left = 0  # in the step that is being scheduled
        self.num_preempted: dict[PreemptionMode, int] = {"swap": 0, "recompute": 0}

    @property
    def num_waiting(self) -> int:
        """Sequences of groups that have not begun or were preempted, with their coming forks. From any thread."""
        return sum(_max_sequences(group) for group in (*self._waiting, *self._preempted))

    @property
    def num_running(self) -> int:
        """Sequences of the groups that run, with their coming forks: never more than `max_num_seqs`. From any
        thread."""
        return sum(map(_max_sequences, self._running))

    @property
    def num_queued(self) -> int:
        """Groups that have not begun. From any thread."""
        return len(self._waiting)

    @property
    def queued_tokens(self) -> list[int]:
        """Of the prompt of each of these. From any thread."""
        return self._waiting.lengths()

    @property
    def first_blocked(self) -> Request:
        """Who cannot go on, when nobody can."""
        group = self._preempted[0] if self._preempted else self._waiting.peek() or self._running[-1]
        return group.members[0]

    def unfinished(self) -> list[Request]:
        """All requests, in no order. From any thread."""
        groups = (*self._running, *self._preempted, *self._waiting)
        return [request for group in groups for request in tuple(group.members)]

    def add(self, group: SequenceGroup) -> None:
        self._waiting.add(group)

    def remove_sequence(self, request: Request) -> None:
        """Forget a request that is finished or cancelled, and free its memory."""
        group = request.group
        group.members.remove(request)
        if request.memory is not None:
            self._release(request)
            self._look_again()  # it may have promised what the head of the queue waits for
        if not group.members:
            if group in self._waiting:
                self._waiting.remove(group)
            for queue in (self._preempted, self._running):
                if group in queue:
                    queue.remove(group)
            if group.swapped is not None:
                self._memory.swapping.discard_swapped(group.swapped)
                group.swapped = None

    def take_unschedulable(self) -> list[SequenceGroup]:
        """Groups that do not fit any more, and cannot go on one by one; they have to be removed."""
        hopeless, self._hopeless = self._hopeless, []
        return hopeless

    def decoding(self) -> list[Request]:
        """Sequences that have only their last token to compute, as far as is known before `schedule`."""
        return [request for request in self._requests() if request.memory is not None and request.num_uncomputed == 1]

    def schedule(self, drafts: Mapping[Request, Sequence[int]] = MappingProxyType({})) -> list[Scheduled]:
        """The next step, its blocks allocated. Empty when there is nothing to do, or no memory to do it with.

        `done` or `abort` must follow.

        Args:
            drafts: guesses what follows the last token of `decoding` sequences. They are computed, too, as far as
                there is room when all others decode.

        Raises:
            SequenceFailure: a call for one sequence has failed. Once its request is ended the others can go on.
        """
        self._serving = None
        try:
            return self._schedule(drafts)
        except BaseException as error:
            if self._serving is None or not is_request_failure(error):
                raise
            raise SequenceFailure(self._serving) from error

    def _schedule(self, drafts: Mapping[Request, Sequence[int]]) -> list[Scheduled]:
        self._scheduled = []
        self._opened.clear()
        self._prompt_logits_left = _PROMPT_LOGITS
        while self._memory.num_free_pages < 0 and self._running:
            self._preempt(self._running[-1])
        while self._preempted and self._resume(self._preempted[0]):
            bisect.insort(self._running, self._preempted.pop(0), key=_rank)
            self._refused = None  # as in `_open`
        budget = self._max_num_batched_tokens

        # Decodes: one token each, and perhaps one block.
        decodes: list[Scheduled] = []
        unfinished_prompts = False
        for request in self._requests():
            if request.memory is None or len(request.token_ids) - request.num_computed != 1:
                unfinished_prompts = True
            elif self._in_step(request.group) and self._grow(request, 1):
                decodes.append(Scheduled(request, 1))
        budget -= len(decodes)
        if drafts:
            budget -= self._add_drafts(decodes, drafts, budget)

        # Prompts: admitted ones first.
        prompts: list[Scheduled] = []
        for request in self._requests() if unfinished_prompts else ():
            begins_or_goes_on = request.memory is None or request.num_uncomputed > 1
            if budget > 0 and begins_or_goes_on and request.group in self._running:
                budget -= self._schedule_chunk(request, budget, prompts)
        # Without those preempted meanwhile: later groups, or other members of the same one.
        decodes = [s for s in decodes if s.request.memory is not None]
        prompts = [s for s in prompts if s.request.memory is not None]
        for s in decodes:
            self._begin(s)
        reserve = self._reserve if self._waiting else 0
        while budget > 0 and not self._preempted:
            group = self._waiting.peek()
            if group is None or not self._admit(group, reserve):
                break
            self._waiting.remove(group)
            bisect.insort(self._running, group, key=_rank)
            for request in list(group.members):
                if budget > 0 and request.group in self._running:
                    budget -= self._schedule_chunk(request, budget, prompts, new=True)
            reserve += self._to_come(group)
        if prompts:
            self._look_again()
        self._scheduled = decodes + [s for s in prompts if s.request.memory is not None]
        return self._scheduled

    def commit_step(self) -> bool:
        """The step that was scheduled is computed. False if nobody got further than before it was preempted."""
        self._memory.prefixes.commit_prefixes()
        got_further = False
        for s in self._scheduled:
            request = s.request
            if self._waiting.is_fair:
                before = max(request.num_computed, request.max_computed, len(request.prompt_token_ids))
                end = request.num_computed + s.num_tokens - len(s.drafts)
                self._waiting.charge(request.group, max(end - before, 0))
            request.num_computed += s.num_tokens
            if request.num_computed > request.max_computed:
                request.max_computed, got_further = request.num_computed, True
        return got_further

    def charge(self, request: Request, num_tokens: int) -> None:
        """Its drafts were right: as many tokens more are its tenant's."""
        if self._waiting.is_fair:
            self._waiting.charge(request.group, num_tokens)

    def abort_step(self) -> None:
        """It is not. Who shared what it was to compute begins again; so does everybody whose recurrent state may have
        been changed by half of it."""
        self._memory.prefixes.abort_prefixes()
        self._refused = None
        lost = [*self._opened]
        if self._memory.prefixes.has_states:
            lost += [s.request.group for s in self._scheduled]
        for group in lost:
            if group in self._running:
                self._preempt(group, "recompute")

    # ---- beginning ----

    def _admit(self, group: SequenceGroup, reserve: int) -> bool:
        """Whether the group may begin: if the step after this one would not have to preempt it at once.

        Args:
            reserve: `_reserve`.
        """
        if self.num_running + _max_sequences(group) > self.max_num_seqs or self._is_refused(group, reserve):
            return False
        self._refused = None
        return self._fits(group, reserve)

    def _is_refused(self, group: SequenceGroup, reserve: int) -> bool:
        """Whether it was refused, and nothing has happened that could let it begin: looking up a long prompt takes
        milliseconds, too much for every step.

        While it is the next to begin nobody else does. So what it needs can become less only by what others generate
        behind a prefix that they share with it; that is looked up when one of these has ended, which frees pages.
        """
        if not self._running or self._refused is None or self._refused[:2] != (group, group.num_sequences):
            return False
        needed = self._refused[2]
        return needed is None or needed + reserve > self._memory.num_free_pages

    def _look_again(self) -> None:
        """A prefix that the head of the queue waits for may be computed now, or not be any more."""
        if self._refused is not None and self._refused[2] is None:
            self._refused = None

    def _fits(self, group: SequenceGroup, reserve: int) -> bool:
        if not self._running:
            return True
        first, *others = group.members
        self._serving = first
        match = self._memory.prefixes.match(first.chain, self._findable(first))
        if match.is_being_computed:
            if (
                not self._memory.prefixes.has_states
            ):  # else it may be what somebody generates, which no prompt brings nearer
                self._refused = group, group.num_sequences, None
            return False
        needed = self._memory.prefixes.pages_needed(match, len(first.token_ids))
        needed += sum(self._memory.pages_for(len(request.token_ids)) for request in others)
        needed += self._per_sequence * (group.num_sequences - len(group.members))  # the forks' first own blocks
        if needed + reserve <= self._memory.num_free_pages:
            return True
        self._refused = group, group.num_sequences, needed
        return False

    def _open(self, request: Request) -> bool:
        """Give the request memory with what the prefix cache has of it; False if it should wait for more."""
        self._serving = request
        match = self._memory.prefixes.match(request.chain, self._findable(request))
        if match.is_being_computed and any(r.memory is not None for r in self._requests() if r is not request):
            return False
        request.chain.extend(request.token_ids)
        memory = self._memory.create_sequence(self._view, expected_tokens=len(request.token_ids))
        try:
            request.num_computed = self._memory.share_prefix(memory, request.chain, self._findable(request))
        except BaseException:
            self._memory.free(memory)
            raise
        request.memory = memory
        self._refused = None  # what the two share costs the head of the queue less now
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed
            self._waiting.charge(request.group, request.num_uncomputed)
        request.snapshot_positions = self._stops(request, match)
        self._memory.prefixes.announce_prefill(memory, len(request.token_ids), request.snapshot_positions)
        self._opened.append(request.group)
        return True

    def _stops(self, request: Request, match: PrefixMatch) -> tuple[int, ...]:
        """Where steps end, so that the state there is kept: where prompts have branched, and before the last token."""
        if not self._memory.prefixes.has_states or not self._memory.prefixes.enabled:
            return ()
        unit = self._memory.prefixes.unit_tokens
        last = (len(request.token_ids) - 1) // unit * unit
        return tuple(sorted({n for n in (match.branch_tokens, last) if request.num_computed < n <= last}))

    def _schedule_chunk(self, request: Request, budget: int, scheduled: list[Scheduled], *, new: bool = False) -> int:
        """Schedule as much of a prompt as the budget allows; returns the tokens. A `new` group takes from nobody."""
        if request.memory is None and not self._open(request):
            return 0
        num_tokens = min(budget, request.num_uncomputed)
        if request.params.prompt_logprobs is not None:
            num_tokens = min(num_tokens, self._prompt_logits_left)
            if not num_tokens:
                return 0
            self._prompt_logits_left -= num_tokens
        if request.group.lockstep and len(request.group.members) > 1:
            num_tokens = min(num_tokens, request.num_uncomputed - 1)  # the last one together with the others
            if not num_tokens:
                return 0
        end = request.num_computed + num_tokens
        end = next((stop for stop in request.snapshot_positions if request.num_computed < stop < end), end)
        if request.snapshot_positions and end < len(request.token_ids):
            whole = end // self._memory.prefixes.unit_tokens * self._memory.prefixes.unit_tokens
            end = whole if whole > request.num_computed else end
        num_tokens = end - request.num_computed
        if not self._grow(request, num_tokens, request.group if new else None):
            return 0
        scheduled.append(Scheduled(request, num_tokens))
        self._begin(scheduled[-1])
        return num_tokens

    def _in_step(self, group: SequenceGroup) -> bool:
        """Whether its members may compute their last tokens: those of a lockstep group when all of them can."""
        return not group.lockstep or all(r.memory is not None and r.num_uncomputed == 1 for r in group.members)

    def _add_drafts(self, decodes: list[Scheduled], drafts: Mapping[Request, Sequence[int]], budget: int) -> int:
        """Let decodes compute drafts, too, if there is memory that nobody else needs; returns how many tokens."""
        num_added, reserve = 0, self._reserve
        for i, s in enumerate(decodes):
            guesses = tuple(drafts.get(s.request, ()))[: budget - num_added]
            if not guesses or s.request.memory is None:
                continue
            end = s.request.num_computed + 1 + len(guesses)
            if self._memory.pages_still_needed(s.request.memory, end) + reserve > self._memory.num_free_pages:
                continue
            self._serving = s.request
            try:
                self._memory.append(s.request.memory, end, start=s.request.num_computed)
            except OutOfPages:
                continue
            decodes[i] = Scheduled(s.request, 1 + len(guesses), guesses)
            num_added += len(guesses)
        return num_added

    def _begin(self, scheduled: Scheduled) -> None:
        self._serving = request = scheduled.request
        assert request.memory is not None
        end = request.num_computed + scheduled.num_tokens - len(scheduled.drafts)  # only what is sure is shared
        self._memory.prefixes.stage_prefix(request.memory, request.token_ids, request.num_computed, end)

    # ---- when blocks run out ----

    def _grow(self, request: Request, num_tokens: int, victim: SequenceGroup | None = None) -> bool:
        """Give the request room for its next tokens, at the cost of the `victim`, by default of later groups; False if
        it was itself preempted."""
        self._serving = request
        while request.memory is not None:
            try:
                self._memory.append(request.memory, request.num_computed + num_tokens, start=request.num_computed)
                return True
            except OutOfPages:
                self._preempt(victim or self._running[-1])
        return False

    def _preempt(self, victim: SequenceGroup, way: PreemptionMode | None = None) -> None:
        """Take all of the group's blocks."""
        self._look_again()
        members = [request for request in victim.members if request.memory is not None]
        if way is None and self._running == [victim] and len(members) > 1:
            self._running.remove(victim)
            self._take_apart(victim)
            return
        if victim in self._opened or not members:  # it may share what is not computed yet: nothing worth keeping
            way = "recompute"
        way = way or self._preemption_mode(members)
        if way == "swap" and not self._swap_out(victim, members):
            way = "recompute"
        self._running.remove(victim)
        for request in members:
            if way == "recompute":
                self._release(request)
                request.num_computed = 0
            request.memory = None
        self.num_preempted[way] += 1
        logger.info("preempted %s by %s", ", ".join(r.request_id for r in victim.members), way)
        bisect.insort(self._preempted, victim, key=_rank)

    def _take_apart(self, group: SequenceGroup) -> None:
        """Alone, and there is no room for it: the budget was lowered after its forks were made. They go on one by one,
        and are computed again; those that can only go on together are given up."""
        logger.warning("%d sequences of one request do not fit any more as they were", len(group.members))
        if group.swapped is not None:
            self._memory.swapping.discard_swapped(group.swapped)
            group.swapped, group.swapped_members = None, []
        for request in group.members:
            if request.memory is not None:
                self._release(request)
            request.num_computed = 0
        if group.lockstep:
            self._hopeless.append(group)
            return
        for request in group.members:
            request.group = SequenceGroup(
                group.priority, group.arrival, [request], adapter=group.adapter, tenant=group.tenant
            )
            bisect.insort(self._preempted, request.group, key=_rank)
        group.members.clear()
        self.num_preempted["recompute"] += 1

    def _preemption_mode(self, members: list[Request]) -> PreemptionMode:
        """What is expected to cost less. What others own too stays in the prefix cache, and is not computed again; nor
        is what the members share with each other, but once."""
        if self._policy != "auto":
            return self._policy
        memories = [request.memory for request in members if request.memory is not None]
        sequences = []
        for request, stays in zip(members, self._memory.prefixes.shared_tokens(memories), strict=True):
            stays = min(stays, request.num_computed)
            sequences.append((request.num_computed - stays, stays))
        return self._recovery.cost(sequences, self._memory.swapping.num_bytes(memories)).better

    def _swap_out(self, group: SequenceGroup, members: list[Request]) -> bool:
        try:
            group.swapped = self._memory.swap_out([r.memory for r in members if r.memory is not None])
        except (OutOfSwap, RuntimeError, MemoryError) as error:  # torch's word for no host memory is RuntimeError
            logger.warning("computing again instead of swapping: %s", error)
            return False
        group.swapped_members = members
        return True

    def _resume(self, group: SequenceGroup) -> bool:
        """Bring a preempted group back, if it would not be preempted again at once."""
        if group.swapped is None:
            return self._admit(group, self._reserve)
        if self.num_running + _max_sequences(group) > self.max_num_seqs:
            return False
        if (
            self._running
            and self._memory.swapping.pages_needed(group.swapped) + self._reserve > self._memory.num_free_pages
        ):
            return False
        self._serving = group.members[0]
        try:
            memories = self._memory.swap_in(group.swapped)
        except OutOfPages:
            if not self._running:
                self._preempted.remove(group)
                self._take_apart(group)
            return False
        for request, memory in zip(group.swapped_members, memories, strict=True):
            if request in group.members:
                request.memory = memory
            else:  # cancelled meanwhile
                self._memory.free(memory)
        group.swapped, group.swapped_members = None, []
        return True

    # ---- helpers ----

    def _groups(self) -> tuple[SequenceGroup, ...]:
        return (*self._running, *self._preempted, *self._waiting)

    def _requests(self) -> list[Request]:
        return [request for group in self._running for request in group.members]

    @property
    def _reserve(self) -> int:
        """Pages that what runs may take in the next step, and for the rest of its prompts."""
        return sum(map(self._to_come, self._running))

    def _to_come(self, group: SequenceGroup) -> int:
        """The same of one group."""
        pages = 0
        for request in group.members:
            coming = 0
            if request.memory is None or request.num_uncomputed > 1:
                coming = self._memory.pages_still_needed(request.memory, len(request.token_ids))
            pages += max(coming, self._per_sequence) + self._per_sequence * request.num_forks
        return pages

    @staticmethod
    def _findable(request: Request) -> Sequence[int]:
        """The tokens to look up in the prefix cache: none of a prompt whose logits are all wanted."""
        return request.token_ids if request.params.prompt_logprobs is None else request.token_ids[:1]

    def _release(self, request: Request) -> None:
        assert request.memory is not None
        self._memory.free(request.memory)
        request.memory = None


def _max_sequences(group: SequenceGroup) -> int:
    """Of how many sequences it may come to consist: fewer beams than wanted may go on for a while."""
    width = next((request.params.num_sequences for request in tuple(group.members)), 0) if group.lockstep else 0
    return max(group.num_sequences, width)


def _rank(group: SequenceGroup) -> tuple[int, int]:
    return group.sort_key
