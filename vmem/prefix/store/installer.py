"""Installer: records of units become cached blocks before their tokens would be computed."""

from __future__ import annotations

import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from folio.vmem.errors import MapError, OutOfPages
from folio.vmem.memory import KVMemory
from folio.vmem.prefix.prefix_tree import PrefixCursor, PrefixNode
from folio.vmem.prefix.store.records import Records
from folio.vmem.prefix.store.segment import StoredUnit
from folio.vmem.prefix.token_chain import TokenChain
from folio.vmem.sequence import GroupTable, SequenceMemory


@dataclass(frozen=True, slots=True)
class Item:
    """A record: of which unit of the chain, of which layer group, and where in the buffer."""

    index: int
    group: int
    offset: int


@dataclass(eq=False)
class FoundPrefix:
    """A part of a prompt's prefix that is not cached here, but on disk or in another process.

    Attributes:
        first_units: units before it, which were cached when it was found.
        num_units: units up to its end; once it is read, up to the first that was not intact.
        is_intact: nothing that was read was damaged.
        num_bytes: of its records.
        items: its records, in order.
        seconds: that reading took.
        is_done: reading has ended.
        is_cancelled: set to end reading early.
        is_awaited: it is fetched before its request comes, which now has.
    """

    chain: TokenChain
    first_units: int
    num_units: int
    num_bytes: int
    items: Sequence[Item]
    seconds: float = 0.0
    is_intact: bool = True
    is_done: bool = False
    is_cancelled: bool = False
    is_awaited: bool = False
    buffer: mmap.mmap | None = field(default=None, repr=False)


class PrefixInstaller:
    """Installs prefixes that have been read. Called by the engine's thread.

    Attributes:
        reads_all_units: no layer reads only a window or a state, so that every part of a prefix can be used.
        unit_bytes: of a unit's records that a prompt reads at any later token.
    """

    def __init__(self, memory: KVMemory, records: Records) -> None:
        self._memory, self._records = memory, records
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
        self.reads_all_units = len(self._whole) == len(self._read_units)
        self.unit_bytes = max(sum(records.num_bytes[g] for g in self._whole), 1)

    def needed(self, num_units: int, first_units: int) -> Iterator[tuple[int, int]]:
        """(unit, layer group) without which a prompt cannot continue after so many units, the first ones cached."""
        for i in range(num_units if num_units > first_units else 0):
            for g, read_units in enumerate(self._read_units):
                if i >= (first_units if read_units is None else num_units - read_units):
                    yield i, g

    def units_after(self, num_units: int, first_units: int, num_records: int) -> int:
        """The units that a prompt can continue after, if of the records that `num_units` need there are the first so
        many."""
        needed = list(self.needed(num_units, first_units))
        if num_records == len(needed):
            return num_units
        return needed[num_records][0] if self.reads_all_units else first_units

    def pages_needed(self, prefix: FoundPrefix) -> int:
        """Pages that installing takes at most."""
        groups = self._memory.group_memories
        return sum(self._records.num_blocks[item.group] * groups[item.group].num_slices for item in prefix.items)

    def install(self, prefix: FoundPrefix) -> bool:
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

    def _install_group(self, g: int, prefix: FoundPrefix, path: PrefixCursor) -> None:
        memory, group, count = self._memory, self._memory.group_memories[g], self._records.num_blocks[g]
        items = [item for item in prefix.items if item.group == g and item.index < len(path.nodes)]
        nodes = [path.nodes[item.index] for item in items]
        missing = [
            (item, node)
            for item, node in zip(items, nodes, strict=True)
            if node.blocks[g] is None and node.writer is None
        ]
        if not missing:
            return
        block_ids = memory.allocator.allocate(group, count * len(missing), at_home=True)
        try:
            memory.regions.map_homes(group, block_ids)
            memory.mapper.wait_for_fence(memory.mapper.fence)  # a step may still read what the blocks held
            with memory.lock.unlocked():
                for i, (item, _) in enumerate(missing):
                    self._copy_in(prefix, item, block_ids[i * count : (i + 1) * count])
                end = self._intact_end(prefix)
            for i, (item, node) in enumerate(missing):
                if item.offset < end:
                    memory.tree.index_blocks(node, g, tuple(block_ids[i * count : (i + 1) * count]))
        finally:
            memory.allocator.free(group, block_ids[::-1])  # cached from now on, the end to be evicted first

    def cancel(self, prefix: FoundPrefix) -> None:
        """End reading early; what has been read is not installed."""
        prefix.is_cancelled = True

    def _copy_in(self, prefix: FoundPrefix, item: Item, block_ids: Sequence[int]) -> None:
        self._records.copy_in(item.group, self.part(prefix, item), block_ids)

    def _intact_end(self, prefix: FoundPrefix) -> float:
        """The offset from which on the records that have been copied are not to be installed."""
        return math.inf

    def part(self, prefix: FoundPrefix, item: Item) -> memoryview:
        """The record's place in the buffer."""
        assert prefix.buffer is not None
        return memoryview(prefix.buffer)[item.offset : item.offset + self._records.num_bytes[item.group]]


class IndexedPrefixes(PrefixInstaller, ABC):
    """Prefixes whose units are found by their digests."""

    def find(self, chain: TokenChain, token_ids: Sequence[int], most_bytes: float) -> FoundPrefix | None:
        """What is known after the cached prefix of these tokens, about `most_bytes` at most; `None` if there is
        nothing, or another sequence computes it. Extends the chain."""
        chain.extend(token_ids)
        limit = (len(token_ids) - 1) // chain.unit_tokens
        deciding = self._whole[0] if self._whole else 0
        if not any(self._has(deciding, digest) for digest in chain.digests[:limit]):
            return None
        match = self._memory.prefixes.match(chain, token_ids)
        if match.is_being_computed:
            return None
        first = end = len(match.nodes)
        limit = int(min(limit, first + max(most_bytes // self.unit_bytes, 1)))
        while end < limit and all(self._has(g, chain.digests[end]) for g in self._whole):
            end += 1
        for num_units in range(end, first, -1):  # windows and states must be there, too
            if items := self._items(chain, match.nodes, num_units):
                num_bytes = items[-1].offset + self._records.num_bytes[items[-1].group]
                return FoundPrefix(chain, first, num_units, num_bytes, items)
        return None

    @abstractmethod
    def _has(self, g: int, digest: bytes) -> bool:
        """Whether a unit's record may be there."""

    @abstractmethod
    def _item(self, index: int, offset: int, unit: StoredUnit) -> Item | None:
        """The unit's record, if it is there."""

    def _items(self, chain: TokenChain, cached: Sequence[PrefixNode], num_units: int) -> list[Item]:
        """Records without which a prompt cannot continue after so many units; none if one of them is not there."""
        items: list[Item] = []
        offset = 0
        for i, g in self.needed(num_units, len(cached)):
            if i < len(cached) and cached[i].blocks[g] is not None:
                continue
            parent = chain.digests[i - 1] if i else chain.root
            item = self._item(i, offset, StoredUnit(g, chain.root, parent, chain.digests[i], chain.units[i]))
            if item is None:
                return []
            items.append(item)
            offset += self._records.num_bytes[g]
        return items
