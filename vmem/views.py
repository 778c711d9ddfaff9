"""Which view a sequence is read through, and the mappings its region needs."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from vmem.allocator import BlockAllocator
from vmem.backends.base import Backend
from vmem.errors import MapError, VmemError
from vmem.group import GroupMemory
from vmem.mapper import Mapper
from vmem.mapper_policy import MappingOptions, MappingPolicy
from vmem.mapping_work import MapRegion, UnmapRegion
from vmem.region import HOLE, Region
from vmem.runs import adjacent_runs
from vmem.sequence import GroupTable, SequenceMemory, StepDemand

logger = logging.getLogger(__name__)

_ALL_TOKENS = 1 << 62


class RegionManager:
    """Sequences enter regions, are shown in them, and leave them. Only called under the memory's lock.

    With the policy "region" or "block_table" a sequence has that view. With "auto" it has a region, until the mappings
    it needs exceed `MappingOptions.max_mappings` even after parked regions have given theirs up; from then on, and when
    the device refuses one, its block table.

    Attributes:
        num_adoptions: sequences that took over a parked region.
        num_demotions: sequences that go on through their block table although a region was asked for.
    """

    def __init__(
        self,
        backend: Backend,
        groups: Sequence[GroupMemory],
        allocator: BlockAllocator,
        mapper: Mapper,
        background: MappingPolicy,
        options: MappingOptions,
    ) -> None:
        self._backend = backend
        self._groups = groups
        self._allocator = allocator
        self._mapper = mapper
        self._background = background
        self._max_mappings = options.max_mappings
        self.num_adoptions = 0
        self.num_demotions = 0

    def assign_regions(self, sequence: SequenceMemory, num_tokens: int, *, evicts: bool = False) -> None:
        """Give a sequence of `num_tokens` tokens its regions, if its policy and the mapping budget allow it.

        Args:
            evicts: it will take blocks for which the content of others is given up.

        Raises:
            VmemError: the policy is "region", and all of them are held.
        """
        if sequence.policy == "block_table":
            return
        now = time.monotonic()
        for group, table, prompts in zip(self._groups, sequence.groups, self._background.demand, strict=True):
            if not group.region_blocks:
                continue
            num_blocks = group.layout.num_blocks(num_tokens)
            prompts.note_prompt(num_blocks, now)
            region = self._adopt(group, table.block_ids, num_blocks, evicts)
            if region is None:
                self.park_regions(sequence)
                if sequence.policy == "region":
                    raise VmemError("every region is taken: more sequences opened than num_regions")
                self.num_demotions += 1
                return
            self.num_adoptions += region.num_mapped > 0
            region.blocks = table.block_ids
            region.first = region.checked = table.first
            if table.first and region.num_mapped:
                group.expired[region] = None  # what it shows before that is nobody's here
            region.touched = now
            table.region = region
            missing = max(num_blocks - table.first - region.num_mapped, 0)
            if not self._may_map(sequence, missing * group.num_slices):
                self._demote(sequence)
                return

    def park_regions(self, sequence: SequenceMemory) -> None:
        """Park the sequence's regions, with all they show."""
        sequence.readable_tokens = 0
        for group, table in zip(self._groups, sequence.groups, strict=True):
            if table.region is not None:
                self._allocator.wait_for_mapper(table.region)
                group.park(table.region, fence=self._allocator.fence, now=time.monotonic())
                table.region = None

    def map_regions(self, sequence: SequenceMemory, num_tokens: int) -> None:
        """Map what the sequence's regions do not show yet of its first `num_tokens` tokens; with "auto" it may lose
        them instead.

        Raises:
            MapError: the policy is "region", and the device refused.
        """
        for group, table in zip(self._groups, sequence.groups, strict=True):
            if table.region is None:
                continue
            try:
                done = self._show(sequence, group, table, table.region, group.layout.num_blocks(num_tokens))
            except MapError as error:
                if sequence.policy == "region":
                    raise
                logger.warning("a sequence goes on through its block table: %s", error)
                done = False
            if not done:
                self._demote(sequence)
                return

    def readable_tokens(self, sequence: SequenceMemory) -> int:
        """Tokens that the sequence can be read up to: all of them through its block tables."""
        shown = [
            table.region.checked * group.layout.block_tokens
            for group, table in zip(self._groups, sequence.groups, strict=True)
            if table.region is not None
        ]
        return min(shown, default=_ALL_TOKENS)

    def request_mapping(self, demand: StepDemand) -> None:
        """Ask the mapper for what a step to come needs."""
        for g, (group, table) in enumerate(zip(self._groups, demand.sequence.groups, strict=True)):
            wanted = min(group.layout.num_blocks(demand.end), group.region_blocks)
            if table.region is None:
                self._background.free_blocks_wanted[g] += max(wanted - len(table.block_ids), 0)
            elif wanted > table.region.checked:
                table.region.wanted = wanted
                group.wanted[table.region] = None

    def _adopt(self, group: GroupMemory, prefix: Sequence[int], num_blocks: int, evicts: bool) -> Region | None:
        """A region for a sequence; waits for one that the mapper has in hand when there is no other."""
        while True:
            region = group.adopt(prefix, num_blocks, evicts=evicts)
            busy = next((parked for parked in group.parked if parked.busy), None)
            if region is not None or busy is None:
                return region
            self._allocator.wait_for_mapper(busy)

    def _show(self, sequence: SequenceMemory, group: GroupMemory, table: GroupTable, region: Region, end: int) -> bool:
        """Map what the region does not show of the table's first `end` blocks; False if it may not."""
        self._allocator.wait_for_mapper(region)
        if region.checked >= end:
            return True
        missing = list(region.stale(end))
        region.wanted = max(region.wanted, end)
        if missing and not self._may_map(sequence, len(missing) * group.num_slices):
            return False
        stale = [place for place in missing if region.at(place) != HOLE]
        if stale:
            self._mapper.wait_for(self._backend, region.fence)
        for first, past in adjacent_runs(stale):
            self._mapper.run_now(UnmapRegion(group, region, stale[first], stale[past - 1] + 1))
        for first, past in adjacent_runs(missing):
            start, stop = missing[first], missing[past - 1] + 1
            self._mapper.run_now(MapRegion(group, region, start, table.block_ids[start:stop], ahead=False))
        region.checked = end
        return True

    def _demote(self, sequence: SequenceMemory) -> None:
        """Read the sequence through its block table from now on."""
        self.park_regions(sequence)
        self.num_demotions += 1

    def _may_map(self, sequence: SequenceMemory, num_pages: int) -> bool:
        """Whether so many more mappings are within their budget, at the cost of parked regions; by policy "region" they
        may exceed it once there are none left."""
        while self._backend.num_mappings + num_pages > self._max_mappings:
            if not any(self._allocator.unmap_oldest_tail(group) for group in self._groups):
                return sequence.policy == "region"
        return True
