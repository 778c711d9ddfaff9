"""What the mapper does next: the first of a list of duties that has something to do.

Duties look at the state of the memory and nothing else. Nothing that a launched step may still read is changed: duties
skip what waits for a fence, and the mapper asks again soon.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from vmem.backends.base import Backend
from vmem.budget import PagePool
from vmem.errors import LayoutError
from vmem.group import GroupMemory
from vmem.mapping_work import AttachPages, DestroyPages, DetachPages, MappingWork, MapRegion, UnmapRegion
from vmem.prefix_tree import PrefixTree
from vmem.region import HOLE, Region

# How soon to look again whether the device has passed a fence.
_FENCE_POLL_S = 0.002
# Waiting for a time that never comes is waiting an hour again and again.
_LONGEST_WAIT_S = 3600.0
# Prompts that the depth of eager allocation is learnt from, and the share of them it should be enough for.
_PROMPTS_REMEMBERED, _PROMPTS_COVERED = 32, 0.75
_MOST_EAGER_REGIONS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MappingOptions:
    """How mappings and pages follow the load.

    Attributes:
        background: have a thread for all that need not happen at once. Without one nothing is mapped ahead, and no
            memory given back: for simulations, in which everything happens in an order.
        overlap: map the next step's blocks while this one computes (vAttention §6.2.1).
        deferred_reclamation: park what finished sequences had mapped, for others to adopt (vAttention §6.2.2).
        eager_allocation: keep regions mapped ahead for the next prompts (vAttention §6.2.2).
        reclaim_threshold: share of the budget below which free pages that no region shows are replenished.
        idle_release_s: pages nobody has used for this long go back to the machine.
        cache_release_s: those of cached prefixes nobody has wanted for this long do.
        max_mappings: pages mapped at once, counted once an address; regions give way to block tables beyond it.
    """

    background: bool = True
    overlap: bool = True
    deferred_reclamation: bool = True
    eager_allocation: bool = True
    reclaim_threshold: float = 0.1
    idle_release_s: float = 0.5
    cache_release_s: float = 60.0
    max_mappings: int = 50_000

    def __post_init__(self) -> None:
        if not 0 <= self.reclaim_threshold <= 1:
            raise LayoutError(f"reclaim_threshold {self.reclaim_threshold} must be between 0 and 1")
        if not (self.idle_release_s >= 0 and self.cache_release_s >= 0 and self.max_mappings >= 1):
            raise LayoutError(
                f"idle_release_s {self.idle_release_s}, cache_release_s {self.cache_release_s} must not be negative, "
                f"max_mappings {self.max_mappings} must be positive"
            )


class PromptDemand:
    """How many blocks the next prompts will probably take, judged by the last ones."""

    def __init__(self) -> None:
        self._num_blocks: deque[int] = deque(maxlen=_PROMPTS_REMEMBERED)
        self._bursts: deque[int] = deque([0], maxlen=_PROMPTS_REMEMBERED)
        self.last_at = -math.inf

    def note_prompt(self, num_blocks: int, now: float) -> None:
        self._num_blocks.append(num_blocks)
        self._bursts[-1] += 1
        self.last_at = now

    def note_step(self) -> None:
        if self._bursts[-1]:
            self._bursts.append(0)

    @property
    def depth(self) -> int:
        """Blocks that are enough for most of the last prompts."""
        if not self._num_blocks:
            return 0
        return sorted(self._num_blocks)[math.ceil(len(self._num_blocks) * _PROMPTS_COVERED) - 1]

    @property
    def num_regions(self) -> int:
        """Prompts that come at once."""
        return min(max(self._bursts), _MOST_EAGER_REGIONS)


class MappingPolicy:
    """The duties, and the state they look at. Only called under the memory's lock.

    Attributes:
        demand: of each group, what prompts have been like.
        wanted_loose: of each group, blocks that the next step will take without a region.
        floor: pages that are created at once and kept.
    """

    def __init__(
        self,
        backend: Backend,
        pages: PagePool,
        groups: Sequence[GroupMemory],
        prefixes: PrefixTree,
        options: MappingOptions,
        floor: int,
    ) -> None:
        self._backend = backend
        self._pages = pages
        self._groups = groups
        self._prefixes = prefixes
        self._options = options
        self._unit_pages = max(1, backend.max_call_bytes // pages.page_bytes)
        self.floor = floor
        self.demand = [PromptDemand() for _ in groups]
        self.free_blocks_wanted = [0] * len(groups)
        self.now = 0.0
        self._waits_for_fence = False

    def next_work(self, now: float) -> MappingWork | None:
        self.now = now
        self._waits_for_fence = False
        duties = (
            self._map_wanted,
            self._hide_expired,
            self._shrink,
            self._reclaim,
            self._fill_floor,
            self._map_ahead,
            self._release_idle,
        )
        return next((work for duty in duties if (work := duty()) is not None), None)

    def clear_step_demand(self) -> None:
        """Drop what steps were going to need; they map it themselves, and hear what the device says."""
        self.free_blocks_wanted = [0] * len(self._groups)
        for group in self._groups:
            group.wanted.clear()

    def wait_s(self, now: float) -> float | None:
        """How long until time alone may have made work; `None` for as long as nobody says so."""
        self.now = now
        if self._waits_for_fence:
            return _FENCE_POLL_S
        if self._pages.num_created <= self.floor:
            return None
        since = [at for group in self._groups if (at := group.pool.oldest_free_since()) is not None]
        since += [at for group in self._groups for region, at in self._tails(group) if self._frees(group, region)]
        due = [at + self._options.idle_release_s for at in since]
        kept = [(group.pool, group.pool.oldest_cached()) for group in self._groups]
        keep_s = max(self._options.cache_release_s, self._options.idle_release_s)
        due += [pool.freed_at[b] + keep_s for pool, b in kept if b is not None]
        return min(max(min(due) - now, _FENCE_POLL_S), _LONGEST_WAIT_S) if due else None

    # ---- duties, the most urgent first ----

    def _map_wanted(self) -> MappingWork | None:
        """This step's and the next step's blocks, behind the regions of the sequences that run."""
        for i, group in enumerate(self._groups):
            missing = self.free_blocks_wanted[i] - group.pool.num_free
            if missing > 0 and (work := self._attach(group, missing)):
                return work
            self.free_blocks_wanted[i] = 0
            while group.wanted:
                region = next(iter(group.wanted))
                if not region.busy and (work := self._map_places(group, region)):
                    return work
                del group.wanted[region]
        return None

    def _map_places(self, group: GroupMemory, region: Region) -> MappingWork | None:
        """The first places up to `wanted` that show nothing: the holder's blocks, or free ones for it to take."""
        blocks = region.blocks
        assert blocks is not None
        place = max(region.checked, region.first)
        while place < region.wanted and region.at(place) != HOLE:
            place += 1  # a stale one among them is changed by the step that needs it
        end = place
        while end < region.wanted and end - place < self._unit_blocks(group) and region.at(end) == HOLE:
            end += 1
        if end == place or self._mappings_left < (end - place) * group.num_slices:
            return None
        if place < len(blocks):
            return MapRegion(group, region, place, blocks[place : min(end, len(blocks))], ahead=False)
        return self._show_free(group, region, place, end - place, steals=True)

    def _hide_expired(self) -> MappingWork | None:
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
        """Pages beyond a budget that was lowered, as far as nobody owns them."""
        excess = self._pages.num_committed - self._pages.budget
        return self._give_back(excess, freed_before=math.inf, kept_before=math.inf) if excess > 0 else None

    def _reclaim(self) -> MappingWork | None:
        """When free pages run low: unmap the tails of the regions parked longest (vAttention §6.2.2)."""
        if self._num_unshown >= self._options.reclaim_threshold * self._pages.budget:
            return None
        return self._hide_tail(parked_only=True, idle_since=math.inf, frees=False)

    def _fill_floor(self) -> MappingWork | None:
        """The pages that are always there."""
        missing = self.floor - self._pages.num_created
        if missing <= 0:
            return None
        group = min(self._groups, key=lambda group: len(group.handles) / len(group.pool.block_ids))
        return self._attach(group, missing // group.num_slices)

    def _map_ahead(self) -> MappingWork | None:
        """Regions for the next prompts (vAttention §6.2.2, eager allocation)."""
        if not self._options.eager_allocation:
            return None
        spare = self._num_unshown - self._options.reclaim_threshold * self._pages.budget
        for group, demand in zip(self._groups, self.demand, strict=True):
            depth = min(self._eager_depth(demand), group.region_blocks)
            ready = sum(self._is_ready(group, region, depth) for region in group.parked)
            if not depth or ready >= demand.num_regions:
                continue
            region = max(
                (r for r in group.parked if self._can_extend(group, r, depth)),
                key=lambda r: r.num_mapped,
                default=None,
            )
            place = region.num_mapped if region is not None else 0
            missing = (depth - place) * group.num_slices
            if missing > spare or missing > self._mappings_left // 2 or (region is None and not group.has_free_slot):
                continue
            if region is None:
                if not group.pool.num_free:
                    return self._attach(group, depth)
                region = group.new_region()
                region.touched = self.now
                group.parked[region] = None
            return self._show_free(group, region, place, depth - place, steals=False)
        return None

    def _release_idle(self) -> MappingWork | None:
        """Pages that nobody has used for a while."""
        excess = self._pages.num_created - self.floor
        if excess <= 0:
            return None
        return self._give_back(
            excess,
            freed_before=self.now - self._options.idle_release_s,
            kept_before=self.now - max(self._options.cache_release_s, self._options.idle_release_s),
        )

    # ---- their parts ----

    def _attach(self, group: GroupMemory, count: int) -> MappingWork | None:
        count = min(
            count, self._unit_blocks(group), group.pool.num_unbacked, self._pages.num_claimable // group.num_slices
        )
        return AttachPages(self._backend, self._pages, group, count) if count > 0 else None

    def _show_free(
        self, group: GroupMemory, region: Region, place: int, count: int, *, steals: bool
    ) -> MappingWork | None:
        """Show free blocks, of which there may have to be some first.

        Args:
            steals: when nothing else is left, those that parked regions show, and those kept for their content.
        """
        count = min(count, self._unit_blocks(group))
        if not group.pool.num_free:
            if (work := self._attach(group, count)) or not steals:
                return work
            if not group.pool.num_free_mapped:
                self._prefixes.evict(group.index, count)
        block_ids = group.pool.begin_map_ahead(count, steals=steals)
        return MapRegion(group, region, place, block_ids, ahead=True) if block_ids else None

    def _can_extend(self, group: GroupMemory, region: Region, depth: int) -> bool:
        """Whether mapping more behind what it shows makes it ready; a region that begins with content never is."""
        return (
            not region.busy
            and region.num_mapped < depth
            and len(region.mapped_blocks) == region.num_mapped
            and group.pool.is_allocatable(region.at(0))
        )

    def _is_ready(self, group: GroupMemory, region: Region, depth: int) -> bool:
        """Whether a prompt of `depth` blocks would find them mapped here, and, judged by two of them, still free."""
        ends = (region.at(0), region.at(depth - 1))
        return region.num_mapped >= depth and all(group.pool.is_allocatable(block_id) for block_id in ends)

    def _give_back(self, excess: int, *, freed_before: float, kept_before: float) -> MappingWork | None:
        """Up to `excess` pages: spare ones, those of loose blocks, then those that only regions' tails show, and those
        whose content nobody has wanted since `kept_before`."""
        if self._pages.spare:
            return DestroyPages(self._backend, self._pages, min(excess, self._unit_pages))
        for group in self._groups:
            count = min(-(-excess // group.num_slices), self._unit_blocks(group))
            block_ids, fence = group.pool.detachable(count, freed_before=freed_before)
            if block_ids and self._backend.completed(fence):
                return DetachPages(self._pages, group, block_ids)
            self._waits_for_fence |= bool(block_ids)
        if work := self._hide_tail(parked_only=False, idle_since=freed_before, frees=True):
            return work
        # What is empty already goes first, as soon as fences and regions let it.
        excess -= sum((group.pool.num_free + group.pool.num_free_mapped) * group.num_slices for group in self._groups)
        return self._give_up_content(excess, freed_before, kept_before) if excess > 0 else None

    def _give_up_content(self, excess: int, idle_since: float, kept_before: float) -> MappingWork | None:
        """Forget the content of blocks that nobody has wanted since `kept_before`, so that they can go back."""
        for group in self._groups:
            count = min(-(-excess // group.num_slices), self._unit_blocks(group))
            while count > 0 and (block_id := group.pool.oldest_cached()) is not None:
                if group.pool.freed_at[block_id] > kept_before:
                    break
                if group.pool.region_mappings[block_id] and idle_since < math.inf:
                    # Shown in a region: only with it, when that is idle, too.
                    return self._hide_tail(parked_only=True, idle_since=idle_since, frees=False)
                count -= self._prefixes.evict_block(group.index, block_id)
            block_ids, fence = group.pool.detachable(self._unit_blocks(group), freed_before=idle_since)
            if block_ids and self._backend.completed(fence):
                return DetachPages(self._pages, group, block_ids)
            self._waits_for_fence |= bool(block_ids)
        return None

    def _hide_tail(self, *, parked_only: bool, idle_since: float, frees: bool) -> MappingWork | None:
        """Args: `frees`: only where blocks are shown that are loose then."""
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
        """Whether the region shows blocks that would be loose without it."""
        return group.pool.num_free_mapped > 0 and any(
            group.pool.is_allocatable(block_id) for block_id in region.mapped_blocks
        )

    def _tails(self, group: GroupMemory) -> list[tuple[Region, float]]:
        """Regions that show more than their holders need, those parked longest first, and since when nobody has used
        that. As many as prompts come at once are in use for as long as prompts come."""
        demand = self.demand[self._groups.index(group)]
        num_idle = len(group.parked) - demand.num_regions
        tails = [
            (region, region.touched if i < num_idle else max(region.touched, demand.last_at))
            for i, region in enumerate(group.parked)
        ]
        return tails + [(r, r.touched) for r in group.held if len(r.mapped_blocks) > max(r.used, r.wanted)]

    def _eager_depth(self, demand: PromptDemand) -> int:
        return demand.depth if self.now - demand.last_at < self._options.idle_release_s else 0

    def _may_change(self, region: Region) -> bool:
        if region.busy:
            return False
        if self._backend.completed(region.fence):
            return True
        self._waits_for_fence = True
        return False

    def _unit_blocks(self, group: GroupMemory) -> int:
        return max(1, self._unit_pages // group.num_slices)

    @property
    def _num_unshown(self) -> int:
        """Free pages that no region shows, created or not, and those kept for their content: shown or not, they can be
        taken at once."""
        return self._pages.num_claimable + sum(
            (group.pool.num_free + group.pool.num_cached) * group.num_slices for group in self._groups
        )

    @property
    def _mappings_left(self) -> int:
        return self._options.max_mappings - self._backend.num_mappings
