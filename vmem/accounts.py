"""Where memory is, and whether the books add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from vmem.allocator import BlockAllocator
from vmem.backend import Backend
from vmem.copies import BlockCopies
from vmem.errors import IntegrityError
from vmem.group import GroupMemory, total_pages
from vmem.mapper import Mapper
from vmem.pages import PagePool
from vmem.pins import Pins
from vmem.prefix import PrefixIndex
from vmem.report import GroupReport, MemoryReport
from vmem.sequence import SequenceMemory
from vmem.swapping import Swapping
from vmem.tables import BlockTables
from vmem.views import SequenceViews


class Accounts:
    """Reads everybody's books and writes none. Only called under the memory's lock.

    Args:
        sequences: those that are open, now and later.
    """

    def __init__(
        self,
        backend: Backend,
        pages: PagePool,
        groups: Sequence[GroupMemory],
        sequences: Collection[SequenceMemory],
        *,
        allocator: BlockAllocator,
        copies: BlockCopies,
        index: PrefixIndex,
        mapper: Mapper,
        pins: Pins,
        swapping: Swapping,
        tables: BlockTables,
        views: SequenceViews,
    ) -> None:
        self._backend = backend
        self._pages = pages
        self._groups = groups
        self._sequences = sequences
        self._allocator = allocator
        self._copies = copies
        self._index = index
        self._mapper = mapper
        self._pins = pins
        self._swapping = swapping
        self._tables = tables
        self._views = views

    def report(self) -> MemoryReport:
        page_bytes, counts, times = self._pages.page_bytes, self._mapper.counts, self._mapper.times
        groups = tuple(
            GroupReport(
                block_tokens=group.layout.block_tokens,
                block_bytes=group.layout.block_bytes,
                active_blocks=group.pool.num_owned,
                free_blocks=group.pool.num_loose + group.pool.num_tied + group.pool.num_kept,
                cached_blocks=group.pool.num_kept,
                parked_blocks=group.pool.num_tied,
                eager_blocks=group.pool.num_eager,
            )
            for group in self._groups
        )
        return MemoryReport(
            budget_bytes=self._pages.budget * page_bytes,
            budget_revision=self._pages.revision,
            reserved_bytes=sum(group.reserved_bytes for group in self._groups),
            mapped_bytes=self._backend.num_mappings * page_bytes,
            physical_bytes=self._pages.num_created * page_bytes,
            anchor_bytes=page_bytes,
            active_bytes=self._allocator.num_owned_pages * page_bytes,
            cached_bytes=sum(group.cached_blocks * group.block_bytes for group in groups),
            pinned_bytes=self._pins.num_pages * page_bytes,
            swapped_bytes=self._swapping.space.used_bytes,
            swap_budget_bytes=self._swapping.space.budget_bytes,
            parked_bytes=sum(group.parked_blocks * group.block_bytes for group in groups),
            eager_bytes=sum(group.eager_blocks * group.block_bytes for group in groups),
            num_mappings=self._backend.num_mappings,
            map_calls=counts.maps,
            unmap_calls=counts.unmaps,
            alias_calls=counts.aliases,
            create_calls=counts.creates,
            destroy_calls=counts.destroys,
            exposed_us=times.exposed_s * 1e6,
            hidden_us=times.hidden_s * 1e6,
            num_exposed=times.num_exposed,
            num_hidden=times.num_hidden,
            mapper_failures=self._mapper.num_failures,
            adoptions=self._views.num_adoptions,
            adopted_blocks=self._tables.num_adopted,
            demotions=self._views.num_demotions,
            queried_tokens=self._index.counts.queried_tokens,
            hit_tokens=self._index.counts.hit_tokens,
            evicted_blocks=self._index.counts.evicted_blocks,
            cached_prefixes=len(self._index),
            copied_blocks=self._copies.num_copied,
            pins=self._pins.report(),
            groups=groups,
        )

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless all adds up. The mapper must be idle."""
        mapped = 0
        sequences = [*self._sequences, *self._pins.sequences]
        self._index.check_integrity([sequence.prefix for sequence in sequences])
        for g, group in enumerate(self._groups):
            owned = Counter(b for s in sequences for b in s.groups[g].block_ids[s.groups[g].first :])
            owned.update(block_id for at, block_id in self._copies.held if at == g)
            mapped += group.check_integrity(owned)
        self._pages.check_integrity(total_pages(self._groups))
        if mapped != self._backend.num_mappings:
            raise IntegrityError(f"{mapped} pages should be mapped, {self._backend.num_mappings} are")

    def check_idle(self) -> None:
        """Raise `IntegrityError` unless no sequence is open, and every block is free or pinned."""
        owned = self._allocator.num_owned_pages - self._pins.num_pages
        if self._sequences or owned or self._swapping.space.used_bytes:
            raise IntegrityError(
                f"idle, but {len(self._sequences)} sequences are open, {owned} pages are owned, "
                f"{self._swapping.space.used_bytes} bytes are swapped"
            )
