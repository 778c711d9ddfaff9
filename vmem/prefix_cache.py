"""What sequences find in the prefix cache, and what they leave there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from vmem.errors import IntegrityError
from vmem.group import GroupMemory
from vmem.prefix_tree import PrefixCursor, PrefixMatch, PrefixNode, PrefixTree, TokenChain
from vmem.sequence import SequenceMemory
from vmem.tables import BlockTables

# Tokens of a partly matching unit that are worth copying its blocks. A copy of 16 tokens takes about as long as
# computing a tenth of a token (Qwen2.5-0.5B shape on 2 cores), but it costs a block until the copy is made.
LEAST_PARTIAL_TOKENS = 4


@dataclass(slots=True)
class _Pending:
    """What a step that has not been computed yet will have computed."""

    sequence: SequenceMemory
    end: int
    num_tokens: int
    first_unit: int
    held: list[tuple[PrefixNode, int]] = field(default_factory=list)


class PrefixCache:
    """Sequences share cached prefixes and put their own there. Only called under the memory's lock.

    A unit is *promised* when its sequence is admitted, *pending* while the step that computes it runs, and then
    computed. In a step keys and values are written before any are read, layer by layer, so a sequence may share pending
    units: if that step fails, it must start again.
    """

    def __init__(self, groups: Sequence[GroupMemory], index: PrefixTree, tables: BlockTables) -> None:
        self._groups = groups
        self._index = index
        self._tables = tables
        self._states = [group for group in groups if group.spec.is_state]
        self._pending: list[_Pending] = []
        self._is_cut_short = False  # a sequence ended whose pending units others share

    @property
    def has_states(self) -> bool:
        return bool(self._states)

    def share_prefix(self, sequence: SequenceMemory, match: PrefixMatch) -> None:
        """Let a sequence without blocks own those of the match."""
        if not match.num_tokens:
            return
        nodes = [*match.nodes, *([match.partial] if match.partial is not None else [])]
        for group, table in self._tables.tables_of(sequence):
            g = group.index
            if group.spec.is_state:
                block_ids = list(match.nodes[-1].blocks[g] or ())
            else:
                per_unit = self._index.unit_tokens // group.layout.block_tokens
                block_ids = [b for node in nodes for b in node.blocks[g] or (0,) * per_unit]
                del block_ids[group.layout.num_blocks(match.num_tokens) :]
            table.block_ids = block_ids
            table.first = self._tables.first_visible(group, match.num_tokens)
            group.pool.acquire_cached(block_ids[table.first :])
        sequence.num_tokens = match.num_tokens
        self._index.start_cursor(sequence.prefix, match.nodes)

    def pages_needed(self, match: PrefixMatch, num_tokens: int, step_tokens: int) -> int:
        """Free pages that a sequence of `num_tokens` tokens takes at most if it begins with the match; what others own
        already it does not take."""
        needed = 0
        for group in self._groups:
            pages = group.spec.most_pages(num_tokens, step_tokens)
            if not group.spec.is_state:  # a shared state is copied
                shared = [node.blocks[group.index] or () for node in match.nodes]
                per_unit = self._index.unit_tokens // group.layout.block_tokens
                first = self._tables.first_visible(group, match.num_tokens) // per_unit
                owned = sum(group.pool.reference_count(b) > 0 for block_ids in shared[first:] for b in block_ids)
                pages = max(pages - owned * group.num_slices, 0)
            needed += pages
        return needed

    def shared_tokens(self, sequences: Sequence[SequenceMemory]) -> list[int]:
        """For each, tokens at the beginning that others than these own too, or one before it in the list has."""
        owned = [
            Counter(b for s in sequences for b in s.groups[group.index].block_ids[s.groups[group.index].first :])
            for group in self._groups
        ]
        seen: set[PrefixNode] = set()
        shared = []
        for sequence in sequences:
            nodes = sequence.prefix.nodes[: sequence.prefix.computed]
            num_units = 0
            while num_units < len(nodes) and (nodes[num_units] in seen or self._is_elsewhere(nodes[num_units], owned)):
                num_units += 1
            shared.append(num_units * self._index.unit_tokens)
            seen.update(nodes)
        return shared

    def _is_elsewhere(self, node: PrefixNode, owned: Sequence[Counter[int]]) -> bool:
        """Whether somebody owns all of the node's blocks beside those who own them in `owned`."""
        for group, count in zip(self._groups, owned, strict=True):
            blocks = node.blocks[group.index]
            if group.spec.window_tokens is None and not group.spec.is_state and blocks is None:
                return False
            if any(group.pool.reference_count(b) <= count[b] for b in blocks or ()):
                return False
        return True

    def reindex_own_blocks(self, sequence: SequenceMemory) -> None:
        """Let its units name the sequence's own blocks, where they name others that hold the same."""
        path = sequence.prefix
        for i, node in enumerate(path.nodes):
            for group, table in self._tables.tables_of(sequence):
                block_ids = tuple(table.block_ids)
                if not group.spec.is_state:
                    per_unit = self._index.unit_tokens // group.layout.block_tokens
                    block_ids = block_ids[i * per_unit : (i + 1) * per_unit]
                    if i * per_unit < table.first:
                        continue
                elif sequence.num_tokens != (i + 1) * self._index.unit_tokens:
                    continue
                if node.blocks[group.index] != block_ids:
                    self._index.unindex_blocks(node, group.index)
                    self._index.index_blocks(node, group.index, block_ids)

    def announce_prefill(self, sequence: SequenceMemory, num_tokens: int, snapshots: Sequence[int]) -> None:
        """The sequence is going to compute its first `num_tokens` tokens; who wants the same should wait.

        Args:
            snapshots: lengths after which its state will be kept.
        """
        path = sequence.prefix
        unit = self._index.unit_tokens
        self._index.extend_cursor(path, num_tokens // unit)
        for node in path.nodes[path.computed :]:
            if node.writer is None and any(node.blocks[g.index] is None for g in self._groups if not g.spec.is_state):
                node.writer = path
        for length in snapshots:
            if self._states and 0 < length // unit <= len(path.nodes):
                node = path.nodes[length // unit - 1]
                if node.writer is None and node.blocks[self._states[0].index] is None:
                    node.writer = path

    def stage_prefix(self, sequence: SequenceMemory, end: int, num_tokens: int) -> None:
        """The coming step computes `num_tokens` tokens of the sequence, up to `end`."""
        path = sequence.prefix
        first = path.computed
        self._index.extend_cursor(path, end // self._index.unit_tokens)
        pending = _Pending(sequence, end, num_tokens, first)
        for i in range(first, min(end // self._index.unit_tokens, len(path.nodes))):
            node = path.nodes[i]
            if node.writer is None:
                node.writer = path
            for group, table in self._tables.tables_of(sequence):
                if group.spec.is_state:
                    continue
                per_unit = self._index.unit_tokens // group.layout.block_tokens
                if i * per_unit < table.first:
                    continue
                block_ids = tuple(table.block_ids[i * per_unit : (i + 1) * per_unit])
                if self._index.index_blocks(node, group.index, block_ids):
                    pending.held.append((node, group.index))
                    node.pending = True
        self._pending.append(pending)

    def commit_prefixes(self) -> None:
        """The step is done: what it was to compute is computed."""
        if self._is_cut_short:
            raise IntegrityError("a sequence ended between begin and commit, and others share what it has not computed")
        done, self._pending = self._pending, []
        for pending in done:
            for node, _ in pending.held:
                node.pending = False
            path = pending.sequence.prefix
            path.computed = min(pending.end // self._index.unit_tokens, len(path.nodes))
            self._let_go(path, pending.first_unit, path.computed)
            if pending.end == path.computed * self._index.unit_tokens:
                self._keep_state(pending.sequence, generated=pending.num_tokens == 1)

    def fork(self, parent: SequenceMemory, child: SequenceMemory, chain: TokenChain | None) -> None:
        """The child's tokens begin as the parent's do, as far as it has blocks."""
        child.prefix.chain = chain
        if chain is None:
            return
        num_units = min(child.num_tokens // self._index.unit_tokens, parent.prefix.computed, len(chain.units))
        self._index.start_cursor(child.prefix, parent.prefix.nodes[:num_units])

    def abort_prefixes(self, sequence: SequenceMemory | None = None) -> None:
        """The step has failed, or this sequence ends before it: what was pending has not been computed."""
        if sequence is None:
            self._is_cut_short = False
        for pending in [p for p in self._pending if sequence is None or p.sequence is sequence]:
            self._pending.remove(pending)
            for node, g in pending.held:
                node.pending = False
                if sequence is not None and any(
                    self._groups[g].pool.reference_count(b) > 1 for b in node.blocks[g] or ()
                ):
                    self._is_cut_short = True
                self._index.unindex_blocks(node, g)
            path = pending.sequence.prefix
            self._let_go(path, pending.first_unit, len(path.nodes))

    def release_prefix(self, sequence: SequenceMemory) -> None:
        """The sequence ends; what it promised others must compute themselves."""
        self.abort_prefixes(sequence)
        self._index.truncate_cursor(sequence.prefix, 0)

    def _let_go(self, path: PrefixCursor, start: int, end: int) -> None:
        for node in path.nodes[start:end]:
            if node.writer is path:
                node.writer = None
        self._index.changes += 1

    def _keep_state(self, sequence: SequenceMemory, *, generated: bool) -> None:
        """Keep the state that the sequence has now; of those made while it generates, only the latest."""
        path = sequence.prefix
        if not path.nodes or not path.computed:
            return
        node = path.nodes[path.computed - 1]
        for group in self._states:
            [block_id] = sequence.groups[group.index].block_ids
            if not self._index.index_blocks(node, group.index, (block_id,)) or not generated:
                continue
            if path.snapshot is not None:
                [old] = path.snapshot.blocks[group.index] or (None,)
                if old is not None and group.pool.is_cached(old):
                    self._index.unindex_blocks(path.snapshot, group.index)
            path.snapshot = node
