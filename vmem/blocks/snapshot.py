"""Snapshot: the state of every block, and the sequences with their regions, for a live view of the memory."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from folio.vmem.blocks.block_pool import PoolCopy
from folio.vmem.mapping.region import Region
from folio.vmem.report import MemoryReport
from folio.vmem.sequence import SequenceMemory

if TYPE_CHECKING:
    from folio.vmem.memory import KVMemory

StateArray = np.ndarray[Any, np.dtype[np.uint8]]


class BlockState(IntEnum):
    """State of one block.

    Attributes:
        UNBACKED: has no page; its memory belongs to the machine. Ids in the anchor's extent never have one.
        FREE: has a page and no content.
        ACTIVE, SHARED: one sequence owns it, or several do.
        PINNED: a pinned prefix owns it, perhaps among others.
        CACHED: it has no owner; the prefix cache has its content.
        PARKED: it has no owner, and is still mapped in a region, or mapped ahead.
        MOVING: its page is being attached, detached or mapped ahead at this moment.
    """

    UNBACKED = 0
    FREE = 1
    ACTIVE = 2
    SHARED = 3
    PINNED = 4
    CACHED = 5
    PARKED = 6
    MOVING = 7


@dataclass(frozen=True, slots=True)
class TableSnapshot:
    """One sequence's blocks in one layer group, in order, without those that have left a window.

    Attributes:
        first: logical index of the first of them.
        slot: of its region; `None`: the blocks are read through the block table.
        num_mapped: places of the region that map a block, those behind the blocks in use included.
    """

    block_ids: list[int]
    first: int
    slot: int | None
    num_mapped: int


@dataclass(frozen=True, slots=True)
class SequenceSnapshot:
    """One sequence. `memory` is the sequence itself, to be compared by identity only."""

    memory: SequenceMemory
    num_tokens: int
    tables: tuple[TableSnapshot, ...]


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """The memory at one moment; states and report agree.

    Attributes:
        states: of each layer group, the `BlockState` of every block: `states[g][i]` is that of block id i + 1.
        swapped_blocks: of each layer group, blocks in host memory.
        num_sequences: of all that are open; `sequences` has the longest of them.
        num_parked: of each layer group, all parked regions; `parked` has (slot, mapped places) of the latest.
        region_blocks: of each layer group, the places of a region.
    """

    report: MemoryReport
    states: tuple[StateArray, ...]
    swapped_blocks: tuple[int, ...]
    num_sequences: int
    sequences: tuple[SequenceSnapshot, ...]
    num_parked: tuple[int, ...]
    parked: tuple[tuple[tuple[int, int], ...], ...]
    region_blocks: tuple[int, ...]


def take_snapshot(
    memory: KVMemory, *, most_sequences: int = 0, most_parked: int = 0, wanted: Collection[SequenceMemory] = ()
) -> MemorySnapshot | None:
    """Take a snapshot. From any thread; `None` if the lock is not free within 20 ms.

    With the lock held, whole lists are copied: 2.5 ms for 100,000 blocks. States are made from the copies afterwards.

    Args:
        most_sequences, most_parked: sequences, and parked regions of each layer group, to copy.
        wanted: sequences to copy in any case if they are open.
    """
    with memory.lock.soon() as held:
        if not held:
            return None
        report = memory.audit.current()
        pools = [group.pool.copy() for group in memory.group_memories]
        pinned = [[s.groups[group.index].owned for s in memory.pins.sequences] for group in memory.group_memories]
        open_now = memory.tables.sequences
        chosen = dict.fromkeys(sequence for sequence in wanted if sequence in open_now)
        chosen |= dict.fromkeys(heapq.nlargest(most_sequences, open_now, key=lambda s: s.num_tokens))
        sequences = tuple(map(_sequence, chosen))
        num_sequences = len(open_now)
        num_parked = tuple(len(group.parked) for group in memory.group_memories)
        parked = tuple(_latest(group.parked, most_parked) for group in memory.group_memories)
        swapped = tuple(memory.swapping.num_blocks)
    states = tuple(_states(pool, owned) for pool, owned in zip(pools, pinned, strict=True))
    region_blocks = tuple(group.region_blocks for group in memory.group_memories)
    return MemorySnapshot(report, states, swapped, num_sequences, sequences, num_parked, parked, region_blocks)


def _sequence(sequence: SequenceMemory) -> SequenceSnapshot:
    tables = tuple(
        TableSnapshot(
            table.owned,
            table.first,
            None if table.region is None else table.region.slot,
            0 if table.region is None else table.region.num_mapped,
        )
        for table in sequence.groups
    )
    return SequenceSnapshot(sequence, sequence.num_tokens, tables)


def _latest(parked: Collection[Region], most: int) -> tuple[tuple[int, int], ...]:
    """(slot, mapped places) of the regions parked last."""
    return tuple((region.slot, region.num_mapped) for region in list(parked)[max(len(parked) - most, 0) :])


def _states(pool: PoolCopy, pinned: list[list[int]]) -> StateArray:
    """The state of every block, the first one's first."""
    states = np.full(len(pool.references), BlockState.FREE, dtype=np.uint8)
    states[_ids(pool.unbacked)] = BlockState.UNBACKED
    end = int(states.nonzero()[0][-1]) + 1  # low ids have pages first: most lists end in blocks without
    begin = states[:end]
    begin[np.array(pool.region_mappings[:end], dtype=np.int32) > 0] = BlockState.PARKED
    begin[_ids(pool.indexed)] = BlockState.CACHED
    references = np.array(pool.references[:end], dtype=np.int32)
    begin[references == 1] = BlockState.ACTIVE
    begin[references > 1] = BlockState.SHARED
    for block_ids in pinned:
        begin[_ids(block_ids)] = BlockState.PINNED
    states[_ids(pool.moving)] = BlockState.MOVING
    return states[1:]


def _ids(block_ids: Collection[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(block_ids if isinstance(block_ids, list) else list(block_ids), dtype=np.int64)
