"""What moves when sequences are swapped: which blocks are copied, and what they are afterwards.

Host memory for the blocks of preempted sequences (PagedAttention §4.5, swapping).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from vmem.allocator import BlockAllocator
from vmem.errors import IntegrityError, OutOfPages, OutOfSwap, VmemError
from vmem.group import GroupMemory
from vmem.prefix_tree import PrefixTree, TokenChain
from vmem.sequence import GroupTable, SequenceMemory, ViewPolicy
from vmem.tables import BlockTables
from vmem.tensors import BlockContents


class Swapping:
    """Copies sequences out and in. A block that several of them share is copied once. Only called under the memory's
    lock."""

    def __init__(
        self,
        groups: Sequence[GroupMemory],
        space: SwapSpace,
        contents: BlockContents,
        index: PrefixTree,
        allocator: BlockAllocator,
        tables: BlockTables,
    ) -> None:
        self.space = space
        self._live: set[SwappedGroup] = set()
        self._keys = itertools.count()
        self._contents = contents
        self._groups = groups
        self._index = index
        self._allocator = allocator
        self._tables = tables

    def num_bytes(self, sequences: Sequence[SequenceMemory]) -> int:
        """Bytes of all blocks that these sequences own."""
        return sum(len(self._blocks(group, sequences)) * group.layout.block_bytes for group in self._groups)

    def copy_out(self, sequences: Sequence[SequenceMemory]) -> SwappedGroup:
        """Contents and tables of these sequences; they stay as they are. Raises `OutOfSwap`."""
        num_bytes = self.num_bytes(sequences)
        self.space.claim(num_bytes)
        rows: list[dict[int, int]] = []
        copies: list[int] = []
        try:
            for group in self._groups:
                blocks = self._blocks(group, sequences)
                rows.append({block_id: row for row, block_id in enumerate(blocks)})
                key = next(self._keys)
                self._contents.save(key, group.index, blocks)
                copies.append(key)
        except BaseException:  # no host memory
            for key in copies:
                self._contents.discard(key)
            self.space.release(num_bytes)
            raise
        self._allocator.set_fence()
        swapped = SwappedGroup(
            sequences=tuple(
                SwappedSequence(
                    policy=sequence.policy,
                    num_tokens=sequence.num_tokens,
                    expected_tokens=sequence.expected_tokens,
                    chain=sequence.prefix.chain,
                    num_units=sequence.prefix.computed,
                    rows=tuple(
                        tuple(None if place < table.first else rows[g][b] for place, b in enumerate(table.block_ids))
                        for g, table in enumerate(sequence.groups)
                    ),
                )
                for sequence in sequences
            ),
            copies=tuple(copies),
            num_rows=tuple(map(len, rows)),
            num_bytes=num_bytes,
        )
        self._live.add(swapped)
        return swapped

    def copy_in(self, swapped: SwappedGroup) -> list[SequenceMemory]:
        """Sequences with their contents, without regions. Raises `OutOfPages` or `MapError`; then nothing changed."""
        if swapped not in self._live:
            raise IntegrityError("swapped sequences are brought back twice, or were given up")
        blocks = self._cached_blocks(swapped)
        # Two sequences that had computed the same may find the same block.
        revived = [(group, list(dict.fromkeys(f.values()))) for group, f in zip(self._groups, blocks, strict=True)]
        needed = sum(
            (num_rows - len(found)) * group.num_slices
            for group, num_rows, found in zip(self._groups, swapped.num_rows, blocks, strict=True)
        ) + sum(group.pool.is_cached(b) * group.num_slices for group, found in revived for b in found)
        if needed > self._allocator.num_free_pages:
            raise OutOfPages(needed, max(self._allocator.num_free_pages, 0))
        for group, block_ids in revived:
            group.pool.acquire_cached(block_ids)
        allocated: list[tuple[GroupMemory, list[int], list[int]]] = []
        try:
            for group, found, num_rows in zip(self._groups, blocks, swapped.num_rows, strict=True):
                missing = [row for row in range(num_rows) if row not in found]
                new = self._allocator.allocate(group, len(missing))
                allocated.append((group, missing, new))
        except VmemError:
            for group, _, new in allocated:
                self._allocator.free(group, new)
            for group, block_ids in revived:
                self._allocator.free(group, block_ids)
            raise
        for group, missing, new in allocated:
            self._contents.restore(swapped.copies[group.index], missing, new)
            blocks[group.index].update(zip(missing, new, strict=True))
        self._allocator.set_fence()
        return self._sequences(swapped, blocks)

    def discard_swapped(self, swapped: SwappedGroup) -> None:
        """Give the host memory back."""
        if swapped not in self._live:
            raise IntegrityError("swapped sequences are given up twice")
        self._live.remove(swapped)
        for key in swapped.copies:
            self._contents.discard(key)
        self.space.release(swapped.num_bytes)

    def _sequences(self, swapped: SwappedGroup, blocks: Sequence[dict[int, int]]) -> list[SequenceMemory]:
        sequences = []
        for old in swapped.sequences:
            tables = tuple(
                GroupTable([0 if row is None else blocks[g][row] for row in rows], _first_row(rows))
                for g, rows in enumerate(old.rows)
            )
            sequences.append(SequenceMemory(old.policy, tables, old.num_tokens, old.expected_tokens))
        for group in self._groups:  # each block has one reference so far
            owners = Counter(
                b for s in sequences for b in s.groups[group.index].block_ids[s.groups[group.index].first :]
            )
            for block_id, count in owners.items():
                group.pool.add_references([block_id] * (count - 1))
        for sequence, old in zip(sequences, swapped.sequences, strict=True):
            self._name_content(sequence, old)
        return sequences

    def _name_content(self, sequence: SequenceMemory, old: SwappedSequence) -> None:
        """Put what was in the prefix cache back into it."""
        sequence.prefix.chain = old.chain
        if old.chain is None:
            return
        self._index.extend_cursor(sequence.prefix, old.num_units)
        sequence.prefix.computed = len(sequence.prefix.nodes)
        for i, node in enumerate(sequence.prefix.nodes):
            for group, table in self._tables.tables_of(sequence):
                if group.spec.is_state:
                    continue
                per_unit = self._index.unit_tokens // group.layout.block_tokens
                if i * per_unit >= table.first:
                    self._index.index_blocks(
                        node, group.index, tuple(table.block_ids[i * per_unit : (i + 1) * per_unit])
                    )

    def _cached_blocks(self, swapped: SwappedGroup) -> list[dict[int, int]]:
        """Of each group, rows whose content is in a block of the prefix cache still, and in which."""
        found: list[dict[int, int]] = [{} for _ in self._groups]
        for sequence in swapped.sequences:
            if sequence.chain is None:
                continue
            for i, node in enumerate(self._index.find(sequence.chain, sequence.num_units)):
                for group in self._groups:
                    block_ids = node.blocks[group.index]
                    if group.spec.is_state or block_ids is None or node.pending:
                        continue
                    rows = sequence.rows[group.index][i * len(block_ids) : (i + 1) * len(block_ids)]
                    if None not in rows and not any(row in found[group.index] for row in rows):
                        found[group.index].update(
                            (row, b) for row, b in zip(rows, block_ids, strict=True) if row is not None
                        )
        return found

    def _blocks(self, group: GroupMemory, sequences: Sequence[SequenceMemory]) -> list[int]:
        tables = [sequence.groups[group.index] for sequence in sequences]
        return list(dict.fromkeys(block_id for table in tables for block_id in table.block_ids[table.first :]))


def _first_row(rows: Sequence[int | None]) -> int:
    """The first place that has a row."""
    return next((place for place, row in enumerate(rows) if row is not None), len(rows))


@dataclass(frozen=True, slots=True)
class SwappedSequence:
    """One sequence's tables, with rows of the swapped copies in place of block ids; `None` before the window."""

    policy: ViewPolicy
    num_tokens: int
    expected_tokens: int
    chain: TokenChain | None
    num_units: int
    rows: tuple[tuple[int | None, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class SwappedGroup:
    """The sequences of one request in host memory: `KVMemory.swap_in` brings them back, `discard` gives them up.

    Attributes:
        copies: of each layer group, the key of its copy (`BlockContents.save`).
    """

    sequences: tuple[SwappedSequence, ...]
    copies: tuple[int, ...]
    num_rows: tuple[int, ...]
    num_bytes: int


class SwapSpace:
    """The host memory that swapped blocks may take. Only called under the memory's lock.

    Args:
        budget_bytes: host memory at most.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0

    def claim(self, num_bytes: int) -> None:
        """Raises `OutOfSwap` when the budget has no room for so many bytes."""
        if self.used_bytes + num_bytes > self.budget_bytes:
            raise OutOfSwap(f"{num_bytes} bytes to swap, {self.budget_bytes - self.used_bytes} of swap space free")
        self.used_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        self.used_bytes -= num_bytes
