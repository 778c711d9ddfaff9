"""Mapping policy: the mapper's next unit of work, the first from a list of duties.

Duties depend on the state of the memory only. Nothing that a launched step may still read is changed: duties skip
regions and blocks whose fence has not passed, and the mapper asks again soon.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from folio.vmem.backends.base import Backend
from folio.vmem.blocks.eviction import EvictionOrder
from folio.vmem.budget import PagePool
from folio.vmem.group import GroupMemory
from folio.vmem.mapping.mapping_count import MappingCount
from folio.vmem.mapping.mapping_work import AttachPages, DestroyPages, DetachPages, MappingWork, MapRegion, UnmapRegion
from folio.vmem.mapping.options import MappingOptions
from folio.vmem.mapping.region import HOLE, Region
from folio.vmem.prefix.prefix_tree import PrefixTree

# Interval for checking whether the device has passed a fence.
_FENCE_POLL_S = 0.002
# The longest single wait; a later time is waited for in several.
_LONGEST_WAIT_S = 3600.0
# The depth of eager allocation suffices for this share of so many last prompts.
_PROMPTS_REMEMBERED, _PROMPTS_COVERED = 32, 0.75
_MOST_EAGER_REGIONS = 4


class PromptDemand:
    """Blocks and regions that the next prompts will probably need, estimated from the last ones."""

    def __init__(self) -> None:
        self._num_blocks: deque[int] = deque(maxlen=_PROMPTS_REMEMBERED)
        self._bursts: deque[int] = deque([0], maxlen=_PROMPTS_REMEMBERED)
        self.last_at = -math.inf

    def note_prompt(self, num_blocks: int, now: float) -> None:
        self._num_blocks.append(num_blocks)
        self._bursts[-1] += 1
        self.last_at = now

    def note_step(self) -> bool:
        """Returns whether prompts have begun since the last step."""
        begun = self._bursts[-1] > 0
        if begun:
            self._bursts.append(0)
        return begun

    @property
    def depth(self) -> int:
        """Blocks that suffice for most of the last prompts."""
        if not self._num_blocks:
            return 0
        return sorted(self._num_blocks)[math.ceil(len(self._num_blocks) * _PROMPTS_COVERED) - 1]

    @property
    def num_regions(self) -> int:
        """The most prompts that came in one step."""
        return min(max(self._bursts), _MOST_EAGER_REGIONS)


@dataclass(eq=False)
class MappingPolicy:
    """The duties of one memory's mapper. Only called with the memory's lock held.

    Attributes:
        demand: of each group, the recent prompts.
        free_blocks_wanted: of each group, blocks that the next step will allocate without a region.
        coming: of each group, blocks that the next step will allocate for a new sequence with a region.
        floor: pages that are created at the start and kept.
        options: may be replaced in tests.
        unit_pages: the most pages of one unit of work.
    """

    _backend: Backend
    _pages: PagePool
    _groups: Sequence[GroupMemory]
    _tree: PrefixTree
    _order: EvictionOrder
    _mappings: MappingCount
    options: MappingOptions
    floor: int
    now: float = 0.0
    _waits_for_fence: bool = False

    def __post_init__(self) -> None:
        self.unit_pages = max(1, self._backend.max_call_bytes // self._pages.page_bytes)
        self.forget_demand()

    def next_work(self, now: float) -> MappingWork | None:
        self.now = now
        self._waits_for_fence = False
        duties = (
            self._map_wanted,
            self._unmap_expired,
            self._shrink,
            self._map_coming,
            self._reclaim,
            self._fill_floor,
            self._map_ahead,
            self._release_idle,
        )
        return next((work for duty in duties if (work := duty()) is not None), None)

    @property
    def is_asked(self) -> bool:
        """Whether steps have announced needs, let blocks leave a window, or made free pages run low."""
        groups = any(group.wanted or group.expired for group in self._groups)
        return groups or any(self.free_blocks_wanted) or any(self.coming) or self._is_short

    def forget_demand(self) -> None:
        """Expect no prompt and no step, as at the start."""
        self.demand = [PromptDemand() for _ in self._groups]
        self.clear_step_demand()

    def clear_step_demand(self) -> None:
        """Drop the announced needs of steps, which then map for themselves and raise the device's errors."""
        self.free_blocks_wanted = [0] * len(self._groups)
        self.coming = [0] * len(self._groups)
        for group in self._groups:
            group.wanted.clear()

    def wait_s(self, now: float) -> float | None:
        """How long until the passing of time may make work; `None`: never."""
        self.now = now
        if self._waits_for_fence:
            return _FENCE_POLL_S
        if self._pages.num_created <= self.floor:
            return None
        since = [at for group in self._groups if (at := group.pool.oldest_free_since()) is not None]
        since += [at for group in self._groups for region, at in self._tails(group) if self._frees(group, region)]
        due = [at + self.options.idle_release_s for at in since]
        cached = [(group.pool, group.pool.cached.oldest()) for group in self._groups]
        keep_s = max(self.options.cache_release_s, self.options.idle_release_s)
        due += [pool.freed_at[b] + keep_s for pool, b in cached if b is not None]
        if (ends_at := self._order.next_retention_end()) is not None:
            due.append(ends_at)
        return min(max(min(due) - now, _FENCE_POLL_S), _LONGEST_WAIT_S) if due else None

    # ---- duties, the most urgent first ----

    def _map_wanted(self) -> MappingWork | None:
        """Blocks of this and the next step, in the regions of running sequences."""
        for i, group in enumerate(self._groups):
            missing = self.free_blocks_wanted[i] - group.pool.num_free
            if missing > 0 and (work := self._attach(group, missing, at_home=True)):
                return work
            self.free_blocks_wanted[i] = 0
            for region in list(group.wanted):
                if not region.busy and (work := self._map_places(group, region)):
                    return work
                if self._may_change(region):  # else what an earlier sequence has left may go later
                    del group.wanted[region]
        return None

    def _map_places(self, group: GroupMemory, region: Region) -> MappingWork | None:
        """The first places up to `wanted` that the holder cannot use. Holes get its blocks, or free ones for it to
        allocate; beyond its blocks, what an earlier holder has left there becomes a hole first."""
        blocks = region.blocks
        assert blocks is not None
        place, good = max(region.checked, region.first), set[int]()
        while place < region.wanted and not self._can_prepare(group, region, place, good):
            good.add(region.at(place))
            place += 1
        is_hole, end = region.at(place) == HOLE, place
        while (
            end < region.wanted
            and end - place < self._unit_blocks(group)
            and (region.at(end) == HOLE) == is_hole
            and self._can_prepare(group, region, end, good)
        ):
            end += 1
        if end == place:
            return None
        if not is_hole:
            return UnmapRegion(group, region, place, end) if self._may_change(region) else None
        if self.mappings_left < (end - place) * group.num_slices:
            return None
        if place < len(blocks):
            return MapRegion(group, region, place, blocks[place : min(end, len(blocks))], ahead=False)
        return self._map_free(group, region, place, end - place, steals=True)

    def _can_prepare(self, group: GroupMemory, region: Region, place: int, good: set[int]) -> bool:
        """Whether the place is a hole, or maps what its holder cannot allocate, such as a block that a `good` place
        before it maps, too. A stale place among the holder's blocks is left to the step that needs it."""
        mapped, pool = region.at(place), group.pool
        if mapped == HOLE or place < region.used or mapped in good:
            return mapped == HOLE or place >= region.used
        evicts = not (pool.num_free or pool.num_free_mapped or group.blocks_in(self._pages.num_claimable))
        return not group.can_allocate_in_place(mapped, evicts=evicts)

    def _unmap_expired(self) -> MappingWork | None:
        """Blocks that have left the window of their sequence."""
        for group in self._groups:
            for region in list(group.expired):
                if not self._may_change(region):
                    continue
                run = region.first_run(region.first, self._unit_blocks(group))
                if run is not None:
                    return UnmapRegion(group, region, *run)
                del group.expired[region]
        return None

    def _shrink(self) -> MappingWork | None:
        """Pages without an owner, beyond a lowered budget."""
        excess = self._pages.num_committed - self._pages.budget
        return self._give_back(excess, freed_before=math.inf, cached_before=math.inf) if excess > 0 else None

    def _reclaim(self) -> MappingWork | None:
        """When free pages run low: unmap the tails of the regions parked longest (vAttention §6.2.2)."""
        if not self._is_short:
            return None
        return self._unmap_tail(parked_only=True, idle_since=math.inf, frees=False)

    def _fill_floor(self) -> MappingWork | None:
        """The pages of the floor. A page of the host takes memory when it is first mapped."""
        group = min(self._groups, key=lambda group: len(group.handles) / len(group.pool.block_ids))
        return self._attach(group, (self.floor - self._pages.num_created) // group.num_slices, at_home=True)

    def _map_coming(self) -> MappingWork | None:
        """A region for the prompt that the next step is to begin. Unlike the duties below, this one may evict content
        and take the slot of the region parked longest, because the prompt would do both when it begins. Each
        announcement counts once: a prompt that does not begin keeps no memory from being given back."""
        for i, group in enumerate(self._groups):
            depth = min(self.coming[i], group.region_blocks)
            if not depth:
                continue
            if ready := next((r for r in reversed(group.parked) if self._is_ready(group, r, depth)), None):
                ready.touched = self.now
                self.coming[i] = 0
            elif work := self._prepare_region(group, depth, evicts=True):
                return work
        return None

    def _map_ahead(self) -> MappingWork | None:
        """Regions for the next prompts (vAttention §6.2.2, eager allocation)."""
        if not self.options.eager_allocation:
            return None
        for group, demand in zip(self._groups, self.demand, strict=True):
            recent = self.now - demand.last_at < self.options.idle_release_s
            depth = min(demand.depth, group.region_blocks) if recent else 0
            if not depth or sum(self._is_ready(group, region, depth) for region in group.parked) >= demand.num_regions:
                continue
            if work := self._prepare_region(group, depth, evicts=False):
                return work
        return None

    def _prepare_region(self, group: GroupMemory, depth: int, *, evicts: bool) -> MappingWork | None:
        """Map `depth` free blocks in a parked region that can be extended, or in a new one. With `evicts` they may be
        blocks of evicted content, and the slot another region's, if there are no others."""
        region = max(
            (r for r in group.parked if self._can_extend(group, r, depth)), key=lambda r: r.num_mapped, default=None
        )
        place = region.num_mapped if region is not None else 0
        missing = (depth - place) * group.num_slices
        spare = self._num_takable_pages - self.options.reclaim_threshold * self._pages.budget
        if missing > spare or missing > self.mappings_left // 2:
            return None
        if region is None:
            if not group.has_free_slot:
                return self._empty_oldest(group) if evicts else None
            if not group.pool.num_free and ((work := self._attach(group, depth, at_home=False)) or not evicts):
                return work
            region = group.new_region()
            region.touched = self.now
            group.parked[region] = None
        work = self._map_free(group, region, place, depth - place, steals=False, evicts=evicts)
        if work is None:  # no block of this group is free or cached
            group.discard_if_empty(region)
        return work

    def _empty_oldest(self, group: GroupMemory) -> MappingWork | None:
        """Unmap the region parked longest, from its end; then its slot is free."""
        region = next((r for r in group.parked if not group.pool.is_allocatable(r.at(0))), None)
        run = None if region is None else region.last_run(0, self._unit_blocks(group))
        if region is None or run is None or not self._may_change(region):
            return None
        return UnmapRegion(group, region, *run)

    def _release_idle(self) -> MappingWork | None:
        """Pages that have been free or cached for a while."""
        excess = self._pages.num_created - self.floor
        if excess <= 0:
            return None
        return self._give_back(
            excess,
            freed_before=self.now - self.options.idle_release_s,
            cached_before=self.now - max(self.options.cache_release_s, self.options.idle_release_s),
        )

    # ---- their parts ----

    def _attach(self, group: GroupMemory, count: int, *, at_home: bool) -> MappingWork | None:
        most = group.blocks_in(self._pages.num_claimable)
        count = min(count, self._unit_blocks(group), group.pool.num_unbacked, most)
        return AttachPages(self._backend, self._pages, group, count, at_home=at_home) if count > 0 else None

    def _map_free(
        self, group: GroupMemory, region: Region, place: int, count: int, *, steals: bool, evicts: bool = True
    ) -> MappingWork | None:
        """Map free blocks ahead, attaching pages first if there are none.

        Args:
            steals: as a last resort take free-mapped blocks that were not mapped ahead.
            evicts: as a last resort evict cached ones, and take them even if other regions map them.
        """
        count = min(count, self._unit_blocks(group))
        if not group.pool.num_free:
            if work := self._attach(group, count, at_home=False):
                return work
            if evicts and not (steals and group.pool.num_free_mapped > group.pool.num_eager):
                count = min(count, self._tree.evict(group.index, count))
                steals = True  # those that were evicted come first
        block_ids = group.pool.begin_map_ahead(count, steals=steals)
        return MapRegion(group, region, place, block_ids, ahead=True) if block_ids else None

    def _can_extend(self, group: GroupMemory, region: Region, depth: int) -> bool:
        """Whether mapping more at the end makes the region ready; never if it begins with cached content."""
        return (
            not region.busy
            and region.num_mapped < depth
            and len(region.mapped_blocks) == region.num_mapped
            and group.pool.is_allocatable(region.at(0))
        )

    def _is_ready(self, group: GroupMemory, region: Region, depth: int) -> bool:
        """Whether the region maps `depth` blocks that are, judged by the first and the last, still free."""
        ends = (region.at(0), region.at(depth - 1))
        return region.num_mapped >= depth and all(group.pool.is_allocatable(block_id) for block_id in ends)

    def _give_back(self, excess: int, *, freed_before: float, cached_before: float) -> MappingWork | None:
        """Release up to `excess` pages: spare ones, those of free blocks, then of blocks in regions' tails, then of
        content cached before `cached_before`."""
        if self._pages.spare:
            return DestroyPages(self._backend, self._pages, min(excess, self.unit_pages))
        for group in self._groups:
            count = min(-(-excess // group.num_slices), self._unit_blocks(group))
            block_ids, fence = group.pool.detachable(count, freed_before=freed_before)
            if block_ids and self._backend.completed(fence):
                return DetachPages(self._pages, group, block_ids)
            self._waits_for_fence |= bool(block_ids)
        if work := self._unmap_tail(parked_only=False, idle_since=freed_before, frees=True):
            return work
        # Free blocks go before cached ones, as soon as fences and regions allow it.
        excess -= sum(
            (group.pool.num_detachable + group.pool.num_free_mapped) * group.num_slices for group in self._groups
        )
        return self._evict_idle(excess, freed_before, cached_before) if excess > 0 else None

    def _evict_idle(self, excess: int, idle_since: float, cached_before: float) -> MappingWork | None:
        """Evict content cached before `cached_before` and detach its pages."""
        for group in self._groups:
            count = min(-(-excess // group.num_slices), self._unit_blocks(group))
            cached = group.pool.cached
            next_block = cached.first if cached_before == math.inf else cached.oldest
            while count > 0 and (block_id := next_block()) is not None:
                if group.pool.freed_at[block_id] > cached_before:
                    break
                if group.pool.region_mappings[block_id] and idle_since < math.inf:
                    # Mapped in a region: evicted together with it, when the region is idle, too.
                    return self._unmap_tail(parked_only=True, idle_since=idle_since, frees=False)
                count -= self._tree.evict_block(group.index, block_id)
            block_ids, fence = group.pool.detachable(self._unit_blocks(group), freed_before=idle_since)
            if block_ids and self._backend.completed(fence):
                return DetachPages(self._pages, group, block_ids)
            self._waits_for_fence |= bool(block_ids)
        return None

    def _unmap_tail(self, *, parked_only: bool, idle_since: float, frees: bool) -> MappingWork | None:
        """Unmap the tail of a region idle since `idle_since`; with `frees` only if blocks become free by it."""
        for group in self._groups:
            for region, since in self._tails(group):
                if since > idle_since or (parked_only and region.blocks is not None):
                    continue
                run = region.last_run(max(region.used, region.wanted), self._unit_blocks(group))
                if run is None or (frees and not self._frees(group, region)):
                    continue
                if self._may_change(region):
                    return UnmapRegion(group, region, *run)
        return None

    def _frees(self, group: GroupMemory, region: Region) -> bool:
        """Whether the region maps free-mapped blocks."""
        return group.pool.num_free_mapped > 0 and any(
            group.pool.is_allocatable(block_id) for block_id in region.mapped_blocks
        )

    def _tails(self, group: GroupMemory) -> list[tuple[Region, float]]:
        """Regions with a tail, those parked longest first, and since when the tail is idle. While prompts come, as many
        parked regions as prompts come in one step count as used."""
        demand = self.demand[group.index]
        num_idle = len(group.parked) - demand.num_regions
        tails = [
            (region, region.touched if i < num_idle else max(region.touched, demand.last_at))
            for i, region in enumerate(group.parked)
        ]
        return tails + [(r, r.touched) for r in group.held if len(r.mapped_blocks) > max(r.used, r.wanted)]

    def _may_change(self, region: Region) -> bool:
        if region.busy:
            return False
        if self._backend.completed(region.fence):
            return True
        self._waits_for_fence = True
        return False

    def _unit_blocks(self, group: GroupMemory) -> int:
        return max(1, self.unit_pages // group.num_slices)

    @property
    def _num_takable_pages(self) -> int:
        """Pages that can be allocated without taking blocks from regions: claimable, of free and of cached blocks."""
        return self._pages.num_claimable + sum(
            (group.pool.num_free + group.pool.num_cached) * group.num_slices for group in self._groups
        )

    @property
    def _is_short(self) -> bool:
        return self._num_takable_pages < self.options.reclaim_threshold * self._pages.budget

    @property
    def mappings_left(self) -> int:
        """Mappings that regions may still take."""
        return self.options.max_mappings - self._mappings.total

    def num_mappings(self) -> int:
        """Mappings of now, and to come: every block with pages may come to be mapped at home. Without the lock."""
        return self._backend.num_mappings + sum(group.num_homeless_pages for group in self._groups)
