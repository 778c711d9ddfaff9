"""Parts of a KV memory: budget, ranges of addresses, and the objects that allocate, map, cache and swap blocks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from folio.vmem.backends.base import Backend
from folio.vmem.blocks.eviction import EvictionOrder, ReturnOrder
from folio.vmem.blocks.tables import BlockAllocator, BlockTables, CopyOnWrite
from folio.vmem.budget import BudgetAnswer, MemoryCounts, PagePool
from folio.vmem.errors import LayoutError
from folio.vmem.group import LayerGroup, longest_sequence, most_pages, reserve_groups
from folio.vmem.lock import MemoryLock
from folio.vmem.mapping.mapper import Mapper
from folio.vmem.mapping.mapper_policy import MappingPolicy
from folio.vmem.mapping.mapping_count import MappingCount
from folio.vmem.mapping.options import MappingOptions
from folio.vmem.mapping.views import RegionManager
from folio.vmem.prefix.pins import Pins
from folio.vmem.prefix.prefix_cache import PrefixCache
from folio.vmem.prefix.prefix_tree import PrefixTree
from folio.vmem.prefix.token_chain import Hash, stable_hash
from folio.vmem.report import MemoryAudit, MemoryReport
from folio.vmem.sequence import SequenceMemory, TableChanges
from folio.vmem.swap.swap_space import SwapSpace
from folio.vmem.swap.swapping import Swapping
from folio.vmem.tensors import BlockContents, CacheTensors, LocalContents


class MemorySizes:
    """The page budget of layer groups, and which sequences fit into it. See `MemoryParts` for the arguments."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        budget_bytes: int,
        max_tokens: int,
        step_tokens: int | None,
        floor_bytes: int,
        may_be_empty: bool,
    ) -> None:
        page_sizes = {group.layout.page_bytes for group in groups}
        if len(page_sizes) != 1:
            raise LayoutError(f"layer groups must share one page size, got {sorted(page_sizes)}")
        [page_bytes] = page_sizes
        shares_handles = any(group.layout.extent_blocks > 1 for group in groups)
        if shares_handles and len(groups) > 1:
            raise LayoutError(f"blocks may share handles in a single layer group only, not in {len(groups)}")
        layout = groups[0].layout
        extent_pages = layout.extent_pages if shares_handles else 1
        self.groups = tuple(groups)
        self.max_tokens, self.step_tokens = max_tokens, step_tokens or max_tokens
        self.may_be_empty = may_be_empty
        self.floor_pages = floor_bytes // page_bytes // extent_pages * extent_pages
        longest = max(self.pages_for(max_tokens), self.floor_pages)
        self.pages = PagePool(
            page_bytes,
            budget_bytes,
            longest,
            self.floor_pages if may_be_empty else longest,
            handle_pages=layout.extent_blocks,
            extent_pages=extent_pages,
        )

    @property
    def context_tokens(self) -> int:
        """The longest sequence that fits into the attainable budget beside pins: `max_tokens` or less. From any
        thread."""
        num_pages = self.pages.attainable - self.pages.num_pinned
        if num_pages >= self.pages.longest:
            return self.max_tokens
        return min(longest_sequence(self.groups, num_pages, self.step_tokens), self.max_tokens)

    def pages_for(self, num_tokens: int) -> int:
        """The most pages that a sequence of that length owns."""
        return most_pages(self.groups, num_tokens, self.step_tokens)

    def pages_still_needed(self, sequence: SequenceMemory | None, num_tokens: int) -> int:
        """Pages that the sequence may still take until it has so many tokens."""
        if sequence is None:
            return self.pages_for(num_tokens)
        return sum(
            max(group.most_pages(num_tokens, self.step_tokens) - table.num_owned * group.layout.num_slices, 0)
            for group, table in zip(self.groups, sequence.groups, strict=True)
        )

    def fit_together(self, lengths: Sequence[int], shared_tokens: int = 0) -> bool:
        """Whether sequences of these lengths, with `shared_tokens` in common, fit into the whole memory together."""
        num_pages = min(self.pages.nominal, self.pages.attainable)
        return self.pages_together(lengths, shared_tokens) <= num_pages - self.pages.num_pinned

    def pages_together(self, lengths: Sequence[int], shared_tokens: int = 0) -> int:
        """The most pages that sequences of these lengths own, with `shared_tokens` in common."""
        shared = sum(
            shared_tokens // group.layout.block_tokens * group.layout.num_slices
            for group in self.groups
            if not group.is_state and group.window_tokens is None
        )
        return sum(map(self.pages_for, lengths)) - shared * (len(lengths) - 1)

    @property
    def most_budget_bytes(self) -> int:
        """The most that `set_budget` accepts."""
        return self.pages.most * self.pages.page_bytes

    @property
    def anchor_bytes(self) -> int:
        """Physical memory beyond the budget, until `close`."""
        return self.groups[0].layout.handle_bytes


class MemoryParts(MemorySizes):
    """Everything that a `KVMemory` is made of, its budget and its reports.

    Args:
        backend: owned from now on and closed by `close`.
        groups: layer groups with pages of one size; they share the budget. Only a single group may share handles.
        budget_bytes: physical memory at most, now and later; the anchor page (see `GroupMemory`) comes on top.
        floor_bytes: physical memory that is taken at the start and never given back.
        num_regions: the most sequences that hold a region at the same time.
        max_tokens: the longest sequence.
        step_tokens: the most tokens that a step computes of one sequence; by default all of them.
        may_be_empty: the budget may be lowered to what is pinned and the floor. By default it always holds a sequence
            of `max_tokens`, too.
        options: how mappings and pages follow the load.
        mappings: of the memories that share the limit of mappings; by default this one has it for itself.
        prefix_cache: whether freed blocks stay cached.
        pin_quota: share of the budget that pinned prefixes may take.
        retain_quota: share of the budget that retained prefixes may take.
        eviction: which cached blocks are evicted first; by default those that are least likely to be used soon.
        swap_bytes: host memory for preempted sequences and kept prefixes.
        swap_space: that of all memories that share it; by default this one has `swap_bytes` for itself.
        contents: given the tensors, how blocks are copied, for copy-on-write and swapping.
        hash: of the prefix cache; for tests.
        clock: in seconds; for simulations.

    Attributes:
        prefixes, pins, swapping: the prefix cache, pinned prefixes, swapped sequences.
        tensors: home and regions as tensors.

    Raises:
        LayoutError: the groups have pages of different sizes, or several groups share handles.
        BudgetError: the budget does not hold one sequence of `max_tokens`, or is below the floor.
    """

    def __init__(
        self,
        backend: Backend,
        groups: Sequence[LayerGroup],
        *,
        budget_bytes: int,
        num_regions: int,
        max_tokens: int,
        step_tokens: int | None = None,
        floor_bytes: int = 0,
        may_be_empty: bool = False,
        options: MappingOptions | None = None,
        mappings: MappingCount | None = None,
        prefix_cache: bool = True,
        pin_quota: float = 0.25,
        retain_quota: float = 0.25,
        eviction: EvictionOrder | None = None,
        swap_bytes: int = 0,
        swap_space: SwapSpace | None = None,
        contents: Callable[[CacheTensors], BlockContents] = LocalContents,
        hash: Hash = stable_hash,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(groups, budget_bytes, max_tokens, step_tokens, floor_bytes, may_be_empty)
        self.backend, pages = backend, self.pages
        options, space = options or MappingOptions(), SwapSpace(swap_bytes, swap_space or SwapSpace())
        counts = MemoryCounts()
        unit_tokens = math.lcm(*(group.layout.block_tokens for group in groups if not group.is_state))
        order = eviction or ReturnOrder(
            lambda: int(retain_quota * pages.budget), lambda units: self.pages_for(units * unit_tokens), clock
        )
        self._anchor, memories = reserve_groups(backend, groups, pages.most, num_regions, max_tokens, order.new_queue)
        self.group_memories = memories
        ranges = [memory.homes for memory in memories], [memory.ranges for memory in memories]
        self.tensors = CacheTensors(backend, groups, *ranges, [memory.region_tokens for memory in memories], max_tokens)
        self.tree = tree = PrefixTree(memories, unit_tokens, hash, counts)
        self._mappings = mappings or MappingCount()
        self.policy = MappingPolicy(backend, pages, memories, tree, order, self._mappings, options, self.floor_pages)
        self._mappings.join(self.policy.num_mappings)
        self.lock = lock = MemoryLock()
        self.changes = changes = TableChanges()
        self.mapper = mapper = Mapper(backend, lock, self.policy, counts, clock)
        self.regions = regions = RegionManager(memories, mapper, self.policy, counts, changes)
        self.allocator = allocator = BlockAllocator(backend, pages, memories, tree, mapper, regions)
        self.contents = blocks = contents(self.tensors)
        self.copies = CopyOnWrite(memories, allocator, regions, mapper, blocks, lock, counts, changes)
        self.tables = tables = BlockTables(memories, allocator, self.copies, mapper, max_tokens, counts, changes)
        self.prefixes = PrefixCache(
            memories, lock, tree, allocator, tables, counts, order, self.step_tokens, prefix_cache
        )
        self.swapping = Swapping(memories, lock, mapper, blocks, tree, allocator, regions, self.prefixes, space)
        self.pins = Pins(lock, pages, memories, pin_quota)
        self.audit = MemoryAudit(
            backend, pages, memories, lock, mapper, tree, self.copies, tables, self.pins, self.swapping, counts
        )
        if options.background:
            mapper.start()

    @property
    def num_free_pages(self) -> int:
        """Pages without an owner. Negative while sequences own more than a budget that was lowered."""
        return self.allocator.num_free_pages

    def set_budget(self, budget_bytes: int, revision: int) -> BudgetAnswer:
        """Change the budget, see `PagePool.set_budget`. From any thread; waits for bookkeeping only.

        The mapper gives back pages without an owner; `num_free_pages` is negative while owners have too many.
        """
        with self.lock:
            answer = self.pages.set_budget(budget_bytes, revision)
            self.lock.notify_all()
            return answer

    @property
    def least_budget_bytes(self) -> int:
        """The least that `set_budget` accepts now. From any thread."""
        with self.lock:
            return self.pages.least * self.pages.page_bytes

    @property
    def held_bytes(self) -> int:
        """Physical memory that exists or is being created: a budget below it keeps it from growing. From any thread."""
        with self.lock:
            return self.pages.num_committed * self.pages.page_bytes

    def report(self) -> MemoryReport:
        """Figures of now. From any thread: after 20 ms without the lock, those of the last report, at most 50 ms older
        than the engine's last call and never older than the last `free`. The engine's own thread gets figures of now.
        """
        return self.audit.report()

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless blocks, regions, pages, prefixes and mappings add up."""
        with self.lock.exclusive():
            self.audit.check_integrity()

    def check_idle(self) -> None:
        """Raise `IntegrityError` unless no sequence is open, and every block is free or pinned."""
        with self.lock.exclusive():
            self.copies.run()
            self.audit.check_idle()
