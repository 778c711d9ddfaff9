"""What block tables gain and lose."""

from __future__ import annotations

from collections.abc import Sequence

from vmem.allocator import BlockAllocator
from vmem.copies import BlockCopies
from vmem.errors import VmemError
from vmem.group import GroupMemory
from vmem.region import HOLE
from vmem.sequence import GroupTable, SequenceMemory


class BlockTables:
    """Grows tables, cuts them, and lets what left the window expire. Only called under the memory's lock.

    Attributes:
        num_adopted: blocks that sequences took because their region showed them already.
    """

    def __init__(self, groups: Sequence[GroupMemory], allocator: BlockAllocator, copies: BlockCopies) -> None:
        self._groups = groups
        self._allocator = allocator
        self._copies = copies
        self.num_adopted = 0

    def of(self, sequence: SequenceMemory) -> list[tuple[GroupMemory, GroupTable]]:
        return list(zip(self._groups, sequence.groups, strict=True))

    def pages_to_grow(self, sequence: SequenceMemory, num_tokens: int) -> int:
        """Pages the sequence would take to own blocks for so many tokens in all, copies of shared ones included."""
        needed = 0
        for group, table in self.of(sequence):
            num_blocks = group.layout.num_blocks(num_tokens) - len(table.block_ids)
            num_blocks += self._copies.shares_last(group.index, table, sequence.num_tokens)
            needed += num_blocks * group.num_slices
        return needed

    def must_copy_state(self, sequence: SequenceMemory) -> bool:
        """Whether the sequence's recurrent state is others' too, so that it cannot go on in it."""
        return any(
            group.spec.is_state and self._copies.shares_last(group.index, table, sequence.num_tokens)
            for group, table in self.of(sequence)
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
            self._allocator.settle(region)
            for place in range(len(table.block_ids), len(table.block_ids) + count):
                shown = region.at(place)
                if shown == HOLE or not group.can_take(shown, evicts=evicts):
                    break
                self._allocator.take(group, shown)
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
            self._allocator.settle(table.region)
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
            self._allocator.settle(region)
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
        for group, table in self.of(sequence):
            if group.spec.is_state and num_tokens not in (0, sequence.num_tokens):
                raise VmemError(
                    f"{num_tokens} tokens cannot be gone on from: of {sequence.num_tokens} only the last state is known"
                )
            if self.first_visible(group, num_tokens) < table.first:
                lost = table.first * group.layout.block_tokens
                raise VmemError(f"{num_tokens} tokens cannot be gone on from: the first {lost} have left the window")
