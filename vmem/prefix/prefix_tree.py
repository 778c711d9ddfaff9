"""Prefix tree: cached token prefixes, found by their hashes, and the blocks that hold them.

    root (salt, adapter) ── node: tokens 0 … 15 ── node: 16 … 31 ── node: 32 … 47
                               blocks [7]  [3]        [9]  [4]   └─ node: 32 … 47, other tokens
                                       one entry a layer group

A node stands for the tokens from the beginning to its end. Hits are verified against parent and tokens, so that a hash
collision costs a miss and never a wrong answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from folio.vmem.blocks.segments import PrefixUse, Segment, output_after
from folio.vmem.budget import MemoryCounts
from folio.vmem.errors import IntegrityError
from folio.vmem.group import GroupMemory
from folio.vmem.prefix.prefix_summary import CachedPrefix, HotNodes, PrefixSummary, key_of
from folio.vmem.prefix.token_chain import Digest, Hash, TokenChain, decode_tokens, encode_tokens

# Children with the same first token that a partial match compares: it must not cost what it saves.
_MOST_ALIKE = 4


@dataclass(slots=True, eq=False)
class PrefixNode:
    """The prefix that ends with the unit `tokens`.

    Attributes:
        keys: see `TokenChain`.
        depth: units from the beginning to its end.
        blocks: of each layer group, the blocks that hold this unit; of a group with states, the block with the state
            after it. `None`: not cached.
        segment: the units that are used together with it.
        by_first: first token → the last few children that begin with it.
        writer: the cursor of the sequence that has announced the unit and not computed it.
        pending: the step that computes the unit is in progress.
        references: children, groups with blocks, and sequences whose last whole unit this is.
    """

    parent: PrefixNode | None
    keys: tuple[str, ...]
    digest: Digest
    tokens: bytes
    depth: int
    blocks: list[tuple[int, ...] | None]
    segment: Segment
    by_first: dict[bytes, list[PrefixNode]] = field(default_factory=dict)
    writer: PrefixCursor | None = None
    pending: bool = False
    references: int = 0


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The cached prefix of a prompt.

    Attributes:
        nodes: its whole units.
        partial: a unit that begins like the next tokens of the prompt.
        num_tokens: tokens of the prompt in `nodes` and `partial`.
        branch_tokens: tokens that the prompt has in common with any known prompt, cached or not.
        is_being_computed: whether another sequence is computing the next units.
    """

    nodes: tuple[PrefixNode, ...]
    partial: PrefixNode | None
    num_tokens: int
    branch_tokens: int
    is_being_computed: bool


@dataclass(slots=True)
class PrefixCursor:
    """A sequence's place in the tree.

    Attributes:
        chain: the hashes of its tokens; `None`: the sequence stays out of the prefix cache.
        nodes: its whole units, computed or announced.
        computed: how many of these are computed.
        broken: the next unit's hash belongs to other tokens, so that nothing more is cached.
        snapshot: the last node that holds this sequence's state from its decoding.
        use: what is known of the sequence.
        segments: of its prompt and its output, in order.
    """

    chain: TokenChain | None = None
    nodes: list[PrefixNode] = field(default_factory=list)
    computed: int = 0
    broken: bool = False
    snapshot: PrefixNode | None = None
    use: PrefixUse = field(default_factory=PrefixUse)
    segments: list[Segment] = field(default_factory=list)

    def segment_at(self, depth: int) -> Segment:
        """The segment of the unit that ends at this depth."""
        if not self.segments:
            self.segments.append(output_after(None, self.use.kind))
        i = len(self.segments) - 1  # nearly always: units are added at the end
        while i and self.segments[i - 1].end >= depth:
            i -= 1
        return self.segments[i]

    def fork(self) -> PrefixCursor:
        """A cursor of a sequence with the same prompt and an output of its own."""
        prompt = self.segments[:-1]
        return PrefixCursor(
            use=self.use, segments=[*prompt, output_after(prompt[-1] if prompt else None, self.use.kind)]
        )


class PrefixTree:
    """The tree and the blocks that its nodes hold. Only called with the memory's lock held.

    Args:
        unit_tokens: tokens of a node; whole blocks in every group.
        hash: parent's digest and tokens → digest.
    """

    def __init__(self, groups: Sequence[GroupMemory], unit_tokens: int, hash: Hash, counts: MemoryCounts) -> None:
        self.unit_tokens = unit_tokens
        self.hash = hash
        self._counts = counts
        self.summary = PrefixSummary()
        self._hot: HotNodes[PrefixNode] = HotNodes()
        # Groups that decide whether a prefix counts as cached: without those of windows, whose blocks go first, and of
        # states, which are few; all groups if there are no others.
        self._deciding = [
            g for g, group in enumerate(groups) if group.spec.window_tokens is None and not group.spec.is_state
        ] or list(range(len(groups)))
        self._groups = groups
        self._nodes: dict[Digest, PrefixNode] = {}
        self._roots: dict[tuple[str, ...], PrefixNode] = {}
        self._node_of: list[dict[int, PrefixNode]] = [{} for _ in groups]  # of each group, block → node

    def __len__(self) -> int:
        return len(self._nodes)

    # ---- looking up ----

    def match(self, chain: TokenChain, token_ids: Sequence[int], limit: int, least_partial: int) -> PrefixMatch:
        """The longest cached prefix of at most `limit` tokens.

        Args:
            least_partial: tokens that make a partly matching unit worth its copy; 0: never.
        """
        walked = list(self.find(chain, max(limit, 0) // self.unit_tokens))
        node = walked[-1] if walked else self._roots.get(chain.keys)
        usable, intact = 0, True
        available = _Availability(self._groups, self.unit_tokens)
        for num_units, unit in enumerate(walked, start=1):
            intact = intact and available.add(unit)
            if intact and available.complete:
                usable = num_units
        awaited = any(node.writer is not None for node in walked[usable:])
        partial, common = None, 0
        at = usable * self.unit_tokens
        if node is not None and usable == len(walked) and 0 < least_partial <= limit - at and intact:
            partial, common = self._partial(node, token_ids[at : min(at + self.unit_tokens, limit)], available)
            if common < least_partial:
                partial, common = None, 0
        num_tokens = at + common
        return PrefixMatch(tuple(walked[:usable]), partial, num_tokens, len(walked) * self.unit_tokens, awaited)

    def is_computed(self, digest: Digest) -> bool:
        """Whether a unit is complete, and no step that computes it is still to be launched. Also without the lock."""
        node = self._nodes.get(digest)
        return node is not None and node.writer is None and not node.pending and None not in node.blocks

    def find(self, chain: TokenChain, most: int) -> Iterator[PrefixNode]:
        """The known nodes of the chain's first `most` units."""
        node = self._roots.get(chain.keys)
        for digest, tokens in zip(chain.digests[:most], chain.units[:most], strict=True):
            parent, node = node, self._nodes.get(digest)
            if node is None or node.parent is not parent or node.tokens != tokens:
                return
            yield node

    def _partial(
        self, node: PrefixNode, token_ids: Sequence[int], available: _Availability
    ) -> tuple[PrefixNode | None, int]:
        """The computed child with the most tokens in common, and their number."""
        tokens = encode_tokens(token_ids)
        best, most = None, 0
        for child in node.by_first.get(tokens[:4], ()):
            if child.writer is not None or child.pending or not available.can_split(child):
                continue
            common = 0
            while common < len(tokens) and child.tokens[common : common + 4] == tokens[common : common + 4]:
                common += 4
            if common > most:
                best, most = child, common
        return best, most // 4

    def count_hit(self, match: PrefixMatch, num_queried: int) -> None:
        """Count the match of a new sequence of `num_queried` tokens."""
        self._counts.queried_tokens += num_queried
        self._counts.hit_tokens += match.num_tokens
        if match.nodes:
            self._hot.note(match.nodes[-1])

    def hot(self, most_tokens: int) -> list[CachedPrefix]:
        """The cached prefixes with the most hits, at most `most_tokens` tokens together."""
        prefixes = []
        for node, hits in self._hot.best(most_tokens // self.unit_tokens, _units, self._is_cached):
            nodes = list(_units(node))[::-1]
            token_ids = decode_tokens(b"".join(unit.tokens for unit in nodes))
            prefixes.append(CachedPrefix(token_ids, node.keys, hits))
        return prefixes

    def hot_nodes(self, most_units: int) -> list[PrefixNode]:
        """The last units of these prefixes, at most `most_units` together."""
        return [node for node, _ in self._hot.best(most_units, _units, self._is_cached)]

    # ---- growing ----

    def root(self, keys: tuple[str, ...]) -> PrefixNode:
        if keys not in self._roots:
            self._roots[keys] = PrefixNode(None, keys, b"", b"", 0, [None] * len(self._groups), Segment(0, 0))
        return self._roots[keys]

    def extend_cursor(self, path: PrefixCursor, num_units: int) -> None:
        """Extend the cursor to `num_units` units, or to the first hash collision."""
        chain = path.chain
        assert chain is not None
        while len(path.nodes) < num_units and not path.broken:
            i = len(path.nodes)
            parent = path.nodes[-1] if path.nodes else self.root(chain.keys)
            digest, tokens = chain.digests[i], chain.units[i]
            node = self._nodes.get(digest)
            if node is None:
                segment, depth = path.segment_at(parent.depth + 1), parent.depth + 1
                node = PrefixNode(parent, chain.keys, digest, tokens, depth, [None] * len(self._groups), segment)
                self._nodes[digest] = node
                parent.references += 1
                alike = parent.by_first.setdefault(tokens[:4], [])
                alike.append(node)
                del alike[:-_MOST_ALIKE]
            elif node.parent is not parent or node.tokens != tokens:
                path.broken = True
                self._drop_root(parent)
                return
            node.references += 1
            if path.nodes:
                self._release(path.nodes[-1])
            path.nodes.append(node)

    def start_cursor(self, path: PrefixCursor, nodes: Sequence[PrefixNode]) -> None:
        """Start a new sequence's cursor with these computed nodes."""
        path.nodes = list(nodes)
        path.computed = len(nodes)
        if nodes:
            nodes[-1].references += 1

    def truncate_cursor(self, path: PrefixCursor, num_units: int) -> None:
        """Cut the cursor to `num_units` units."""
        for node in path.nodes[num_units:]:
            if node.writer is path:
                node.writer = None
        if num_units < len(path.nodes):
            last = path.nodes[-1]
            del path.nodes[num_units:]
            if path.nodes:
                path.nodes[-1].references += 1
            self._release(last)
        path.computed = min(path.computed, num_units)
        path.broken = path.broken and num_units > 0
        if path.snapshot is not None and path.snapshot not in path.nodes[-1:]:
            path.snapshot = None

    # ---- blocks ----

    def index_blocks(self, node: PrefixNode, g: int, block_ids: tuple[int, ...]) -> bool:
        """Index these owned blocks of a group in the node; False if the node has some, or another node has them.

        Args:
            block_ids: a tuple of this call's own, by which `PageExport` tells whether the node has had it all the time.
        """
        if node.blocks[g] is not None or any(b in self._node_of[g] for b in block_ids):
            return False
        node.blocks[g] = block_ids
        node.references += 1
        for block_id in block_ids:
            self._node_of[g][block_id] = node
            self._groups[g].pool.mark_indexed(block_id, node)
        if g in self._deciding and self._is_cached(node):
            self.summary.add(node.digest, node.depth)
        return True

    def unindex_blocks(self, node: PrefixNode, g: int) -> int:
        """Remove a group's blocks from the node; returns their number."""
        block_ids = node.blocks[g]
        if block_ids is None:
            return 0
        if g in self._deciding and self._is_cached(node):
            self.summary.remove(node.digest, node.depth)
        node.blocks[g] = None
        for block_id in block_ids:
            del self._node_of[g][block_id]
            self._groups[g].pool.unmark_indexed(block_id)
        self._release(node)
        return len(block_ids)

    def evict(self, g: int, count: int) -> int:
        """Evict `count` cached blocks of a group or a few more, see `eviction`. Returns their number."""
        pool, evicted = self._groups[g].pool, 0
        while evicted < count and (block_id := pool.cached.first()) is not None:
            evicted += self.evict_block(g, block_id)
        return evicted

    def evict_block(self, g: int, block_id: int) -> int:
        """Evict this block, and the others of the same unit and group."""
        evicted = self.unindex_blocks(self._node_of[g][block_id], g)
        self._counts.evicted_blocks += evicted
        return evicted

    def clear(self, keys: tuple[str, ...] | None = None) -> None:
        """Drop all prefixes, or those with these keys."""
        for g, node_of in enumerate(self._node_of):
            for node in set(node_of.values()):
                if keys is None or node.keys == keys:
                    self.unindex_blocks(node, g)

    def check_integrity(self, cursors: Sequence[PrefixCursor]) -> None:
        """Raise `IntegrityError` unless references, indexed blocks, writers, keys and hits agree."""
        nodes = list(self._nodes.values())
        for node, references in self._expected_references(cursors).items():
            if not node.references == references > 0:
                raise IntegrityError(f"a prefix has {node.references} references, {references} are known")
        for g, (node_of, group) in enumerate(zip(self._node_of, self._groups, strict=True)):
            held = [b for node in nodes for b in node.blocks[g] or ()]
            if sorted(held) != sorted(node_of) or set(held) != group.pool.indexed_blocks.keys():
                raise IntegrityError(f"group {g}: {len(held)} blocks in prefixes, {len(node_of)} indexed")
        if not {id(node.writer) for node in nodes if node.writer is not None} <= set(map(id, cursors)):
            raise IntegrityError("the writer of an announced prefix is gone")
        self.summary.check_integrity({(key_of(node.digest), node.depth) for node in nodes if self._is_cached(node)})
        if gone := [node for node in self._hot if self._nodes.get(node.digest) is not node]:
            raise IntegrityError(f"hits are counted for {len(gone)} prefixes that are gone")

    def _expected_references(self, cursors: Sequence[PrefixCursor]) -> Counter[PrefixNode]:
        expected = Counter(dict.fromkeys(self._roots.values(), 0))
        expected.update(cursor.nodes[-1] for cursor in cursors if cursor.nodes)
        for node in self._nodes.values():
            expected[node] += sum(blocks is not None for blocks in node.blocks)
            assert node.parent is not None
            expected[node.parent] += 1
        return expected

    def _is_cached(self, node: PrefixNode) -> bool:
        return all(node.blocks[g] is not None for g in self._deciding)

    def _release(self, node: PrefixNode) -> None:
        """Drop a reference; a node without any is removed, and its parent perhaps, too."""
        while True:
            node.references -= 1
            if node.references or node.parent is None:
                break
            parent = node.parent
            del self._nodes[node.digest]
            self._hot.forget(node)
            alike = parent.by_first.get(node.tokens[:4], [])
            if node in alike:
                alike.remove(node)
                if not alike:
                    del parent.by_first[node.tokens[:4]]
            node = parent
        self._drop_root(node)

    def _drop_root(self, node: PrefixNode) -> None:
        """Remove a root without references."""
        if node.parent is None and not node.references:
            del self._roots[node.keys]


def _units(node: PrefixNode) -> Iterator[PrefixNode]:
    """The node, its parent, and so on; without the root."""
    while node.parent is not None:
        yield node
        node = node.parent


class _Availability:
    """Whether a sequence can continue after a run of nodes: groups need all blocks, those of a window, or a state."""

    def __init__(self, groups: Sequence[GroupMemory], unit_tokens: int) -> None:
        self._num_nodes = 0
        self._needed: list[int | None] = []  # of each group, the last nodes that must have blocks; `None`: all
        self._has_state = any(group.spec.is_state for group in groups)
        for group in groups:
            needed = 1 if group.spec.is_state else None
            if group.spec.window_tokens is not None:
                needed = -(-(group.spec.window_tokens - 1) // unit_tokens)
            self._needed.append(needed)
        self._runs = [0] * len(groups)  # of each group, nodes in a row up to here that have its blocks

    def add(self, node: PrefixNode) -> bool:
        """Add a node; False if no longer run can be complete."""
        self._num_nodes += 1
        for g, blocks in enumerate(node.blocks):
            self._runs[g] = self._runs[g] + 1 if blocks is not None else 0
        return all(
            needed is not None or run == self._num_nodes for needed, run in zip(self._needed, self._runs, strict=True)
        )

    @property
    def complete(self) -> bool:
        return all(
            run >= (self._num_nodes if needed is None else min(needed, self._num_nodes))
            for needed, run in zip(self._needed, self._runs, strict=True)
        )

    def can_split(self, node: PrefixNode) -> bool:
        """Whether a sequence can continue within this node. A state exists only at the end of a node."""
        return not self._has_state and self.complete and all(blocks is not None for blocks in node.blocks)
