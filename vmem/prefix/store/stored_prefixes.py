"""Stored prefixes: the part of a prompt's prefix that is on disk."""

from __future__ import annotations

import mmap
import time
from contextlib import suppress
from dataclasses import dataclass

from folio.vmem.memory import KVMemory
from folio.vmem.prefix.store.block_store import BlockStore, Place
from folio.vmem.prefix.store.installer import FoundPrefix, IndexedPrefixes, Item
from folio.vmem.prefix.store.records import Records
from folio.vmem.prefix.store.segment import StoredUnit


@dataclass(frozen=True, slots=True)
class _StoredItem(Item):
    """A record on disk."""

    place: Place
    unit: StoredUnit


class StoredPrefixes(IndexedPrefixes):
    """Finds, reads and installs stored prefixes. `read` is called by the store's thread, all else by the engine's."""

    def __init__(self, memory: KVMemory, store: BlockStore, records: Records) -> None:
        super().__init__(memory, records)
        self._store = store

    def _has(self, g: int, digest: bytes) -> bool:
        return self._store.find(g, digest) is not None

    def _item(self, index: int, offset: int, unit: StoredUnit) -> _StoredItem | None:
        place = self._store.find(unit.group, unit.digest)
        return None if place is None else _StoredItem(index, unit.group, offset, place, unit)

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
