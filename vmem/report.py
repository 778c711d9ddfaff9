"""Report and audit of a KV memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from folio.vmem.backends.base import Backend
from folio.vmem.blocks.tables import BlockTables, CopyOnWrite
from folio.vmem.budget import MemoryCounts, PagePool
from folio.vmem.errors import IntegrityError
from folio.vmem.group import GroupMemory
from folio.vmem.lock import MemoryLock
from folio.vmem.mapping.mapper import Mapper
from folio.vmem.prefix.pins import PinReport, Pins
from folio.vmem.prefix.prefix_tree import PrefixTree
from folio.vmem.swap.swapping import Swapping


@dataclass(frozen=True, slots=True)
class GroupReport:
    """Blocks of one layer group. `free_blocks` counts free, free-mapped (`parked_blocks`) and cached blocks;
    `eager_blocks` are the free-mapped ones that were mapped ahead."""

    block_tokens: int
    block_bytes: int
    active_blocks: int
    free_blocks: int
    cached_blocks: int
    parked_blocks: int
    eager_blocks: int


@dataclass(kw_only=True)
class MemoryReport(MemoryCounts):
    """Figures of one moment. Counts and times run from the start.

    Attributes:
        budget_bytes, budget_revision: what `set_budget` last accepted.
        reserved_bytes: virtual addresses, mapped or not.
        mapped_bytes: mapped virtual addresses; a page mapped twice counts twice.
        physical_bytes: memory taken from the device, without the anchor page.
        anchor_bytes: the anchor page, or the handle that it shares, outside the budget.
        active_bytes: of the physical, owned by sequences and pins.
        cached_bytes: of the physical, in cached blocks.
        pinned_bytes: of the active, owned by pinned prefixes.
        swapped_bytes, kept_bytes: host memory that preempted sequences take, and copies of cached prefixes.
        swap_budget_bytes: what both together may take.
        parked_bytes: of the physical, in free-mapped blocks.
        eager_bytes: of the parked, mapped ahead.
        num_mappings: handles mapped now, counted once per address. A handle is one page, or the pages of an extent.
        map_calls, unmap_calls: handles mapped and unmapped.
        alias_calls: of the handles mapped, those that were mapped in a region already.
        create_calls, destroy_calls: handles taken from the device and given back.
        exposed_us, hidden_us: mapping time that steps waited for, and that passed beside them.
        in_flight_us: of both, the time of calls that began while a launched step was under way.
        num_exposed, num_hidden: units of mapping work in each.
        mapper_failures: units of work that the device refused; the mapper retries.
        adoptions, adopted_blocks: sequences that adopted a parked region, and blocks they found mapped there.
        demotions: sequences demoted to the home view, or that found every region taken.
        queried_tokens, hit_tokens: tokens of new sequences, and how many of them were prefix hits.
        evicted_blocks: cached blocks that were evicted.
        cached_prefixes: prefixes known now, one for each unit of tokens.
        copied_blocks: copies on write.
        pins: pinned prefixes.
    """

    # `/v1/load/memory` has all fields.
    __pydantic_config__: ClassVar[dict[str, bool]] = {"json_schema_serialization_defaults_required": True}

    budget_bytes: int
    budget_revision: int
    reserved_bytes: int
    mapped_bytes: int
    physical_bytes: int
    anchor_bytes: int
    active_bytes: int
    cached_bytes: int
    pinned_bytes: int
    swapped_bytes: int
    kept_bytes: int
    swap_budget_bytes: int
    parked_bytes: int
    eager_bytes: int
    num_mappings: int
    cached_prefixes: int
    pins: tuple[PinReport, ...]
    groups: tuple[GroupReport, ...]


# A published report is renewed when an exclusive call ends and the report is older than this: making one takes as long
# as the bookkeeping of a few calls.
_RENEWED_AFTER_S = 0.05


@dataclass(eq=False)
class MemoryAudit:
    """Reports and checks the accounting of one memory; changes nothing."""

    _backend: Backend
    _pages: PagePool
    _groups: Sequence[GroupMemory]
    _lock: MemoryLock
    _mapper: Mapper
    _tree: PrefixTree
    _copies: CopyOnWrite
    _tables: BlockTables
    _pins: Pins
    _swapping: Swapping
    _counts: MemoryCounts

    def __post_init__(self) -> None:
        self._lock.after_exclusive = self._publish_if_old
        self.publish()

    def report(self) -> MemoryReport:
        """See `KVMemory.report`."""
        with self._lock.soon() as held:
            return self.current() if held else self._report

    def current(self) -> MemoryReport:
        """A report of now. With the lock held."""
        self.publish()
        return self._report

    def publish(self) -> None:
        """Make a report for readers that cannot have the lock. With the lock held."""
        self._report = self._make_report()
        self._published_at = self._mapper.clock()

    @property
    def _num_owned_pages(self) -> int:
        return sum(group.pool.num_owned * group.num_slices for group in self._groups)

    def _publish_if_old(self) -> None:
        if self._mapper.clock() - self._published_at > _RENEWED_AFTER_S:
            self.publish()

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless blocks, regions, pages, prefixes and mappings add up. Exclusive."""
        self._mapper.wait_until_idle()
        with self._lock.unlocked():  # only the budget can change meanwhile
            sequences = [*self._tables.sequences, *self._pins.sequences]
            self._tree.check_integrity([sequence.prefix for sequence in sequences])
            mapped = 0
            for g, group in enumerate(self._groups):
                for table in (s.groups[g] for s in sequences):
                    if lost := group.not_at_home(table.block_ids[table.first : table.at_home]):
                        raise IntegrityError(f"extents {lost} should be mapped at home")
                owned = Counter(b for s in sequences for b in s.groups[g].owned)
                owned.update(block_id for at, block_id in self._copies.held if at == g)
                mapped += group.check_integrity(owned)
            self._pages.check_integrity(sum(len(group.handles) * group.layout.extent_pages for group in self._groups))
            if mapped != self._backend.num_mappings:
                raise IntegrityError(f"{mapped} handles should be mapped, {self._backend.num_mappings} are")

    def check_idle(self) -> None:
        """Raise `IntegrityError` unless no sequence is open, and every block is free or pinned. Exclusive."""
        self.check_integrity()
        owned = self._num_owned_pages - self._pages.num_pinned
        if self._tables.sequences or owned or self._swapping.used_bytes:
            raise IntegrityError(
                f"idle, but {len(self._tables.sequences)} sequences are open, {owned} pages are owned, "
                f"{self._swapping.used_bytes} bytes are swapped"
            )

    def _make_report(self) -> MemoryReport:
        page_bytes = self._pages.page_bytes
        groups = tuple(
            GroupReport(
                block_tokens=group.layout.block_tokens,
                block_bytes=group.layout.block_bytes,
                active_blocks=group.pool.num_owned,
                free_blocks=group.pool.num_free + group.pool.num_free_mapped + group.pool.num_cached,
                cached_blocks=group.pool.num_cached,
                parked_blocks=group.pool.num_free_mapped,
                eager_blocks=group.pool.num_eager,
            )
            for group in self._groups
        )
        return MemoryReport(
            **vars(self._counts),
            budget_bytes=self._pages.budget * page_bytes,
            budget_revision=self._pages.revision,
            reserved_bytes=sum(group.reserved_bytes for group in self._groups),
            mapped_bytes=self._backend.num_mappings * self._pages.handle_bytes,
            physical_bytes=self._pages.num_created * page_bytes,
            anchor_bytes=self._pages.handle_bytes,
            active_bytes=self._num_owned_pages * page_bytes,
            cached_bytes=sum(group.cached_blocks * group.block_bytes for group in groups),
            pinned_bytes=self._pages.num_pinned * page_bytes,
            swapped_bytes=self._swapping.used_bytes,
            kept_bytes=self._swapping.space.kept_bytes,
            swap_budget_bytes=int(self._swapping.space.most_bytes),
            parked_bytes=sum(group.parked_blocks * group.block_bytes for group in groups),
            eager_bytes=sum(group.eager_blocks * group.block_bytes for group in groups),
            num_mappings=self._backend.num_mappings,
            cached_prefixes=len(self._tree),
            pins=self._pins.report(),
            groups=groups,
        )
