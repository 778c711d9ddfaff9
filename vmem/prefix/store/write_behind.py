"""Write behind: which units are written to disk, and when.

What is written is chosen when sequences end, and not when blocks are evicted: eviction is on the way of a step's
allocation, while nearly all units stay in the cache for longer than it takes to write them. From time to time the
units with the most hits are looked through, for those that are not on disk, or no longer.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from itertools import islice

from folio.vmem.errors import MapError
from folio.vmem.memory import KVMemory
from folio.vmem.prefix.prefix_tree import PrefixNode
from folio.vmem.prefix.store.block_store import BlockStore
from folio.vmem.prefix.store.kept_prefixes import KeptPrefixes
from folio.vmem.prefix.store.records import Records, stored_unit
from folio.vmem.prefix.store.segment import StoredUnit

logger = logging.getLogger(__name__)

# Share of one core's time that writing takes while sequences are open: where the CPU computes, what steps lose at most;
# beside a GPU other cores are free.
_BUSY_SHARE, _BUSY_SHARE_BESIDE_GPU = 0.01, 0.25
# Prefixes that wait to be written.
_MOST_ENDED = 1024
# The prefixes with the most hits are looked through in this period; most units of them.
_HOT_PERIOD_S, _MOST_HOT_UNITS = 10.0, 4096
# After an error of the disk nothing is written for this long.
_REST_S = 60.0
# Poll interval of a step that may still write what is to be copied.
_POLL_S = 0.002


class WriteBehind:
    """Writes cached units, each prefix from its beginning. Called by the store's thread; `note_ended` with the memory's
    lock held, by any.

    Args:
        kept: has units that are no longer cached; `None`: these are dropped.
        keeps: given the keys of a prefix, whether it may be stored.
    """

    def __init__(
        self,
        memory: KVMemory,
        store: BlockStore,
        records: Records,
        keeps: Callable[[tuple[str, ...]], bool],
        kept: KeptPrefixes | None,
    ) -> None:
        self._kept = kept
        self._memory, self._store, self._records, self._keeps = memory, store, records, keeps
        self._ended: deque[tuple[PrefixNode, int]] = deque()  # with the fence of the last step that may have written it
        self._due: deque[tuple[PrefixNode, int]] = deque()  # (unit, layer group)
        self._share = _BUSY_SHARE if records.on_host else _BUSY_SHARE_BESIDE_GPU
        self._next_at = 0.0
        self._hot_at = time.monotonic() + _HOT_PERIOD_S

    @property
    def has_work(self) -> bool:
        return bool(self._due or self._ended)

    def note_ended(self, node: PrefixNode) -> None:
        """Note that a sequence has ended whose last cached unit is this one."""
        if self._keeps(node.keys):
            self._ended.append((node, self._memory.mapper.fence))

    def wait_s(self) -> float:
        """Seconds until `write_next` has something to do, as far as it is known."""
        return max((self._next_at if self.has_work else self._hot_at) - time.monotonic(), 0.0)

    def write_next(self) -> None:
        """Write a unit, if it is time and there is one."""
        now = time.monotonic()
        if now >= self._hot_at:
            self._note_hot()
        while len(self._ended) > _MOST_ENDED:
            self._store.counts.dropped += len(self._missing(self._ended.popleft()[0]))
        if now < self._next_at:
            return
        began = time.thread_time()
        try:
            while not self._due and self._ended:
                if not self._memory.backend.completed(self._ended[0][1]):
                    self._next_at = now + _POLL_S
                    return
                self._due.extend(self._missing(self._ended.popleft()[0]))
            if self._due:
                self._write(*self._due.popleft())
        except (OSError, MapError) as error:
            logger.warning("cached prefixes are not written to disk for %.0f s: %s", _REST_S, error)
            self._store.counts.dropped += 1 + len(self._due)
            self._due.clear()
            self._next_at = now + _REST_S
            return
        if self._memory.tables.sequences:
            self._next_at = time.monotonic() + (time.thread_time() - began) * (1 / self._share - 1)

    def flush(self, longest_s: float) -> None:
        """Write what is due while there is time: the units with the most hits, then those of the latest sequences."""
        deadline, self._next_at = time.monotonic() + longest_s, 0.0
        self._note_hot()
        with self._memory.lock:  # sequences may end
            self._ended = deque(islice(reversed(self._ended), _MOST_ENDED))
        while self.has_work and time.monotonic() + self.wait_s() < deadline:
            time.sleep(self.wait_s())
            self.write_next()

    def _note_hot(self) -> None:
        self._hot_at = time.monotonic() + _HOT_PERIOD_S
        with self._memory.lock:
            for node in self._memory.tree.hot_nodes(_MOST_HOT_UNITS):
                self.note_ended(node)

    def _missing(self, node: PrefixNode) -> list[tuple[PrefixNode, int]]:
        """Cached units of the prefix that ends with this one and are not on disk, in order."""
        found: list[tuple[PrefixNode, int]] = []
        at: PrefixNode | None = node
        while at is not None and at.parent is not None:
            new = [(at, g) for g in range(len(at.blocks)) if self._store.find(g, at.digest) is None]
            there = [(unit, g) for unit, g in new if unit.blocks[g] is not None or self._is_kept(unit, g)]
            found += there
            # Of some layer groups most units are never cached to their end: windows, states.
            self._store.counts.dropped += len(new) == len(at.blocks) and not there
            at = at.parent
        return found[::-1]

    def _write(self, node: PrefixNode, g: int) -> None:
        """Write a unit. Raises `OSError`, and `MapError` if its blocks cannot be mapped to be copied."""
        if self._store.find(g, node.digest) is not None:
            return
        unit = stored_unit(self._memory, node, g)
        record = self._kept_record(unit) or self._copied(node, g)
        if record is not None:
            self._store.write(unit, record)

    def _is_kept(self, node: PrefixNode, g: int) -> bool:
        return self._kept is not None and self._kept_record(stored_unit(self._memory, node, g)) is not None

    def _kept_record(self, unit: StoredUnit) -> memoryview | None:
        return None if self._kept is None else self._kept.record(unit)

    def _copied(self, node: PrefixNode, g: int) -> memoryview | None:
        """The content of a unit's blocks, unless they have been evicted."""
        memory = self._memory
        with memory.lock.exclusive():  # nothing is evicted until the blocks are copied
            block_ids = node.blocks[g]
            if block_ids is None or node.pending:
                self._store.counts.dropped += block_ids is None
                return None
            memory.regions.map_homes(memory.group_memories[g], block_ids)
            with memory.lock.unlocked():
                record = self._records.copy_out(g, block_ids)
        return record()
