"""Admission: whether a waiting or preempted request fits beside those that run."""

from __future__ import annotations

from collections import abc

from folio.app.engine.request.faults import attribute_failures
from folio.app.engine.request.request import Request, Sequence
from folio.app.engine.schedule.read_ahead import ReadAhead
from folio.app.engine.schedule.running import RunningRequests
from folio.app.engine.schedule.waiting_queue import WaitingQueue
from folio.vmem import KVMemory, PrefixMatch


class Admission:
    """Decides whether a request can run now.

    A refused request is not matched with the prefix cache in every step, which would take milliseconds. Its need
    decreases only with the outputs of sequences that share its prefix; it is matched again when one of them ends and
    frees pages.

    Args:
        begun: requests that run or are preempted.
        waiting: requests that have not begun.
        max_num_seqs: most sequences that run at once.
        reads: of prefixes that are not cached; `None`: these are computed.
    """

    def __init__(
        self,
        memory: KVMemory,
        begun: RunningRequests,
        waiting: WaitingQueue,
        max_num_seqs: int,
        reads: ReadAhead | None = None,
    ) -> None:
        self._memory = memory
        self._begun = begun
        self._waiting, self._reads = waiting, reads
        self._max_num_seqs = max_num_seqs
        # The request last refused, its sequences, and the free pages that it needs; `None`: it waits for a prefix.
        self._refused: tuple[Request, int, int | None] | None = None
        self._matched: tuple[Sequence | None, bool] = None, False  # the queue's head, and whether a prefix is cached

    def queue(self, request: Request) -> None:
        """Add a request to the waiting queue, and begin to read its prefix."""
        self._waiting.add(request)
        if self._reads is not None:
            self._reads.begin(request)

    def can_admit(self, request: Request, reserve: int) -> bool:
        """Whether the request fits beside `reserve` pages, so that the next step need not preempt it at once."""
        if self._begun.num_running + request.max_sequences > self._max_num_seqs:
            return False
        if self._reads is not None and self._reads.is_awaited(
            request,
            lambda needed: (
                (not self._begun.running and not self._memory.may_be_empty)
                or needed + reserve <= self._memory.num_free_pages
            ),
        ):
            return False
        if self._begun.running and self._refused is not None and self._refused[:2] == (request, request.num_sequences):
            needed = self._refused[2]
            if needed is None or needed + reserve > self._memory.num_free_pages:
                return False
        self._refused = None
        return self._fits(request, reserve)

    def may_begin_uncached(self, request: Request) -> bool:
        """Whether the waiting queue's head will probably begin in the next step but one, without a cached prefix."""
        if self._refused is not None and self._refused[0] is request:
            return False
        if self._reads is not None and request in self._reads:
            return False
        first = request.sequences[0]
        if first.expected_cached_tokens or self._memory.pages_for(len(first.token_ids)) > self._memory.num_free_pages:
            return False
        if self._matched[0] is not first:
            with attribute_failures(first):
                match = self._memory.prefixes.match(first.chain, tokens_to_match(first))
            self._matched = first, match.num_tokens > 0 or match.is_being_computed
        return not self._matched[1]

    def forget_refusal(self) -> None:
        """Match the queue's head again: it may need fewer pages than it did."""
        self._refused = None

    def forget_pending_refusal(self) -> None:
        """Match the queue's head again: the prefix that it waits for may be computed or abandoned."""
        if self._refused is not None and self._refused[2] is None:
            self._refused = None

    def _fits(self, request: Request, reserve: int) -> bool:
        if not self._begun.running and not self._memory.may_be_empty:
            return True
        first, *others = request.sequences
        self._begun.current_sequence = first
        match = self._memory.prefixes.match(first.chain, tokens_to_match(first))
        if match.is_being_computed:
            # With recurrent states the prefix may be an output, which no step of a prompt completes: match every time.
            if not self._memory.prefixes.has_states:
                self._refused = request, request.num_sequences, None
            return False
        needed = self._memory.prefixes.pages_needed(match, len(first.token_ids))
        if self._begun.running:
            needed += sum(self._memory.pages_for(len(sequence.token_ids)) for sequence in others)
        else:  # nothing else runs: what the sequences share counts once
            lengths = [len(sequence.token_ids) for sequence in request.sequences]
            needed += self._memory.pages_together(lengths, len(first.prompt_token_ids))
            needed -= self._memory.pages_for(lengths[0])
        needed += self._begun.pages_per_token * (request.num_sequences - len(request.sequences))
        if needed + reserve <= self._memory.num_free_pages:
            return True
        self._refused = request, request.num_sequences, needed
        return False

    def snapshot_positions(self, sequence: Sequence, match: PrefixMatch) -> tuple[int, ...]:
        """Where steps end to keep a recurrent state: where prompts have branched, and before the last token."""
        prefixes = self._memory.prefixes
        if not prefixes.has_states or not prefixes.enabled:
            return ()
        last = (len(sequence.token_ids) - 1) // prefixes.unit_tokens * prefixes.unit_tokens
        return tuple(sorted({n for n in (match.branch_tokens, last) if sequence.num_computed < n <= last}))

    def resume(self, request: Request) -> bool:
        """Swap in, or admit again, a preempted request, unless it would be preempted at once."""
        if request.swapped is None:
            return self.can_admit(request, self._begun.reserve)
        if self._begun.num_running + request.max_sequences > self._max_num_seqs:
            return False
        if (self._begun.running or self._memory.may_be_empty) and self._memory.swapping.pages_needed(
            request.swapped
        ) + self._begun.reserve > self._memory.num_free_pages:
            return False
        return self._begun.swap_in(request)


def tokens_to_match(sequence: Sequence) -> abc.Sequence[int]:
    """The tokens to match with the prefix cache."""
    return sequence.token_ids[:1] if sequence.reads_whole_prompt else sequence.token_ids
