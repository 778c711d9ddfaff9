"""Views of sequences: adopt, map, unmap and park regions, demote sequences to the home view, and map blocks at home."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from folio.vmem.backends.base import adjacent_runs
from folio.vmem.budget import MemoryCounts
from folio.vmem.errors import MapError, VmemError
from folio.vmem.group import GroupMemory
from folio.vmem.mapping.mapper import Mapper
from folio.vmem.mapping.mapper_policy import MappingPolicy
from folio.vmem.mapping.mapping_work import MapHomes, MapRegion, UnmapRegion
from folio.vmem.mapping.region import HOLE, Region
from folio.vmem.sequence import GroupTable, SequenceMemory, StepDemand, TableChanges, ViewPolicy

logger = logging.getLogger(__name__)

_ALL_TOKENS = 1 << 62


@dataclass(eq=False)
class RegionManager:
    """The regions of all sequences. Only called within `MemoryLock.exclusive`.

    With the policy "region" or "block_table" a sequence keeps that view. With "auto" it has a region until its mappings
    would exceed `max_mappings` although parked regions have given up theirs, or the device refuses one; then it is
    demoted to the home view.
    """

    _groups: Sequence[GroupMemory]
    _mapper: Mapper
    _policy: MappingPolicy
    _counts: MemoryCounts
    _changes: TableChanges

    def assign_regions(self, sequence: SequenceMemory, num_tokens: int, *, evicts: bool = False) -> None:
        """Give a sequence of `num_tokens` tokens its regions, if its policy and `max_mappings` allow it.

        Args:
            evicts: the sequence will take blocks whose cached content is evicted.

        Raises:
            VmemError: the policy is "region", and every region is held.
        """
        if sequence.policy == "block_table":
            return
        now = self._mapper.clock()
        for group, table, demand in zip(self._groups, sequence.groups, self._policy.demand, strict=True):
            if not group.region_blocks:
                continue
            num_blocks = group.layout.num_blocks(num_tokens)
            demand.note_prompt(num_blocks, now)
            region = self._adopt(group, table.block_ids, num_blocks, evicts)
            if region is None:
                if sequence.policy == "region":
                    self.park_regions(sequence)
                    raise VmemError(f"all {group.num_regions} regions (num_regions) are held by other sequences")
                self._demote(sequence)
                return
            self._counts.adoptions += region.num_mapped > 0
            region.blocks = table.block_ids
            region.first = region.checked = table.first
            if table.first and region.num_mapped:
                group.expired[region] = None  # mappings before the window are not this sequence's
            region.touched = now
            table.region = region
            self._changes.note(table, 0)
            missing = max(num_blocks - table.first - region.num_mapped, 0)
            if not self._may_map(sequence, missing * group.num_slices):
                self._demote(sequence)
                return

    def park_regions(self, sequence: SequenceMemory) -> None:
        """Park the sequence's regions, with all their mappings."""
        sequence.readable_tokens = 0
        for group, table in zip(self._groups, sequence.groups, strict=True):
            if table.region is not None:
                self._mapper.wait_for_region(table.region)
                group.park(table.region, fence=self._mapper.fence, now=self._mapper.clock())
                table.region = None
                self._changes.note(table, 0)

    def map_tokens(self, sequence: SequenceMemory, num_tokens: int) -> None:
        """Map the sequence's first `num_tokens` tokens in its regions, or demote the sequence; without regions, at
        home.

        Raises:
            MapError: the device refused, and the policy is "region" or the sequence has no region.
        """
        for group, table in zip(self._groups, sequence.groups, strict=True):
            if table.region is None:
                continue
            end = group.layout.num_blocks(num_tokens)
            try:
                mapped = self._map_region(sequence, group, table, table.region, end)
            except MapError as error:
                if sequence.policy == "region":
                    raise
                logger.warning("a sequence is demoted to the home view: %s", error)
                mapped = False
            if not mapped:
                self._demote(sequence)
                break
        for group, table in zip(self._groups, sequence.groups, strict=True):
            end = group.layout.num_blocks(num_tokens)
            if table.region is None and group.region_blocks and end > table.at_home:
                self.map_homes(group, table.block_ids[max(table.first, table.at_home) : end])
                table.at_home = end

    def map_homes(self, group: GroupMemory, block_ids: Iterable[int]) -> None:
        """Map blocks with an owner at home, where something is about to read or write them.

        Raises:
            MapError: the device refused although no region has a tail to give up.
        """
        while extents := group.not_at_home(block_ids):
            try:
                self._mapper.run_now(MapHomes(group, extents))
            except MapError:
                if not any(self.unmap_oldest_tail(each) for each in self._groups):
                    raise

    def readable_tokens(self, sequence: SequenceMemory) -> int:
        """Tokens known to be mapped in the sequence's view."""
        mapped = [
            (table.at_home if table.region is None else table.region.checked) * group.layout.block_tokens
            for group, table in zip(self._groups, sequence.groups, strict=True)
            if group.region_blocks
        ]
        return min(mapped, default=_ALL_TOKENS)

    def request_mapping(self, demand: StepDemand) -> None:
        """Have the mapper prepare a later step."""
        for g, (group, table) in enumerate(zip(self._groups, demand.sequence.groups, strict=True)):
            end = min(group.layout.num_blocks(demand.end), group.region_blocks)
            if table.region is None:
                self._policy.free_blocks_wanted[g] += max(end - len(table.block_ids), 0)
            elif end > table.region.checked:
                table.region.wanted = end
                group.wanted[table.region] = None

    def request_region(self, num_tokens: int, policy: ViewPolicy) -> None:
        """Have the mapper prepare the first tokens of a new sequence."""
        for g, group in enumerate(self._groups):
            num_blocks = group.layout.num_blocks(num_tokens)
            if group.region_blocks and policy != "block_table":
                self._policy.coming[g] = num_blocks
            else:
                self._policy.free_blocks_wanted[g] += num_blocks

    def unmap_oldest_tail(self, group: GroupMemory) -> bool:
        """Unmap the tail of the region parked longest, else of a held one; False if there is no tail."""
        for region in [*group.parked, *group.held]:
            if len(region.mapped_blocks) > region.used or region in group.expired:
                before = region.num_mapped
                self.unmap_tail(group, region)
                if region.num_mapped < before:
                    return True
        return False

    def unmap_tail(self, group: GroupMemory, region: Region) -> None:
        """Unmap all places that the holder does not use, once no step can read them."""
        self._mapper.wait_for_region(region)
        self._mapper.wait_for_fence(region.fence)
        while (run := region.last_run(region.used, group.region_blocks)) is not None:
            self._mapper.run_now(UnmapRegion(group, region, *run))
        while (run := region.first_run(region.first, group.region_blocks)) is not None:
            self._mapper.run_now(UnmapRegion(group, region, *run))

    def _adopt(self, group: GroupMemory, prefix: Sequence[int], num_blocks: int, evicts: bool) -> Region | None:
        """Adopt a parked region; waits for one that the mapper changes if there is no other."""
        while True:
            region = group.adopt(prefix, num_blocks, evicts=evicts)
            busy = next((parked for parked in group.parked if parked.busy), None)
            if region is not None or busy is None:
                return region
            self._mapper.wait_for_region(busy)

    def _map_region(
        self, sequence: SequenceMemory, group: GroupMemory, table: GroupTable, region: Region, end: int
    ) -> bool:
        """Map the table's first `end` blocks in the region; False if `max_mappings` forbids it."""
        self._mapper.wait_for_region(region)
        if region.checked >= end:
            return True
        missing = list(region.stale(end))
        region.wanted = max(region.wanted, end)
        if missing and not self._may_map(sequence, len(missing) * group.num_slices):
            return False
        stale = [place for place in missing if region.at(place) != HOLE]
        if stale:
            self._mapper.wait_for_fence(region.fence)
        for first, past in adjacent_runs(stale):
            self._mapper.run_now(UnmapRegion(group, region, stale[first], stale[past - 1] + 1))
        for first, past in adjacent_runs(missing):
            start, stop = missing[first], missing[past - 1] + 1
            self._mapper.run_now(MapRegion(group, region, start, table.block_ids[start:stop], ahead=False))
        region.checked = end
        return True

    def _demote(self, sequence: SequenceMemory) -> None:
        self.park_regions(sequence)
        self._counts.demotions += 1

    def _may_map(self, sequence: SequenceMemory, num_pages: int) -> bool:
        """Make room for more mappings within `max_mappings` by unmapping tails. The policy "region" may exceed it."""
        while self._policy.mappings_left < num_pages:
            if not any(self.unmap_oldest_tail(group) for group in self._groups):
                return sequence.policy == "region"
        return True
