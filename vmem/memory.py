"""KV memory of one engine: sequences own blocks, blocks have pages, pages are mapped where kernels read them.

docs/internals/memory.md draws the two address ranges and the life of a page. A block is mapped in regions, and at home
once something reads or writes it there: a sequence can change from its region to its block table at any time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from functools import partial

from folio.vmem.backends.base import retry_undo
from folio.vmem.blocks.segments import PrefixUse
from folio.vmem.errors import IntegrityError, MapError, OutOfPages, OutOfSwap, PinError, VmemError
from folio.vmem.mapping.mapping_work import DestroyPages, DetachPages
from folio.vmem.parts import MemoryParts
from folio.vmem.prefix.prefix_summary import CachedPrefix
from folio.vmem.prefix.token_chain import TokenChain
from folio.vmem.sequence import GroupTable, SequenceMemory, StepDemand, ViewPolicy
from folio.vmem.swap.swapping import SwappedGroup

logger = logging.getLogger(__name__)


class KVMemory(MemoryParts):
    """Blocks, pages, mappings and regions of one device.

    **Threads.** The engine's thread makes nearly every call, beside the mapper's thread. Calls that name the same
    sequence, and those of one step (`prefixes.stage_prefix` … `prefixes.commit_prefixes`), belong to one thread at a
    time. Any other thread may call:

    - `report`, `prefixes.cached_keys`: wait at most 20 ms; made for event loops.
    - `set_budget`, `held_bytes`, `least_budget_bytes`, `pins.check_pin`, `pins.pinned_prefixes`,
      `prefixes.hot_prefixes`: wait for one piece of bookkeeping, which takes milliseconds for some ten thousand tokens.
    - `unpin`, `check_integrity`, `prefixes.evict_prefixes`: wait for the engine's call in progress, copies included.

    A call that raises has changed nothing, unless its description says otherwise. Arguments: see `MemoryParts`.
    """

    _unpinned: tuple[CachedPrefix, ...] = ()  # by a `release_all` that failed

    # ---- sequences ----

    def create_sequence(self, policy: ViewPolicy = "auto", *, expected_tokens: int = 0) -> SequenceMemory:
        """Create a sequence without blocks. Its regions are chosen for at least `expected_tokens` tokens."""
        sequence = SequenceMemory(
            policy, tuple(GroupTable() for _ in self.groups), expected_tokens=min(expected_tokens, self.max_tokens)
        )
        with self.lock.exclusive():
            self.tables.sequences.add(sequence)
        return sequence

    def append(self, sequence: SequenceMemory, num_tokens: int, *, start: int = 0) -> None:
        """Allocate blocks until the sequence has blocks for `num_tokens` tokens in all.

        A shared or cached last block into which the new tokens go is copied first (PagedAttention §4.4).

        Args:
            start: blocks that no query from this position on sees are freed first, even if the call then fails.

        Raises:
            OutOfPages, MapError: the budget is used up, or the device refused; the sequence owns the blocks it owned.
        """
        if num_tokens <= sequence.writable_tokens:  # nearly always: one more token in a block
            sequence.num_tokens = max(sequence.num_tokens, num_tokens)
            return
        if num_tokens > self.max_tokens:
            raise VmemError(f"{num_tokens} tokens exceed the {self.max_tokens} of a sequence")
        tables = self.tables
        with self.mapper.call():
            tables.check_open(sequence)
            sequence.writable_tokens = sequence.readable_tokens = 0
            tables.expire(sequence, start)
            if num_tokens <= sequence.num_tokens and not tables.must_copy_state(sequence):
                return
            num_tokens = max(num_tokens, sequence.num_tokens)
            needed = tables.pages_to_grow(sequence, num_tokens)
            if needed > max(self.num_free_pages, 0):
                raise OutOfPages(needed, self.num_free_pages)
            if needed:
                needs_region = not sequence.num_tokens and sequence.view == "block_table"
                evicts = self.allocator.must_evict(needed)
                try:
                    if needs_region:
                        self.regions.assign_regions(sequence, max(num_tokens, sequence.expected_tokens), evicts=evicts)
                    tables.grow(sequence, num_tokens, evicts=evicts)
                except VmemError:
                    if needs_region:
                        self.regions.park_regions(sequence)
                    raise
            tables.set_length(sequence, num_tokens)

    def fork(
        self,
        sequence: SequenceMemory,
        num_tokens: int,
        policy: ViewPolicy | None = None,
        chain: TokenChain | None = None,
    ) -> SequenceMemory:
        """Create a sequence that shares the blocks of the first `num_tokens` tokens, which must be computed
        (PagedAttention §4.4). In the region view the shared blocks are mapped once more.

        Args:
            chain: of the new sequence's tokens, to add what it computes to the prefix cache.

        Raises:
            VmemError: the window or the state has moved past `num_tokens`, or every region is held.
        """
        with self.mapper.call():
            return self._fork(sequence, num_tokens, policy, chain)

    def truncate(self, sequence: SequenceMemory, num_tokens: int) -> None:
        """Keep the blocks and the chain of the first `num_tokens` tokens only; other tokens may follow. Not between
        `prefixes.stage_prefix` and `prefixes.commit_prefixes`."""
        with self.mapper.call():
            self.tables.check_open(sequence)
            if num_tokens > sequence.num_tokens:
                raise VmemError(f"truncation to {num_tokens} of a sequence of {sequence.num_tokens} tokens")
            self.tables.check_can_continue(sequence, num_tokens)
            sequence.writable_tokens = sequence.readable_tokens = 0
            for group, table in self.tables.tables_of(sequence):
                self.tables.drop(group, table, group.layout.num_blocks(num_tokens))
            self.prefixes.truncate_prefix(sequence, num_tokens)
            sequence.num_tokens = num_tokens
            self.lock.notify_all()

    def free(self, sequence: SequenceMemory, use: PrefixUse | None = None) -> None:
        """Free the sequence's blocks and park its regions.

        Args:
            use: in place of what `share_prefix` was told, which the sequence's end may have changed.

        Raises:
            MapError: only without deferred reclamation: a region could not be unmapped. It is parked, and the sequence
                is freed nevertheless.
        """
        with self.lock.exclusive():
            sequence.prefix.use = use or sequence.prefix.use
            self._free(sequence)
            self.audit.publish()  # a client may ask for the report as soon as its request has ended

    def share_prefix(
        self, sequence: SequenceMemory, chain: TokenChain, token_ids: Sequence[int], use: PrefixUse | None = None
    ) -> int:
        """Give a sequence without blocks the cached prefix of its tokens; returns the number of tokens shared.

        A unit that only begins like the next tokens is shared, too, and copied before the next step.

        Args:
            use: tells eviction what the sequence is, and how long its prefix is worth keeping.
        """
        if self.prefixes.enabled:
            chain.extend(token_ids)
        with self.mapper.call():
            self.tables.check_open(sequence)
            if sequence.num_tokens:
                raise VmemError(f"a sequence of {sequence.num_tokens} tokens cannot begin with a cached prefix")
            sequence.prefix.chain = chain
            if not self.prefixes.enabled:
                return 0
            match = self.prefixes.match_held(chain, token_ids)
            self.prefixes.share_match(sequence, match)
            for table in sequence.groups:
                self.changes.note(table, 0)
            expected = max(match.num_tokens, sequence.expected_tokens)
            try:
                if match.num_tokens:
                    evicts = self.allocator.must_evict(self.tables.pages_to_grow(sequence, expected))
                    self.regions.assign_regions(sequence, expected, evicts=evicts)
            except VmemError:
                self._release(sequence)
                sequence.num_tokens, sequence.prefix.chain = 0, None
                raise
            self.tree.count_hit(match, len(token_ids))
            self.prefixes.begin_use(sequence, match, len(token_ids), use or PrefixUse())
            return match.num_tokens

    def pin(self, name: str, sequence: SequenceMemory, num_tokens: int) -> None:
        """Keep the blocks of the sequence's first `num_tokens` tokens, which must be computed, until `unpin`. No effect
        if the same prefix has that name already.

        Raises:
            PinError: the name is taken, the quota is used up, or the window or the state has moved past the prefix.
        """
        with self.mapper.call():
            chain = sequence.prefix.chain
            if chain is not None and self.pins.is_pinned(name, chain, num_tokens):
                return
            self.pins.check_quota(name, sequence, num_tokens)
            try:
                own = None if chain is None else chain.fork(num_tokens)  # `truncate` shortens the sequence's
                pinned = self._fork(sequence, num_tokens, "block_table", own)
            except VmemError as error:
                raise PinError(f"{name!r} cannot be pinned: {error}") from error
            self.prefixes.reindex_own_blocks(pinned)
            self.tables.sequences.remove(pinned)
            self.pins.add(name, pinned)

    def unpin(self, name: str) -> None:
        """Make a pinned prefix evictable. Raises `PinError` if there is none of that name."""
        with self.lock.exclusive():
            self._release(self.pins.remove_pin(name))
            self.lock.notify_all()

    def release_all(self) -> list[CachedPrefix]:
        """Give all pages back now, cached and pinned prefixes included. The anchor page stays, and so do swapped
        sequences, in host memory. Everything works as before afterwards; the floor is filled again in the background.

        Returns:
            The prefixes that were pinned, the earliest pin first.

        Raises:
            MapError: the device refused; what was given back until then is gone. Call again: the answer is complete.
            IntegrityError: a sequence is open.
        """
        with self.mapper.call():
            self._check_none_open("released")
            self.copies.run()
            self.mapper.wait_for_work()
            self._unpinned += tuple(self.pins.prefixes())
            self._release_pages()
            unpinned, self._unpinned = list(self._unpinned), ()
            self.lock.notify_all()
            self.audit.publish()
            return unpinned

    def swap_out(self, sequences: Sequence[SequenceMemory]) -> SwappedGroup:
        """Copy the blocks of these sequences to host memory and free them, all or none (PagedAttention §4.5). Raises
        `OutOfSwap`, also when the device refuses to map them for the copy."""
        with self.mapper.call():
            for sequence in sequences:
                self.tables.check_open(sequence)
            if len(set(sequences)) < len(sequences):
                raise IntegrityError("a sequence is swapped out twice")
            try:
                self.copies.run()
                swapped = self.swapping.copy_out(sequences)
            except MapError as error:
                raise OutOfSwap(f"blocks cannot be copied: {error}") from error
            for sequence in sequences:
                try:
                    self._free(sequence)
                except MapError as error:  # the sequence is freed nevertheless, see `free`
                    logger.warning("the region of a swapped sequence stays mapped: %s", error)
            return swapped

    def swap_in(self, swapped: SwappedGroup) -> list[SequenceMemory]:
        """Create the sequences again, in the order of `swap_out`, ahead of all later work of the device. `swapped` is
        used up.

        Raises:
            OutOfPages, MapError: too few pages are free, or the device refused; nothing has changed.
        """
        with self.mapper.call():
            sequences = self.swapping.copy_in(swapped)
            try:
                for sequence in sequences:
                    self.regions.assign_regions(sequence, sequence.num_tokens)
            except VmemError:
                for sequence in sequences:
                    self._release(sequence)
                raise
            self.tables.sequences.update(sequences)
            self.swapping.release_swapped(swapped)
            return sequences

    # ---- steps ----

    def ensure(self, demands: Iterable[StepDemand]) -> None:
        """Make the step's blocks readable and writable: map what the mapper has not mapped yet, make due copies.

        Call it before the step's batch is laid out: sequences with the policy "auto" may be demoted.

        Raises:
            MapError: the device refused; what was mapped before stays mapped, and owners stay the same. Also raised,
                once, when the mapper's own calls keep failing.
        """
        with self.mapper.call():
            self.mapper.raise_failure()
            self.copies.run()
            for sequence, start, end in demands:
                if end <= sequence.readable_tokens:
                    continue
                self.tables.expire(sequence, start)
                self.regions.map_tokens(sequence, end)
                if self.tables.only_grow:
                    sequence.readable_tokens = self.regions.readable_tokens(sequence)

    def map_home(self, sequence: SequenceMemory) -> None:
        """Map the sequence's blocks at home, too, for readers of its block table beside its region.

        Raises:
            MapError: the device refused.
        """
        with self.mapper.call():
            self.tables.check_open(sequence)
            for group, table in self.tables.tables_of(sequence):
                self.regions.map_homes(group, table.owned)

    def plan(self, demands: Iterable[StepDemand], prompt_tokens: int = 0, policy: ViewPolicy = "auto") -> None:
        """Announce the needs of the step after the coming one, for the mapper to prepare (vAttention §6.2.1).

        Args:
            prompt_tokens: of a sequence of this policy that the step will probably begin, without a cached prefix.
        """
        with self.mapper.call():
            begun = [prompts.note_step() for prompts in self.policy.demand]
            self.policy.clear_step_demand()
            if self.policy.options.overlap:
                for demand in demands:
                    if demand.end > demand.sequence.readable_tokens or demand.end > demand.sequence.writable_tokens:
                        self.regions.request_mapping(demand)
                self.regions.request_region(prompt_tokens, policy)
            # Most steps of a decode need nothing: the thread would take a processor, and Python's lock, from the step.
            if any(begun) or self.policy.is_asked:
                self.lock.notify_all()

    def take_changes(self) -> dict[GroupTable, int]:
        """Block tables of open sequences that have changed since the last call → the first index from which entries
        have, 0 if the region has. So a step's plan need not read every table."""
        with self.lock:
            return self.changes.take()

    def closed(self, sequences: Iterable[SequenceMemory]) -> list[SequenceMemory]:
        """Those of the sequences that are freed or swapped out."""
        with self.lock:
            return [sequence for sequence in sequences if sequence not in self.tables.sequences]

    def launched(self) -> None:
        """Note that a step which reads the mappings has been submitted: they may change only once it is done."""
        fence = self.backend.fence()  # before the lock is taken: a device without an event is waited for
        with self.mapper.call():
            self.mapper.fence = fence

    def wait_for_progress(self, timeout_s: float) -> None:
        """Wait until the mapper has finished some work, at most `timeout_s`: for callers that found no pages."""
        with self.lock:
            self.mapper.raise_failure()
            self.lock.wait(timeout_s)

    def close(self) -> None:
        """Stop the mapper and give all memory back, pinned prefixes included; calls that fail are made again. No step
        may be running. Raises `IntegrityError` if a sequence is still open, or a call fails each time."""
        with self.lock.exclusive():
            self._check_none_open("closed")
            self.copies.run()
        self.mapper.stop()
        with self.lock.exclusive():
            retry_undo(self._release_pages)
            self.swapping.close()
            self._mappings.leave(self.policy.num_mappings)
            with self.lock.unlocked():
                for group in self.group_memories:
                    retry_undo(group.release)
                retry_undo(partial(self.backend.destroy, self._anchor))
                retry_undo(self.backend.close)

    # ---- within `MemoryLock.exclusive` ----

    def _check_none_open(self, done: str) -> None:
        if self.tables.sequences:
            raise IntegrityError(f"{done} with {len(self.tables.sequences)} sequences open")

    def _release_pages(self) -> None:
        """Destroy all pages; the mapper has no work in hand."""
        for pinned in self.pins.remove_all():
            self._release(pinned)
        self.tree.clear()
        self.policy.forget_demand()
        self.mapper.set_fence()
        self.mapper.wait_for_fence(self.mapper.fence)
        for group in self.group_memories:
            for region in list(group.parked):
                self.regions.unmap_tail(group, region)
            if block_ids := group.pool.detachable(group.pool.num_free, freed_before=math.inf)[0]:
                self.mapper.run_now(DetachPages(self.pages, group, block_ids))
        if self.pages.spare:
            self.mapper.run_now(DestroyPages(self.backend, self.pages, self.pages.num_spare))

    def _fork(
        self, sequence: SequenceMemory, num_tokens: int, policy: ViewPolicy | None, chain: TokenChain | None
    ) -> SequenceMemory:
        self.tables.check_open(sequence)
        child = self.tables.fork(sequence, num_tokens, policy or sequence.policy)
        try:
            self.regions.assign_regions(child, num_tokens)
        except VmemError:
            self._release(child)
            raise
        self.prefixes.fork_prefix(sequence, child, chain)
        self.tables.sequences.add(child)
        return child

    def _free(self, sequence: SequenceMemory) -> None:
        self.tables.check_open(sequence)
        self.tables.sequences.remove(sequence)
        tails = [(group, table.region) for group, table in self.tables.tables_of(sequence)]
        self._release(sequence)
        self.lock.notify_all()
        for group, region in tails:
            if region is not None and not self.policy.options.deferred_reclamation:
                self.regions.unmap_tail(group, region)

    def _release(self, sequence: SequenceMemory) -> None:
        """Give up the sequence's cursor, regions and blocks."""
        sequence.writable_tokens = sequence.readable_tokens = 0
        self.prefixes.release_prefix(sequence)
        self.regions.park_regions(sequence)
        for group, table in self.tables.tables_of(sequence):
            self.tables.drop(group, table, 0)
            self.changes.forget(table)
