"""Block tables: how they grow and shrink, where their blocks come from, and copy-on-write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from folio.vmem.backends.base import Backend
from folio.vmem.budget import MemoryCounts, PagePool
from folio.vmem.errors import IntegrityError, OutOfPages, VmemError
from folio.vmem.group import GroupMemory
from folio.vmem.lock import MemoryLock
from folio.vmem.mapping.mapper import Mapper
from folio.vmem.mapping.mapping_work import AttachPages, DetachPages
from folio.vmem.mapping.region import HOLE
from folio.vmem.mapping.views import RegionManager
from folio.vmem.prefix.prefix_tree import PrefixTree
from folio.vmem.sequence import GroupTable, SequenceMemory, TableChanges, ViewPolicy

if TYPE_CHECKING:
    from folio.vmem.tensors import BlockContents


@dataclass(eq=False)
class BlockAllocator:
    """Blocks for the engine's thread: free ones first, then pages from wherever they cost least. Only called within
    `MemoryLock.exclusive`."""

    _backend: Backend
    _pages: PagePool
    _groups: Sequence[GroupMemory]
    _tree: PrefixTree
    _mapper: Mapper
    _regions: RegionManager

    @property
    def num_free_pages(self) -> int:
        return self._pages.budget - sum(group.pool.num_owned * group.num_slices for group in self._groups)

    def must_evict(self, num_pages: int) -> bool:
        """Whether so many pages can only be had by evicting cached content."""
        cached = sum(group.pool.num_cached * group.num_slices for group in self._groups)
        return num_pages > self.num_free_pages - cached

    def allocate(self, group: GroupMemory, count: int, *, at_home: bool) -> list[int]:
        """Allocate `count` blocks, all or none.

        Args:
            at_home: they will be read at home: map blocks with new pages there.

        Raises:
            OutOfPages: there are not enough; the device may have less than the budget.
            MapError: the device refused.
        """
        pool = group.pool
        taken = pool.allocate_free(count)
        device_full = False
        try:
            # Free-mapped blocks cost nothing now, and one more mapping when their region is adopted; a page that must
            # be created and zeroed costs several times that, and memory. Content is evicted last.
            taken += pool.allocate_free_mapped(count - len(taken))
            while len(taken) < count:
                missing = count - len(taken)
                if device_full:
                    missing = min(missing, group.blocks_in(self._pages.num_spare))
                if missing and pool.num_unbacked and group.blocks_in(self._pages.num_claimable):
                    try:
                        self._mapper.run_now(AttachPages(self._backend, self._pages, group, missing, at_home=at_home))
                    except OutOfPages:
                        device_full = True
                elif not (
                    self._make_room(group, evicts=False)
                    or self._tree.evict(group.index, count - len(taken))
                    or self._make_room(group, evicts=True)
                ):
                    raise OutOfPages((count - len(taken)) * group.num_slices, max(self.num_free_pages, 0))
                taken += pool.allocate_free(count - len(taken))
                taken += pool.allocate_free_mapped(count - len(taken))
        except VmemError:
            pool.free(taken, fence=0, now=self._mapper.clock())
            raise
        return sorted(taken)  # neighbours are mapped by one call

    def allocate_block(self, group: GroupMemory, block_id: int) -> None:
        """Allocate this free or cached block; cached content is evicted."""
        if group.pool.is_cached(block_id):
            self._tree.evict_block(group.index, block_id)
        group.pool.allocate_block(block_id)

    def free(self, group: GroupMemory, block_ids: Sequence[int]) -> None:
        """Drop a reference of each block; the last launched step may still read them."""
        group.pool.free(block_ids, fence=self._mapper.fence, now=self._mapper.clock())

    def _make_room(self, group: GroupMemory, *, evicts: bool) -> bool:
        """Take pages from free blocks of other groups, or wait for the mapper's work in hand."""
        for other in self._groups:
            if other is group:
                continue
            needed = -(-group.num_slices // other.num_slices)
            if evicts and not other.pool.num_free and not other.pool.num_free_mapped:
                self._tree.evict(other.index, needed)
            while not other.pool.num_free and other.pool.num_free_mapped and self._regions.unmap_oldest_tail(other):
                pass
            block_ids, fence = other.pool.detachable(needed, freed_before=math.inf)
            if block_ids:
                self._mapper.wait_for_fence(fence)
                self._mapper.run_now(DetachPages(self._pages, other, block_ids))
                return True
        return self._mapper.wait_for_work()


@dataclass(eq=False)
class CopyOnWrite:
    """Copies of blocks due before the next step; each holds a reference on source and target. Only called within
    `MemoryLock.exclusive`."""

    _groups: Sequence[GroupMemory]
    _allocator: BlockAllocator
    _regions: RegionManager
    _mapper: Mapper
    _contents: BlockContents
    _lock: MemoryLock
    _counts: MemoryCounts
    _changes: TableChanges
    _due: list[tuple[int, int, int]] = field(default_factory=list)  # (group, source, target)

    @property
    def held(self) -> list[tuple[int, int]]:
        """(group, block) of every reference that due copies hold."""
        return [(g, block_id) for g, *pair in self._due for block_id in pair]

    def is_last_block_shared(self, g: int, table: GroupTable, num_tokens: int) -> bool:
        """Whether the token after `num_tokens` would be written into a shared or indexed block."""
        group = self._groups[g]
        if num_tokens % group.layout.block_tokens == 0:
            return False
        last = table.block_ids[-1]
        if last in group.pool.indexed_blocks:
            return True
        references = group.pool.references[last]
        return references > 1 and references - self.held.count((g, last)) > 1

    def unshare_last_block(self, g: int, table: GroupTable) -> None:
        """Replace the table's shared last block by a block of its own, copied before the next step."""
        group = self._groups[g]
        [new] = self._allocator.allocate(group, 1, at_home=True)
        old = table.block_ids[-1]
        # If the old block is itself the target of a due copy, read from that copy's source.
        source = next((a for at, a, b in self._due if (at, b) == (g, old)), old)
        group.pool.add_references([source, new])
        self._due.append((g, source, new))
        if table.region is not None:
            self._mapper.wait_for_region(table.region)
            table.region.checked = min(table.region.checked, len(table.block_ids) - 1)
            table.region.fence = self._mapper.fence
        table.at_home = min(table.at_home, len(table.block_ids) - 1)
        self._replace_last(table, new)
        self._allocator.free(group, [old])

    def undo_unshare_last_block(self, g: int, table: GroupTable, shared: int) -> None:
        group, new = self._groups[g], table.block_ids[-1]
        source = next(a for at, a, b in self._due if (at, b) == (g, new))
        self._due.remove((g, source, new))
        group.pool.add_references([shared])
        table.at_home = min(table.at_home, len(table.block_ids) - 1)
        self._replace_last(table, shared)
        self._allocator.free(group, [source, new, new])

    def _replace_last(self, table: GroupTable, block_id: int) -> None:
        table.block_ids[-1] = block_id
        self._changes.note(table, len(table.block_ids) - 1)

    def run(self) -> None:
        """Make the due copies, in the device's queue after the launched steps. After an error they are due again.

        Raises:
            MapError: the device refused.
        """
        if not self._due:
            return
        for g in sorted({at for at, _, _ in self._due}):
            sources, targets = zip(*((source, target) for at, source, target in self._due if at == g), strict=True)
            self._regions.map_homes(self._groups[g], (*sources, *targets))
            with self._lock.unlocked():
                self._contents.copy(g, sources, targets)
        self._mapper.set_fence()  # if this fails the copies stay due: copying again does no harm
        done, self._due = self._due, []
        self._counts.copied_blocks += len(done)
        for g, source, target in done:
            self._allocator.free(self._groups[g], [source, target])

    def drop_unneeded(self) -> None:
        """Drop copies whose target has no other owner left."""
        for copy in list(self._due):
            g, source, target = copy
            if self._groups[g].pool.references[target] == self.held.count((g, target)):
                self._due.remove(copy)
                self._allocator.free(self._groups[g], [source, target])


@dataclass(eq=False)
class BlockTables:
    """The tables of open sequences. Methods that change something are only called within `MemoryLock.exclusive`.

    Attributes:
        sequences: the open ones.
    """

    _groups: Sequence[GroupMemory]
    _allocator: BlockAllocator
    _copies: CopyOnWrite
    _mapper: Mapper
    _max_tokens: int
    _counts: MemoryCounts
    _changes: TableChanges
    sequences: set[SequenceMemory] = field(default_factory=set)

    def __post_init__(self) -> None:
        # Without windows, whose blocks expire, and states, which are copied, an allocated block stays as it is.
        self.only_grow = all(not g.spec.is_state and g.spec.window_tokens is None for g in self._groups)

    def tables_of(self, sequence: SequenceMemory) -> list[tuple[GroupMemory, GroupTable]]:
        return list(zip(self._groups, sequence.groups, strict=True))

    def check_open(self, sequence: SequenceMemory) -> None:
        if sequence not in self.sequences:
            raise IntegrityError("the sequence is not open: it was freed or swapped out")

    def pages_to_grow(self, sequence: SequenceMemory, num_tokens: int) -> int:
        """Pages needed to own blocks for `num_tokens` tokens in all, copies of shared blocks included."""
        needed = 0
        for group, table in self.tables_of(sequence):
            num_blocks = group.layout.num_blocks(num_tokens) - len(table.block_ids)
            num_blocks += self._copies.is_last_block_shared(group.index, table, sequence.num_tokens)
            needed += num_blocks * group.num_slices
        return needed

    def must_copy_state(self, sequence: SequenceMemory) -> bool:
        """Whether the sequence's recurrent state is shared, so that the next step needs a copy."""
        return any(
            group.spec.is_state and self._copies.is_last_block_shared(group.index, table, sequence.num_tokens)
            for group, table in self.tables_of(sequence)
        )

    def grow(self, sequence: SequenceMemory, num_tokens: int, *, evicts: bool) -> None:
        """Own blocks for `num_tokens` tokens, the last block exclusively. All or nothing.

        Args:
            evicts: cached content must be evicted anyway, so that cached blocks mapped in the region are best.
        """
        had_tokens, tables = sequence.num_tokens, self.tables_of(sequence)
        unshared: list[tuple[int, GroupTable, int]] = []  # (group, table, its shared block)
        try:
            for g, (group, table) in enumerate(tables):
                if self._copies.is_last_block_shared(g, table, had_tokens):
                    shared = table.block_ids[-1]
                    self._copies.unshare_last_block(g, table)
                    unshared.append((g, table, shared))
                self._append_blocks(group, table, group.layout.num_blocks(num_tokens) - len(table.block_ids), evicts)
        except VmemError:
            for group, table in tables:
                self.drop(group, table, group.layout.num_blocks(had_tokens))
            for g, table, shared in unshared:
                self._copies.undo_unshare_last_block(g, table, shared)
            raise

    def _append_blocks(self, group: GroupMemory, table: GroupTable, count: int, evicts: bool) -> None:
        """Append blocks, all or none: those that the region maps next if they are free, then any."""
        if count <= 0:
            return
        region = table.region
        new: list[int] = []
        if region is not None:
            self._mapper.wait_for_region(region)
            for place in range(len(table.block_ids), len(table.block_ids) + count):
                mapped = region.at(place)
                if mapped == HOLE or not group.can_allocate_in_place(mapped, evicts=evicts):
                    break
                self._allocator.allocate_block(group, mapped)
                new.append(mapped)
        self._counts.adopted_blocks += len(new)
        try:
            new += self._allocator.allocate(group, count - len(new), at_home=region is None)
        except VmemError:
            self._allocator.free(group, new)
            raise
        self._changes.note(table, len(table.block_ids))
        table.block_ids += new

    def set_length(self, sequence: SequenceMemory, num_tokens: int) -> None:
        """Note the sequence's length, and its capacity where blocks stay as they are."""
        sequence.num_tokens = num_tokens
        if self.only_grow:
            owned = [len(table.block_ids) * group.layout.block_tokens for group, table in self.tables_of(sequence)]
            sequence.writable_tokens = min(*owned, self._max_tokens)

    def fork(self, sequence: SequenceMemory, num_tokens: int, policy: ViewPolicy) -> SequenceMemory:
        """Create a sequence, not open yet, that shares the blocks of the first `num_tokens` tokens."""
        if not 0 < num_tokens <= sequence.num_tokens:
            raise VmemError(f"a fork of {num_tokens} tokens from a sequence of {sequence.num_tokens}")
        self.check_can_continue(sequence, num_tokens)
        sequence.writable_tokens = 0
        tables = []
        for group, table in self.tables_of(sequence):
            tables.append(GroupTable(table.block_ids[: group.layout.num_blocks(num_tokens)], table.first))
            group.pool.add_references(tables[-1].owned)
        return SequenceMemory(policy, tuple(tables), num_tokens)

    def drop(self, group: GroupMemory, table: GroupTable, kept: int) -> None:
        """Free the blocks from index `kept` on. Their places in the region become its tail."""
        if kept >= len(table.block_ids):
            table.first = min(table.first, kept)
            return
        if table.region is not None:
            self._mapper.wait_for_region(table.region)
            table.region.checked = min(table.region.checked, kept)
            table.region.wanted = min(table.region.wanted, kept)
            table.region.fence = self._mapper.fence
        table.at_home = min(table.at_home, kept)
        self._changes.note(table, kept)
        freed = table.block_ids[max(kept, table.first) :]
        del table.block_ids[kept:]
        table.first = min(table.first, kept)
        # In reverse, so that the end of a cached prefix is evicted first.
        self._allocator.free(group, freed[::-1])
        self._copies.drop_unneeded()

    def expire(self, sequence: SequenceMemory, start: int) -> None:
        """Free the blocks that no query from position `start` on sees."""
        for group, table in self.tables_of(sequence):
            first = min(self.first_visible(group, start), len(table.block_ids))
            if first <= table.first:
                continue
            if table.region is not None:
                region = table.region
                self._mapper.wait_for_region(region)
                region.first = first
                region.checked = max(region.checked, first)
                region.fence = self._mapper.fence
                group.expired[region] = None
            self._allocator.free(group, table.block_ids[table.first : first])
            table.first = first

    def first_visible(self, group: GroupMemory, start: int) -> int:
        """The first block that a query at position `start` sees a token of."""
        window = group.spec.window_tokens
        return 0 if window is None else max(0, start - window + 1) // group.layout.block_tokens

    def check_can_continue(self, sequence: SequenceMemory, num_tokens: int) -> None:
        """Raise `VmemError` unless the sequence can continue after its first `num_tokens` tokens."""
        for group, table in self.tables_of(sequence):
            if group.spec.is_state and num_tokens not in (0, sequence.num_tokens):
                raise VmemError(
                    f"cannot continue after {num_tokens} of {sequence.num_tokens} tokens: "
                    "only the last recurrent state is kept"
                )
            if self.first_visible(group, num_tokens) < table.first:
                lost = table.first * group.layout.block_tokens
                raise VmemError(
                    f"cannot continue after {num_tokens} of {sequence.num_tokens} tokens: "
                    f"the first {lost} have left the window of {group.spec.window_tokens}"
                )
