"""Stored prefixes: the part of a prompt's prefix that is on disk becomes cached blocks before it would be computed."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from folio.vmem.errors import MapError, OutOfPages
from folio.vmem.memory import KVMemory
from folio.vmem.prefix.prefix_tree import PrefixCursor, PrefixNode
from folio.vmem.prefix.store.block_store import BlockStore, Place
from folio.vmem.prefix.store.records import Records
from folio.vmem.prefix.store.segment import StoredUnit
from folio.vmem.prefix.token_chain import TokenChain
from folio.vmem.sequence import GroupTable, SequenceMemory


@dataclass(frozen=True, slots=True)
class _Item:
    """A record to read. `index`: of its unit in the chain; `offset`: in the buffer."""

    index: int
    offset: int
    place: Place
    unit: StoredUnit


@dataclass(eq=False)
class StoredPrefix:
    """A part of a prompt's prefix, on disk.

    Attributes:
        first_units: units before it, which were cached when it was found.
        num_units: units up to its end; once it is read, up to the first that was not intact.
        is_intact: nothing that was read was damaged.
        num_bytes: of its records.
        seconds: that reading took.
        is_done: reading has ended.
        is_cancelled: set to end reading early.
    """

    chain: TokenChain
    first_units: int
    num_units: int
    num_bytes: int
    items: Sequence[_Item]
    seconds: float = 0.0
    is_intact: bool = True
    is_done: bool = False
    is_cancelled: bool = False
    buffer: mmap.mmap | None = field(default=None, repr=False)


class StoredPrefixes:
    """Finds, reads and installs stored prefixes. `read` is called by the store's thread, all else by the engine's."""

    def __init__(self, memory: KVMemory, store: BlockStore, records: Records) -> None:
        self._memory, self._store, self._records = memory, store, records
        unit_tokens = memory.prefixes.unit_tokens
        # Of each layer group, the units before a prompt's next token that it reads; `None`: all.
        self._read_units: list[int | None] = [
            1
            if group.is_state
            else None
            if group.window_tokens is None
            else -(-(group.window_tokens - 1) // unit_tokens)
            for group in memory.groups
        ]
        self._whole = [g for g, units in enumerate(self._read_units) if units is None]

    def find(self, chain: TokenChain, token_ids: Sequence[int], most_bytes: int) -> StoredPrefix | None:
        """What is on disk after the cached prefix of these tokens, about `most_bytes` at most; `None` if there is
        nothing, or another sequence computes it. Extends the chain."""
        chain.extend(token_ids)
        limit = (len(token_ids) - 1) // chain.unit_tokens
        deciding = self._whole[0] if self._whole else 0
        if not any(self._store.find(deciding, digest) for digest in chain.digests[:limit]):
            return None
        match = self._memory.prefixes.match(chain, token_ids)
        if match.is_being_computed:
            return None
        first = end = len(match.nodes)
        unit_bytes = max(sum(self._records.num_bytes[g] for g in self._whole), 1)
        limit = min(limit, first + max(most_bytes // unit_bytes, 1))
        while end < limit and all(self._store.find(g, chain.digests[end]) for g in self._whole):
            end += 1
        for num_units in range(end, first, -1):  # windows and states must be there, too
            if items := self._items(chain, match.nodes, num_units):
                num_bytes = items[-1].offset + self._records.num_bytes[items[-1].unit.group]
                return StoredPrefix(chain, first, num_units, num_bytes, items)
        return None

    def _items(self, chain: TokenChain, cached: Sequence[PrefixNode], num_units: int) -> list[_Item]:
        """Records without which a prompt cannot continue after so many units; none if one of them is not on disk."""
        items: list[_Item] = []
        offset = 0
        for i in range(num_units):
            for g, read_units in enumerate(self._read_units):
                if i < len(cached) and cached[i].blocks[g] is not None:
                    continue
                if i < (len(cached) if read_units is None else num_units - read_units):
                    continue
                if (place := self._store.find(g, chain.digests[i])) is None:
                    return []
                parent = chain.digests[i - 1] if i else chain.root
                unit = StoredUnit(g, chain.root, parent, chain.digests[i], chain.units[i])
                items.append(_Item(i, offset, place, unit))
                offset += self._records.num_bytes[g]
        return items

    def read(self, prefix: StoredPrefix) -> None:
        """Read and verify the records, in order, up to the first that is not intact."""
        began = time.perf_counter()
        with suppress(OSError):  # too little host memory: nothing is read
            prefix.buffer = mmap.mmap(-1, prefix.num_bytes)
        for item in prefix.items:
            if (
                prefix.buffer is None
                or prefix.is_cancelled
                or not self._store.read(item.place, item.unit, self._part(prefix, item))
            ):
                prefix.num_units, prefix.is_intact = item.index, False
                break
        prefix.seconds = time.perf_counter() - began
        prefix.is_done = True
        with self._memory.lock:
            self._memory.lock.notify_all()

    def pages_needed(self, prefix: StoredPrefix) -> int:
        """Pages that installing takes at most."""
        groups = self._memory.group_memories
        return sum(
            self._records.num_blocks[item.unit.group] * groups[item.unit.group].num_slices for item in prefix.items
        )

    def install(self, prefix: StoredPrefix) -> bool:
        """Make what was read cached blocks, unless it is cached or computed meanwhile. False if pages were missing, or
        the device refused to map them."""
        memory = self._memory
        path = PrefixCursor(prefix.chain)
        owner = SequenceMemory("block_table", tuple(GroupTable() for _ in memory.groups), prefix=path)
        with memory.mapper.call():
            memory.tree.extend_cursor(path, prefix.num_units)
            path.computed = len(path.nodes)
            try:
                for g in range(len(memory.groups)):
                    self._install_group(g, prefix, path)
                memory.mapper.set_fence()
            except (OutOfPages, MapError):
                return False
            finally:
                memory.prefixes.release_prefix(owner)
        return True

    def _install_group(self, g: int, prefix: StoredPrefix, path: PrefixCursor) -> None:
        memory, group, count = self._memory, self._memory.group_memories[g], self._records.num_blocks[g]
        items = [item for item in prefix.items if item.unit.group == g and item.index < len(path.nodes)]
        nodes = [path.nodes[item.index] for item in items]
        missing = [
            (item, node)
            for item, node in zip(items, nodes, strict=True)
            if node.blocks[g] is None and node.writer is None
        ]
        block_ids = memory.allocator.allocate(group, count * len(missing), at_home=True)
        try:
            memory.regions.map_homes(group, block_ids)
            memory.mapper.wait_for_fence(memory.mapper.fence)  # a step may still read what the blocks held
            with memory.lock.unlocked():
                for i, (item, _) in enumerate(missing):
                    self._records.copy_in(g, self._part(prefix, item), block_ids[i * count : (i + 1) * count])
            for i, (_, node) in enumerate(missing):
                memory.tree.index_blocks(node, g, tuple(block_ids[i * count : (i + 1) * count]))
        finally:
            memory.allocator.free(group, block_ids[::-1])  # cached from now on, the end to be evicted first

    def _part(self, prefix: StoredPrefix, item: _Item) -> memoryview:
        """The record's place in the buffer."""
        assert prefix.buffer is not None
        return memoryview(prefix.buffer)[item.offset : item.offset + self._records.num_bytes[item.unit.group]]
