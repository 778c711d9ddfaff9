"""Scheduler: chooses the tokens of the next step."""

from __future__ import annotations

import bisect
import logging
import math
import time
from collections import abc
from collections.abc import Callable, Mapping
from operator import attrgetter
from types import MappingProxyType

from folio.app.config.engine import PreemptionPolicy
from folio.app.engine.request.faults import SequenceFailure, is_request_failure
from folio.app.engine.request.request import Request, Sequence
from folio.app.engine.schedule.admission import Admission, tokens_to_match
from folio.app.engine.schedule.mixed_steps import MixedSteps
from folio.app.engine.schedule.preemption import PreemptionCostModel
from folio.app.engine.schedule.read_ahead import ReadAhead
from folio.app.engine.schedule.running import RunningRequests, TokensAwaited, rank
from folio.app.engine.schedule.scheduled import Committed, Scheduled
from folio.app.engine.schedule.waiting_queue import WaitingQueue
from folio.vmem import KVMemory, OutOfPages, StepDemand, ViewPolicy

logger = logging.getLogger(__name__)

# Shorter prompts may overtake a prompt if they arrive within this many times its own computing time.
PATIENCE = 16

# Most prompt tokens of a step for `prompt_logprobs`: a row of logits takes up to a megabyte.
_PROMPT_LOGITS = 128


class Scheduler:
    """Iteration-level batching.

    Each step has at most `max_num_batched_tokens` tokens: decodes first, then chunks of prompts, of admitted and new
    requests, in the order in which they are due; beside decodes `mixed_steps` bounds the chunks. A request is admitted
    when its whole prompt fits; blocks are allocated chunk by chunk. It shares its cached prefix, and waits while a
    running sequence computes more of it.

    **Order.** Within its priority a request is due `PATIENCE` times as long after its arrival as its prompt takes to
    compute, as far as the router does not expect it in the cache. So a short prompt passes long ones, waiting or begun,
    and a long one is passed only by those that arrive before it is due. First come, first served would let sixteen long
    prompts delay every short one by the time of all sixteen.

    While a preempted request (`RunningRequests`) waits, no new request is admitted, whatever its priority.

    At most `max_num_seqs` sequences run, coming forks included, so that every sequence can decode in each step.

    Args:
        recovery: cost model for preemption.
        policy: "auto", or the mode that is always used; requests that do not fit into the swap space are recomputed.
        fair_tenants: admit by deficit round robin over tenants (`WaitingQueue`).
        max_mixed_step_s: longest step with prompts and decodes, in seconds (`MixedSteps`).
        reads: of prefixes that are not cached; `None`: these are computed.
        clock: the current time in seconds.

    Attributes:
        waiting: requests that have not begun.
        begun: requests that run or are preempted.
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
        reads: ReadAhead | None = None,
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
        self.begun = RunningRequests(memory, recovery, policy, lambda: self._admission.forget_pending_refusal())
        self._admission = Admission(memory, self.begun, self.waiting, self.max_num_seqs, reads)
        self._scheduled: list[Scheduled] = []
        self._prompt_logits_left = 0  # of `_PROMPT_LOGITS`, in the step that is being scheduled

    @property
    def num_waiting(self) -> int:
        """Sequences of waiting and preempted requests, coming forks included. From any thread."""
        return sum(request.max_sequences for request in (*self.waiting, *self.preempted))

    @property
    def running(self) -> list[Request]:
        """Requests that run, by priority and arrival. From any thread."""
        return self.begun.running

    @property
    def preempted(self) -> list[Request]:
        """Requests that are preempted, by priority and arrival. From any thread."""
        return self.begun.preempted

    @property
    def num_running(self) -> int:
        """Sequences of running requests, coming forks included; at most `max_num_seqs`. From any thread."""
        return self.begun.num_running

    @property
    def first(self) -> Request | None:
        """The request that gets memory first."""
        begun = self.running or self.preempted
        return begun[0] if begun else self.waiting.peek()

    @property
    def first_blocked(self) -> Sequence:
        """A sequence of the request to fail when none can go on."""
        request = self.preempted[0] if self.preempted else self.waiting.peek() or self.running[-1]
        return request.sequences[0]

    def unfinished(self) -> list[Sequence]:
        """Sequences of all requests, in no order. From any thread."""
        requests = (*self.running, *self.preempted, *self.waiting)
        return [sequence for request in requests for sequence in tuple(request.sequences)]

    def add(self, request: Request) -> None:
        """Add a request to the waiting queue."""
        seconds, times = 0.0, self._recovery.step_times
        for sequence in request.sequences:
            cached = sequence.expected_cached_tokens or 0
            cached = min(cached, sequence.num_uncomputed - 1) if not sequence.reads_whole_prompt else 0
            seconds += times.prefill_s(sequence.num_uncomputed - cached, cached, self.max_num_batched_tokens)
        request.due = self._clock() + PATIENCE * seconds
        self._admission.queue(request)

    def add_running(self, request: Request) -> None:
        """Add a request whose sequences are forks of a running one, and share its blocks."""
        bisect.insort(self.running, request, key=rank)

    def remove_sequence(self, sequence: Sequence) -> None:
        """Remove a sequence that is finished or cancelled, and free its memory."""
        request = sequence.request
        sequence.is_ended = True
        request.sequences.remove(sequence)
        if sequence.memory is not None:
            self.begun.free(sequence)
            # The sequence may have announced the prefix that the queue's head waits for.
            self._admission.forget_pending_refusal()
        if not request.sequences:
            if request in self.waiting:
                self.waiting.remove(request)
            for queue in (self.preempted, self.running):
                if request in queue:
                    queue.remove(request)
            if request.swapped is not None:
                self._memory.swapping.discard_swapped(request.swapped)
                request.swapped = None

    def take_unschedulable(self) -> list[Request]:
        """Requests that no longer fit, and whose sequences cannot run one by one; the caller must end them."""
        unschedulable, self.begun.unschedulable = self.begun.unschedulable, []
        return unschedulable

    def decoding(self) -> list[Sequence]:
        """Sequences that generate, with one token to compute, as far as is known before `schedule`."""
        return [
            sequence
            for sequence in self.begun.sequences()
            if sequence.memory is not None
            and sequence.num_uncomputed == 1
            and sequence.pin_name is None
            and sequence.pooled is None
        ]

    def schedule(
        self, drafts: Mapping[Sequence, abc.Sequence[int]] = MappingProxyType({}), *, ahead: bool = False
    ) -> list[Scheduled]:
        """Schedule the next step and allocate its blocks. Empty when there is nothing to do, or no memory.

        `commit_step` or `abort_step` must follow.

        Args:
            drafts: draft tokens of `decoding` sequences. They are computed as far as all other decodes leave room.
            ahead: a launched step's tokens are not known yet. Sequences that need theirs are left out.

        Raises:
            SequenceFailure: a call for one sequence has failed; the others can go on without its request.
            TokensAwaited: `ahead`, and a request must be preempted, or more sequences would be left out than go on.
        """
        self.begun.current_sequence = None
        self.begun.is_ahead = ahead
        try:
            return self._schedule(drafts)
        except TokensAwaited:
            raise
        except BaseException as error:
            if self.begun.current_sequence is None or not is_request_failure(error):
                raise
            raise SequenceFailure(self.begun.current_sequence) from error

    def _schedule(self, drafts: Mapping[Sequence, abc.Sequence[int]]) -> list[Scheduled]:
        self._scheduled = []
        self.begun.opened.clear()
        self.begun.staged.clear()
        self._prompt_logits_left = _PROMPT_LOGITS
        self._preempt_and_resume()
        decodes, has_prompts = self._schedule_decodes()
        budget = self.max_num_batched_tokens - len(decodes)
        if drafts:
            budget -= self._add_drafts(decodes, drafts, budget)
        prompts: list[Scheduled] = []
        if has_prompts or self.waiting.peek() is not None:
            self.mixed_steps.begin(decodes)
        if has_prompts:
            budget = self._schedule_prompts(budget, prompts)
        # Without sequences that were preempted meanwhile: of later requests, or of the same one.
        decodes = [s for s in decodes if s.sequence.memory is not None]
        prompts = [s for s in prompts if s.sequence.memory is not None]
        for s in decodes:
            if s.pending_row is None:  # else `settle` does, because the hash needs the token
                self._stage(s)
        if prompts:  # which may complete the prefix that the queue's head waits for
            self._admission.forget_pending_refusal()
        self._admit_waiting(budget, prompts)
        if prompts:
            self._admission.forget_pending_refusal()
        self._scheduled = decodes + [s for s in prompts if s.sequence.memory is not None]
        return self._scheduled

    def _preempt_and_resume(self) -> None:
        """Preempt requests beyond a lowered budget, and resume preempted ones that fit."""
        if self.begun.is_ahead and self.preempted:
            raise TokensAwaited
        while self._memory.num_free_pages < 0 and self.running:
            self.begun.preempt(self.running[-1])
        while self.preempted and self._admission.resume(self.preempted[0]):
            bisect.insort(self.running, self.preempted.pop(0), key=rank)
            self._admission.forget_refusal()  # as in `_open`

    def coming_tokens(self, following: abc.Sequence[StepDemand]) -> int:
        """Prompt tokens of the queue's head that the step after the scheduled one will probably compute beside the
        `following` ones; 0 if it will not begin, or with a cached prefix."""
        head = self.waiting.peek()
        left = self.max_num_batched_tokens - sum(demand.end - demand.start for demand in following)
        if head is None or left <= 0 or self.preempted or not self._admission.may_begin_uncached(head):
            return 0
        return min(left, len(head.sequences[0].token_ids))

    def commit_step(self) -> Committed:
        """Note that the scheduled step is launched: later steps may read what it writes."""
        committed = Committed(self._prefixes.commit_prefixes())
        for s in self._scheduled:
            sequence = s.sequence
            if self.waiting.is_fair:
                before = max(s.start, sequence.max_computed, len(sequence.prompt_token_ids))
                self.waiting.charge(sequence.request, max(s.start + s.num_tokens - len(s.drafts) - before, 0))
            sequence.num_awaited += s.samples
            sequence.num_computed = end = s.start + s.num_tokens
            if end > sequence.max_computed:
                sequence.max_computed, committed.progress = end, True
        return committed

    def settle(self, scheduled: abc.Sequence[Scheduled]) -> None:
        """Note that a committed step's tokens are known, and with them the hashes of the tokens it computed."""
        unit_tokens, are_staged = self._prefixes.unit_tokens, False
        for s in scheduled:
            sequence = s.sequence
            sequence.num_awaited -= s.samples
            sequence.pending_row = None
            if s.pending_row is not None and not (s.start + 1) % unit_tokens and sequence.memory is not None:
                self._prefixes.stage_prefix(sequence.memory, sequence.token_ids, s.start, s.start + 1)
                are_staged = True
        if are_staged:
            self._prefixes.commit_prefixes()

    def discard_steps(self, steps: abc.Sequence[tuple[abc.Sequence[Scheduled], Committed]]) -> None:
        """Undo committed steps that have failed: all running requests are computed again, and what these steps computed
        is not cached."""
        self.begun.is_ahead = False
        for s in (s for scheduled, _ in steps for s in scheduled):
            s.sequence.num_awaited, s.sequence.pending_row = 0, None
        self._prefixes.discard_prefixes([unit for _, committed in steps for unit in committed.units])  # never on disk
        for request in list(self.running):
            self.begun.preempt(request, "recompute")

    def preempt_all(self) -> None:
        """Preempt all running requests, between two steps."""
        self.begun.is_ahead = False
        self.begun.opened.clear()
        self.begun.staged.clear()
        while self.running:
            self.begun.preempt(self.running[-1])
        self._admission.forget_refusal()

    def abort_step(self) -> None:
        """Roll back the step. Sharers of its pending prefixes recompute, and so do scheduled recurrent sequences."""
        self.begun.is_ahead = False
        self._prefixes.abort_prefixes()
        self._admission.forget_refusal()
        lost = [*self.begun.opened]
        if self._prefixes.has_states:
            lost += [s.sequence.request for s in self._scheduled]
        for request in lost:
            if request in self.running:
                self.begun.preempt(request, "recompute")

    # ---- decodes and prompts of running requests ----

    def _schedule_decodes(self) -> tuple[list[Scheduled], bool]:
        """Schedule one token of each sequence that decodes; also returns whether other sequences have a prompt."""
        decodes: list[Scheduled] = []
        has_prompts = False
        num_left_out = 0
        for sequence in self.begun.sequences():
            if sequence.num_awaited and not self._can_go_ahead(sequence):
                num_left_out += 1
            elif sequence.memory is None or sequence.num_uncomputed != 1:
                has_prompts = True
            elif sequence.request.can_decode and self.begun.grow(sequence, 1):
                decodes.append(Scheduled(sequence, 1))
        if num_left_out > len(decodes):
            raise TokensAwaited
        return decodes, has_prompts

    def _can_go_ahead(self, sequence: Sequence) -> bool:
        """Whether the next step can compute a token that is not known yet, and another one will follow."""
        if sequence.pending_row is None or sequence.num_output_tokens + sequence.num_awaited >= sequence.max_tokens:
            return False
        # A recurrent state is kept at the end of a unit, under the hash of its tokens, before the next step changes it.
        ends_unit = (sequence.num_computed + 1) % self._prefixes.unit_tokens == 0
        return not (ends_unit and self._prefixes.has_states and self._prefixes.enabled)

    def _add_drafts(self, decodes: list[Scheduled], drafts: Mapping[Sequence, abc.Sequence[int]], budget: int) -> int:
        """Add draft tokens to decodes where no running sequence needs the memory; returns their number."""
        num_added, reserve = 0, self.begun.reserve
        for i, s in enumerate(decodes):
            tokens = tuple(drafts.get(s.sequence, ()))[: budget - num_added]
            if not tokens or s.sequence.memory is None or s.pending_row is not None:
                continue
            end = s.sequence.num_computed + 1 + len(tokens)
            if self._memory.pages_still_needed(s.sequence.memory, end) + reserve > self._memory.num_free_pages:
                continue
            self.begun.current_sequence = s.sequence
            try:
                self._memory.append(s.sequence.memory, end, start=s.sequence.num_computed)
            except OutOfPages:
                continue
            decodes[i] = Scheduled(s.sequence, 1 + len(tokens), tokens)
            num_added += len(tokens)
        return num_added

    def _schedule_prompts(self, budget: int, prompts: list[Scheduled]) -> int:
        """Append the next chunks of running requests' prompts, and of waiting requests that are due before one of them.
        Returns the budget that is left."""
        having = [
            sequence
            for sequence in self.begun.sequences()
            if sequence.memory is None or (sequence.num_uncomputed > 1 and not sequence.num_awaited)
        ]
        is_refused = False
        for sequence in sorted(having, key=attrgetter("request.prefill_key")):
            if not is_refused:
                budget = self._admit_waiting(budget, prompts, before=sequence.request)
                head = self.waiting.peek()
                is_refused = head is not None and head.prefill_key < sequence.request.prefill_key
            if budget > 0 and sequence.request in self.running:
                budget -= self._schedule_chunk(sequence, budget, prompts)
        return budget

    def _schedule_chunk(self, sequence: Sequence, budget: int, scheduled: list[Scheduled], *, new: bool = False) -> int:
        """Append the next chunk of a prompt; returns its tokens, or the whole budget if the step is to take no further
        prompt. A `new` request preempts no other one."""
        if sequence.memory is None and not self._open(sequence):
            return 0
        num_tokens = self.mixed_steps.fitting_tokens(sequence.num_computed, min(budget, sequence.num_uncomputed))
        if sequence.params.prompt_logprobs is not None:
            num_tokens = min(num_tokens, self._prompt_logits_left)
            self._prompt_logits_left -= num_tokens
        if sequence.request.lockstep and len(sequence.request.sequences) > 1:
            num_tokens = min(num_tokens, sequence.num_uncomputed - 1)  # the last one together with the other beams
        if not num_tokens:
            return 0
        end = sequence.num_computed + num_tokens
        end = next((stop for stop in sequence.snapshot_positions if sequence.num_computed < stop < end), end)
        if sequence.snapshot_positions:  # chunks end at whole units; the prompt's last one begins at its last position
            whole = end // self._prefixes.unit_tokens * self._prefixes.unit_tokens
            end = whole if whole > sequence.num_computed else end
        num_tokens = end - sequence.num_computed
        if not self.begun.grow(sequence, num_tokens, sequence.request if new else None):
            return budget  # the request has been preempted, or waits for memory
        scheduled.append(Scheduled(sequence, num_tokens))
        self._stage(scheduled[-1])
        self.begun.staged.add(sequence.request)
        return num_tokens if self.mixed_steps.take(scheduled[-1].start, num_tokens) else budget

    def _open(self, sequence: Sequence) -> bool:
        """Create the sequence's memory with its cached prefix; false while a running one computes more of it, or while
        the request's sequences run one by one."""
        if not self.begun.may_open(sequence):
            return False
        self.begun.current_sequence = sequence
        tokens = tokens_to_match(sequence)
        match = self._prefixes.match(sequence.chain, tokens)
        if match.is_being_computed and any(s.memory is not None for s in self.begun.sequences() if s is not sequence):
            return False
        memory = self.begun.share_prefix(sequence, tokens, self.view)
        self._admission.forget_refusal()  # a prefix that this sequence shares now costs the queue's head less
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed
            self.waiting.charge(sequence.request, sequence.num_uncomputed)
        sequence.snapshot_positions = self._admission.snapshot_positions(sequence, match)
        self._prefixes.announce_prefill(memory, len(sequence.token_ids), sequence.snapshot_positions)
        self.begun.opened.append(sequence.request)
        return True

    def _stage(self, scheduled: Scheduled) -> None:
        self.begun.current_sequence = sequence = scheduled.sequence
        assert sequence.memory is not None
        end = sequence.num_computed + scheduled.num_tokens - len(scheduled.drafts)  # drafts are not shared
        self._prefixes.stage_prefix(sequence.memory, sequence.token_ids, sequence.num_computed, end)

    # ---- admission ----

    def _admit_waiting(self, budget: int, prompts: list[Scheduled], before: Request | None = None) -> int:
        """Admit waiting requests in order, and append the first chunks of their prompts; returns the budget left.

        Args:
            before: only requests whose prompt is due before this one's.
        """
        reserve: int | None = None
        while budget > 0 and not self.preempted:
            request = self.waiting.peek()
            if request is None or (before is not None and request.prefill_key > before.prefill_key):
                break
            reserve = self.begun.reserve if reserve is None else reserve
            if not self._admission.can_admit(request, reserve):
                break
            self.waiting.remove(request)
            bisect.insort(self.running, request, key=rank)
            for sequence in list(request.sequences):
                if budget > 0 and sequence.request in self.running:
                    budget -= self._schedule_chunk(sequence, budget, prompts, new=True)
            reserve += self.begun.pages_to_come(request)
        return budget
