"""Free blocks: with pages, without owner, content and region mapping, by id and by the time they were freed."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator


class FreeBlocks:
    """A queue of blocks, the first freed first, from which the lowest ids are allocated.

    The `extent_blocks` blocks whose ids give the same quotient form an extent: their pages share handles, and are given
    back together. An extent is *whole* while all of its blocks are free.
    """

    def __init__(self, end: int, extent_blocks: int) -> None:
        self._extent_blocks = extent_blocks
        self._queue: OrderedDict[int, None] = OrderedDict()
        self._lowest: list[int] = []  # heap over the ids in `_queue`; entries that left the queue are skipped
        self._in_heap = [False] * end
        # Whole extents, the first that became whole first; of single blocks these are the blocks themselves.
        self._whole: OrderedDict[int, None] = self._queue if extent_blocks == 1 else OrderedDict()
        self._num_free = [0] * (0 if extent_blocks == 1 else -(-end // extent_blocks))

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[int]:
        return iter(self._queue)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._queue

    @property
    def num_whole(self) -> int:
        """Blocks of whole extents."""
        return len(self._whole) * self._extent_blocks

    def add(self, block_id: int, *, first: bool = False) -> None:
        """Add a block at the end, or as the first one."""
        self._queue[block_id] = None
        if first:
            self._queue.move_to_end(block_id, last=False)
        if not self._in_heap[block_id]:
            self._in_heap[block_id] = True
            heapq.heappush(self._lowest, block_id)
        if self._extent_blocks > 1:
            extent = block_id // self._extent_blocks
            self._num_free[extent] += 1
            if self._num_free[extent] == self._extent_blocks:
                self._whole[extent] = None

    def remove(self, block_id: int) -> None:
        del self._queue[block_id]
        if self._extent_blocks > 1:
            extent = block_id // self._extent_blocks
            if self._num_free[extent] == self._extent_blocks:
                del self._whole[extent]
            self._num_free[extent] -= 1

    def take_lowest(self, count: int) -> list[int]:
        """Remove up to `count` blocks, lowest ids first."""
        taken: list[int] = []
        while len(taken) < count and self._queue:
            block_id = heapq.heappop(self._lowest)
            self._in_heap[block_id] = False
            if block_id in self._queue:
                self.remove(block_id)
                taken.append(block_id)
        return taken

    def whole_extents(self) -> Iterator[range]:
        """The blocks of each whole extent."""
        size = self._extent_blocks
        return (range(extent * size, (extent + 1) * size) for extent in self._whole)

    def is_consistent(self) -> bool:
        """Whether heap and extents agree with the queue."""
        size = self._extent_blocks
        counts = [0] * len(self._num_free)
        if size > 1:
            for block_id in self._queue:
                counts[block_id // size] += 1
            if counts != self._num_free or self._whole.keys() != {e for e, n in enumerate(counts) if n == size}:
                return False
        return self._queue.keys() <= set(self._lowest)
