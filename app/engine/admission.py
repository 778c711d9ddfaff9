"""Admission: whether a waiting or preempted group fits beside those that run."""

from __future__ import annotations

from collections.abc import Sequence

from folio.app.engine.request import Request, SequenceGroup
from folio.app.engine.running import RunningGroups
from folio.vmem import KVMemory


class Admission:
    """Decides whether a group can run now.

    A refused group is not matched with the prefix cache in every step, which would take milliseconds. Its need
    decreases only with the outputs of sequences that share its prefix; it is matched again when one of them ends and
    frees pages.

    Args:
        groups: those that run.
        max_num_seqs: most sequences that run at once.
    """

    def __init__(self, memory: KVMemory, groups: RunningGroups, max_num_seqs: int) -> None:
        self._memory = memory
        self._groups = groups
        self._max_num_seqs = max_num_seqs
        # The group last refused, its sequences, and the free pages that it needs; `None`: it waits for a prefix.
        self._refused: tuple[SequenceGroup, int, int | None] | None = None

    def can_admit(self, group: SequenceGroup, reserve: int) -> bool:
        """Whether the group fits beside `reserve` pages, so that the next step need not preempt it at once."""
        if self._groups.num_running + group.max_sequences > self._max_num_seqs:
            return False
        if self._groups.running and self._refused is not None and self._refused[:2] == (group, group.num_sequences):
            needed = self._refused[2]
            if needed is None or needed + reserve > self._memory.num_free_pages:
                return False
        self._refused = None
        return self._fits(group, reserve)

    def is_refused(self, group: SequenceGroup) -> bool:
        """Whether the group was refused, and nothing has changed since."""
        return self._refused is not None and self._refused[0] is group

    def forget_refusal(self) -> None:
        """Match the queue's head again: it may need fewer pages than it did."""
        self._refused = None

    def forget_pending_refusal(self) -> None:
        """Match the queue's head again: the prefix that it waits for may be computed or abandoned."""
        if self._refused is not None and self._refused[2] is None:
            self._refused = None

    def _fits(self, group: SequenceGroup, reserve: int) -> bool:
        if not self._groups.running and not self._memory.may_be_empty:
            return True
        first, *others = group.members
        self._groups.serving = first
        match = self._memory.prefixes.match(first.chain, tokens_to_match(first))
        if match.is_being_computed:
            # With recurrent states the prefix may be an output, which no step of a prompt completes: match every time.
            if not self._memory.prefixes.has_states:
                self._refused = group, group.num_sequences, None
            return False
        needed = self._memory.prefixes.pages_needed(match, len(first.token_ids))
        if self._groups.running:
            needed += sum(self._memory.pages_for(len(request.token_ids)) for request in others)
        else:  # nothing else runs: what the sequences share counts once
            lengths = [len(request.token_ids) for request in group.members]
            needed += self._memory.pages_together(lengths, len(first.prompt_token_ids))
            needed -= self._memory.pages_for(lengths[0])
        needed += self._groups.pages_per_token * (group.num_sequences - len(group.members))
        if needed + reserve <= self._memory.num_free_pages:
            return True
        self._refused = group, group.num_sequences, needed
        return False

    def resume(self, group: SequenceGroup) -> bool:
        """Swap in, or admit again, a preempted group, unless it would be preempted at once."""
        if group.swapped is None:
            return self.can_admit(group, self._groups.reserve)
        if self._groups.num_running + group.max_sequences > self._max_num_seqs:
            return False
        if (self._groups.running or self._memory.may_be_empty) and self._memory.swapping.pages_needed(
            group.swapped
        ) + self._groups.reserve > self._memory.num_free_pages:
            return False
        return self._groups.swap_in(group)


def tokens_to_match(request: Request) -> Sequence[int]:
    """The tokens to match with the prefix cache."""
    return request.token_ids[:1] if request.reads_whole_prompt else request.token_ids
