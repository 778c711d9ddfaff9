"""Prefix cache: sequences share cached prefixes and add their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from folio.vmem.blocks.eviction import EvictionOrder
from folio.vmem.blocks.segments import PrefixUse
from folio.vmem.blocks.tables import BlockAllocator, BlockTables
from folio.vmem.budget import MemoryCounts
from folio.vmem.errors import IntegrityError
from folio.vmem.group import GroupMemory
from folio.vmem.lock import MemoryLock
from folio.vmem.prefix.prefix_summary import NO_KEYS, CachedKeys, CachedPrefix
from folio.vmem.prefix.prefix_tree import PrefixCursor, PrefixMatch, PrefixNode, PrefixTree
from folio.vmem.prefix.token_chain import Digest, TokenChain
from folio.vmem.sequence import SequenceMemory

# Tokens of a partly matching unit that are worth copying its blocks. A copy of 16 tokens takes about as long as
# computing a tenth of a token (Qwen2.5-0.5B shape on 2 cores), but it costs a block until the copy is made.
_LEAST_PARTIAL_TOKENS = 4


@dataclass(slots=True)
class _Pending:
    """Units that a step in progress computes for one sequence."""

    sequence: SequenceMemory
    end: int
    num_tokens: int
    first_unit: int
    indexed: list[tuple[PrefixNode, int]] = field(default_factory=list)  # (unit, group)


@dataclass(eq=False)
class PrefixCache:
    """The prefix cache of one memory. Announced, pending and cached units: docs/internals/memory.md.

    Args:
        enabled: without it nothing is found and nothing is kept.
        step_tokens: the most tokens that a step computes of one sequence.

    Attributes:
        unit_tokens: prefixes are shared in multiples of so many tokens.
        has_states: whether a layer keeps a recurrent state; prefixes are then shared up to where a step has ended.
        on_release: called with the lock held and the last computed unit of a sequence that ends.
    """

    _groups: Sequence[GroupMemory]
    _lock: MemoryLock
    _tree: PrefixTree
    _allocator: BlockAllocator
    _tables: BlockTables
    _counts: MemoryCounts
    _order: EvictionOrder
    _step_tokens: int
    enabled: bool
    _pending: list[_Pending] = field(default_factory=list)
    _is_cut_short: bool = False  # a sequence was freed whose pending units others share
    _keys: dict[int, tuple[int, CachedKeys]] = field(default_factory=dict)  # `most` → version of the summary, keys
    on_release: Callable[[PrefixNode], None] | None = None

    def __post_init__(self) -> None:
        self._states = [group for group in self._groups if group.spec.is_state]
        self.unit_tokens = self._tree.unit_tokens
        self.has_states = bool(self._states)

    def chain(self, keys: tuple[str, ...] = ()) -> TokenChain:
        """Create the hash chain of a request's tokens. Keep it as long as the request.

        Args:
            keys: what must be equal beside the tokens: a cache salt, an adapter.
        """
        return TokenChain(self.unit_tokens, keys, self._tree.hash)

    def match(self, chain: TokenChain, token_ids: Sequence[int]) -> PrefixMatch:
        """Return the cached prefix of these tokens but the last one, whose logits are needed. Extends the chain; valid
        until the next call that changes ownership."""
        chain.extend(token_ids)  # without the lock: hashing takes longer than the look-up
        with self._lock:
            return self.match_held(chain, token_ids)

    def pages_needed(self, match: PrefixMatch, num_tokens: int) -> int:
        """Free pages that a sequence of `num_tokens` tokens takes at most if it begins with the match; blocks that have
        an owner cost nothing."""
        needed = 0
        with self._lock:
            for group in self._groups:
                pages = group.spec.most_pages(num_tokens, self._step_tokens)
                if not group.spec.is_state:  # a shared state is copied
                    shared = [node.blocks[group.index] or () for node in match.nodes]
                    first = self._tables.first_visible(group, match.num_tokens) // self._blocks_per_unit(group)
                    owned = sum(group.pool.references[b] > 0 for block_ids in shared[first:] for b in block_ids)
                    pages = max(pages - owned * group.num_slices, 0)
                needed += pages
        return needed

    def shared_tokens(self, sequences: Sequence[SequenceMemory]) -> list[int]:
        """For each sequence, the tokens at its beginning that stay cached when all of these are freed, because they
        have another owner, and those in common with a sequence before it in the list."""
        with self._lock:
            owned = [Counter(b for s in sequences for b in s.groups[g].owned) for g in range(len(self._groups))]
            seen: set[PrefixNode] = set()
            shared = []
            for sequence in sequences:
                nodes = sequence.prefix.nodes[: sequence.prefix.computed]
                num_units = 0
                while num_units < len(nodes) and (
                    nodes[num_units] in seen or self._has_other_owner(nodes[num_units], owned)
                ):
                    num_units += 1
                shared.append(num_units * self.unit_tokens)
                seen.update(nodes)
            return shared

    def cached_keys(self, most: int) -> CachedKeys:
        """At most `most` keys of cached prefixes, to compare with the digests of a `TokenChain`. From any thread: waits
        at most 20 ms, then returns the last result for the same `most`, at first `NO_KEYS`."""
        summary = self._tree.summary
        since, last = self._keys.get(most, (-1, NO_KEYS))
        if since == summary.num_changes:
            return last
        with self._lock.soon() as held:
            since, last = self._keys.get(most, (-1, NO_KEYS))  # another thread may have asked meanwhile
            if held:
                last = summary.keys(most, last, since)
                self._keys[most] = summary.num_changes, last
            return last

    def hot_prefixes(self, most_tokens: int) -> list[CachedPrefix]:
        """The cached prefixes with the most hits, at most `most_tokens` tokens together. From any thread."""
        with self._lock:
            return self._tree.hot(most_tokens)

    def evict_prefixes(self, keys: tuple[str, ...]) -> None:
        """Evict all prefixes with these keys; none of them may be in use by a step."""
        with self._lock.exclusive():
            self._tree.clear(keys)

    def reset_counts(self) -> None:
        """Count look-ups and evictions for reports from now on."""
        with self._lock:
            self._counts.queried_tokens = self._counts.hit_tokens = self._counts.evicted_blocks = 0

    def is_computed(self, digest: Digest) -> bool:
        """Whether the unit with this digest is cached, or will be when the launched steps have ended. Without the
        lock."""
        return self._tree.is_computed(digest)

    # ---- the units of a step ----

    def announce_prefill(self, sequence: SequenceMemory, num_tokens: int, snapshots: Sequence[int] = ()) -> None:
        """Announce the prefill of the sequence's first `num_tokens` tokens, so that `match` tells other requests to
        wait.

        Args:
            snapshots: lengths after which a recurrent state will be kept, because a step ends there.
        """
        path = sequence.prefix
        if not self.enabled or path.chain is None:
            return
        with self._lock.exclusive():
            self._tree.extend_cursor(path, num_tokens // self.unit_tokens)
            for node in path.nodes[path.computed :]:
                if node.writer is None and any(
                    node.blocks[g.index] is None for g in self._groups if not g.spec.is_state
                ):
                    node.writer = path
            for length in snapshots:
                if self._states and 0 < length // self.unit_tokens <= len(path.nodes):
                    node = path.nodes[length // self.unit_tokens - 1]
                    if node.writer is None and node.blocks[self._states[0].index] is None:
                        node.writer = path

    def stage_prefix(self, sequence: SequenceMemory, token_ids: Sequence[int], start: int, end: int) -> None:
        """Index the tokens `start … end - 1`, which the coming step computes; other sequences of that step may share
        them. `commit_prefixes` or `abort_prefixes` follows."""
        path = sequence.prefix
        if not self.enabled or path.chain is None or (path.broken and path.computed == len(path.nodes)):
            return
        if end // self.unit_tokens <= path.computed:
            return
        path.chain.extend(token_ids[:end])
        with self._lock.exclusive():
            first = path.computed
            self._tree.extend_cursor(path, end // self.unit_tokens)
            pending = _Pending(sequence, end, end - start, first)
            for i in range(first, min(end // self.unit_tokens, len(path.nodes))):
                node = path.nodes[i]
                if node.writer is None:
                    node.writer = path
                for group, block_ids in self._blocks_of_unit(sequence, i):
                    if self._tree.index_blocks(node, group.index, block_ids):
                        pending.indexed.append((node, group.index))
                        node.pending = True
            self._pending.append(pending)

    def commit_prefixes(self) -> list[tuple[PrefixNode, int]]:
        """Launch the step: its pending units are cached. Returns them, each with a layer group, for
        `discard_prefixes`."""
        with self._lock.exclusive():
            if self._is_cut_short:
                raise IntegrityError("a sequence was freed between stage and commit while others share its units")
            done, self._pending = self._pending, []
            for pending in done:
                for node, _ in pending.indexed:
                    node.pending = False
                path = pending.sequence.prefix
                path.computed = min(pending.end // self.unit_tokens, len(path.nodes))
                self._clear_writer(path, pending.first_unit, path.computed)
                if pending.end == path.computed * self.unit_tokens:
                    self._keep_state(pending.sequence, generated=pending.num_tokens == 1)
            return [unit for pending in done for unit in pending.indexed]

    def discard_prefixes(self, units: Iterable[tuple[PrefixNode, int]]) -> None:
        """Forget units of a launched step that has failed. Sequences that read them must be freed next."""
        with self._lock.exclusive():
            for node, g in units:
                if node.blocks[g] is not None:
                    self._tree.unindex_blocks(node, g)

    def abort_prefixes(self) -> None:
        """Roll back the step: its pending units are not computed. Sequences that share them must be freed."""
        with self._lock.exclusive():
            self._is_cut_short = False
            for pending in self._pending:
                self._roll_back(pending)
            self._pending = []

    # ---- with the lock held ----

    def match_held(self, chain: TokenChain, token_ids: Sequence[int]) -> PrefixMatch:
        if not self.enabled:
            return PrefixMatch((), None, 0, 0, is_being_computed=False)
        limit = len(token_ids) - 1
        match = self._tree.match(chain, token_ids, limit, _LEAST_PARTIAL_TOKENS)
        if match.partial is not None:
            # Until its copy is made, a partial unit takes its blocks twice.
            needed = sum(
                group.spec.most_pages(n, self._step_tokens)
                for group in self._groups
                for n in (len(token_ids), self.unit_tokens)
            )
            if needed > self._allocator.num_free_pages:
                match = self._tree.match(chain, token_ids, limit, 0)
        return match

    def share_match(self, sequence: SequenceMemory, match: PrefixMatch) -> None:
        """Give a sequence without blocks those of the match."""
        if not match.num_tokens:
            return
        nodes = [*match.nodes, *([match.partial] if match.partial is not None else [])]
        for group, table in self._tables.tables_of(sequence):
            g = group.index
            if group.spec.is_state:
                block_ids = list(match.nodes[-1].blocks[g] or ())
            else:
                block_ids = [b for node in nodes for b in node.blocks[g] or (0,) * self._blocks_per_unit(group)]
                del block_ids[group.layout.num_blocks(match.num_tokens) :]
            table.block_ids = block_ids
            table.first = self._tables.first_visible(group, match.num_tokens)
            group.pool.acquire_cached(table.owned)
        sequence.num_tokens = match.num_tokens
        self._tree.start_cursor(sequence.prefix, match.nodes)

    def begin_use(self, sequence: SequenceMemory, match: PrefixMatch, num_tokens: int, use: PrefixUse) -> None:
        """Note how a sequence of `num_tokens` tokens, which begins with the match, uses the cache."""
        path = sequence.prefix
        assert path.chain is not None
        num_prompt = num_tokens if use.num_prompt_tokens is None else use.num_prompt_tokens
        digests = path.chain.digests[: num_prompt // self.unit_tokens]
        path.use, path.segments = use, self._order.begin(digests, match.nodes, use)

    def fork_prefix(self, parent: SequenceMemory, child: SequenceMemory, chain: TokenChain | None) -> None:
        """Start the child's cursor in the units that it shares with its parent."""
        child.prefix = parent.prefix.fork()
        child.prefix.chain = chain
        if chain is not None:
            num_units = min(child.num_tokens // self.unit_tokens, parent.prefix.computed, len(chain.units))
            self._tree.start_cursor(child.prefix, parent.prefix.nodes[:num_units])

    def truncate_prefix(self, sequence: SequenceMemory, num_tokens: int) -> None:
        self._tree.truncate_cursor(sequence.prefix, num_tokens // self.unit_tokens)
        if sequence.prefix.chain is not None:
            sequence.prefix.chain.truncate_chain(num_tokens)

    def release_prefix(self, sequence: SequenceMemory) -> None:
        """End the sequence's cursor; its announced and pending units are not computed."""
        for pending in [p for p in self._pending if p.sequence is sequence]:
            self._pending.remove(pending)
            for node, g in pending.indexed:
                if any(self._groups[g].pool.references[b] > 1 for b in node.blocks[g] or ()):
                    self._is_cut_short = True
            self._roll_back(pending)
        path = sequence.prefix
        self._order.end(path.segments, path.computed, path.use)
        if self.on_release is not None and path.computed:
            self.on_release(path.nodes[path.computed - 1])
        self._tree.truncate_cursor(path, 0)

    def reindex_own_blocks(self, sequence: SequenceMemory) -> None:
        """Index the sequence's own blocks in its units, in place of others with the same content."""
        for i, node in enumerate(sequence.prefix.nodes):
            blocks = self._blocks_of_unit(sequence, i)
            if sequence.num_tokens == (i + 1) * self.unit_tokens:
                blocks += [(group, tuple(sequence.groups[group.index].block_ids)) for group in self._states]
            for group, block_ids in blocks:
                if node.blocks[group.index] != block_ids:
                    self._tree.unindex_blocks(node, group.index)
                    self._tree.index_blocks(node, group.index, block_ids)

    def restore_prefix(self, sequence: SequenceMemory) -> None:
        """Index the blocks of a sequence that was swapped in, as many units as its cursor counts."""
        path = sequence.prefix
        if path.chain is None:
            return
        self._tree.extend_cursor(path, path.computed)
        path.computed = len(path.nodes)
        for i, node in enumerate(path.nodes):
            for group, block_ids in self._blocks_of_unit(sequence, i):
                self._tree.index_blocks(node, group.index, block_ids)

    def _blocks_per_unit(self, group: GroupMemory) -> int:
        return self.unit_tokens // group.layout.block_tokens

    def _blocks_of_unit(self, sequence: SequenceMemory, i: int) -> list[tuple[GroupMemory, tuple[int, ...]]]:
        """The sequence's blocks in unit i, of each group that has no state and still has them in its window."""
        blocks = []
        for group, table in self._tables.tables_of(sequence):
            if not group.spec.is_state and i * (count := self._blocks_per_unit(group)) >= table.first:
                blocks.append((group, tuple(table.block_ids[i * count : (i + 1) * count])))
        return blocks

    def _has_other_owner(self, node: PrefixNode, owned: Sequence[Counter[int]]) -> bool:
        """Whether each of the node's blocks has more references than `owned` counts."""
        for group, count in zip(self._groups, owned, strict=True):
            blocks = node.blocks[group.index]
            if group.spec.window_tokens is None and not group.spec.is_state and blocks is None:
                return False
            if any(group.pool.references[b] <= count[b] for b in blocks or ()):
                return False
        return True

    def _roll_back(self, pending: _Pending) -> None:
        for node, g in pending.indexed:
            node.pending = False
            self._tree.unindex_blocks(node, g)
        path = pending.sequence.prefix
        self._clear_writer(path, pending.first_unit, len(path.nodes))

    def _clear_writer(self, path: PrefixCursor, start: int, end: int) -> None:
        for node in path.nodes[start:end]:
            if node.writer is path:
                node.writer = None

    def _keep_state(self, sequence: SequenceMemory, *, generated: bool) -> None:
        """Index the sequence's present state; of those made while it generates, only the latest."""
        path = sequence.prefix
        if not path.nodes or not path.computed:
            return
        node = path.nodes[path.computed - 1]
        for group in self._states:
            [block_id] = sequence.groups[group.index].block_ids
            if not self._tree.index_blocks(node, group.index, (block_id,)) or not generated:
                continue
            if path.snapshot is not None:
                [old] = path.snapshot.blocks[group.index] or (None,)
                if old is not None and group.pool.is_cached(old):
                    self._tree.unindex_blocks(path.snapshot, group.index)
            path.snapshot = node
