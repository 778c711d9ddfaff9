"""The KV memory of one engine: sequences own blocks, blocks have pages, pages are mapped where kernels read them.

Two address ranges show the same pages:

    home      | anchor  | block 1 | block 2 | block 3 | …      block b is always at b · page_bytes
    regions   | anchor | 2 | 1 |   hole    | 3 |   hole  | …   each shows one sequence's blocks in order

A paged kernel reads home through the block table; any contiguous kernel reads the sequence's region. Every block is at
home as long as it has pages, so a sequence can change from its region to its block table at any time.

What a sequence leaves is found again by its content: a free block keeps it until the page is needed (prefix cache).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from vmem.allocator import BlockAllocator
from vmem.backends.base import Backend
from vmem.budget import BudgetAnswer, PagePool
from vmem.errors import IntegrityError, LayoutError, MapError, OutOfPages, PinError, VmemError
from vmem.group import GroupMemory, LayerGroup
from vmem.mapper import Mapper
from vmem.mapper_policy import MappingOptions, MappingPolicy
from vmem.mapping_work import DetachPages, MappingWork
from vmem.pins import Pins
from vmem.prefix_cache import LEAST_PARTIAL_TOKENS, PrefixCache
from vmem.prefix_summary import CachedKeys, CachedPrefix
from vmem.prefix_tree import Hash, PrefixCounts, PrefixMatch, PrefixTree, TokenChain, stable_hash
from vmem.report import MemoryAudit, MemoryReport, ReportCache
from vmem.sequence import GroupTable, SequenceMemory, StepDemand, ViewPolicy
from vmem.swapping import SwappedGroup, Swapping, SwapSpace
from vmem.tables import BlockTables, CopyOnWrite
from vmem.tensors import BlockContents, CacheTensors, LocalContents, UnlockedContents
from vmem.views import RegionManager

logger = logging.getLogger(__name__)


class KVMemory:
    """Blocks, pages, mappings and regions of one device.

    **Threads.** Two meet here: the engine's, which calls nearly everything, and the mapper's, which changes mappings
    and pages beside it and drops cached content that has become old. Methods that name the same sequence, and those of
    one step (`begin`, `ensure`, `launched`, `commit`), belong to one thread at a time.

    **Locks.** One lock guards the books. It is held to read and change them and for nothing else: blocks are copied,
    pages mapped and unmapped, and fences waited for without it, while what they concern is owned, or marked as in
    somebody's hands. So that nothing comes between the halves of such a call, calls that change what is owned take
    turns, and the mapper begins nothing before they end (`Mapper.turn`). Any other thread may call:

    - `report`, `cached_keys`: wait at most 20 ms, whatever happens, and are made for event loops.
    - `set_budget`, `held_bytes`, `least_budget_bytes`, `check_pin`, `pinned_prefixes`, `hot_prefixes`: wait for one
      piece of bookkeeping. That takes microseconds, and milliseconds to match, or swap in, some ten thousand tokens.
    - `unpin`, `check_integrity`, `forget_prefixes`: wait for the engine's call that is under way, copies included.

    What `match` returns holds until the next call that changes something: `reuse` looks again.

    A call that raises has changed nothing, unless it says so.

    Which view a sequence is read through is its policy's business, see `SequenceViews`.

    Args:
        backend: owned from now on and closed by `close`.
        groups: layer groups with pages of one size; they share the budget.
        budget_bytes: physical memory at most, and the most that `set_budget` can set. There is one page beside it, the
            anchor page (see `GroupMemory`).
        floor_bytes: physical memory, in whole pages, that is taken at once and never given back.
        num_regions: how many sequences may hold a region at once.
        max_tokens: the longest sequence.
        step_tokens: the most tokens that a step computes of one sequence; by default all of them.
        options: how mappings and pages follow the load.
        prefix_cache: whether free blocks keep their content for sequences that begin alike.
        pin_quota: share of the budget that pinned prefixes may take.
        swap_bytes: host memory for preempted sequences.
        contents: made once the addresses are reserved: how blocks are copied, for copy-on-write and swapping.
        hash: of the prefix cache; for tests.

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
        step_tokens: int | None = None,
        floor_bytes: int = 0,
        options: MappingOptions | None = None,
        prefix_cache: bool = True,
        pin_quota: float = 0.25,
        swap_bytes: int = 0,
        contents: Callable[[CacheTensors], BlockContents] = LocalContents,
        hash: Hash = stable_hash,
    ) -> None:
        page_sizes = {group.layout.page_bytes for group in groups}
        if len(page_sizes) != 1:
            raise LayoutError(f"layer groups must share one page size, got {sorted(page_sizes)}")
        page_bytes = page_sizes.pop()
        self.max_tokens = max_tokens
        self.step_tokens = step_tokens or max_tokens
        self._options = options or MappingOptions()
        self._backend = backend
        self._specs = tuple(groups)
        fewest_pages = max(self.pages_for(max_tokens), floor_bytes // page_bytes)
        self._pages = PagePool(page_bytes, budget_bytes // page_bytes, fewest_pages)
        self._groups: list[GroupMemory] = []
        self._anchor = backend.create(page_bytes)
        try:
            for g, group in enumerate(groups):
                self._groups.append(
                    GroupMemory(
                        backend,
                        g,
                        group,
                        anchor=self._anchor,
                        num_blocks=self._pages.most // group.layout.num_slices,
                        num_regions=num_regions,
                        region_blocks=0 if group.is_state else group.layout.num_blocks(max_tokens),
                    )
                )
        except VmemError:
            for made in self._groups:
                made.release()
            backend.destroy(self._anchor)
            raise
        self.tensors = CacheTensors(
            backend,
            groups,
            [group.homes for group in self._groups],
            [group.ranges for group in self._groups],
            [group.region_blocks * group.layout.block_tokens for group in self._groups],
        )
        self._sequences: set[SequenceMemory] = set()
        # No window whose blocks expire, no state that is copied: a block in place stays as it is.
        self._only_grows = not any(group.is_state or group.window_tokens is not None for group in groups)
        self.prefix_cache = prefix_cache
        block_sizes = [group.layout.block_tokens for group in groups if not group.is_state]
        self._index = PrefixTree(self._groups, math.lcm(*block_sizes), hash)
        self._background = MappingPolicy(
            backend, self._pages, self._groups, self._index, self._options, floor_bytes // page_bytes
        )
        self._mapper = Mapper(self._next_work, self._wait_s, self._background.clear_step_demand)
        self._lock = self._mapper.lock
        self._allocator = BlockAllocator(backend, self._pages, self._groups, self._index, self._mapper)
        moves = UnlockedContents(contents(self.tensors), self._mapper.unlocked)
        self._copies = CopyOnWrite(self._groups, self._allocator, moves)
        self._tables = BlockTables(self._groups, self._allocator, self._copies)
        self._reuse = PrefixCache(self._groups, self._index, self._tables)
        self._views = RegionManager(
            backend, self._groups, self._allocator, self._mapper, self._background, self._options
        )
        self._swapping = Swapping(
            self._groups, SwapSpace(swap_bytes), moves, self._index, self._allocator, self._tables
        )
        self._pins = Pins(self._pages, self._groups, pin_quota)
        self._accounts = MemoryAudit(
            backend,
            self._pages,
            self._groups,
            self._sequences,
            allocator=self._allocator,
            copies=self._copies,
            index=self._index,
            mapper=self._mapper,
            pins=self._pins,
            swapping=self._swapping,
            tables=self._tables,
            views=self._views,
        )
        self._figures = ReportCache(self._lock, self._accounts, self._index.summary)
        if self._options.background:
            self._mapper.start()

    # ---- sizes ----

    @property
    def backend(self) -> Backend:
        return self._backend

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        return self._specs

    @property
    def num_free_pages(self) -> int:
        """Pages no sequence owns. Negative while sequences own more than a budget that was lowered."""
        return self._allocator.num_free_pages

    def pages_for(self, num_tokens: int) -> int:
        """Pages a sequence of that length owns at most; of layers with a window, only that."""
        return sum(group.most_pages(num_tokens, self.step_tokens) for group in self._specs)

    def pages_still_needed(self, sequence: SequenceMemory | None, num_tokens: int) -> int:
        """Pages that the sequence may still take until it has so many tokens."""
        if sequence is None:
            return self.pages_for(num_tokens)
        owned = [len(table.block_ids) - table.first for table in sequence.groups]
        return sum(
            max(group.most_pages(num_tokens, self.step_tokens) - count * group.layout.num_slices, 0)
            for group, count in zip(self._specs, owned, strict=True)
        )

    def fit_together(self, lengths: Sequence[int], shared_tokens: int = 0) -> bool:
        """Whether sequences of these lengths could run at once, if nothing else did.

        Args:
            shared_tokens: with which all of them begin; whole blocks of these they own together.
        """
        shared = sum(
            shared_tokens // group.layout.block_tokens * group.layout.num_slices
            for group in self._specs
            if not group.is_state and group.window_tokens is None
        )
        needed = sum(map(self.pages_for, lengths)) - shared * (len(lengths) - 1)
        return needed <= self._pages.budget - self._pages.num_pinned

    # ---- sequences ----

    def create_sequence(self, policy: ViewPolicy = "auto", *, expected_tokens: int = 0) -> SequenceMemory:
        """A new sequence without blocks. Free it with `free`.

        Args:
            expected_tokens: how long it will be soon, if longer than its first `append` says.
        """
        sequence = SequenceMemory(
            policy, tuple(GroupTable() for _ in self._specs), expected_tokens=min(expected_tokens, self.max_tokens)
        )
        with self._taking_turns():
            self._sequences.add(sequence)
        return sequence

    def append(self, sequence: SequenceMemory, num_tokens: int, *, start: int = 0) -> None:
        """Let the sequence own blocks for `num_tokens` tokens in all, the ones it has included.

        A last block that it shares with a fork, or with the prefix cache, and that the new tokens begin in is copied
        first (PagedAttention §4.4).

        Args:
            start: what no query from this position on sees is freed first, whatever happens then.

        Raises:
            OutOfPages: the budget is used up; the sequence owns what it owned.
            MapError: the device refused; the sequence owns what it owned.
        """
        if num_tokens <= sequence.writable_tokens:  # nearly always: one more token in a block
            sequence.num_tokens = max(sequence.num_tokens, num_tokens)
            return
        if num_tokens > self.max_tokens:
            raise VmemError(f"{num_tokens} tokens exceed the {self.max_tokens} of a sequence")
        with self._locked():
            self._check_open(sequence)
            sequence.writable_tokens = sequence.readable_tokens = 0
            had_tokens = sequence.num_tokens
            tables = self._tables.tables_of(sequence)
            for group, table in tables:
                self._tables.expire(group, table, start)
            if num_tokens <= had_tokens and not self._tables.must_copy_state(sequence):
                return
            num_tokens = max(num_tokens, had_tokens)
            needed = self._tables.pages_to_grow(sequence, num_tokens)
            if not needed:
                sequence.num_tokens = num_tokens
                self._note_ready(sequence)
                return
            if needed > self.num_free_pages:
                raise OutOfPages(needed, self.num_free_pages)
            enters = not had_tokens and sequence.view == "block_table"
            evicts = self._allocator.must_evict(needed)
            copied: list[tuple[int, GroupTable, int]] = []  # (group, table, the shared block it had)
            try:
                if enters:
                    self._views.assign_regions(sequence, max(num_tokens, sequence.expected_tokens), evicts=evicts)
                for g, (group, table) in enumerate(tables):
                    if self._copies.is_last_block_shared(g, table, had_tokens):
                        shared = table.block_ids[-1]
                        self._copies.unshare_last_block(g, table)
                        copied.append((g, table, shared))
                    count = group.layout.num_blocks(num_tokens) - len(table.block_ids)
                    self._tables.grow(group, table, count, evicts=evicts)
            except VmemError:
                for group, table in tables:
                    self._tables.drop(group, table, group.layout.num_blocks(had_tokens))
                if enters:
                    self._views.park_regions(sequence)
                for g, table, shared in copied:
                    self._copies.undo_unshare_last_block(g, table, shared)
                raise
            sequence.num_tokens = num_tokens
            self._note_ready(sequence)

    def fork(
        self,
        sequence: SequenceMemory,
        num_tokens: int,
        policy: ViewPolicy | None = None,
        chain: TokenChain | None = None,
    ) -> SequenceMemory:
        """A new sequence that shares the blocks of the first `num_tokens` tokens, which must be computed
        (PagedAttention §4.4).

        In the region view its shared blocks are mapped once more. Whoever first appends to a shared last block copies
        it.

        Args:
            chain: of the new sequence's tokens, to put what it computes into the prefix cache.

        Raises:
            VmemError: the window, or the state, has moved past `num_tokens`; or every region is taken.
        """
        with self._locked():
            return self._fork(sequence, num_tokens, policy, chain)

    def _fork(
        self, sequence: SequenceMemory, num_tokens: int, policy: ViewPolicy | None, chain: TokenChain | None
    ) -> SequenceMemory:
        self._check_open(sequence)
        if not 0 < num_tokens <= sequence.num_tokens:
            raise VmemError(f"a fork of {num_tokens} tokens from a sequence of {sequence.num_tokens}")
        self._tables.check_can_go_on(sequence, num_tokens)
        sequence.writable_tokens = 0
        child = SequenceMemory(policy or sequence.policy, tuple(GroupTable() for _ in self._specs), num_tokens)
        for group, table, new in zip(self._groups, sequence.groups, child.groups, strict=True):
            new.block_ids = table.block_ids[: group.layout.num_blocks(num_tokens)]
            new.first = table.first
            group.pool.add_references(new.block_ids[new.first :])
        try:
            self._views.assign_regions(child, num_tokens)
        except VmemError:
            self._drop_all(child)
            raise
        self._reuse.fork(sequence, child, chain)
        self._sequences.add(child)
        return child

    def truncate(self, sequence: SequenceMemory, num_tokens: int) -> None:
        """Let the sequence own blocks for its first `num_tokens` tokens only; other tokens may follow. Its chain is
        cut, too. Not between `begin` and `commit`."""
        with self._locked():
            self._check_open(sequence)
            if num_tokens > sequence.num_tokens:
                raise VmemError(f"truncation to {num_tokens} of a sequence of {sequence.num_tokens} tokens")
            self._tables.check_can_go_on(sequence, num_tokens)
            sequence.writable_tokens = sequence.readable_tokens = 0
            for group, table in self._tables.tables_of(sequence):
                self._tables.drop(group, table, group.layout.num_blocks(num_tokens))
            self._index.truncate_cursor(sequence.prefix, num_tokens // self._index.unit_tokens)
            if sequence.prefix.chain is not None:
                sequence.prefix.chain.truncate_chain(num_tokens)
            sequence.num_tokens = num_tokens
            self._mapper.wake()

    def free(self, sequence: SequenceMemory) -> None:
        """Give everything back. A region stays as it is for another sequence to adopt, until free pages run low.

        Raises:
            MapError: only without deferred reclamation: its region could not be unmapped. It is parked; the sequence
                is gone all the same.
        """
        with self._taking_turns():
            self._free(sequence)
            self._figures.publish()  # who hears of a request's end may ask at once where its memory is

    def _free(self, sequence: SequenceMemory) -> None:
        self._check_open(sequence)
        self._sequences.remove(sequence)
        left = [(group, table.region) for group, table in zip(self._groups, sequence.groups, strict=True)]
        self._drop_all(sequence)
        self._mapper.wake()
        if not self._options.deferred_reclamation:
            for group, region in left:
                if region is not None:
                    self._allocator.unmap_tail(group, region)

    # ---- the prefix cache ----

    def chain(self, keys: tuple[str, ...] = ()) -> TokenChain:
        """Hashes of a request's tokens in this memory's units. Keep it as long as the request.

        Args:
            keys: what must be equal beside the tokens: a cache salt, an adapter.
        """
        return TokenChain(self._index.unit_tokens, keys, self._index.hash)

    def match(self, chain: TokenChain, token_ids: Sequence[int]) -> PrefixMatch:
        """What is cached of these tokens, the last excepted: its logits are needed. Extends the chain, and changes
        nothing else."""
        chain.extend(token_ids)  # hashing a long prompt takes longer than looking it up
        with self._lock:
            return self._match(chain, token_ids)

    def pages_needed(self, match: PrefixMatch, num_tokens: int) -> int:
        """Free pages that a sequence of so many tokens takes at most if it begins with the match."""
        with self._lock:
            return self._reuse.pages_needed(match, num_tokens, self.step_tokens)

    def shared_tokens(self, sequences: Sequence[SequenceMemory]) -> list[int]:
        """For each sequence, tokens at its beginning that are still there when all of these are freed, because others
        own their blocks too, or that it has in common with one before it in the list."""
        with self._lock:
            return self._reuse.shared_tokens(sequences)

    @property
    def match_version(self) -> int:
        """Increases whenever `match` may have another answer than before."""
        return self._index.changes

    def share_prefix(self, sequence: SequenceMemory, chain: TokenChain, token_ids: Sequence[int]) -> int:
        """Let a sequence without blocks share what is cached of its tokens; returns how many tokens that is.

        Whole units are shared. A unit that begins like the next tokens is shared too and copied before the next step.
        """
        if self.prefix_cache:
            chain.extend(token_ids)
        with self._locked():
            self._check_open(sequence)
            if sequence.num_tokens:
                raise VmemError(f"a sequence of {sequence.num_tokens} tokens cannot begin with a cached prefix")
            sequence.prefix.chain = chain
            if not self.prefix_cache:
                return 0
            match = self._match(chain, token_ids)
            self._reuse.share_prefix(sequence, match)
            try:
                if match.num_tokens:
                    needed = self._tables.pages_to_grow(sequence, max(sequence.expected_tokens, match.num_tokens))
                    self._views.assign_regions(
                        sequence,
                        max(match.num_tokens, sequence.expected_tokens),
                        evicts=self._allocator.must_evict(needed),
                    )
            except VmemError:
                self._drop_all(sequence)
                sequence.num_tokens, sequence.prefix.chain = 0, None
                raise
            self._index.counts.queried_tokens += len(token_ids)
            self._index.counts.hit_tokens += match.num_tokens
            self._index.note_hit(match)
            return match.num_tokens

    def announce_prefill(self, sequence: SequenceMemory, num_tokens: int, snapshots: Sequence[int] = ()) -> None:
        """Say that the sequence is going to compute its first `num_tokens` tokens, so that `match` tells others to
        wait.

        Args:
            snapshots: where `begin` will end, so that a recurrent state is kept there.
        """
        if self.prefix_cache and sequence.prefix.chain is not None:
            with self._taking_turns():
                self._reuse.announce_prefill(sequence, num_tokens, snapshots)

    def stage_prefix(self, sequence: SequenceMemory, token_ids: Sequence[int], start: int, end: int) -> None:
        """The coming step computes the tokens `start … end - 1` of the sequence; others of the same step may share
        them already. `commit` or `abort` says how it went."""
        path = sequence.prefix
        if not self.prefix_cache or path.chain is None or (path.broken and path.computed == len(path.nodes)):
            return
        if end // self._index.unit_tokens > path.computed:
            path.chain.extend(token_ids[:end])
            with self._taking_turns():
                self._reuse.stage_prefix(sequence, end, end - start)

    def commit_prefixes(self) -> None:
        """What `begin` announced is computed: it is in the prefix cache."""
        with self._taking_turns():
            self._reuse.commit_prefixes()

    def abort_prefixes(self) -> None:
        """What `begin` announced has not been computed. Sequences that shared it must be freed."""
        with self._taking_turns():
            self._reuse.abort_prefixes()

    def cached_keys(self, most: int) -> CachedKeys:
        """Which prefixes are cached, for others to compare with the digests of a `TokenChain`. From any thread, an
        event loop's too: waits at most 20 ms for the books, and then returns what it last returned for the same `most`,
        at first `NO_KEYS`."""
        return self._figures.cached_keys(most)

    def hot_prefixes(self, most_tokens: int) -> list[CachedPrefix]:
        """The cached prefixes that sequences have begun with most often, at most so many tokens of them; from any
        thread."""
        with self._lock:
            return self._index.hot(most_tokens)

    def evict_prefixes(self, keys: tuple[str, ...]) -> None:
        """Give up what is cached under these keys; nobody may be computing any of it."""
        with self._taking_turns():
            self._index.clear(keys)

    def begin_counting(self) -> None:
        """From now on look-ups and evictions count for reports: what has been looked up so far were no requests'."""
        with self._lock:
            self._index.counts = PrefixCounts()

    @property
    def unit_tokens(self) -> int:
        """Prefixes are shared in multiples of so many tokens."""
        return self._index.unit_tokens

    @property
    def has_states(self) -> bool:
        """Whether a layer keeps a recurrent state: prefixes are then shared up to where a step has ended."""
        return self._reuse.has_states

    # ---- pinned prefixes ----

    def pin(self, name: str, sequence: SequenceMemory, num_tokens: int) -> None:
        """Keep the blocks of the sequence's first `num_tokens` tokens, which must be computed, until `unpin`. Nothing
        changes if the same prefix has that name already.

        Raises:
            PinError: the name is another prefix's; the quota, or what the longest sequence needs, leaves no room for
                it; or the window, or the state, has moved past it.
        """
        with self._locked():
            if sequence.prefix.chain is not None and self._pins.has(name, sequence.prefix.chain, num_tokens):
                return
            self._pins.check_quota(name, self._tables.tables_of(sequence), num_tokens)
            try:
                pinned = self._fork(sequence, num_tokens, "block_table", sequence.prefix.chain)
            except VmemError as error:
                raise PinError(f"{name!r} cannot be pinned: {error}") from error
            self._reuse.reindex_own_blocks(pinned)
            self._sequences.remove(pinned)
            self._pins.add(name, pinned)

    def check_pin(self, name: str, chain: TokenChain, token_ids: Sequence[int]) -> None:
        """Raise `PinError` if this prefix cannot be pinned under that name in any case.

        Args:
            chain: as its sequence will have it. Extends it.
        """
        chain.extend(token_ids)
        with self._lock:
            if self._pins.has(name, chain, len(token_ids)):
                return
            num_blocks = [group.layout.num_blocks(len(token_ids)) for group in self._specs]
            num_pages = sum(n * group.layout.num_slices for n, group in zip(num_blocks, self._specs, strict=True))
            windowed = any(group.window_tokens is not None for group in self._specs)
            self._pins.check_request(name, 0 if windowed else num_pages)

    def pinned_prefixes(self) -> list[CachedPrefix]:
        """What is pinned; from any thread."""
        with self._lock:
            return self._pins.prefixes()

    def unpin(self, name: str) -> None:
        """Let the prefix go the way of others. Raises `PinError` if no prefix of that name is pinned."""
        with self._taking_turns():
            self._drop_all(self._pins.remove_pin(name))
            self._mapper.wake()

    # ---- swapping ----

    def swap_bytes(self, sequences: Sequence[SequenceMemory]) -> int:
        """Bytes that `swap_out` of these sequences would copy; blocks that they share count once."""
        with self._lock:
            return self._swapping.num_bytes(sequences)

    def pages_of(self, swapped: SwappedGroup) -> int:
        """Pages that `swap_in` needs at most."""
        return sum(count * group.layout.num_slices for count, group in zip(swapped.num_rows, self._specs, strict=True))

    def swap_out(self, sequences: Sequence[SequenceMemory]) -> SwappedGroup:
        """Copy what these sequences own to host memory, and free them, all or nothing (PagedAttention §4.5).

        Raises:
            OutOfSwap: there is no room for it.
        """
        with self._locked():
            for sequence in sequences:
                self._check_open(sequence)
            if len(set(sequences)) < len(sequences):
                raise IntegrityError("a sequence is swapped out twice")
            self._copies.run()
            swapped = self._swapping.copy_out(sequences)
            for sequence in sequences:
                try:
                    self._free(sequence)
                except MapError as error:  # it is gone all the same, see `free`
                    logger.warning("a swapped sequence left its region mapped: %s", error)
            return swapped

    def swap_in(self, swapped: SwappedGroup) -> list[SequenceMemory]:
        """Bring sequences back, in the order of `swap_out`, before whatever the device does next. What the prefix
        cache still has is shared, not copied. `swapped` is used up.

        Raises:
            OutOfPages: too few pages are free; nothing has changed.
            MapError: the device refused; nothing has changed.
        """
        with self._locked():
            sequences = self._swapping.copy_in(swapped)
            for i, sequence in enumerate(sequences):
                try:
                    self._views.assign_regions(sequence, sequence.num_tokens)
                except VmemError:
                    for entered in sequences[: i + 1]:
                        self._views.park_regions(entered)
                    for entered in sequences:
                        self._drop_all(entered)
                    raise
            self._sequences.update(sequences)
            self._swapping.discard_swapped(swapped)
            return sequences

    def discard_swapped(self, swapped: SwappedGroup) -> None:
        """Give swapped sequences up."""
        with self._taking_turns():
            self._swapping.discard_swapped(swapped)

    # ---- steps ----

    def ensure(self, demands: Iterable[StepDemand]) -> None:
        """Make the step's blocks readable and writable: map what the mapper has not mapped yet, copy what was shared.

        Call it before the step's batch is laid out: with "auto", a sequence may lose its region here.

        Raises:
            MapError: the device refused; what was mapped before stays mapped, and owners are as they were. Also
                raised, once, when the mapper's own calls keep failing.
        """
        with self._locked():
            self._mapper.raise_failure()
            self._copies.run()
            for sequence, start, end in demands:
                if end <= sequence.readable_tokens:
                    continue
                for group, table in zip(self._groups, sequence.groups, strict=True):
                    self._tables.expire(group, table, start)
                self._views.map_regions(sequence, end)
                if self._only_grows:
                    sequence.readable_tokens = self._views.readable_tokens(sequence)

    def plan(self, demands: Iterable[StepDemand]) -> None:
        """Say what the step after the one that now begins will need, for the mapper to do meanwhile
        (vAttention §6.2.1)."""
        with self._locked():
            for prompts in self._background.demand:
                prompts.note_step()
            self._background.clear_step_demand()
            if self._options.overlap:
                for demand in demands:
                    if demand.end > demand.sequence.readable_tokens or demand.end > demand.sequence.writable_tokens:
                        self._views.request_mapping(demand)
            self._mapper.wake()

    def launched(self) -> None:
        """Note that a step which reads the mappings has been submitted: they may change only once it is done."""
        fence = self._backend.fence()  # before the lock is taken: a device without an event is waited for
        with self._locked():
            self._allocator.fence = fence

    # ---- the budget ----

    def set_budget(self, budget_bytes: int, revision: int) -> BudgetAnswer:
        """Change how much physical memory there may be. From any thread: done when it returns, and waits for
        bookkeeping only, neither for the device nor for copies.

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

    @property
    def least_budget_bytes(self) -> int:
        """The least that `set_budget` accepts now. From any thread."""
        with self._lock:
            return (self._pages.fewest + self._pages.num_pinned) * self._pages.page_bytes

    @property
    def most_budget_bytes(self) -> int:
        """The most that `set_budget` accepts."""
        return self._pages.most * self._pages.page_bytes

    @property
    def held_bytes(self) -> int:
        """Physical memory that there is or is being created: with a budget below it there will never be more. From any
        thread."""
        with self._lock:
            return self._pages.num_committed * self._pages.page_bytes

    def wait_for_progress(self, timeout_s: float) -> None:
        """Wait until the mapper has done something, at most that long: for whoever found no pages."""
        with self._lock:
            self._mapper.raise_failure()
            self._lock.wait(timeout_s)

    # ---- accounting ----

    def report(self) -> MemoryReport:
        """Where memory is, now. From any thread, an event loop's too: waits at most 20 ms for the books. If another
        thread has them for longer, this is the last report that was made: at most 50 ms older than the end of the
        engine's last call, and not older than the last `free`. The engine's own thread gets what is true now."""
        return self._figures.report()

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless blocks, regions, pages, prefixes and mappings add up."""
        with self._taking_turns():
            self._check_integrity()

    def check_idle(self) -> None:
        """Raise `IntegrityError` unless no sequence is open, and every block is free or pinned."""
        with self._taking_turns():
            self._copies.run()
            self._check_integrity()
            self._accounts.check_idle()

    def close(self) -> None:
        """Stop the mapper, unpin what is pinned and give everything back.

        Raises `IntegrityError` if a sequence is still open.

        No step may be running any more.
        """
        with self._taking_turns():
            if self._sequences:
                raise IntegrityError(f"closed with {len(self._sequences)} sequences open")
            self._copies.run()
        self._mapper.stop()
        with self._taking_turns():
            for name in list(self._pins.names):
                self._drop_all(self._pins.remove_pin(name))
            self._index.clear()
            self._allocator.set_fence()
            self._mapper.wait_for(self._backend, self._allocator.fence)
            for group in self._groups:
                for region in list(group.parked):
                    self._allocator.unmap_tail(group, region)
                block_ids, _ = group.pool.detachable(group.pool.num_free, freed_before=math.inf)
                if block_ids:
                    self._mapper.run_now(DetachPages(self._pages, group, block_ids))
            with self._mapper.unlocked():
                for group in self._groups:
                    group.release()
                for handle in (*self._pages.spare, self._anchor):
                    self._backend.destroy(handle)
                self._backend.close()

    # ---- inside; all with the lock held ----

    @contextmanager
    def _taking_turns(self) -> Iterator[None]:
        """Hold the lock for a call that no other of its kind may come between when it lets go of the lock."""
        with self._mapper.turn_lock, self._lock:
            self._figures.writer = threading.get_ident()
            try:
                yield
            finally:
                self._figures.publish_if_old()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The same, with a mapper that is alive; the time until the lock is there counts as exposed."""
        start = time.perf_counter()
        with self._taking_turns():
            self._mapper.times.exposed_s += time.perf_counter() - start
            self._mapper.raise_death()
            yield

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        self._mapper.wait_until_idle()
        yield

    def _check_integrity(self) -> None:
        with self._quiet(), self._mapper.unlocked():  # nobody changes anything now but the budget
            self._accounts.check_integrity()

    def _next_work(self) -> MappingWork | None:
        return self._background.next_work(time.monotonic())

    def _wait_s(self) -> float | None:
        return self._background.wait_s(time.monotonic())

    def _match(self, chain: TokenChain, token_ids: Sequence[int]) -> PrefixMatch:
        if not self.prefix_cache:
            return PrefixMatch((), None, 0, 0, is_being_computed=False)
        limit = len(token_ids) - 1
        match = self._index.match(chain, token_ids, limit, LEAST_PARTIAL_TOKENS)
        if match.partial is not None:
            # Until its copy is made, a partial unit takes its blocks twice.
            needed = self.pages_for(len(token_ids)) + self.pages_for(self.unit_tokens)
            if needed > self.num_free_pages:
                match = self._index.match(chain, token_ids, limit, 0)
        return match

    def _note_ready(self, sequence: SequenceMemory) -> None:
        if self._only_grows:
            own = [len(t.block_ids) * group.layout.block_tokens for group, t in self._tables.tables_of(sequence)]
            sequence.writable_tokens = min(*own, self.max_tokens)

    def _check_open(self, sequence: SequenceMemory) -> None:
        if sequence not in self._sequences:
            raise IntegrityError("the sequence is not open")

    def _drop_all(self, sequence: SequenceMemory) -> None:
        sequence.writable_tokens = sequence.readable_tokens = 0
        self._reuse.release_prefix(sequence)
        self._views.park_regions(sequence)
        for group, table in self._tables.tables_of(sequence):
            self._tables.drop(group, table, 0)
