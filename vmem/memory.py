"""The KV memory of one engine: sequences own blocks, blocks have pages, pages are mapped where kernels read them.

Two address ranges show the same pages:

    home      | block 0 | block 1 | block 2 | block 3 | …      block b is always at b · page_bytes
    regions   | 2 | 0 |   hole    | 3 |     hole       | …     each shows one sequence's blocks in order

A paged kernel reads home through the block table; any contiguous kernel reads the sequence's region. Every block is at
home as long as it has pages, so a sequence can change from its region to its block table at any time.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

from vmem.backend import Backend
from vmem.background import Background, MappingOptions
from vmem.errors import BudgetError, IntegrityError, LayoutError, MapError, OutOfPages, VmemError
from vmem.group import GroupMemory, LayerGroup, total_pages
from vmem.mapper import Mapper
from vmem.pages import PagePool
from vmem.region import HOLE, Region
from vmem.report import GroupReport, MemoryReport
from vmem.work import Attach, Detach, Hide, Show, Work

logger = logging.getLogger(__name__)

View = Literal["region", "block_table"]
ViewPolicy = Literal["auto", "region", "block_table"]
BudgetAnswer = Literal["applied", "deferred", "stale"]


@dataclass(slots=True, eq=False)
class GroupTable:
    """What a sequence owns in one layer group.

    Attributes:
        block_ids: the block table: logical block index → block id.
        first: blocks before it have left the window; they belong to others, and their entries mean nothing.
        region: where they are shown in order, `None` if they are read through the block table.
    """

    block_ids: list[int] = field(default_factory=list)
    first: int = 0
    region: Region | None = None


@dataclass(slots=True, eq=False)
class SequenceMemory:
    """What one sequence owns. Made by `KVMemory.open` and `fork`, changed by `KVMemory` only.

    Attributes:
        policy: what was asked for; `view` is what it came to.
        groups: one table for each layer group.
        num_tokens: tokens there is room for as far as anybody asked.
    """

    policy: ViewPolicy
    groups: tuple[GroupTable, ...]
    num_tokens: int = 0

    @property
    def view(self) -> View:
        return "region" if any(table.region is not None for table in self.groups) else "block_table"


@dataclass(frozen=True, slots=True)
class Demand:
    """A step computes the tokens `start … end - 1` of a sequence, over everything cached before them."""

    sequence: SequenceMemory
    start: int
    end: int


class KVMemory:
    """Blocks, pages, mappings and regions of one device.

    Its methods may be called from any thread, those that name the same sequence or the same step from one at a time;
    the mapper's thread works beside them. A call that raises has changed nothing, unless it says so.

    Which view a sequence is read through: with the policy "region" or "block_table" that one. With "auto" a region,
    until the mappings it needs exceed `MappingOptions.max_mappings` even after parked regions have given theirs up;
    from then on its block table. A running sequence changes its view too when a mapping it needs cannot be had.

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
        self._pages = PagePool(page_bytes, budget_bytes // page_bytes)
        self._most_pages = self._pages.budget
        self._fewest_pages = max(self.pages_for(max_tokens), floor_bytes // page_bytes)
        self._check_budget(budget_bytes)
        self._revision = 0
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
        self._copies: list[tuple[int, int, int]] = []  # (group, from block, to block), a reference held on both
        self._fence = backend.fence()
        self._adoptions = self._adopted_blocks = self._demotions = 0
        self._background = Background(backend, self._pages, self._groups, self._options, floor_bytes // page_bytes)
        self._mapper = Mapper(self._next_work, self._wait_s, self._background.forget)
        self._lock = self._mapper.lock
        self._mapper.start()

    # ---- sizes ----

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        return self._specs

    @property
    def num_free_pages(self) -> int:
        """Pages no sequence owns. Negative while sequences own more than a budget that was lowered."""
        return self._pages.budget - self._num_owned_pages

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
                (group.layout.num_blocks(num_tokens) - len(table.block_ids) + self._shares_last(g, table, had_tokens))
                * group.num_slices
                for g, (group, table) in enumerate(tables)
            )
            if needed > self.num_free_pages:
                raise OutOfPages(needed, self.num_free_pages)
            enters = not had_tokens and sequence.view == "block_table"
            copied: list[tuple[int, GroupTable, int]] = []  # (group, table, the shared block it had)
            try:
                if enters:
                    self._enter_regions(sequence, num_tokens)
                for g, (group, table) in enumerate(tables):
                    if self._shares_last(g, table, had_tokens):
                        shared = table.block_ids[-1]
                        self._own_last(g, table)
                        copied.append((g, table, shared))
                    self._grow(group, table, group.layout.num_blocks(num_tokens) - len(table.block_ids))
            except VmemError:
                for group, table in tables:
                    self._drop(group, table, group.layout.num_blocks(had_tokens))
                    if enters:
                        self._leave_region(group, table)
                for g, table, shared in copied:
                    self._share_last_again(g, table, shared)
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
                self._enter_regions(child, num_tokens)
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
                        self._hide_tail(group, region)

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
            self._run_copies()
            for demand in demands:
                for group, table in zip(self._groups, demand.sequence.groups, strict=True):
                    self._expire(group, table, demand.start)
                    if table.region is not None:
                        self._show(demand.sequence, group, table, group.layout.num_blocks(demand.end))

    def plan(self, demands: Iterable[Demand]) -> None:
        """Say what the step after the one that now begins will need, for the mapper to do meanwhile
        (vAttention §6.2.1)."""
        with self._locked():
            for prompts in self._background.demand:
                prompts.note_step()
            self._background.forget()
            if self._options.overlap:
                for demand in demands:
                    self._want(demand)
            self._mapper.wake()

    def launched(self) -> None:
        """Note that a step which reads the mappings has been submitted: they may change only once it is done."""
        with self._locked():
            self._fence = self._backend.fence()

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
            if revision <= self._revision:
                return "stale"
            self._check_budget(budget_bytes)
            self._revision = revision
            self._pages.budget = budget_bytes // self._pages.page_bytes
            self._mapper.wake()
            return "applied" if self._pages.num_coming <= self._pages.budget else "deferred"

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
                budget_revision=self._revision,
                reserved_bytes=sum(group.reserved_bytes for group in self._groups),
                mapped_bytes=self._backend.num_mappings * page_bytes,
                physical_bytes=self._pages.num_created * page_bytes,
                active_bytes=self._num_owned_pages * page_bytes,
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
                adoptions=self._adoptions,
                adopted_blocks=self._adopted_blocks,
                demotions=self._demotions,
                groups=groups,
            )

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless blocks, regions, pages and mappings add up."""
        with self._lock, self._quiet():
            mapped = 0
            for g, group in enumerate(self._groups):
                owned = Counter(b for s in self._sequences for b in s.groups[g].block_ids[s.groups[g].first :])
                owned.update(b for at, *pair in self._copies if at == g for b in pair)
                mapped += group.check_integrity(owned)
            self._pages.check_integrity(total_pages(self._groups))
            if mapped != self._backend.num_mappings:
                raise IntegrityError(f"{mapped} pages should be mapped, {self._backend.num_mappings} are")

    def check_idle(self) -> None:
        """Raise `IntegrityError` unless no sequence is open and every block is free."""
        with self._lock:
            self._run_copies()
            self.check_integrity()
            if self._sequences or self._num_owned_pages:
                raise IntegrityError(
                    f"idle, but {len(self._sequences)} sequences are open, {self._num_owned_pages} pages are owned"
                )

    def close(self) -> None:
        """Stop the mapper and give everything back. Raises `IntegrityError` if a sequence is still open.

        No step may be running any more.
        """
        with self._lock:
            if self._sequences:
                raise IntegrityError(f"closed with {len(self._sequences)} sequences open")
            self._run_copies()
        self._mapper.stop()
        with self._lock:
            self._backend.wait(self._backend.fence())
            for group in self._groups:
                for region in list(group.parked):
                    self._hide_tail(group, region)
                block_ids, _ = group.pool.detachable(group.pool.num_loose, freed_before=math.inf)
                if block_ids:
                    self._mapper.run_now(Detach(self._pages, group, block_ids))
                group.release()
            for handle in self._pages.spare:
                self._backend.destroy(handle)
            self._backend.close()

    # ---- inside; all with the lock held ----

    @property
    def _num_owned_pages(self) -> int:
        return sum(group.pool.num_owned * group.num_slices for group in self._groups)

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

    def _check_budget(self, budget_bytes: int) -> None:
        page_bytes = self._pages.page_bytes
        if not self._fewest_pages <= budget_bytes // page_bytes <= self._most_pages:
            raise BudgetError(
                f"a budget of {budget_bytes} bytes must be between {self._fewest_pages * page_bytes}, which one "
                f"sequence of {self.max_tokens} tokens and the floor take, and {self._most_pages * page_bytes}"
            )

    # blocks

    def _shares_last(self, g: int, table: GroupTable, num_tokens: int) -> bool:
        """Whether the next token goes into a block that other sequences own too."""
        group = self._groups[g]
        if num_tokens % group.layout.block_tokens == 0:
            return False
        last = table.block_ids[-1]
        return group.pool.references(last) - self._held_by_copies(g, last) > 1

    def _held_by_copies(self, g: int, block_id: int) -> int:
        """References that copies which are still to be made hold on the block."""
        return sum((source == block_id) + (target == block_id) for at, source, target in self._copies if at == g)

    def _grow(self, group: GroupMemory, table: GroupTable, count: int) -> None:
        """Append blocks to the table: those its region shows next if they are free, then any. All or none."""
        if count <= 0:
            return
        region = table.region
        new: list[int] = []
        if region is not None:
            self._settle(region)
            for place in range(len(table.block_ids), len(table.block_ids) + count):
                shown = region.at(place)
                if shown == HOLE or not group.pool.is_free(shown):
                    break
                group.pool.take(shown)
                new.append(shown)
        self._adopted_blocks += len(new)
        try:
            new += self._allocate(group, count - len(new))
        except VmemError:
            group.pool.free(new, fence=0, now=time.monotonic())
            raise
        table.block_ids += new

    def _allocate(self, group: GroupMemory, count: int) -> list[int]:
        """Take `count` blocks from wherever they come at least cost, all or none.

        Raises:
            OutOfPages: there are not enough; the device may have less than the budget says.
            MapError: the device refused.
        """
        pool = group.pool
        taken = pool.take_loose(count)
        device_full = False
        try:
            # Blocks that parked regions show cost nothing now, and one more mapping when such a region is adopted; a
            # page that must be made and zeroed first costs several times that, and memory.
            taken += pool.take_tied(count - len(taken))
            while len(taken) < count:
                missing = count - len(taken)
                if device_full:
                    missing = min(missing, len(self._pages.spare) // group.num_slices)
                if missing and self._room_for(group):
                    try:
                        self._mapper.run_now(Attach(self._backend, self._pages, group, missing))
                    except OutOfPages:
                        device_full = True
                elif not self._make_room(group):
                    raise OutOfPages((count - len(taken)) * group.num_slices, max(self.num_free_pages, 0))
                taken += pool.take_loose(count - len(taken))
        except VmemError:
            pool.free(taken, fence=0, now=time.monotonic())
            raise
        return taken

    def _room_for(self, group: GroupMemory) -> bool:
        return group.pool.num_cold > 0 and self._pages.room >= group.num_slices

    def _make_room(self, group: GroupMemory) -> bool:
        """Take pages from free blocks of other groups, or wait for the mapper to let go of some."""
        for other in self._groups:
            if other is group:
                continue
            while not other.pool.num_loose and other.pool.num_tied and self._hide_some(other):
                pass
            wanted = -(-group.num_slices // other.num_slices)
            block_ids, fence = other.pool.detachable(wanted, freed_before=math.inf)
            if block_ids:
                self._mapper.wait_for(self._backend, fence)
                self._mapper.run_now(Detach(self._pages, other, block_ids))
                return True
        if self._mapper.is_working:
            self._mapper.wait_while(lambda: self._mapper.is_working)
            return True
        return False

    def _own_last(self, g: int, table: GroupTable) -> None:
        """Replace the shared last block by one of its own; the copy is made before the next step."""
        group = self._groups[g]
        [new] = self._allocate(group, 1)
        old = table.block_ids[-1]
        # A copy of what is itself still to be copied reads from where that comes from.
        source = next((a for at, a, b in self._copies if (at, b) == (g, old)), old)
        group.pool.share([source, new])
        self._copies.append((g, source, new))
        if table.region is not None:
            self._settle(table.region)
            table.region.checked = min(table.region.checked, len(table.block_ids) - 1)
            table.region.fence = self._fence
        table.block_ids[-1] = new
        group.pool.free([old], fence=self._fence, now=time.monotonic())

    def _share_last_again(self, g: int, table: GroupTable, shared: int) -> None:
        """Undo `_own_last`."""
        group, new = self._groups[g], table.block_ids[-1]
        source = next(a for at, a, b in self._copies if (at, b) == (g, new))
        self._copies.remove((g, source, new))
        group.pool.share([shared])
        table.block_ids[-1] = shared
        group.pool.free([source, new, new], fence=0, now=time.monotonic())

    def _run_copies(self) -> None:
        """Copy shared blocks, on the device's own queue: after the steps before, before the steps to come."""
        if not self._copies:
            return
        copies, self._copies = self._copies, []
        try:
            for g in sorted({at for at, _, _ in copies}):
                pairs = [(source, target) for at, source, target in copies if at == g]
                for home in self._groups[g].home_tensors():
                    pages = home.view(-1, self._pages.page_bytes)
                    sources, targets = (torch.tensor(side, device=home.device) for side in zip(*pairs, strict=True))
                    pages[targets] = pages[sources]
            self._fence = self._backend.fence()
        except BaseException:
            self._copies = copies  # copying again what was copied is harmless
            raise
        for g, source, target in copies:
            self._groups[g].pool.free([source, target], fence=self._fence, now=time.monotonic())

    def _forget_copies(self) -> None:
        """Drop the copies into blocks that nobody owns any more."""
        for copy in list(self._copies):
            g, source, target = copy
            if self._groups[g].pool.references(target) == self._held_by_copies(g, target):
                self._copies.remove(copy)
                self._groups[g].pool.free([source, target], fence=0, now=time.monotonic())

    def _drop(self, group: GroupMemory, table: GroupTable, kept: int) -> None:
        """Free the blocks from `kept` on. Their places in the region become its tail."""
        if kept >= len(table.block_ids):
            return
        if table.region is not None:
            self._settle(table.region)
            table.region.checked = min(table.region.checked, kept)
            table.region.wanted = min(table.region.wanted, kept)
            table.region.fence = self._fence
        freed = table.block_ids[max(kept, table.first) :]
        del table.block_ids[kept:]
        group.pool.free(freed, fence=self._fence, now=time.monotonic())
        self._forget_copies()

    def _drop_all(self, sequence: SequenceMemory) -> None:
        for group, table in zip(self._groups, sequence.groups, strict=True):
            self._leave_region(group, table)
            self._drop(group, table, 0)

    def _expire(self, group: GroupMemory, table: GroupTable, start: int) -> None:
        """Free the blocks that no query from position `start` on sees any more."""
        first = self._first_visible(group, start)
        if first <= table.first:
            return
        if table.region is not None:
            region = table.region
            self._settle(region)
            region.first = first
            region.checked = max(region.checked, first)
            region.fence = self._fence
            group.expired[region] = None
        group.pool.free(table.block_ids[table.first : first], fence=self._fence, now=time.monotonic())
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

    # regions

    def _settle(self, region: Region) -> None:
        """Wait until the mapper has let go of the region."""
        self._mapper.wait_while(lambda: region.busy)

    def _enter_regions(self, sequence: SequenceMemory, num_tokens: int) -> None:
        """Give a sequence its regions, if its policy and the mapping budget allow it."""
        if sequence.policy == "block_table":
            return
        now = time.monotonic()
        entered: list[tuple[GroupMemory, GroupTable]] = []
        for group, table, demand in zip(self._groups, sequence.groups, self._background.demand, strict=True):
            num_blocks = group.layout.num_blocks(num_tokens)
            demand.note_prompt(num_blocks, now)
            region = self._adopt(group, table.block_ids, num_blocks)
            if region is not None:
                self._adoptions += region.num_shown > 0
                region.blocks = table.block_ids
                region.first = region.checked = table.first
                region.touched = now
                table.region = region
                entered.append((group, table))
                missing = max(num_blocks - table.first - region.num_shown, 0)
                if self._may_map(sequence, missing * group.num_slices):
                    continue
            elif sequence.policy == "region":
                for left, its in entered:
                    self._leave_region(left, its)
                raise VmemError("every region is taken: more sequences opened than num_regions")
            for left, its in entered:
                self._leave_region(left, its)
            self._demotions += 1
            return

    def _adopt(self, group: GroupMemory, prefix: Sequence[int], num_blocks: int) -> Region | None:
        """A region for a sequence; waits for one that the mapper has in hand when there is no other."""
        while True:
            region = group.adopt(prefix, num_blocks)
            busy = next((parked for parked in group.parked if parked.busy), None)
            if region is not None or busy is None:
                return region
            self._settle(busy)

    def _leave_region(self, group: GroupMemory, table: GroupTable) -> None:
        """Park the region, with all it shows."""
        region = table.region
        if region is None:
            return
        self._settle(region)
        table.region = None
        group.park(region, fence=self._fence, now=time.monotonic())

    def _show(self, sequence: SequenceMemory, group: GroupMemory, table: GroupTable, end: int) -> None:
        """Map what the region does not show yet of the table's first `end` blocks."""
        region = table.region
        assert region is not None
        self._settle(region)
        if region.checked >= end:
            return
        missing = list(region.stale(end))
        region.wanted = max(region.wanted, end)
        if missing and not self._may_map(sequence, len(missing) * group.num_slices):
            self._demote(sequence)
            return
        stale = [place for place in missing if region.at(place) != HOLE]
        try:
            if stale:
                self._mapper.wait_for(self._backend, region.fence)
            for start, stop in _ranges(stale):
                self._mapper.run_now(Hide(group, region, start, stop))
            for start, stop in _ranges(missing):
                self._mapper.run_now(Show(group, region, start, table.block_ids[start:stop], ahead=False))
        except MapError as error:
            if sequence.policy == "region":
                raise
            logger.warning("a sequence goes on through its block table: %s", error)
            self._demote(sequence)
            return
        region.checked = end

    def _demote(self, sequence: SequenceMemory) -> None:
        """Read the sequence through its block table from now on."""
        for group, table in zip(self._groups, sequence.groups, strict=True):
            self._leave_region(group, table)
        self._demotions += 1

    def _may_map(self, sequence: SequenceMemory, num_pages: int) -> bool:
        """Whether so many more mappings are within their budget, at the cost of parked regions; by policy "region" they
        may exceed it once there are none left."""
        while self._backend.num_mappings + num_pages > self._options.max_mappings:
            if not any(self._hide_some(group) for group in self._groups):
                return sequence.policy == "region"
        return True

    def _hide_some(self, group: GroupMemory) -> bool:
        """Unmap what the region parked longest shows, or what the holder of one does not use; False if there is
        nothing."""
        for region in [*group.parked, *group.held]:
            if len(region.shows) > region.used or region in group.expired:
                before = region.num_shown
                self._hide_tail(group, region)
                if region.num_shown < before:
                    return True
        return False

    def _hide_tail(self, group: GroupMemory, region: Region) -> None:
        """Unmap all that the region shows and its holder does not use, once no step can read that any more."""
        self._settle(region)
        self._mapper.wait_for(self._backend, region.fence)
        while (run := region.last_run(region.used, group.region_blocks)) is not None:
            self._mapper.run_now(Hide(group, region, *run))
        while (run := region.first_run(region.first, group.region_blocks)) is not None:
            self._mapper.run_now(Hide(group, region, *run))

    def _want(self, demand: Demand) -> None:
        for g, (group, table) in enumerate(zip(self._groups, demand.sequence.groups, strict=True)):
            wanted = min(group.layout.num_blocks(demand.end), group.region_blocks)
            if table.region is None:
                self._background.wanted_loose[g] += max(wanted - len(table.block_ids), 0)
            elif wanted > table.region.checked:
                table.region.wanted = wanted
                group.wanted[table.region] = None


def _ranges(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, end) of each run of neighbouring places."""
    start = 0
    for i in range(1, len(places) + 1):
        if i == len(places) or places[i] != places[i - 1] + 1:
            yield places[start], places[i - 1] + 1
            start = i
