"""What block tables gain and lose.

Copy-on-write: blocks that are to be copied before the next step (PagedAttention §4.4).
"""

from __future__ import annotations

from collections.abc import Sequence

from vmem.allocator import BlockAllocator
from vmem.errors import VmemError
from vmem.group import GroupMemory
from vmem.region import HOLE
from vmem.sequence import GroupTable, SequenceMemory
from vmem.tensors import BlockContents


class BlockTables:
    """Grows tables, cuts them, and lets what left the window expire. Only called under the memory's lock.

    Attributes:
        num_adopted: blocks that sequences took because their region showed them already.
    """

    def __init__(self, groups: Sequence[GroupMemory], allocator: BlockAllocator, copies: CopyOnWrite) -> None:
        self._groups = groups
        self._allocator = allocator
        self._copies = copies
        self.num_adopted = 0

    def tables_of(self, sequence: SequenceMemory) -> list[tuple[GroupMemory, GroupTable]]:
        return list(zip(self._groups, sequence.groups, strict=True))

    def pages_to_grow(self, sequence: SequenceMemory, num_tokens: int) -> int:
        """Pages the sequence would take to own blocks for so many tokens in all, copies of shared ones included."""
        needed = 0
        for group, table in self.tables_of(sequence):
            num_blocks = group.layout.num_blocks(num_tokens) - len(table.block_ids)
            num_blocks += self._copies.is_last_block_shared(group.index, table, sequence.num_tokens)
            needed += num_blocks * group.num_slices
        return needed

    def must_copy_state(self, sequence: SequenceMemory) -> bool:
        """Whether the sequence's recurrent state is others' too, so that it cannot go on in it."""
        return any(
            group.spec.is_state and self._copies.is_last_block_shared(group.index, table, sequence.num_tokens)
            for group, table in self.tables_of(sequence)
        )

    def grow(self, group: GroupMemory, table: GroupTable, count: int, *, evicts: bool) -> None:
        """Append blocks to the table: those its region shows next if they are free, then any. All or none.

        Args:
            evicts: the content of some free blocks must be given up anyway, so those that are mapped already do best.
        """
        if count <= 0:
            return
        region = table.region
        new: list[int] = []
        if region is not None:
            self._allocator.wait_for_mapper(region)
            for place in range(len(table.block_ids), len(table.block_ids) + count):
                shown = region.at(place)
                if shown == HOLE or not group.can_allocate_in_place(shown, evicts=evicts):
                    break
                self._allocator.allocate_block(group, shown)
                new.append(shown)
        self.num_adopted += len(new)
        try:
            new += self._allocator.allocate(group, count - len(new))
        except VmemError:
            self._allocator.free(group, new)
            raise
        table.block_ids += new

    def drop(self, group: GroupMemory, table: GroupTable, kept: int) -> None:
        """Free the blocks from `kept` on. Their places in the region become its tail."""
        if kept >= len(table.block_ids):
            table.first = min(table.first, kept)
            return
        if table.region is not None:
            self._allocator.wait_for_mapper(table.region)
            table.region.checked = min(table.region.checked, kept)
            table.region.wanted = min(table.region.wanted, kept)
            table.region.fence = self._allocator.fence
        freed = table.block_ids[max(kept, table.first) :]
        del table.block_ids[kept:]
        table.first = min(table.first, kept)
        # The last first: of a prefix in the cache, its end is the first to go.
        self._allocator.free(group, freed[::-1])
        self._copies.forget_unneeded()

    def expire(self, group: GroupMemory, table: GroupTable, start: int) -> None:
        """Free the blocks that no query from position `start` on sees any more."""
        first = min(self.first_visible(group, start), len(table.block_ids))
        if first <= table.first:
            return
        if table.region is not None:
            region = table.region
            self._allocator.wait_for_mapper(region)
            region.first = first
            region.checked = max(region.checked, first)
            region.fence = self._allocator.fence
            group.expired[region] = None
        self._allocator.free(group, table.block_ids[table.first : first])
        table.first = first

    def first_visible(self, group: GroupMemory, start: int) -> int:
        """The first block that a query at position `start` sees a token of."""
        window = group.spec.window_tokens
        return 0 if window is None else max(0, start - window + 1) // group.layout.block_tokens

    def check_can_go_on(self, sequence: SequenceMemory, num_tokens: int) -> None:
        """Raise `VmemError` unless the sequence can go on after its first `num_tokens` tokens."""
        for group, table in self.tables_of(sequence):
            if group.spec.is_state and num_tokens not in (0, sequence.num_tokens):
                raise VmemError(
                    f"{num_tokens} tokens cannot be gone on from: of {sequence.num_tokens} only the last state is known"
                )
            if self.first_visible(group, num_tokens) < table.first:
                lost = table.first * group.layout.block_tokens
                raise VmemError(f"{num_tokens} tokens cannot be gone on from: the first {lost} have left the window")


class CopyOnWrite:
    """Copies that are promised and not made yet; each holds a reference on both its blocks. Under the memory's lock.

    Attributes:
        num_copied: blocks copied since the start.
    """

    def __init__(self, groups: Sequence[GroupMemory], allocator: BlockAllocator, contents: BlockContents) -> None:
        self._groups = groups
        self._allocator = allocator
        self._contents = contents
        self.num_copied = 0
        self._copies: list[tuple[int, int, int]] = []  # (group, from block, to block)

    @property
    def held(self) -> list[tuple[int, int]]:
        """(group, block) of every reference that copies hold."""
        return [(g, block_id) for g, *pair in self._copies for block_id in pair]

    def is_last_block_shared(self, g: int, table: GroupTable, num_tokens: int) -> bool:
        """Whether the token after `num_tokens` goes into a block that other sequences own too, or may want again."""
        group = self._groups[g]
        if num_tokens % group.layout.block_tokens == 0:
            return False
        last = table.block_ids[-1]
        if last in group.pool.indexed_blocks:
            return True
        references = group.pool.reference_count(last)
        return references > 1 and references - self.held.count((g, last)) > 1

    def unshare_last_block(self, g: int, table: GroupTable) -> None:
        """Replace the table's shared last block by one of its own, a copy of it when the next step begins."""
        group = self._groups[g]
        [new] = self._allocator.allocate(group, 1)
        old = table.block_ids[-1]
        # A copy of what is itself still to be copied reads from where that comes from.
        source = next((a for at, a, b in self._copies if (at, b) == (g, old)), old)
        group.pool.add_references([source, new])
        self._copies.append((g, source, new))
        if table.region is not None:
            self._allocator.wait_for_mapper(table.region)
            table.region.checked = min(table.region.checked, len(table.block_ids) - 1)
            table.region.fence = self._allocator.fence
        table.block_ids[-1] = new
        self._allocator.free(group, [old])

    def undo_unshare_last_block(self, g: int, table: GroupTable, shared: int) -> None:
        """Undo `own_last`."""
        group, new = self._groups[g], table.block_ids[-1]
        source = next(a for at, a, b in self._copies if (at, b) == (g, new))
        self._copies.remove((g, source, new))
        group.pool.add_references([shared])
        table.block_ids[-1] = shared
        self._allocator.free(group, [source, new, new])

    def run(self) -> None:
        """Copy, on the device's own queue: after the steps before, before the steps to come."""
        if not self._copies:
            return
        for g in sorted({at for at, _, _ in self._copies}):
            sources, targets = zip(*((source, target) for at, source, target in self._copies if at == g), strict=True)
            self._contents.copy(g, sources, targets)
        self._allocator.set_fence()  # nothing is undone before: copying again would be harmless
        done, self._copies = self._copies, []
        self.num_copied += len(done)
        for g, source, target in done:
            self._allocator.free(self._groups[g], [source, target])

    def forget_unneeded(self) -> None:
        """Drop the copies into blocks that nobody owns any more."""
        for copy in list(self._copies):
            g, source, target = copy
            if self._groups[g].pool.reference_count(target) == self.held.count((g, target)):
                self._copies.remove(copy)
                self._allocator.free(self._groups[g], [source, target])
