"""Running groups: their blocks grow with each step, and are taken from the latest one while there are too few."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from operator import attrgetter

from folio.app.config.engine import PreemptionPolicy
from folio.app.engine.preemption import PreemptionCostModel, PreemptionMode, swap_out
from folio.app.engine.request import Request, SequenceGroup
from folio.vmem import KVMemory, OutOfPages

logger = logging.getLogger(__name__)

rank = attrgetter("sort_key")


class TokensAwaited(Exception):
    """A step cannot be scheduled before the tokens of the launched one are known."""


class RunningGroups:
    """Groups that run, and those that are preempted.

    When blocks run out, or the budget is lowered, the latest group of the lowest priority whose prompt is not part of
    the step is preempted as a whole: by swap or recompute, whichever is expected to cost less (PagedAttention §4.5).

    Args:
        recovery: cost model for preemption.
        policy: "auto", or the mode that is always used; groups that do not fit into the swap space are recomputed.
        forget_refusal: called when a preemption may have changed why the waiting queue's head was refused.

    Attributes:
        running, preempted: groups by priority and arrival.
        num_preempted: preemptions since the start, by mode.
        pages_per_token: most pages that a sequence takes in a step that computes one token.
        opened: groups that may share a prefix which the step in preparation computes.
        staged: groups with a part of a prompt in that step.
        unschedulable: groups that no longer fit and cannot be split.
        is_ahead: the tokens of a launched step are not known: nothing may be preempted.
        serving: the request of the latest call of the memory.
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
        self.running: list[SequenceGroup] = []
        self.preempted: list[SequenceGroup] = []
        self.num_preempted: dict[PreemptionMode, int] = {"swap": 0, "recompute": 0}
        self.pages_per_token = sum(group.layout.num_slices for group in memory.groups)
        self.opened: list[SequenceGroup] = []
        self.staged: set[SequenceGroup] = set()
        self.unschedulable: list[SequenceGroup] = []
        self.is_ahead = False
        self.serving: Request | None = None

    @property
    def num_running(self) -> int:
        """Sequences of running groups, coming forks included. From any thread."""
        return sum(group.max_sequences for group in self.running)

    def grow(self, request: Request, num_tokens: int, victim: SequenceGroup | None = None) -> bool:
        """Allocate the blocks of the next tokens, preempting the `victim` while blocks run out, by default the last
        running group. No group is preempted whose prompt is part of this step: others, also of the same group, may
        share what that prompt's chunk computes. False if the request itself was preempted, or must wait."""
        self.serving = request
        while request.memory is not None:
            try:
                self._memory.append(request.memory, request.num_computed + num_tokens, start=request.num_computed)
                return True
            except OutOfPages:
                last = victim or self._last_preemptible(request.group)
                if last is None or last in self.staged:
                    return False
                self.preempt(last)
        return False

    def _last_preemptible(self, group: SequenceGroup) -> SequenceGroup | None:
        """The last running group that a group may preempt: itself, if it is the last of all."""
        for last in reversed(self.running):
            if last is group:
                return group if group is self.running[-1] else None
            if last not in self.staged:
                return last
        return None

    def preempt(self, victim: SequenceGroup, mode: PreemptionMode | None = None) -> None:
        """Take all blocks of a running group, by default in the mode of the policy."""
        if self.is_ahead:
            raise TokensAwaited
        self._forget_refusal()
        members = [request for request in victim.members if request.memory is not None]
        if mode is None and self.running == [victim] and len(members) > 1 and not self._memory.may_be_empty:
            self.running.remove(victim)
            self._split(victim)
            return
        if victim in self.opened or not members:  # its blocks may hold a shared prefix that is not computed yet
            mode = "recompute"
        if mode is None:
            mode = self._recovery.choose_mode(self._memory, members) if self._policy == "auto" else self._policy
        if mode == "swap" and not swap_out(self._memory, victim, members):
            mode = "recompute"
        self.running.remove(victim)
        for request in members:
            if mode == "recompute":
                self.free(request)
                request.num_computed = 0
            request.memory = None
        self.num_preempted[mode] += 1
        logger.debug("preempted %s by %s", ", ".join(r.request_id for r in victim.members), mode)
        bisect.insort(self.preempted, victim, key=rank)

    def _split(self, group: SequenceGroup) -> None:
        """Recompute the sequences of a group one by one: it runs alone, and no longer fits into a lowered budget, which
        is not raised for it."""
        logger.warning("%d sequences of one request no longer fit into the KV cache together", len(group.members))
        if group.swapped is not None:
            self._memory.swapping.discard_swapped(group.swapped)
            group.swapped, group.swapped_members = None, []
        for request in group.members:
            if request.memory is not None:
                self.free(request)
            request.num_computed = 0
        if group.lockstep:  # beams cannot run one by one
            self.unschedulable.append(group)
            return
        for request in group.members:
            request.group = SequenceGroup(
                group.priority, group.arrival, [request], adapter=group.adapter, tenant=group.tenant, due=group.due
            )
            bisect.insort(self.preempted, request.group, key=rank)
        group.members.clear()
        self.num_preempted["recompute"] += 1

    def swap_in(self, group: SequenceGroup) -> bool:
        """Give a preempted group its swapped blocks back; false if the device has too little memory."""
        assert group.swapped is not None
        self.serving = group.members[0]
        try:
            memories = self._memory.swap_in(group.swapped)
        except OutOfPages:
            if not self.running and not self._memory.may_be_empty:
                self.preempted.remove(group)
                self._split(group)
            return False
        for request, memory in zip(group.swapped_members, memories, strict=True):
            if request in group.members:
                request.memory = memory
            else:  # cancelled meanwhile
                self._memory.free(memory)
        group.swapped, group.swapped_members = None, []
        return True

    def requests(self) -> list[Request]:
        return [request for group in self.running for request in group.members]

    @property
    def reserve(self) -> int:
        """Pages that running groups may take in the next step, and for the rest of their prompts."""
        return sum(map(self.pages_to_come, self.running))

    def pages_to_come(self, group: SequenceGroup) -> int:
        pages = 0
        for request in group.members:
            coming = 0
            if request.memory is None or request.num_uncomputed > 1:
                coming = self._memory.pages_still_needed(request.memory, len(request.token_ids))
            pages += max(coming, self.pages_per_token) + self.pages_per_token * request.num_forks
        return pages

    def free(self, request: Request) -> None:
        assert request.memory is not None
        self._memory.free(request.memory, request.use)
        request.memory = None
