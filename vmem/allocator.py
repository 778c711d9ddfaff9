"""Where blocks come from: at once if some are free, else by taking pages from wherever that costs least."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from vmem.backends.base import Backend
from vmem.budget import PagePool
from vmem.errors import OutOfPages, VmemError
from vmem.group import GroupMemory
from vmem.mapper import Mapper
from vmem.mapping_work import AttachPages, DetachPages, UnmapRegion
from vmem.prefix_tree import PrefixTree
from vmem.region import Region


class BlockAllocator:
    """Allocates, frees and unmaps in the engine's thread, beside the mapper. Only called under the memory's lock, which
    it lets go of while the device works (`Mapper.unlocked`).

    Attributes:
        fence: of the last step that was launched. What is freed now, that step may still read.
    """

    def __init__(
        self,
        backend: Backend,
        pages: PagePool,
        groups: Sequence[GroupMemory],
        prefixes: PrefixTree,
        mapper: Mapper,
    ) -> None:
        self._backend = backend
        self._pages = pages
        self._groups = groups
        self._prefixes = prefixes
        self._mapper = mapper
        self.fence = backend.fence()

    @property
    def num_owned_pages(self) -> int:
        return sum(group.pool.num_owned * group.num_slices for group in self._groups)

    @property
    def num_free_pages(self) -> int:
        return self._pages.budget - self.num_owned_pages

    def must_evict(self, num_pages: int) -> bool:
        """Whether so many pages cannot be had without giving up the content of free blocks."""
        kept = sum(group.pool.num_cached * group.num_slices for group in self._groups)
        return num_pages > self.num_free_pages - kept

    def allocate(self, group: GroupMemory, count: int) -> list[int]:
        """Take `count` blocks from wherever they come at least cost, all or none.

        Raises:
            OutOfPages: there are not enough; the device may have less than the budget says.
            MapError: the device refused.
        """
        pool = group.pool
        taken = pool.allocate_free(count)
        device_full = False
        try:
            # Blocks that parked regions show cost nothing now, and one more mapping when such a region is adopted; a
            # page that must be made and zeroed first costs several times that, and memory. Content that may be wanted
            # again is given up when the budget leaves nothing else.
            taken += pool.allocate_free_mapped(count - len(taken))
            while len(taken) < count:
                missing = count - len(taken)
                if device_full:
                    missing = min(missing, len(self._pages.spare) // group.num_slices)
                if missing and pool.num_unbacked and self._pages.num_claimable >= group.num_slices:
                    try:
                        self._mapper.run_now(AttachPages(self._backend, self._pages, group, missing))
                    except OutOfPages:
                        device_full = True
                elif not (
                    self._make_room(group, evicts=False)
                    or self._prefixes.evict(group.index, count - len(taken))
                    or self._make_room(group, evicts=True)
                ):
                    raise OutOfPages((count - len(taken)) * group.num_slices, max(self.num_free_pages, 0))
                taken += pool.allocate_free(count - len(taken))
                taken += pool.allocate_free_mapped(count - len(taken))
        except VmemError:
            pool.free(taken, fence=0, now=time.monotonic())
            raise
        return sorted(taken)  # neighbours are mapped by one call

    def allocate_block(self, group: GroupMemory, block_id: int) -> None:
        """Own this free block, whatever it holds."""
        if group.pool.is_cached(block_id):
            self._prefixes.evict_block(group.index, block_id)
        group.pool.allocate_block(block_id)

    def free(self, group: GroupMemory, block_ids: Sequence[int]) -> None:
        """Drop a reference of each block; the last launched step may still read them."""
        group.pool.free(block_ids, fence=self.fence, now=time.monotonic())

    def set_fence(self) -> None:
        """Mark what the device has been given to do so far: what is freed from now on, that may still read. Without the
        lock, because a device that has no event for the mark is waited for."""
        with self._mapper.unlocked():
            fence = self._backend.fence()
        self.fence = fence

    def wait_for_mapper(self, region: Region) -> None:
        """Wait until the mapper has let go of the region."""
        self._mapper.wait_while(lambda: region.busy)

    def unmap_oldest_tail(self, group: GroupMemory) -> bool:
        """Unmap what the region parked longest shows, or what the holder of one does not use; False if there is
        nothing."""
        for region in [*group.parked, *group.held]:
            if len(region.mapped_blocks) > region.used or region in group.expired:
                before = region.num_mapped
                self.unmap_tail(group, region)
                if region.num_mapped < before:
                    return True
        return False

    def unmap_tail(self, group: GroupMemory, region: Region) -> None:
        """Unmap all that the region shows and its holder does not use, once no step can read that any more."""
        self.wait_for_mapper(region)
        self._mapper.wait_for(self._backend, region.fence)
        while (run := region.last_run(region.used, group.region_blocks)) is not None:
            self._mapper.run_now(UnmapRegion(group, region, *run))
        while (run := region.first_run(region.first, group.region_blocks)) is not None:
            self._mapper.run_now(UnmapRegion(group, region, *run))

    def _make_room(self, group: GroupMemory, *, evicts: bool) -> bool:
        """Take pages from free blocks of other groups, or wait for the mapper to let go of some."""
        for other in self._groups:
            if other is group:
                continue
            wanted = -(-group.num_slices // other.num_slices)
            if evicts and not other.pool.num_free and not other.pool.num_free_mapped:
                self._prefixes.evict(other.index, wanted)
            while not other.pool.num_free and other.pool.num_free_mapped and self.unmap_oldest_tail(other):
                pass
            block_ids, fence = other.pool.detachable(wanted, freed_before=math.inf)
            if block_ids:
                self._mapper.wait_for(self._backend, fence)
                self._mapper.run_now(DetachPages(self._pages, other, block_ids))
                return True
        if self._mapper.is_working:
            self._mapper.wait_while(lambda: self._mapper.is_working)
            return True
        return False
