"""Which blocks are free, and how many owners each of the others has."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable

from vmem.errors import IntegrityError, OutOfPages


class BlockPool:
    """Reference counts over block ids `0 … num_blocks - 1` (PagedAttention §4.3).

    Low ids are handed out first: blocks that are neighbours are mapped by one call and merge into one mapping.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))  # a heap; ascending order is one
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks with one reference each, all or none. Raises `OutOfPages`."""
        if count > len(self._free):
            raise OutOfPages(count, len(self._free))
        block_ids = [heapq.heappop(self._free) for _ in range(count)]
        for block_id in block_ids:
            self._references[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block; each needs a `free` of its own."""
        for block_id in block_ids:
            if not self._references[block_id]:
                raise IntegrityError(f"share of block {block_id}, which is free")
            self._references[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop one reference of each block; a block without any is free again."""
        for block_id in block_ids:
            if not self._references[block_id]:
                raise IntegrityError(f"free of block {block_id}, which is free already")
            self._references[block_id] -= 1
            if not self._references[block_id]:
                heapq.heappush(self._free, block_id)

    def check_integrity(self, owned: Counter[int]) -> None:
        """Raise `IntegrityError` unless the counts are those of `owned` and every other block is free once."""
        counted = Counter({b: n for b, n in enumerate(self._references) if n})
        if counted != owned:
            raise IntegrityError(f"references {dict(counted - owned)} too many, {dict(owned - counted)} too few")
        free = set(self._free)
        if len(free) != len(self._free) or len(free) + len(counted) != self.num_blocks or free & counted.keys():
            raise IntegrityError(f"{len(self._free)} free entries, {len(counted)} owned, of {self.num_blocks} blocks")
