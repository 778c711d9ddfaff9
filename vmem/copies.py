"""Copy-on-write: blocks that are to be copied before the next step (PagedAttention §4.4)."""

from __future__ import annotations

from collections.abc import Sequence

from vmem.allocator import BlockAllocator
from vmem.contents import BlockContents
from vmem.group import GroupMemory
from vmem.sequence import GroupTable


class BlockCopies:
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

    def shares_last(self, g: int, table: GroupTable, num_tokens: int) -> bool:
        """Whether the token after `num_tokens` goes into a block that other sequences own too, or may want again."""
        group = self._groups[g]
        if num_tokens % group.layout.block_tokens == 0:
            return False
        last = table.block_ids[-1]
        if last in group.pool.kept_blocks:
            return True
        references = group.pool.references(last)
        return references > 1 and references - self.held.count((g, last)) > 1

    def own_last(self, g: int, table: GroupTable) -> None:
        """Replace the table's shared last block by one of its own, a copy of it when the next step begins."""
        group = self._groups[g]
        [new] = self._allocator.allocate(group, 1)
        old = table.block_ids[-1]
        # A copy of what is itself still to be copied reads from where that comes from.
        source = next((a for at, a, b in self._copies if (at, b) == (g, old)), old)
        group.pool.share([source, new])
        self._copies.append((g, source, new))
        if table.region is not None:
            self._allocator.settle(table.region)
            table.region.checked = min(table.region.checked, len(table.block_ids) - 1)
            table.region.fence = self._allocator.fence
        table.block_ids[-1] = new
        self._allocator.free(group, [old])

    def share_last_again(self, g: int, table: GroupTable, shared: int) -> None:
        """Undo `own_last`."""
        group, new = self._groups[g], table.block_ids[-1]
        source = next(a for at, a, b in self._copies if (at, b) == (g, new))
        self._copies.remove((g, source, new))
        group.pool.share([shared])
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
            if self._groups[g].pool.references(target) == self.held.count((g, target)):
                self._copies.remove(copy)
                self._allocator.free(self._groups[g], [source, target])
