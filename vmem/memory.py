"""The KV memory of one engine: sequences own blocks, blocks have pages, pages are mapped where kernels read them.

Two address ranges show the same pages:

    home      | block 0 | block 1 | block 2 | block 3 | …      block b is always at b · page_bytes
    regions   | 2 | 0 |   hole    | 3 |     hole       | …     each shows one sequence's blocks in order

A paged kernel reads home through the block table; any contiguous kernel reads the sequence's region. Every block is at
home as long as it has pages, so a sequence can change from its region to its block table at any time.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from vmem.allocator import BlockAllocator
from vmem.backend import Backend
from vmem.background import Background, MappingOptions
from vmem.copies import BlockCopies
from vmem.errors import IntegrityError, LayoutError, OutOfPages, VmemError
from vmem.group import GroupMemory, LayerGroup, total_pages
from vmem.mapper import Mapper
from vmem.pages import BudgetAnswer, PagePool
from vmem.region import HOLE
from vmem.report import GroupReport, MemoryReport
from vmem.sequence import Demand, GroupTable, SequenceMemory, ViewPolicy
from vmem.views import SequenceViews
from vmem.work import Detach, Work


class KVMemory:
    """Blocks, pages, mappings and regions of one device.

    Its methods may be called from any thread, those that name the same sequence or the same step from one at a time;
    the mapper's thread works beside them. A call that raises has changed nothing, unless it says so.

    Which view a sequence is read through is its policy's business, see `SequenceViews`.

    Args:
        backend: owned from now on and closed by `close`.
        groups: layer groups with pages of one size; they share the budget.
        budget_bytes: physical memory at most, and the most that `set_budget` can set.
        floor_bytes: physical memory, in whole pages, that is taken at once and never given back.
        num_regions: how many sequences may hold a region at once.
        max_tokens: the longest sequence.
        options: how mappings and pages follow the load.

    Raises:
        LayoutError: the groups do not fit together.
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
        floor_bytes: int = 0,
        options: MappingOptions | None = None,
    ) -> None:
        page_sizes = {group.layout.page_bytes for group in groups}
        if len(page_sizes) != 1:
            raise LayoutError(f"layer groups must share one page size, got {sorted(page_sizes)}")
        page_bytes = page_sizes.pop()
        self.max_tokens = max_tokens
        self._options = options or MappingOptions()
        self._backend = backend
        self._specs = tuple(groups)
        fewest_pages = max(self.pages_for(max_tokens), floor_bytes // page_bytes)
        self._pages = PagePool(page_bytes, budget_bytes // page_bytes, fewest_pages)
        self._groups: list[GroupMemory] = []
        try:
            for group in groups:
                num_blocks = self._pages.budget // group.layout.num_slices
                region_blocks = group.layout.num_blocks(max_tokens)
                self._groups.append(
                    GroupMemory(
                        backend, group, num_blocks=num_blocks, num_regions=num_regions, region_blocks=region_blocks
                    )
                )
        except VmemError:
            for made in self._groups:
                made.release()
            raise
        self._place_of_layer = {layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)}
        self._sequences: set[SequenceMemory] = set()
        self._num_adopted_blocks = 0
        self._background = Background(backend, self._pages, self._groups, self._options, floor_bytes // page_bytes)
        self._mapper = Mapper(self._next_work, self._wait_s, self._background.forget)
        self._lock = self._mapper.lock
        self._allocator = BlockAllocator(backend, self._pages, self._groups, self._mapper)
        self._copies = BlockCopies(backend, self._groups, self._allocator)
        self._views = SequenceViews(
            backend, self._groups, self._allocator, self._mapper, self._background, self._options
        )
        self._mapper.start()

    # ---- sizes ----

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        return self._specs

    @property
    def num_free_pages(self) -> int:
        """Pages no sequence owns. Negative while sequences own more than a budget that was lowered."""
        return self._allocator.num_free_pages

    def pages_for(self, num_tokens: int) -> int:
        """Pages a sequence of that length owns."""
        return sum(group.layout.num_blocks(num_tokens) * group.layout.num_slices for group in self._specs)

    # ---- sequences ----

    def open(self, policy: ViewPolicy = "auto") -> SequenceMemory:
        """A new sequence without blocks. Free it with `free`."""
        sequence = SequenceMemory(policy, tuple(GroupTable() for _ in self._specs))
        with self._lock:
            self._sequences.add(sequence)
        return sequence

    def append(self, sequence: SequenceMemory, num_tokens: int) -> None:
        """Let the sequence own blocks for `num_tokens` tokens in all, the ones it has included.

        A last block that it shares with a fork and that the new tokens begin in is copied first (PagedAttention §4.4).

        Raises:
            OutOfPages: the budget is used up; the sequence owns what it owned.
            MapError: the device refused; the sequence owns what it owned.
        """
        if num_tokens > self.max_tokens:
            raise VmemError(f"{num_tokens} tokens exceed the {self.max_tokens} of a sequence")
        with self._locked():
            self._check_open(sequence)
            had_tokens = sequence.num_tokens
            if num_tokens <= had_tokens:
                return
            tables = list(zip(self._groups, sequence.groups, strict=True))
            needed = sum(
                (
                    group.layout.num_blocks(num_tokens)
                    - len(table.block_ids)
                    + self._copies.shares_last(g, table, had_tokens)
                )
                * group.num_slices
                for g, (group, table) in enumerate(tables)
            )
            if not needed:
                sequence.num_tokens = num_tokens
                return
            if needed > self.num_free_pages:
                raise OutOfPages(needed, self.num_free_pages)
            enters = not had_tokens and sequence.view == "block_table"
            copied: list[tuple[int, GroupTable, int]] = []  # (group, table, the shared block it had)
            try:
                if enters:
                    self._views.enter(sequence, num_tokens)
                for g, (group, table) in enumerate(tables):
                    if self._copies.shares_last(g, table, had_tokens):
                        shared = table.block_ids[-1]
                        self._copies.own_last(g, table)
                        copied.append((g, table, shared))
                    self._grow(group, table, group.layout.num_blocks(num_tokens) - len(table.block_ids))
            except VmemError:
                for group, table in tables:
                    self._drop(group, table, group.layout.num_blocks(had_tokens))
                if enters:
                    self._views.leave(sequence)
                for g, table, shared in copied:
                    self._copies.share_last_again(g, table, shared)
                raise
            sequence.num_tokens = num_tokens

    def fork(self, sequence: SequenceMemory, num_tokens: int, policy: ViewPolicy | None = None) -> SequenceMemory:
        """A new sequence that shares the blocks of the first `num_tokens` tokens, which must be computed
        (PagedAttention §4.4).

        In the region view its shared blocks are mapped once more. Whoever first appends to a shared last block copies
        it.
        """
        with self._locked():
            self._check_open(sequence)
            if not 0 < num_tokens <= sequence.num_tokens:
                raise VmemError(f"a fork of {num_tokens} tokens from a sequence of {sequence.num_tokens}")
            self._check_window(sequence, num_tokens)
            child = SequenceMemory(policy or sequence.policy, tuple(GroupTable() for _ in self._specs), num_tokens)
            for group, table, new in zip(self._groups, sequence.groups, child.groups, strict=True):
                new.block_ids = table.block_ids[: group.layout.num_blocks(num_tokens)]
                new.first = table.first
                group.pool.share(new.block_ids[new.first :])
            try:
                self._views.enter(child, num_tokens)
            except VmemError:
                self._drop_all(child)
                raise
            self._sequences.add(child)
            return child

    def truncate(self, sequence: SequenceMemory, num_tokens: int) -> None:
        """Let the sequence own blocks for its first `num_tokens` tokens only."""
        with self._locked():
            self._check_open(sequence)
            if num_tokens > sequence.num_tokens:
                raise VmemError(f"truncation to {num_tokens} of a sequence of {sequence.num_tokens} tokens")
            self._check_window(sequence, num_tokens)
            for group, table in zip(self._groups, sequence.groups, strict=True):
                self._drop(group, table, group.layout.num_blocks(num_tokens))
            sequence.num_tokens = num_tokens
            self._mapper.wake()

    def free(self, sequence: SequenceMemory) -> None:
        """Give everything back. A region stays as it is for another sequence to adopt, until free pages run low.

        Raises:
            MapError: only without deferred reclamation: its region could not be unmapped. It is parked; the sequence
                is gone all the same.
        """
        with self._lock:
            self._check_open(sequence)
            self._sequences.remove(sequence)
            left = [(group, table.region) for group, table in zip(self._groups, sequence.groups, strict=True)]
            self._drop_all(sequence)
            self._mapper.wake()
            if not self._options.deferred_reclamation:
                for group, region in left:
                    if region is not None:
                        self._allocator.hide_unused(group, region)

    # ---- steps ----

    def ensure(self, demands: Iterable[Demand]) -> None:
        """Make the step's blocks readable and writable: map what the mapper has not mapped yet, copy what was shared.

        Call it before the step's batch is laid out: with "auto", a sequence may lose its region here.

        Raises:
            MapError: the device refused; what was mapped before stays mapped, and owners are as they were. Also
                raised, once, when the mapper's own calls keep failing.
        """
        with self._locked():
            self._mapper.raise_failure()
            self._copies.run()
            for demand in demands:
                for group, table in zip(self._groups, demand.sequence.groups, strict=True):
                    self._expire(group, table, demand.start)
                self._views.show(demand.sequence, demand.end)

    def plan(self, demands: Iterable[Demand]) -> None:
        """Say what the step after the one that now begins will need, for the mapper to do meanwhile
        (vAttention §6.2.1)."""
        with self._locked():
            for prompts in self._background.demand:
                prompts.note_step()
            self._background.forget()
            if self._options.overlap:
                for demand in demands:
                    self._views.want(demand)
            self._mapper.wake()

    def launched(self) -> None:
        """Note that a step which reads the mappings has been submitted: they may change only once it is done."""
        with self._locked():
            self._allocator.fence = self._backend.fence()

    # ---- the two views ----

    def group_of(self, layer: int) -> int:
        """The layer group of a layer of the model."""
        return self._place_of_layer[layer][0]

    def region_tokens(self, group: int) -> int:
        """Tokens from one slot to the next in `region_view`."""
        return self._groups[group].region_blocks * self._specs[group].layout.block_tokens

    def home_view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer by block: `[num_blocks, block_tokens, num_heads, dim]`."""
        g, i = self._place_of_layer[layer]
        group = self._groups[g]
        return group.layout.view(group.home_tensors(), i, group.layout.block_tokens)

    def region_view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer by slot: `[num_regions, region_tokens, num_heads, dim]`, holes included."""
        g, i = self._place_of_layer[layer]
        group = self._groups[g]
        return group.layout.view(group.region_tensors(), i, self.region_tokens(g))

    # ---- the budget ----

    def set_budget(self, budget_bytes: int, revision: int) -> BudgetAnswer:
        """Change how much physical memory there may be.

        Pages nobody owns are given back by the mapper; for the others, `num_free_pages` is negative until the scheduler
        has preempted enough.

        Args:
            revision: increases with every order; an older one that arrives late is ignored.

        Returns:
            "applied" when physical memory is within the budget now, "deferred" when it will be, "stale" for a revision
            that is not newer than the last.

        Raises:
            BudgetError: out of bounds: one sequence of `max_tokens`, and the floor, must fit, and it cannot exceed
                the budget this memory was made with.
        """
        with self._lock:
            answer = self._pages.set_budget(budget_bytes, revision)
            self._mapper.wake()
            return answer

    def wait_for_progress(self, timeout_s: float) -> None:
        """Wait until the mapper has done something, at most that long: for whoever found no pages."""
        with self._lock:
            self._mapper.raise_failure()
            self._lock.wait(timeout_s)

    # ---- accounting ----

    def report(self) -> MemoryReport:
        """Where memory is. Takes microseconds, once a call under way in another thread lets it; from any thread."""
        with self._lock:
            page_bytes, counts, times = self._pages.page_bytes, self._mapper.counts, self._mapper.times
            groups = tuple(
                GroupReport(
                    block_tokens=group.layout.block_tokens,
                    block_bytes=group.layout.block_bytes,
                    active_blocks=group.pool.num_owned,
                    free_blocks=group.pool.num_loose + group.pool.num_tied,
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
                active_bytes=self._allocator.num_owned_pages * page_bytes,
                cached_bytes=0,
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
                adopted_blocks=self._num_adopted_blocks,
                demotions=self._views.num_demotions,
                groups=groups,
            )

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless blocks, regions, pages and mappings add up."""
        with self._lock, self._quiet():
            mapped = 0
            for g, group in enumerate(self._groups):
                owned = Counter(b for s in self._sequences for b in s.groups[g].block_ids[s.groups[g].first :])
                owned.update(block_id for at, block_id in self._copies.held if at == g)
                mapped += group.check_integrity(owned)
            self._pages.check_integrity(total_pages(self._groups))
            if mapped != self._backend.num_mappings:
                raise IntegrityError(f"{mapped} pages should be mapped, {self._backend.num_mappings} are")

    def check_idle(self) -> None:
        """Raise `IntegrityError` unless no sequence is open and every block is free."""
        with self._lock:
            self._copies.run()
            self.check_integrity()
            owned = self._allocator.num_owned_pages
            if self._sequences or owned:
                raise IntegrityError(f"idle, but {len(self._sequences)} sequences are open, {owned} pages are owned")

    def close(self) -> None:
        """Stop the mapper and give everything back. Raises `IntegrityError` if a sequence is still open.

        No step may be running any more.
        """
        with self._lock:
            if self._sequences:
                raise IntegrityError(f"closed with {len(self._sequences)} sequences open")
            self._copies.run()
        self._mapper.stop()
        with self._lock:
            self._backend.wait(self._backend.fence())
            for group in self._groups:
                for region in list(group.parked):
                    self._allocator.hide_unused(group, region)
                block_ids, _ = group.pool.detachable(group.pool.num_loose, freed_before=math.inf)
                if block_ids:
                    self._mapper.run_now(Detach(self._pages, group, block_ids))
                group.release()
            for handle in self._pages.spare:
                self._backend.destroy(handle)
            self._backend.close()

    # ---- inside; all with the lock held ----

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of a mapper that is alive; the time until it is there counts as exposed."""
        start = time.perf_counter()
        with self._lock:
            self._mapper.times.exposed_s += time.perf_counter() - start
            self._mapper.raise_death()
            yield

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        self._mapper.pause()
        try:
            yield
        finally:
            self._mapper.resume()

    def _next_work(self) -> Work | None:
        return self._background.next_work(time.monotonic())

    def _wait_s(self) -> float | None:
        return self._background.wait_s(time.monotonic())

    def _check_open(self, sequence: SequenceMemory) -> None:
        if sequence not in self._sequences:
            raise IntegrityError("the sequence is not open")

    def _grow(self, group: GroupMemory, table: GroupTable, count: int) -> None:
        """Append blocks to the table: those its region shows next if they are free, then any. All or none."""
        if count <= 0:
            return
        region = table.region
        new: list[int] = []
        if region is not None:
            self._allocator.settle(region)
            for place in range(len(table.block_ids), len(table.block_ids) + count):
                shown = region.at(place)
                if shown == HOLE or not group.pool.is_free(shown):
                    break
                group.pool.take(shown)
                new.append(shown)
        self._num_adopted_blocks += len(new)
        try:
            new += self._allocator.allocate(group, count - len(new))
        except VmemError:
            self._allocator.free(group, new)
            raise
        table.block_ids += new

    def _drop(self, group: GroupMemory, table: GroupTable, kept: int) -> None:
        """Free the blocks from `kept` on. Their places in the region become its tail."""
        if kept >= len(table.block_ids):
            return
        if table.region is not None:
            self._allocator.settle(table.region)
            table.region.checked = min(table.region.checked, kept)
            table.region.wanted = min(table.region.wanted, kept)
            table.region.fence = self._allocator.fence
        freed = table.block_ids[max(kept, table.first) :]
        del table.block_ids[kept:]
        self._allocator.free(group, freed)
        self._copies.forget_unneeded()

    def _drop_all(self, sequence: SequenceMemory) -> None:
        self._views.leave(sequence)
        for group, table in zip(self._groups, sequence.groups, strict=True):
            self._drop(group, table, 0)

    def _expire(self, group: GroupMemory, table: GroupTable, start: int) -> None:
        """Free the blocks that no query from position `start` on sees any more."""
        first = self._first_visible(group, start)
        if first <= table.first:
            return
        if table.region is not None:
            region = table.region
            self._allocator.settle(region)
            region.first = first
            region.checked = max(region.checked, first)
            region.fence = self._allocator.fence
            group.expired[region] = None
        self._allocator.free(group, table.block_ids[table.first : first])
        table.first = first

    def _first_visible(self, group: GroupMemory, start: int) -> int:
        """The first block that a query at position `start` sees a token of."""
        window = group.spec.window_tokens
        return 0 if window is None else max(0, start - window + 1) // group.layout.block_tokens

    def _check_window(self, sequence: SequenceMemory, num_tokens: int) -> None:
        """Raise `VmemError` unless the sequence can go on after its first `num_tokens` tokens."""
        for group, table in zip(self._groups, sequence.groups, strict=True):
            if self._first_visible(group, num_tokens) < table.first:
                lost = table.first * group.layout.block_tokens
                raise VmemError(f"{num_tokens} tokens cannot be gone on from: the first {lost} have left the window")
