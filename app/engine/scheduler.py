"""Scheduler: the tokens of the next step."""

from __future__ import annotations

import bisect
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from types import MappingProxyType

from folio.app.config.engine import PreemptionPolicy
from folio.app.engine.admission import Admission, tokens_to_match
from folio.app.engine.faults import SequenceFailure, attribute_failures, is_request_failure
from folio.app.engine.mixed_steps import MixedSteps
from folio.app.engine.preemption import PreemptionCostModel
from folio.app.engine.request import Request, SequenceGroup
from folio.app.engine.running import RunningGroups, TokensAwaited, rank
from folio.app.engine.scheduled import Committed, Scheduled
from folio.app.engine.waiting_queue import WaitingQueue
from folio.vmem import KVMemory, OutOfPages, PrefixMatch, StepDemand, ViewPolicy

logger = logging.getLogger(__name__)

# For how many times its own computing time a prompt may be passed by shorter ones that arrive later.
PATIENCE = 16

_turn = attrgetter("group.prefill_key")

# Most prompt tokens of a step for `prompt_logprobs`: a row of logits takes up to a megabyte.
_PROMPT_LOGITS = 128


class Scheduler:
    """Iteration-level batching.

    Each step has at most `max_num_batched_tokens` tokens: decodes first, then chunks of prompts as they are due, of
    admitted requests and of new ones; beside decodes no more than `mixed_steps` lets them have. A request is admitted
    when its whole prompt fits; blocks are allocated chunk by chunk. It shares its cached prefix, and waits while a
    running sequence computes more of it.

    **Order.** Within its priority a group is due `PATIENCE` times as long after its arrival as its prompt takes to
    compute, as far as the router does not expect it in the cache. So a short prompt passes long ones, waiting or begun,
    and a long one is passed only by those that arrive before it is due. First come, first served would let sixteen long
    prompts delay every short one by all of theirs.

    While a preempted group (`RunningGroups`) waits, no new request is admitted, whatever its priority.

    At most `max_num_seqs` sequences run, coming forks included, so that every sequence can decode in each step.

    Args:
        recovery: cost model for preemption.
        policy: "auto", or the mode that is always used; groups that do not fit into the swap space are recomputed.
        fair_tenants: admit by deficit round robin over tenants (`WaitingQueue`).
        max_mixed_step_s: seconds that prompts may stretch a step with decodes to (`MixedSteps`).
        clock: the current time in seconds.

    Attributes:
        waiting: groups that have not begun.
        groups: those that have.
        mixed_steps: bounds the time of steps with prompts and decodes.
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
        max_mixed_step_s: float = math.inf,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._memory = memory
        self._prefixes = memory.prefixes
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)  # each running sequence decodes in every step
        self.max_num_batched_tokens = max_num_batched_tokens
        self.view = view
        self._recovery = recovery
        self.mixed_steps = MixedSteps(recovery, max_mixed_step_s)
        self.waiting = WaitingQueue(max_num_batched_tokens if fair_tenants else None)
        self.groups = RunningGroups(memory, recovery, policy, lambda: self._admission.forget_pending_refusal())
        self._admission = Admission(memory, self.groups, self.max_num_seqs)
        self._scheduled: list[Scheduled] = []
        self._matched: tuple[Request | None, bool] = None, False  # the queue's head, and whether a prefix is cached
        self._prompt_logits_left = 0  # of `_PROMPT_LOGITS`, in the step that is being scheduled

    @property
    def num_waiting(self) -> int:
        """Sequences of waiting and preempted groups, coming forks included. From any thread."""
        return sum(group.max_sequences for group in (*self.waiting, *self.preempted))

    @property
    def running(self) -> list[SequenceGroup]:
        """Groups that run, by priority and arrival. From any thread."""
        return self.groups.running

    @property
    def preempted(self) -> list[SequenceGroup]:
        """Groups that are preempted, by priority and arrival. From any thread."""
        return self.groups.preempted

    @property
    def num_running(self) -> int:
        """Sequences of running groups, coming forks included; at most `max_num_seqs`. From any thread."""
        return self.groups.num_running

    @property
    def first(self) -> SequenceGroup | None:
        """The group that gets memory first."""
        for groups in (self.running, self.preempted):
            if groups:
                return groups[0]
        return self.waiting.peek()

    @property
    def first_blocked(self) -> Request:
        """The request to fail when none can go on."""
        group = self.preempted[0] if self.preempted else self.waiting.peek() or self.running[-1]
        return group.members[0]

    def unfinished(self) -> list[Request]:
        """All requests, in no order. From any thread."""
        groups = (*self.running, *self.preempted, *self.waiting)
        return [request for group in groups for request in tuple(group.members)]

    def add(self, group: SequenceGroup) -> None:
        """Add a group to the waiting queue."""
        seconds = 0.0
        for request in group.members:
            cached = request.expected_cached_tokens or 0
            cached = min(cached, request.num_uncomputed - 1) if not request.reads_whole_prompt else 0
            seconds += self._recovery.step_times.prefill_s(
                request.num_uncomputed - cached, cached, self.max_num_batched_tokens
            )
        group.due = self._clock() + PATIENCE * seconds
        self.waiting.add(group)

    def remove_sequence(self, request: Request) -> None:
        """Remove a sequence that is finished or cancelled, and free its memory."""
        group = request.group
        request.is_ended = True
        group.members.remove(request)
        if request.memory is not None:
            self.groups.free(request)
            # The sequence may have announced the prefix that the queue's head waits for.
            self._admission.forget_pending_refusal()
        if not group.members:
            if group in self.waiting:
                self.waiting.remove(group)
            for queue in (self.preempted, self.running):
                if group in queue:
                    queue.remove(group)
            if group.swapped is not None:
                self._memory.swapping.discard_swapped(group.swapped)
                group.swapped = None

    def take_unschedulable(self) -> list[SequenceGroup]:
        """Groups that no longer fit and cannot be split; the caller must end them."""
        unschedulable, self.groups.unschedulable = self.groups.unschedulable, []
        return unschedulable

    def decoding(self) -> list[Request]:
        """Sequences that generate, with one token to compute, as far as is known before `schedule`."""
        return [
            request
            for request in self.groups.requests()
            if request.memory is not None
            and request.num_uncomputed == 1
            and request.pin_name is None
            and request.pooled is None
        ]

    def schedule(
        self, drafts: Mapping[Request, Sequence[int]] = MappingProxyType({}), *, ahead: bool = False
    ) -> list[Scheduled]:
        """Schedule the next step and allocate its blocks. Empty when there is nothing to do, or no memory.

        `commit_step` or `abort_step` must follow.

        Args:
            drafts: draft tokens of `decoding` sequences. They are computed as far as all other decodes leave room.
            ahead: a launched step's tokens are not known yet. Sequences that need theirs are left out.

        Raises:
            SequenceFailure: a call for one sequence has failed; the others can go on without its request.
            TokensAwaited: `ahead`, and a group must be preempted, or more sequences would be left out than go on.
        """
        self.groups.serving = None
        self.groups.is_ahead = ahead
        try:
            return self._schedule(drafts)
        except TokensAwaited:
            raise
        except BaseException as error:
            if self.groups.serving is None or not is_request_failure(error):
                raise
            raise SequenceFailure(self.groups.serving) from error

    def _schedule(self, drafts: Mapping[Request, Sequence[int]]) -> list[Scheduled]:
        self._scheduled = []
        self.groups.opened.clear()
        self.groups.staged.clear()
        self._prompt_logits_left = _PROMPT_LOGITS
        if self.groups.is_ahead and self.preempted:
            raise TokensAwaited
        while self._memory.num_free_pages < 0 and self.running:
            self.groups.preempt(self.running[-1])
        while self.preempted and self._admission.resume(self.preempted[0]):
            bisect.insort(self.running, self.preempted.pop(0), key=rank)
            self._admission.forget_refusal()  # as in `_open`

        decodes, has_prompts = self._schedule_decodes()
        budget = self.max_num_batched_tokens - len(decodes)
        if drafts:
            budget -= self._add_drafts(decodes, drafts, budget)
        prompts: list[Scheduled] = []
        if has_prompts or self.waiting.peek() is not None:
            self.mixed_steps.begin(decodes)
        if has_prompts:
            budget = self._schedule_prompts(budget, prompts)
        # Without sequences that were preempted meanwhile: of later groups, or of the same one.
        decodes = [s for s in decodes if s.request.memory is not None]
        prompts = [s for s in prompts if s.request.memory is not None]
        for s in decodes:
            if s.pending_row is None:  # else `settle` does, because the hash needs the token
                self._stage(s)
        if prompts:  # which may complete the prefix that the queue's head waits for
            self._admission.forget_pending_refusal()
        self._admit_waiting(budget, prompts)
        if prompts:
            self._admission.forget_pending_refusal()
        self._scheduled = decodes + [s for s in prompts if s.request.memory is not None]
        return self._scheduled

    def coming_tokens(self, following: Sequence[StepDemand]) -> int:
        """Prompt tokens of the queue's head that the step after the scheduled one will probably compute beside the
        `following` ones; 0 if it will not begin, or with a cached prefix."""
        head = self.waiting.peek()
        left = self.max_num_batched_tokens - sum(demand.end - demand.start for demand in following)
        if head is None or left <= 0 or self.preempted or self._admission.is_refused(head):
            return 0
        first = head.members[0]
        num_tokens = len(first.token_ids)
        if first.expected_cached_tokens or self._memory.pages_for(num_tokens) > self._memory.num_free_pages:
            return 0
        if self._matched[0] is not first:
            with attribute_failures(first):
                match = self._prefixes.match(first.chain, tokens_to_match(first))
            self._matched = first, match.num_tokens > 0 or match.is_being_computed
        return 0 if self._matched[1] else min(left, num_tokens)

    def commit_step(self) -> Committed:
        """Note that the scheduled step is launched: later steps may read what it writes."""
        committed = Committed(self._prefixes.commit_prefixes())
        for s in self._scheduled:
            request = s.request
            if self.waiting.is_fair:
                before = max(s.start, request.max_computed, len(request.prompt_token_ids))
                self.waiting.charge(request.group, max(s.start + s.num_tokens - len(s.drafts) - before, 0))
            request.num_awaited += s.samples
            request.num_computed = end = s.start + s.num_tokens
            if end > request.max_computed:
                request.max_computed, committed.progress = end, True
        return committed

    def settle(self, scheduled: Sequence[Scheduled]) -> None:
        """Note that a committed step's tokens are known, and with them the hashes of the tokens it computed."""
        unit_tokens, are_staged = self._prefixes.unit_tokens, False
        for s in scheduled:
            request = s.request
            request.num_awaited -= s.samples
            request.pending_row = None
            if s.pending_row is not None and not (s.start + 1) % unit_tokens and request.memory is not None:
                self._prefixes.stage_prefix(request.memory, request.token_ids, s.start, s.start + 1)
                are_staged = True
        if are_staged:
            self._prefixes.commit_prefixes()

    def discard_steps(self, steps: Sequence[tuple[Sequence[Scheduled], Committed]]) -> None:
        """Undo committed steps that have failed: all running groups are computed again, and what these steps computed
        is not cached."""
        self.groups.is_ahead = False
        for s in (s for scheduled, _ in steps for s in scheduled):
            s.request.num_awaited, s.request.pending_row = 0, None
        for group in list(self.running):
            self.groups.preempt(group, "recompute")
        self._prefixes.discard_prefixes([unit for _, committed in steps for unit in committed.units])

    def preempt_all(self) -> None:
        """Preempt all running groups, between two steps."""
        self.groups.is_ahead = False
        self.groups.opened.clear()
        self.groups.staged.clear()
        while self.running:
            self.groups.preempt(self.running[-1])
        self._admission.forget_refusal()

    def abort_step(self) -> None:
        """Roll back the step. Sharers of its pending prefixes recompute, and so do scheduled recurrent sequences."""
        self.groups.is_ahead = False
        self._prefixes.abort_prefixes()
        self._admission.forget_refusal()
        lost = [*self.groups.opened]
        if self._prefixes.has_states:
            lost += [s.request.group for s in self._scheduled]
        for group in lost:
            if group in self.running:
                self.groups.preempt(group, "recompute")

    # ---- decodes and prompts of running groups ----

    def _schedule_decodes(self) -> tuple[list[Scheduled], bool]:
        """Schedule one token of each sequence that decodes; also returns whether other sequences have a prompt."""
        decodes: list[Scheduled] = []
        has_prompts = False
        num_left_out = 0
        for request in self.groups.requests():
            if request.num_awaited and not self._can_go_ahead(request):
                num_left_out += 1
            elif request.memory is None or request.num_uncomputed != 1:
                has_prompts = True
            elif request.group.can_decode and self.groups.grow(request, 1):
                decodes.append(Scheduled(request, 1))
        if num_left_out > len(decodes):
            raise TokensAwaited
        return decodes, has_prompts

    def _can_go_ahead(self, request: Request) -> bool:
        """Whether the next step can compute a token that is not known yet, and another one will follow."""
        if request.pending_row is None or request.num_output_tokens + request.num_awaited >= request.max_tokens:
            return False
        # A recurrent state is kept at the end of a unit, under the hash of its tokens, before the next step changes it.
        ends_unit = (request.num_computed + 1) % self._prefixes.unit_tokens == 0
        return not (ends_unit and self._prefixes.has_states and self._prefixes.enabled)

    def _add_drafts(self, decodes: list[Scheduled], drafts: Mapping[Request, Sequence[int]], budget: int) -> int:
        """Add draft tokens to decodes where no running sequence needs the memory; returns their number."""
        num_added, reserve = 0, self.groups.reserve
        for i, s in enumerate(decodes):
            tokens = tuple(drafts.get(s.request, ()))[: budget - num_added]
            if not tokens or s.request.memory is None or s.pending_row is not None:
                continue
            end = s.request.num_computed + 1 + len(tokens)
            if self._memory.pages_still_needed(s.request.memory, end) + reserve > self._memory.num_free_pages:
                continue
            self.groups.serving = s.request
            try:
                self._memory.append(s.request.memory, end, start=s.request.num_computed)
            except OutOfPages:
                continue
            decodes[i] = Scheduled(s.request, 1 + len(tokens), tokens)
            num_added += len(tokens)
        return num_added

    def _schedule_prompts(self, budget: int, prompts: list[Scheduled]) -> int:
        """Append the next chunks of running groups' prompts, and of waiting groups that are due before one of them.
        Returns the budget that is left."""
        having = [
            request
            for request in self.groups.requests()
            if request.memory is None or (request.num_uncomputed > 1 and not request.num_awaited)
        ]
        is_refused = False
        for request in sorted(having, key=_turn):
            if not is_refused:
                budget = self._admit_waiting(budget, prompts, before=request.group)
                head = self.waiting.peek()
                is_refused = head is not None and head.prefill_key < request.group.prefill_key
            if budget > 0 and request.group in self.running:
                budget -= self._schedule_chunk(request, budget, prompts)
        return budget

    def _schedule_chunk(self, request: Request, budget: int, scheduled: list[Scheduled], *, new: bool = False) -> int:
        """Append the next chunk of a prompt; returns its tokens, or the whole budget if the step is to take no further
        prompt. A `new` group preempts no other one."""
        if request.memory is None and not self._open(request):
            return 0
        num_tokens = self.mixed_steps.fitting_tokens(request.num_computed, min(budget, request.num_uncomputed))
        if request.params.prompt_logprobs is not None:
            num_tokens = min(num_tokens, self._prompt_logits_left)
            self._prompt_logits_left -= num_tokens
        if request.group.lockstep and len(request.group.members) > 1:
            num_tokens = min(num_tokens, request.num_uncomputed - 1)  # the last one together with the other beams
        if not num_tokens:
            return 0
        end = request.num_computed + num_tokens
        end = next((stop for stop in request.snapshot_positions if request.num_computed < stop < end), end)
        if request.snapshot_positions:  # chunks end at whole units; the prompt's last one begins at its last position
            whole = end // self._prefixes.unit_tokens * self._prefixes.unit_tokens
            end = whole if whole > request.num_computed else end
        num_tokens = end - request.num_computed
        if not self.groups.grow(request, num_tokens, request.group if new else None):
            return budget  # the group has been preempted, or waits for memory
        scheduled.append(Scheduled(request, num_tokens))
        self._stage(scheduled[-1])
        self.groups.staged.add(request.group)
        return num_tokens if self.mixed_steps.take(scheduled[-1].start, num_tokens) else budget

    def _open(self, request: Request) -> bool:
        """Create the request's memory with its cached prefix; false while a running sequence computes more of it."""
        self.groups.serving = request
        tokens = tokens_to_match(request)
        match = self._prefixes.match(request.chain, tokens)
        if match.is_being_computed and any(r.memory is not None for r in self.groups.requests() if r is not request):
            return False
        request.chain.extend(request.token_ids)
        memory = self._memory.create_sequence(self.view, expected_tokens=len(request.token_ids))
        try:
            use = replace(request.use, resumes=request.num_cached_tokens is not None)
            request.num_computed = self._memory.share_prefix(memory, request.chain, tokens, use)
        except BaseException:
            self._memory.free(memory)
            raise
        request.memory = memory
        self._admission.forget_refusal()  # a prefix that this request shares now costs the queue's head less
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed
            self.waiting.charge(request.group, request.num_uncomputed)
        request.snapshot_positions = _snapshot_positions(request, match, self._memory)
        self._prefixes.announce_prefill(memory, len(request.token_ids), request.snapshot_positions)
        self.groups.opened.append(request.group)
        return True

    def _stage(self, scheduled: Scheduled) -> None:
        self.groups.serving = request = scheduled.request
        assert request.memory is not None
        end = request.num_computed + scheduled.num_tokens - len(scheduled.drafts)  # drafts are not shared
        self._prefixes.stage_prefix(request.memory, request.token_ids, request.num_computed, end)

    # ---- admission ----

    def _admit_waiting(self, budget: int, prompts: list[Scheduled], before: SequenceGroup | None = None) -> int:
        """Admit waiting groups in order, and append the first chunks of their prompts; returns the budget that is left.

        Args:
            before: only groups whose prompt is due before this one's.
        """
        reserve: int | None = None
        while budget > 0 and not self.preempted:
            group = self.waiting.peek()
            if group is None or (before is not None and group.prefill_key > before.prefill_key):
                break
            reserve = self.groups.reserve if reserve is None else reserve
            if not self._admission.can_admit(group, reserve):
                break
            self.waiting.remove(group)
            bisect.insort(self.running, group, key=rank)
            for request in list(group.members):
                if budget > 0 and request.group in self.running:
                    budget -= self._schedule_chunk(request, budget, prompts, new=True)
            reserve += self.groups.pages_to_come(group)
        return budget


def _snapshot_positions(request: Request, match: PrefixMatch, memory: KVMemory) -> tuple[int, ...]:
    """Where steps end to keep a recurrent state: where prompts have branched, and before the last token."""
    if not memory.prefixes.has_states or not memory.prefixes.enabled:
        return ()
    last = (len(request.token_ids) - 1) // memory.prefixes.unit_tokens * memory.prefixes.unit_tokens
    return tuple(sorted({n for n in (match.branch_tokens, last) if request.num_computed < n <= last}))
