"""Kept prefixes: copies of cached prefixes in host memory, for the time after their memory has been given back.

    memory is given back ──> copies in host memory ──┬─> cached again, for a request that waits, or a pin
                                                     └─> the prefix store: what is not on disk yet

Copies take what swapped sequences leave of the swap space, and give it up for them, and for later copies of other
memories: the oldest first, of one `keep` the one worth least.
"""

from __future__ import annotations

import itertools
import logging
import math
import mmap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

from folio.vmem.errors import IntegrityError, MapError, OutOfPages, OutOfSwap, PinError
from folio.vmem.memory import KVMemory
from folio.vmem.prefix.prefix_summary import CachedPrefix
from folio.vmem.prefix.prefix_tree import PrefixNode
from folio.vmem.prefix.store.installer import FoundPrefix, IndexedPrefixes, Item
from folio.vmem.prefix.store.records import Records, stored_unit
from folio.vmem.prefix.store.segment import StoredUnit

logger = logging.getLogger(__name__)

# Units are copied, and given up, in pieces of so many bytes, but no more than this share of the swap space.
_COPY_BYTES, _COPY_SHARE = 8 << 20, 1 / 16
# Longest processor time of `keep`, and a piece: another model waits for the memory. On a busy machine it takes longer,
# as does the work that it saves. The sum of all sleeps is bounded by that work: a unit is copied once.
_MOST_S = 0.2

_Unit = tuple[PrefixNode, int]  # with a layer group
_Key = tuple[int, bytes]  # layer group and digest


@dataclass(frozen=True, slots=True)
class _KeptItem(Item):
    """A record in a copy, whose memory stays as long as the item."""

    record: memoryview


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """Copied units. `index`: of all copies of the memory."""

    num_bytes: int
    index: dict[_Key, _Kept]
    keys: list[_Key] = field(default_factory=list)

    def forget(self) -> None:
        for key in self.keys:
            del self.index[key]


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A unit's record."""

    unit: StoredUnit
    record: memoryview
    copy: _Copy


class KeptPrefixes(IndexedPrefixes):
    """Copies of one memory's cached prefixes. `record` is called by any thread, all else by the engine's.

    Args:
        is_worth: given bytes and tokens, whether copying these out and in takes less time than computing them.
        keeps: given the keys of a prefix, whether it may be kept.
    """

    def __init__(
        self,
        memory: KVMemory,
        records: Records,
        is_worth: Callable[[int, int], bool] = lambda num_bytes, num_tokens: True,
        keeps: Callable[[tuple[str, ...]], bool] = lambda keys: True,
    ) -> None:
        super().__init__(memory, records)
        self._is_worth, self._keeps = is_worth, keeps
        self._space = memory.swapping.space
        self._index: dict[_Key, _Kept] = {}

    def record(self, unit: StoredUnit) -> memoryview | None:
        """A unit's record, if it is kept."""
        kept = self._index.get((unit.group, unit.digest))
        return None if kept is None or kept.unit != unit else kept.record

    def read(self, prefix: FoundPrefix) -> None:
        """Its records are in memory."""
        prefix.is_done = True

    def part(self, prefix: FoundPrefix, item: Item) -> memoryview:
        assert isinstance(item, _KeptItem)
        return item.record

    def keep(self) -> None:
        """Copy cached prefixes in the order of `by_worth`, as far as there is room and time. No step may run."""
        with self._memory.lock:
            kept = (node for node in by_worth(self._memory) if self._keeps(node.keys))
            nodes = list(itertools.islice(kept, int(self._space.most_bytes // min(self._records.num_bytes))))
        sizes = (size for node in nodes for size, ids in zip(self._records.num_bytes, node.blocks, strict=True) if ids)
        if not nodes or not self._is_worth(sum(sizes), len(nodes) * self._memory.prefixes.unit_tokens):
            return
        began = time.thread_time()
        wanted: dict[_Copy, None] = {}  # the best first; not offered to others meanwhile
        try:
            for part in self._parts(nodes, wanted):
                wanted[self._copied(part)] = None
                if time.thread_time() - began > _MOST_S:
                    break
        except (OutOfSwap, MapError, OSError) as error:
            logger.debug("no more prefixes are kept: %s", error)
        finally:
            for copy in reversed(wanted):
                self._space.offer(copy)

    def pin(self, prefix: CachedPrefix) -> bool:
        """Pin a prefix whose copy is kept; false if it is not kept as a whole, or has no room."""
        memory, chain = self._memory, self._memory.prefixes.chain(prefix.keys)
        assert prefix.pin_name is not None
        token_ids = [*prefix.token_ids, 0]  # the last one is never cached
        found = self.find(chain, token_ids, math.inf)
        if found is not None and (self.pages_needed(found) > memory.num_free_pages or not self.install(found)):
            return False
        if memory.prefixes.match(chain, token_ids).num_tokens < len(prefix.token_ids):
            return False
        sequence = memory.create_sequence("block_table")
        try:
            memory.share_prefix(sequence, chain, token_ids)
            memory.pin(prefix.pin_name, sequence, len(prefix.token_ids))
        except (OutOfPages, MapError, PinError) as error:
            logger.info("the pin %r is computed again: %s", prefix.pin_name, error)
            return False
        finally:
            memory.free(sequence)
        return True

    def close(self) -> None:
        """Drop all copies."""
        for copy in self._copies():
            if self._space.withdraw(copy):
                copy.forget()
                self._space.give_back(copy.num_bytes)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless the copies take what the swap space counts, and no more than it has."""
        space, num_bytes = self._space, sum(copy.num_bytes for copy in self._copies())
        if num_bytes != space.kept_bytes or not num_bytes <= space.used_bytes <= space.most_bytes:
            raise IntegrityError(
                f"copies take {num_bytes} bytes; of {space.most_bytes} {space.used_bytes} are used, {space.kept_bytes} "
                "of these by copies"
            )

    def _has(self, g: int, digest: bytes) -> bool:
        return (g, digest) in self._index

    def _item(self, index: int, offset: int, unit: StoredUnit) -> _KeptItem | None:
        record = self.record(unit)
        return None if record is None else _KeptItem(index, unit.group, offset, record)

    def _copies(self) -> set[_Copy]:
        return {kept.copy for kept in list(self._index.values())}

    def _parts(self, nodes: Iterable[PrefixNode], wanted: dict[_Copy, None]) -> Iterator[list[_Unit]]:
        """Units to copy together. The copies that other units have already are added to `wanted`."""
        most_bytes = min(_COPY_BYTES, self._space.most_bytes * _COPY_SHARE)
        part: list[_Unit] = []
        num_bytes = 0
        for node, g in itertools.product(nodes, range(len(self._records.num_bytes))):
            kept = self._index.get((g, node.digest))
            if kept is not None and (kept.copy in wanted or self._space.withdraw(kept.copy)):
                wanted[kept.copy] = None
            elif node.blocks[g] is not None:
                part.append((node, g))
                num_bytes += self._records.num_bytes[g]
            if num_bytes >= most_bytes:
                yield part
                part, num_bytes = [], 0
        if part:
            yield part

    def _copied(self, part: Sequence[_Unit]) -> _Copy:
        """Copy units, as far as they are still cached. Raises `OutOfSwap`, `MapError`, `OSError`; then nothing is
        taken."""
        memory, sizes = self._memory, self._records.num_bytes
        copy = _Copy(sum(sizes[g] for _, g in part), self._index)
        self._space.take(copy.num_bytes)
        try:
            content = mmap.mmap(-1, copy.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # not in all systems; page faults would take longer than the copy
                content.madvise(mmap.MADV_HUGEPAGE)
            with memory.mapper.call():
                memory.mapper.wait_for_fence(memory.mapper.fence)  # a step may still write the blocks
                there = [(node, g, blocks) for node, g in part if (blocks := node.blocks[g]) is not None]
                for group in memory.group_memories:
                    mapped = [b for _, g, blocks in there if g == group.index for b in blocks]
                    memory.regions.map_homes(group, mapped)
                with memory.lock.unlocked():
                    self._fill(copy, memoryview(content), there)
        except BaseException:
            copy.forget()
            self._space.give_back(copy.num_bytes)
            raise
        return copy

    def _fill(self, copy: _Copy, content: memoryview, units: Sequence[tuple[PrefixNode, int, tuple[int, ...]]]) -> None:
        at = 0
        for node, g, block_ids in units:
            record = content[at : at + self._records.num_bytes[g]]
            at += len(record)
            self._records.copy_into(record, g, block_ids)
            self._index[g, node.digest] = _Kept(stored_unit(self._memory, node, g), record, copy)
            copy.keys.append((g, node.digest))


def by_worth(memory: KVMemory) -> Iterator[PrefixNode]:
    """Cached units, each after those before it: pinned ones, and then those to be evicted last. Without those that
    swapped sequences have, if these have all blocks of a unit. With the lock held."""
    groups = memory.group_memories
    pool = next((g for g in groups if g.spec.window_tokens is None and not g.spec.is_state), groups[0]).pool
    seen: set[PrefixNode | None] = {None}
    swapped = memory.swapping.digests if len(groups) == 1 else ()
    ends = [node for sequence in memory.pins.sequences for node in sequence.prefix.nodes[-1:]]
    ends += [cast(PrefixNode, pool.indexed_blocks[block_id]) for block_id in pool.cached.last_first()]
    for end in ends:
        path = []
        at: PrefixNode | None = end
        while at not in seen:
            assert at is not None
            path.append(at)
            seen.add(at)
            at = at.parent
        yield from (node for node in reversed(path) if node.parent is not None and node.digest not in swapped)
