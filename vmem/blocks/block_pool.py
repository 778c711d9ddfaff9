"""Block pool: the state and the reference count of every block."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from folio.vmem.blocks.eviction import EvictionQueue
from folio.vmem.blocks.free_blocks import FreeBlocks
from folio.vmem.blocks.segments import CachedUnit
from folio.vmem.errors import IntegrityError


@dataclass(frozen=True, slots=True)
class PoolCopy:
    """A copy of what decides the states of a pool's blocks. `unbacked`: ids in no order, with those from 1 on that the
    pool lacks; others as in `BlockPool`."""

    references: list[int]
    region_mappings: list[int]
    unbacked: list[int]
    indexed: set[int]
    moving: set[int]


class BlockPool:
    """States and reference counts of the blocks with these ids (PagedAttention §4.3).

    The states and their changes are drawn in docs/internals/memory.md, "The life of a page".

    Low ids are allocated first: neighbours are mapped by one call and merge into one mapping. A block that is being
    attached, detached or mapped ahead is *moving*, and neither free nor owned. Only called with the memory's lock held.

    Args:
        block_ids: whole extents, see `FreeBlocks`.
        extent_blocks: blocks that get and lose their pages together.

    Attributes:
        references: by block id, the number of owners.
        region_mappings: by block id, the number of places of regions that map it.
        freed_at: by block id, when it was last freed, in seconds of a monotonic clock.
        cached: blocks without an owner whose content the prefix cache has indexed.
        indexed_blocks: blocks whose content the prefix cache has indexed, owned or cached, with their units.
        num_owned: blocks with at least one reference.
    """

    def __init__(self, block_ids: range, cached: EvictionQueue, extent_blocks: int = 1) -> None:
        self.block_ids = block_ids
        self._extent_blocks = extent_blocks
        self.references = [0] * block_ids.stop
        self.region_mappings = [0] * block_ids.stop
        self.freed_at = [0.0] * block_ids.stop
        self.cached = cached
        self.indexed_blocks: dict[int, CachedUnit] = {}
        self.num_owned = 0
        self._unbacked = list(block_ids)  # a heap of whole extents; ascending order is one
        self._free = FreeBlocks(block_ids.stop, extent_blocks)
        self._free_mapped: OrderedDict[int, None] = OrderedDict()  # the first was freed first
        self._eager: set[int] = set()  # free-mapped blocks that were mapped ahead
        self._moving: set[int] = set()
        self._fence = [0] * block_ids.stop

    @property
    def num_unbacked(self) -> int:
        return len(self._unbacked)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_detachable(self) -> int:
        """Free blocks whose pages could be detached."""
        return self._free.num_whole

    @property
    def num_free_mapped(self) -> int:
        return len(self._free_mapped)

    @property
    def num_eager(self) -> int:
        return len(self._eager)

    @property
    def num_cached(self) -> int:
        return len(self.cached)

    def copy(self) -> PoolCopy:
        """Copy the states whole lists at once, so that the lock is held briefly."""
        return PoolCopy(
            self.references.copy(),
            self.region_mappings.copy(),
            [*range(1, self.block_ids.start), *self._unbacked],
            set(self.indexed_blocks),
            self._moving.copy(),
        )

    def is_allocatable(self, block_id: int) -> bool:
        """Whether the block is free or free-mapped."""
        return block_id in self._free_mapped or block_id in self._free

    def is_cached(self, block_id: int) -> bool:
        return block_id in self.cached

    # ---- content ----

    def mark_indexed(self, block_id: int, unit: CachedUnit) -> None:
        """Note that the prefix cache has indexed this owned block: once freed, it is cached."""
        assert self.references[block_id], f"block {block_id} is indexed, but has no owner"
        self.indexed_blocks[block_id] = unit

    def unmark_indexed(self, block_id: int) -> None:
        """Note that the block is no longer indexed; a cached block becomes free, and the first to be reused."""
        del self.indexed_blocks[block_id]
        if block_id in self.cached:
            self.cached.remove(block_id)
            self._make_free(block_id, first=True)

    def acquire_cached(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each of these indexed blocks, cached or owned."""
        for block_id in block_ids:
            if self.references[block_id]:
                self.references[block_id] += 1
            else:
                self.cached.remove(block_id)
                self._own(block_id)

    # ---- owners ----

    def allocate_block(self, block_id: int) -> None:
        """Allocate this free or free-mapped block."""
        if block_id in self._free_mapped:
            del self._free_mapped[block_id]
            self._eager.discard(block_id)
        elif block_id in self._free:
            self._free.remove(block_id)
        else:
            raise IntegrityError(f"block {block_id} cannot be allocated: not free")
        self._own(block_id)

    def allocate_free(self, count: int) -> list[int]:
        """Allocate up to `count` free blocks, lowest ids first."""
        taken = self._free.take_lowest(count)
        for block_id in taken:
            self._own(block_id)
        return taken

    def allocate_free_mapped(self, count: int) -> list[int]:
        """Allocate up to `count` free-mapped blocks, those freed first. Their places in regions become stale."""
        taken = [self._free_mapped.popitem(last=False)[0] for _ in range(min(count, len(self._free_mapped)))]
        self._eager.difference_update(taken)
        for block_id in taken:
            self._own(block_id)
        return taken

    def add_references(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block; each needs a `free` of its own."""
        for block_id in block_ids:
            if not self.references[block_id]:
                raise IntegrityError(f"block {block_id} cannot be shared: it has no owner")
            self.references[block_id] += 1

    def free(self, block_ids: Iterable[int], *, fence: int, now: float) -> None:
        """Drop one reference of each block.

        Args:
            fence: of the last step that may read the blocks; 0 if none since they were allocated.
        """
        for block_id in block_ids:
            if not self.references[block_id]:
                raise IntegrityError(f"block {block_id} cannot be freed: free already")
            self.references[block_id] -= 1
            if self.references[block_id]:
                continue
            self.num_owned -= 1
            self.freed_at[block_id] = now
            self._fence[block_id] = max(self._fence[block_id], fence)
            if (unit := self.indexed_blocks.get(block_id)) is not None:
                self.cached.add(block_id, unit)
            else:
                self._make_free(block_id)

    # ---- regions ----

    def note_region_mapped(self, block_ids: Iterable[int]) -> None:
        """Count one more region mapping of each of these owned blocks."""
        for block_id in block_ids:
            assert self.references[block_id], f"block {block_id} is mapped in a region, but has no owner"
            self.region_mappings[block_id] += 1

    def begin_map_ahead(self, count: int, *, steals: bool = False) -> list[int]:
        """Take up to `count` free blocks to map ahead; with `steals` also free-mapped ones that were not."""
        block_ids = self.allocate_free(count)
        if steals:
            stealable = (block_id for block_id in self._free_mapped if block_id not in self._eager)
            for block_id in list(islice(stealable, count - len(block_ids))):
                self.allocate_block(block_id)
                block_ids.append(block_id)
        for block_id in block_ids:
            self.references[block_id] = 0
        self.num_owned -= len(block_ids)
        self._moving.update(block_ids)
        return block_ids

    def end_map_ahead(self, block_ids: Sequence[int], now: float, *, failed: bool) -> None:
        """Count one more region mapping of each block unless the mapping failed; they are free or free-mapped again."""
        for block_id in block_ids:
            self._moving.remove(block_id)
            self.freed_at[block_id] = now
            self.region_mappings[block_id] += not failed
            self._make_free(block_id)
        if not failed:
            self._eager.update(block_ids)

    def note_region_unmapped(self, block_ids: Iterable[int]) -> None:
        """Count one region mapping less of each block; free-mapped blocks without any become free, the first to be
        detached."""
        for block_id in block_ids:
            if not self.region_mappings[block_id]:
                raise IntegrityError(f"block {block_id} cannot be unmapped: no region maps it")
            self.region_mappings[block_id] -= 1
            if not self.region_mappings[block_id] and block_id in self._free_mapped:
                del self._free_mapped[block_id]
                self._eager.discard(block_id)
                self._make_free(block_id, first=True)

    # ---- pages ----

    def begin_attach(self, count: int) -> list[int]:
        """Take up to `count` unbacked blocks, in whole extents rounded up, lowest ids first, to attach pages."""
        count = -(-count // self._extent_blocks) * self._extent_blocks
        block_ids = [heapq.heappop(self._unbacked) for _ in range(min(count, len(self._unbacked)))]
        self._moving.update(block_ids)
        return block_ids

    def detachable(self, count: int, *, freed_before: float) -> tuple[list[int], int]:
        """Up to `count` free blocks whose pages could be detached, in whole extents rounded up, those freed first; and
        the latest of their fences. Blocks freed after `freed_before` stay."""
        block_ids: list[int] = []
        for extent in self._free.whole_extents():
            if len(block_ids) >= count or any(self.freed_at[block_id] > freed_before for block_id in extent):
                break
            block_ids += extent
        return sorted(block_ids), max((self._fence[b] for b in block_ids), default=0)

    def begin_detach(self, block_ids: Sequence[int]) -> None:
        """Take these free blocks to detach their pages."""
        for block_id in block_ids:
            self._free.remove(block_id)
        self._moving.update(block_ids)

    def end_move(self, block_ids: Sequence[int], *, has_pages: bool, freed_at: float | None = None) -> None:
        """End attaching or detaching: the blocks are free, or unbacked.

        Args:
            freed_at: when blocks with new pages count as freed.
        """
        for block_id in block_ids:
            self._moving.remove(block_id)
            if freed_at is not None:
                self.freed_at[block_id] = freed_at
            if has_pages:
                self._make_free(block_id)
            else:
                heapq.heappush(self._unbacked, block_id)

    def oldest_free_since(self) -> float | None:
        """Since when the pages of the first free blocks could be detached."""
        extent = next(self._free.whole_extents(), None)
        return None if extent is None else max(self.freed_at[block_id] for block_id in extent)

    def check_integrity(self, owned: Counter[int], mapped: Counter[int]) -> None:
        """Raise `IntegrityError` unless the reference counts are those of `owned`, the region mappings those of
        `mapped`, and every block has exactly one state."""
        for name, counts, expected in (
            ("references", self.references, owned),
            ("region mappings", self.region_mappings, mapped),
        ):
            counted = Counter({b: n for b, n in enumerate(counts) if n})
            if counted != expected:
                raise IntegrityError(f"{name}: {dict(counted - expected)} too many, {dict(expected - counted)} too few")
        states = [*self._unbacked, *self._free, *self._free_mapped, *self.cached, *self._moving, *owned]
        if sorted(states) != list(self.block_ids):
            raise IntegrityError(
                f"{len(states)} states for {len(self.block_ids)} blocks: {Counter(states).most_common(3)}"
            )
        if len(owned) != self.num_owned:
            raise IntegrityError(f"{len(owned)} blocks are owned, {self.num_owned} counted")
        if any(not self.region_mappings[b] for b in self._free_mapped) or any(
            self.region_mappings[b] for b in (*self._free, *self._unbacked)
        ):
            raise IntegrityError("the free and free-mapped queues contradict the region mappings")
        cached = set(self.cached)
        if not cached <= self.indexed_blocks.keys() or self.indexed_blocks.keys() - set(owned) - cached:
            raise IntegrityError("the cached blocks contradict the indexed ones")
        self.cached.check_integrity()
        if not self._eager <= self._free_mapped.keys() or not self._free.is_consistent():
            raise IntegrityError("the queues of free blocks contradict each other")

    def _own(self, block_id: int) -> None:
        self.references[block_id] = 1
        self.num_owned += 1

    def _make_free(self, block_id: int, *, first: bool = False) -> None:
        """Queue a block without owner and content as free or free-mapped, as the last or the first one."""
        if not self.region_mappings[block_id]:
            self._free.add(block_id, first=first)
            return
        self._free_mapped[block_id] = None
        if first:
            self._free_mapped.move_to_end(block_id, last=False)
