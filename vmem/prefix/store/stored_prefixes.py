"""Stored prefixes: the part of a prompt's prefix that is on disk."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from folio.vmem.memory import KVMemory
from folio.vmem.prefix.prefix_tree import PrefixNode
from folio.vmem.prefix.store.block_store import BlockStore, Place
from folio.vmem.prefix.store.installer import FoundPrefix, Item, PrefixInstaller
from folio.vmem.prefix.store.records import Records
from folio.vmem.prefix.store.segment import StoredUnit
from folio.vmem.prefix.token_chain import TokenChain


@dataclass(frozen=True, slots=True)
class _StoredItem(Item):
    """A record on disk."""

    place: Place
    unit: StoredUnit


class StoredPrefixes(PrefixInstaller):
    """Finds, reads and installs stored prefixes. `read` is called by the store's thread, all else by the engine's."""

    def __init__(self, memory: KVMemory, store: BlockStore, records: Records) -> None:
        super().__init__(memory, records)
        self._store = store

    def find(self, chain: TokenChain, token_ids: Sequence[int], most_bytes: int) -> FoundPrefix | None:
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
        limit = min(limit, first + max(most_bytes // self._unit_bytes, 1))
        while end < limit and all(self._store.find(g, chain.digests[end]) for g in self._whole):
            end += 1
        for num_units in range(end, first, -1):  # windows and states must be there, too
            if items := self._items(chain, match.nodes, num_units):
                num_bytes = items[-1].offset + self._records.num_bytes[items[-1].group]
                return FoundPrefix(chain, first, num_units, num_bytes, items)
        return None

    def _items(self, chain: TokenChain, cached: Sequence[PrefixNode], num_units: int) -> list[_StoredItem]:
        """Records without which a prompt cannot continue after so many units; none if one of them is not on disk."""
        items: list[_StoredItem] = []
        offset = 0
        for i, g in self.needed(num_units, len(cached)):
            if i < len(cached) and cached[i].blocks[g] is not None:
                continue
            if (place := self._store.find(g, chain.digests[i])) is None:
                return []
            parent = chain.digests[i - 1] if i else chain.root
            unit = StoredUnit(g, chain.root, parent, chain.digests[i], chain.units[i])
            items.append(_StoredItem(i, g, offset, place, unit))
            offset += self._records.num_bytes[g]
        return items

    def read(self, prefix: FoundPrefix) -> None:
        """Read and verify the records, in order, up to the first that is not intact."""
        began = time.perf_counter()
        with suppress(OSError):  # too little host memory: nothing is read
            prefix.buffer = mmap.mmap(-1, prefix.num_bytes)
        for item in prefix.items:
            assert isinstance(item, _StoredItem)
            if (
                prefix.buffer is None
                or prefix.is_cancelled
                or not self._store.read(item.place, item.unit, self.part(prefix, item))
            ):
                prefix.num_units, prefix.is_intact = item.index, False
                break
        prefix.seconds = time.perf_counter() - began
        prefix.is_done = True
        with self._memory.lock:
            self._memory.lock.notify_all()
