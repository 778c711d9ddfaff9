"""Swapping: preempted sequences in host memory (PagedAttention §4.5)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from folio.vmem.blocks.tables import BlockAllocator
from folio.vmem.errors import IntegrityError, OutOfPages, VmemError
from folio.vmem.group import GroupMemory
from folio.vmem.lock import MemoryLock
from folio.vmem.mapping.mapper import Mapper
from folio.vmem.mapping.views import RegionManager
from folio.vmem.prefix.prefix_cache import PrefixCache
from folio.vmem.prefix.prefix_tree import PrefixCursor, PrefixTree
from folio.vmem.sequence import GroupTable, SequenceMemory
from folio.vmem.swap.swap_space import SwapSpace

if TYPE_CHECKING:
    from folio.vmem.tensors import BlockContents


@dataclass(frozen=True, slots=True, eq=False)
class SwappedGroup:
    """The sequences of one request in host memory, until `KVMemory.swap_in` or `Swapping.discard_swapped`.

    Attributes:
        sequences: as they were, with rows of the copies in place of block ids.
        copies: of each layer group, the key of its copy (`BlockContents.save`).
        num_rows: of each layer group, the blocks in its copy.
    """

    sequences: tuple[SequenceMemory, ...]
    copies: tuple[int, ...]
    num_rows: tuple[int, ...]
    num_bytes: int


@dataclass(eq=False)
class Swapping:
    """Swapped sequences and their copies. A block that several sequences of a request share is copied once.

    Attributes:
        space: host memory of this memory, shared with kept prefixes.
        used_bytes: what swapped sequences take of it.
    """

    _groups: Sequence[GroupMemory]
    _lock: MemoryLock
    _mapper: Mapper
    _contents: BlockContents
    _tree: PrefixTree
    _allocator: BlockAllocator
    _regions: RegionManager
    _prefixes: PrefixCache
    space: SwapSpace
    _live: set[SwappedGroup] = field(default_factory=set)
    used_bytes: int = 0
    _keys: Iterator[int] = field(default_factory=itertools.count)

    def num_bytes(self, sequences: Sequence[SequenceMemory]) -> int:
        """Bytes that swapping these sequences out would copy."""
        with self._lock:
            return self._num_bytes(sequences)

    def pages_needed(self, swapped: SwappedGroup) -> int:
        """Pages that swapping in takes at most."""
        return sum(rows * group.num_slices for rows, group in zip(swapped.num_rows, self._groups, strict=True))

    @property
    def num_blocks(self) -> list[int]:
        """Copied blocks of each layer group. With the lock held."""
        return [sum(swapped.num_rows[g] for swapped in self._live) for g in range(len(self._groups))]

    @property
    def digests(self) -> set[bytes]:
        """Of the swapped units. With the lock held."""
        paths = (sequence.prefix for swapped in self._live for sequence in swapped.sequences)
        return {d for path in paths if path.chain is not None for d in path.chain.digests[: path.computed]}

    def discard_swapped(self, swapped: SwappedGroup) -> None:
        """Drop swapped sequences."""
        with self._lock.exclusive():
            self.release_swapped(swapped)

    def close(self) -> None:
        """Leave the swap space to others; copies that are left go with this memory."""
        self.space.give_back(self.used_bytes)
        self.used_bytes = 0

    # ---- within `MemoryLock.exclusive` ----

    def copy_out(self, sequences: Sequence[SequenceMemory]) -> SwappedGroup:
        """Copy contents and tables of these sequences, which stay as they are.

        Raises:
            OutOfSwap: the swap space is too full.
            MapError: blocks could not be mapped at home, to be read there.
        """
        num_bytes = self._num_bytes(sequences)
        self.space.take(num_bytes)
        self.used_bytes += num_bytes
        rows: list[dict[int, int]] = []
        copies: list[int] = []
        try:
            for group in self._groups:
                blocks = self._blocks(group, sequences)
                self._regions.map_homes(group, blocks)
                rows.append({block_id: row for row, block_id in enumerate(blocks)})
                key = next(self._keys)
                with self._lock.unlocked():
                    self._contents.save(key, group.index, blocks)
                copies.append(key)
            self._mapper.set_fence()
        except BaseException:  # no host memory, or a mapping that the device refuses
            self._drop_copies(copies, num_bytes)
            raise
        swapped = SwappedGroup(
            sequences=tuple(_renumbered(sequence, rows) for sequence in sequences),
            copies=tuple(copies),
            num_rows=tuple(map(len, rows)),
            num_bytes=num_bytes,
        )
        self._live.add(swapped)
        return swapped

    def copy_in(self, swapped: SwappedGroup) -> list[SequenceMemory]:
        """Create the sequences again, without regions; blocks that are still cached are shared, not copied.

        Raises:
            OutOfPages, MapError: nothing has changed.
        """
        if swapped not in self._live:
            raise IntegrityError("the sequences were swapped in or discarded before")
        blocks = self._cached_blocks(swapped)
        plans = []  # of each group: rows and their cached blocks, these blocks, rows to copy
        for group, found, num_rows in zip(self._groups, blocks, swapped.num_rows, strict=True):
            shared = list(dict.fromkeys(found.values()))  # sequences with the same tokens may find the same block
            plans.append((group, found, shared, [row for row in range(num_rows) if row not in found]))
        needed = sum(
            (len(missing) + sum(map(group.pool.is_cached, shared))) * group.num_slices
            for group, _, shared, missing in plans
        )
        if needed > self._allocator.num_free_pages:
            raise OutOfPages(needed, max(self._allocator.num_free_pages, 0))
        for group, _, shared, _ in plans:
            group.pool.acquire_cached(shared)
        taken: dict[int, list[int]] = {}
        try:
            for group, _, _, missing in plans:
                taken[group.index] = self._allocator.allocate(group, len(missing), at_home=True)
                self._regions.map_homes(group, taken[group.index])
        except VmemError:
            for group, _, shared, _ in plans:
                self._allocator.free(group, [*taken.get(group.index, ()), *shared])
            raise
        for group, found, _, missing in plans:
            with self._lock.unlocked():
                self._contents.restore(swapped.copies[group.index], missing, taken[group.index])
            found.update(zip(missing, taken[group.index], strict=True))
        self._mapper.set_fence()
        return self._sequences(swapped, blocks)

    def release_swapped(self, swapped: SwappedGroup) -> None:
        """Give the host memory back."""
        if swapped not in self._live:
            raise IntegrityError("the sequences were swapped in or discarded before")
        self._live.remove(swapped)
        self._drop_copies(swapped.copies, swapped.num_bytes)

    def _drop_copies(self, keys: Sequence[int], num_bytes: int) -> None:
        with self._lock.unlocked():  # freeing host memory takes long
            for key in keys:
                self._contents.discard(key)
        self.used_bytes -= num_bytes
        self.space.give_back(num_bytes)

    def _sequences(self, swapped: SwappedGroup, blocks: Sequence[dict[int, int]]) -> list[SequenceMemory]:
        sequences = [_renumbered(old, blocks) for old in swapped.sequences]
        for group in self._groups:  # each block has one reference so far
            owners = Counter(b for s in sequences for b in s.groups[group.index].owned)
            for block_id, count in owners.items():
                group.pool.add_references([block_id] * (count - 1))
        for sequence in sequences:
            self._prefixes.restore_prefix(sequence)
        return sequences

    def _cached_blocks(self, swapped: SwappedGroup) -> list[dict[int, int]]:
        """For each group: row whose content is still cached → the block that has it."""
        found: list[dict[int, int]] = [{} for _ in self._groups]
        for sequence in swapped.sequences:
            chain = sequence.prefix.chain
            if chain is None:
                continue
            for i, node in enumerate(self._tree.find(chain, sequence.prefix.computed)):
                for group in self._groups:
                    block_ids = node.blocks[group.index]
                    if group.spec.is_state or block_ids is None or node.pending:
                        continue
                    table, start = sequence.groups[group.index], i * len(block_ids)
                    rows = table.block_ids[start : start + len(block_ids)]
                    if start >= table.first and not any(row in found[group.index] for row in rows):
                        found[group.index].update(zip(rows, block_ids, strict=True))
        return found

    def _blocks(self, group: GroupMemory, sequences: Sequence[SequenceMemory]) -> list[int]:
        """The blocks of these sequences, each once."""
        return list(dict.fromkeys(b for sequence in sequences for b in sequence.groups[group.index].owned))

    def _num_bytes(self, sequences: Sequence[SequenceMemory]) -> int:
        return sum(len(self._blocks(group, sequences)) * group.layout.block_bytes for group in self._groups)


def _renumbered(sequence: SequenceMemory, numbers: Sequence[Mapping[int, int]]) -> SequenceMemory:
    """The sequence with its blocks renumbered, of each group by present number → new one; without regions."""
    tables = tuple(
        GroupTable([0] * table.first + [numbers[g][b] for b in table.owned], table.first)
        for g, table in enumerate(sequence.groups)
    )
    old = sequence.prefix
    prefix = PrefixCursor(old.chain, computed=old.computed, use=old.use, segments=old.segments)
    return SequenceMemory(sequence.policy, tables, sequence.num_tokens, sequence.expected_tokens, prefix)
