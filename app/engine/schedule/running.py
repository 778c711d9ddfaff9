"""Running requests: allocates their blocks step by step, and preempts the latest one when blocks run out."""

from __future__ import annotations

import bisect
import logging
from collections import abc
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter

from folio.app.config.engine import PreemptionPolicy
from folio.app.engine.request.request import Request, Sequence
from folio.app.engine.schedule.preemption import PreemptionCostModel, PreemptionMode, swap_out
from folio.vmem import KVMemory, OutOfPages, SequenceMemory, ViewPolicy

logger = logging.getLogger(__name__)

rank = attrgetter("sort_key")


class TokensAwaited(Exception):
    """A step cannot be scheduled before the tokens of the launched one are known."""


class RunningRequests:
    """Requests that run, and those that are preempted.

    When blocks run out, or the budget is lowered, the latest request of the lowest priority whose prompt is not part of
    the step is preempted as a whole: by swap or recompute, whichever is expected to cost less (PagedAttention §4.5).

    Args:
        recovery: cost model for preemption.
        policy: "auto", or the mode that is always used; requests that do not fit into the swap space are recomputed.
        forget_refusal: called when a preemption may have removed the reason why the waiting queue's head was refused.

    Attributes:
        running, preempted: requests by priority and arrival.
        num_preempted: preemptions since the start, by mode.
        pages_per_token: most pages that a sequence takes in a step that computes one token.
        opened: requests that may share a prefix which the step in preparation computes.
        staged: requests with a part of a prompt in that step.
        unschedulable: requests that no longer fit, and whose sequences cannot run one by one.
        is_ahead: whether tokens of a launched step are not known yet; then nothing may be preempted.
        current_sequence: the sequence of the latest call of the memory; blamed if the call fails.
    """

    def __init__(
        self,
        memory: KVMemory,
        recovery: PreemptionCostModel,
        policy: PreemptionPolicy,
        forget_refusal: Callable[[], None],
    ) -> None:
        self._memory = memory
        self._recovery = recovery
        self._policy = policy
        self._forget_refusal = forget_refusal
        self.running: list[Request] = []
        self.preempted: list[Request] = []
        self.num_preempted: dict[PreemptionMode, int] = {"swap": 0, "recompute": 0}
        self.pages_per_token = sum(group.layout.num_slices for group in memory.groups)
        self.opened: list[Request] = []
        self.staged: set[Request] = set()
        self.unschedulable: list[Request] = []
        self.is_ahead = False
        self.current_sequence: Sequence | None = None

    @property
    def num_running(self) -> int:
        """Sequences of running requests, coming forks included. From any thread."""
        return sum(request.max_sequences for request in self.running)

    def grow(self, sequence: Sequence, num_tokens: int, victim: Request | None = None) -> bool:
        """Allocate the blocks of the next tokens, preempting the `victim` while blocks run out, by default the last
        running request. No request is preempted whose prompt is part of this step: other sequences may share what that
        prompt's chunk computes. False if the sequence itself was preempted, or must wait."""
        self.current_sequence = sequence
        while sequence.memory is not None:
            try:
                self._memory.append(sequence.memory, sequence.num_computed + num_tokens, start=sequence.num_computed)
                return True
            except OutOfPages:
                last = victim or self._last_preemptible(sequence.request)
                if last is None or last in self.staged:
                    return False
                self.preempt(last)
        return False

    def _last_preemptible(self, request: Request) -> Request | None:
        """The last running request that a request may preempt: itself, if it is the last of all."""
        for last in reversed(self.running):
            if last is request:
                return request if request is self.running[-1] else None
            if last not in self.staged:
                return last
        return None

    def preempt(self, victim: Request, mode: PreemptionMode | None = None) -> None:
        """Take all blocks of a running request, by default in the mode of the policy."""
        if self.is_ahead:
            raise TokensAwaited
        self._forget_refusal()
        sequences = [sequence for sequence in victim.sequences if sequence.memory is not None]
        if mode is None and self.running == [victim] and len(sequences) > 1 and not self._memory.may_be_empty:
            self._drop(victim, sequences[-1:])
            return
        mode = self._choose_mode(victim, sequences, mode)
        if mode == "swap" and not swap_out(self._memory, victim, sequences):
            mode = "recompute"
        self.running.remove(victim)
        for sequence in sequences:
            if mode == "recompute":
                self.free(sequence)
                sequence.num_computed = 0
            sequence.memory = None
        self.num_preempted[mode] += 1
        logger.debug("preempted %s by %s", victim.request_id, mode)
        bisect.insort(self.preempted, victim, key=rank)

    def _choose_mode(self, victim: Request, sequences: list[Sequence], mode: PreemptionMode | None) -> PreemptionMode:
        if victim in self.opened or not sequences:  # its blocks may hold a shared prefix that is not computed yet
            return "recompute"
        if mode is None and self._policy != "auto":
            return self._policy
        return mode or self._recovery.choose_mode(self._memory, sequences)

    def _drop(self, request: Request, sequences: list[Sequence]) -> None:
        """Free sequences of the only running request, to recompute them one by one: together they no longer fit into a
        lowered budget."""
        if not request.one_by_one:
            count = len(request.sequences)
            logger.warning("%s: %d sequences no longer fit into the KV cache together", request.request_id, count)
        request.one_by_one = True
        for sequence in request.sequences if request.lockstep else sequences:
            if sequence.memory is not None:
                self.free(sequence)
            sequence.num_computed = 0
        if request.lockstep:  # beams cannot run one by one
            (self.running if request in self.running else self.preempted).remove(request)
            self.unschedulable.append(request)
        else:
            self.num_preempted["recompute"] += 1

    def share_prefix(self, sequence: Sequence, tokens: abc.Sequence[int], view: ViewPolicy) -> SequenceMemory:
        """Create the memory of a running request's sequence, with the cached prefix of `tokens`."""
        sequence.chain.extend(sequence.token_ids)
        memory = self._memory.create_sequence(view, expected_tokens=len(sequence.token_ids))
        try:
            use = replace(sequence.use, resumes=sequence.num_cached_tokens is not None)
            sequence.num_computed = self._memory.share_prefix(memory, sequence.chain, tokens, use)
        except BaseException:
            self._memory.free(memory)
            raise
        sequence.memory = memory
        return memory

    def may_open(self, sequence: Sequence) -> bool:
        """Whether a running request's sequence may get memory. If the request's sequences run one by one, it must fit
        beside those that run."""
        request = sequence.request
        if not request.one_by_one:
            return True
        num_running = sum(other.memory is not None for other in request.sequences)
        needed = self._memory.pages_for(len(sequence.token_ids)) + self.pages_per_token * num_running
        return not num_running or needed <= self._memory.num_free_pages

    def swap_in(self, request: Request) -> bool:
        """Give a preempted request its swapped blocks back; false if the device has too little memory."""
        assert request.swapped is not None
        self.current_sequence = request.sequences[0]
        try:
            memories = self._memory.swap_in(request.swapped)
        except OutOfPages:
            if not self.running and not self._memory.may_be_empty:
                self._memory.swapping.discard_swapped(request.swapped)
                request.swapped, request.swapped_sequences = None, []
                self._drop(request, request.sequences)
            return False
        for sequence, memory in zip(request.swapped_sequences, memories, strict=True):
            if sequence in request.sequences:
                sequence.memory = memory
            else:  # cancelled meanwhile
                self._memory.free(memory)
        request.swapped, request.swapped_sequences = None, []
        return True

    def sequences(self) -> list[Sequence]:
        """Sequences of running requests."""
        return [sequence for request in self.running for sequence in request.sequences]

    @property
    def reserve(self) -> int:
        """Pages that running requests may take in the next step, and for the rest of their prompts."""
        return sum(map(self.pages_to_come, self.running))

    def pages_to_come(self, request: Request) -> int:
        pages = 0
        for sequence in request.sequences:
            coming = 0
            if sequence.memory is None or sequence.num_uncomputed > 1:
                coming = self._memory.pages_still_needed(sequence.memory, len(sequence.token_ids))
            pages += max(coming, self.pages_per_token) + self.pages_per_token * sequence.num_forks
        return pages

    def free(self, sequence: Sequence) -> None:
        assert sequence.memory is not None
        self._memory.free(sequence.memory, sequence.use)
        sequence.memory = None
