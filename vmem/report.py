"""Where KV memory is, at one moment.

Where memory is, and whether the books add up.

ReportCache of a memory that every thread may ask for at any time, an event loop's thread too.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from vmem.allocator import BlockAllocator
from vmem.backends.base import Backend
from vmem.budget import PagePool
from vmem.errors import IntegrityError
from vmem.group import GroupMemory, total_pages
from vmem.mapper import Mapper
from vmem.pins import PinReport, Pins
from vmem.prefix_summary import NO_KEYS, CachedKeys, PrefixSummary
from vmem.prefix_tree import PrefixTree
from vmem.sequence import SequenceMemory
from vmem.swapping import Swapping
from vmem.tables import BlockTables, CopyOnWrite
from vmem.views import RegionManager


@dataclass(frozen=True, slots=True)
class GroupReport:
    """Blocks of one layer group. `free_blocks` have pages; `cached_blocks` of them are kept for their content, others
    are `parked_blocks` that regions still show, and `eager_blocks` of those were mapped ahead for sequences to come."""

    block_tokens: int
    block_bytes: int
    active_blocks: int
    free_blocks: int
    cached_blocks: int
    parked_blocks: int
    eager_blocks: int


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """KV memory at one moment. Counts and times run from the start.

    Attributes:
        budget_bytes, budget_revision: what `set_budget` last accepted.
        reserved_bytes: virtual addresses, with or without memory behind them.
        mapped_bytes: virtual addresses with memory behind them; a page mapped twice counts twice.
        physical_bytes: memory taken from the device.
        anchor_bytes: memory taken beside that and beside the budget: the anchor page, which stays.
        active_bytes: of the physical, owned by sequences.
        cached_bytes: of these, free and kept for their content (prefix cache).
        pinned_bytes: of the active, owned by pinned prefixes.
        swapped_bytes, swap_budget_bytes: host memory that preempted sequences take, and may take.
        parked_bytes: of these, free and mapped in some region: where a sequence ended, or ahead of need.
        eager_bytes: of the parked, mapped ahead for the next prompts and tokens.
        num_mappings: pages mapped now, counted once an address.
        map_calls, unmap_calls: pages mapped and unmapped.
        alias_calls: of the pages mapped, those that a region showed already.
        create_calls, destroy_calls: pages taken from the device and given back.
        exposed_us, hidden_us: mapping time that calls of the engine waited for, and that passed beside them.
        num_exposed, num_hidden: units of mapping work in each.
        mapper_failures: units of work the device refused the mapper; it tries again.
        adoptions, adopted_blocks: sequences that took over a parked region, and blocks they found mapped there.
        demotions: sequences that went on through their block table because the mapping budget was used up.
        queried_tokens, hit_tokens: tokens of sequences that began, and how many of them the prefix cache had.
        evicted_blocks: blocks whose content was given up for other content, or with their page.
        cached_prefixes: prefixes known now, one for each unit of tokens.
        copied_blocks: copies on write.
        pins: pinned prefixes.
    """

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
    swap_budget_bytes: int
    parked_bytes: int
    eager_bytes: int
    num_mappings: int
    map_calls: int
    unmap_calls: int
    alias_calls: int
    create_calls: int
    destroy_calls: int
    exposed_us: float
    hidden_us: float
    num_exposed: int
    num_hidden: int
    mapper_failures: int
    adoptions: int
    adopted_blocks: int
    demotions: int
    queried_tokens: int
    hit_tokens: int
    evicted_blocks: int
    cached_prefixes: int
    copied_blocks: int
    pins: tuple[PinReport, ...]
    groups: tuple[GroupReport, ...]


class MemoryAudit:
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
        copies: CopyOnWrite,
        index: PrefixTree,
        mapper: Mapper,
        pins: Pins,
        swapping: Swapping,
        tables: BlockTables,
        views: RegionManager,
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
                free_blocks=group.pool.num_free + group.pool.num_free_mapped + group.pool.num_cached,
                cached_blocks=group.pool.num_cached,
                parked_blocks=group.pool.num_free_mapped,
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


# A reader waits for the lock no longer than this. It is held for bookkeeping only, so that microseconds are usual; more
# is a very long sequence, or a holder that the machine has no core for.
_PATIENCE_S = 0.02
# A published report is renewed when a call of the engine ends and the report is older than this: making one takes as
# long as the bookkeeping of a few calls.
_RENEWED_AFTER_S = 0.05


class ReportCache:
    """Reads the books under the lock if it is free soon, else returns the figures that were published last.

    Args:
        lock: the memory's.

    Attributes:
        writer: the thread that changed the books last, other than the mapper's. It waits for the lock in any case, so
            that it reads what it has written.
    """

    def __init__(self, lock: threading.Condition, accounts: MemoryAudit, summary: PrefixSummary) -> None:
        self._lock = lock
        self._accounts = accounts
        self._summary = summary
        self._keys: dict[int, tuple[int, CachedKeys]] = {}  # by the most that were asked for, with `num_changes` then
        self.writer = threading.get_ident()
        self.publish()

    def report(self) -> MemoryReport:
        """Where memory is now, or was a little earlier, see `KVMemory.report`."""
        with self._soon() as held:
            if held:
                self.publish()
            return self._report

    def cached_keys(self, most: int) -> CachedKeys:
        """At most `most` keys of cached prefixes: those of now, or those last returned for the same `most`."""
        since, last = self._keys.get(most, (-1, NO_KEYS))
        if since == self._summary.num_changes:
            return last
        with self._soon() as held:
            since, last = self._keys.get(most, (-1, NO_KEYS))  # another thread may have asked meanwhile
            if held:
                last = self._summary.keys(most, last, since)
                self._keys[most] = self._summary.num_changes, last
            return last

    def publish(self) -> None:
        """Make a report for readers who cannot have the lock. With the lock held."""
        self._report = self._accounts.report()
        self._published_at = time.monotonic()

    def publish_if_old(self) -> None:
        """The same, unless there is one that is nearly new. With the lock held."""
        if time.monotonic() - self._published_at > _RENEWED_AFTER_S:
            self.publish()

    @contextmanager
    def _soon(self) -> Iterator[bool]:
        """Hold the lock if it can be had soon; says whether it is held."""
        held = self._lock.acquire(timeout=-1 if self.writer == threading.get_ident() else _PATIENCE_S)
        try:
            yield held
        finally:
            if held:
                self._lock.release()
