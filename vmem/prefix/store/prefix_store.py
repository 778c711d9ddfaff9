"""Prefix store: cached prefixes on disk, which outlive the process.

    a sequence ends ──> its units are written behind ──> segment files ──> read ahead ──> a request that waits

One thread reads and writes, so that no file is closed while it is read. Reads go first. While sequences are open,
writing takes a small share of a processor, and units that are evicted before their turn are dropped. Nothing waits for
the thread but requests whose prefix it reads.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from folio.vmem.memory import KVMemory
from folio.vmem.prefix.prefix_tree import PrefixNode
from folio.vmem.prefix.store.block_store import BlockStore, StoreCounts
from folio.vmem.prefix.store.installer import FoundPrefix
from folio.vmem.prefix.store.kept_prefixes import KeptPrefixes
from folio.vmem.prefix.store.records import Records
from folio.vmem.prefix.store.stored_prefixes import StoredPrefixes
from folio.vmem.prefix.store.write_behind import WriteBehind

logger = logging.getLogger(__name__)

# Longest time of `flush`: Serve ends the replicas of a server that is stopped within 4 s.
_FLUSH_S = 2.0


class PrefixStore:
    """The store of one memory. Called by the engine's thread.

    Args:
        folder: of the files; engines may share it.
        most_bytes: of all files in it.
        fingerprint: 16 bytes; of all that gives the content of blocks its meaning.
        keeps: given the keys of a prefix, whether it may be stored.
        kept: prefixes that stay in host memory after the memory has been given back, and are written from there.

    Attributes:
        prefixes: finds and installs stored prefixes.

    Raises:
        OSError: the folder cannot be used.
        VmemError: the limit is too low.
    """

    def __init__(
        self,
        memory: KVMemory,
        folder: Path,
        most_bytes: int,
        fingerprint: bytes,
        keeps: Callable[[tuple[str, ...]], bool] = lambda keys: True,
        kept: KeptPrefixes | None = None,
    ) -> None:
        records = Records(memory)
        self._memory = memory
        self._store = BlockStore(folder, most_bytes, fingerprint, records.num_bytes, 4 * memory.prefixes.unit_tokens)
        self._writer = WriteBehind(memory, self._store, records, keeps, kept)
        self.prefixes = StoredPrefixes(memory, self._store, records)
        self._reads: deque[FoundPrefix] = deque()
        self._is_working = self._is_stopping = False
        self._wake, self._flushed = threading.Event(), threading.Event()
        self._flushed.set()
        self._thread = threading.Thread(target=self._run, name="folio-store", daemon=True)
        self._thread.start()
        memory.prefixes.on_release = self._note_ended

    @property
    def counts(self) -> StoreCounts:
        """From any thread."""
        return self._store.counts

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits to be read or written. From any thread."""
        is_busy = self._reads or self._writer.has_work or self._wake.is_set() or self._is_working
        return not (is_busy and self._thread.is_alive())

    def read(self, prefix: FoundPrefix) -> None:
        """Read a prefix; the memory's lock is notified when it is done."""
        self._reads.append(prefix)
        self._wake.set()
        if not self._thread.is_alive():
            self._give_up_reads()

    def flush(self) -> None:
        """Write what is due: the units with the most hits, then those of the latest sequences. Takes two seconds at
        most. From any thread."""
        self._flushed.clear()
        self._wake.set()
        if self._thread.is_alive():
            self._flushed.wait(_FLUSH_S)

    def close(self) -> None:
        """End the thread, and leave the files to others. What is not written is lost: `flush` first."""
        self._memory.prefixes.on_release = None
        self._is_stopping = True
        self._wake.set()
        self._thread.join()
        self._store.close()

    def _note_ended(self, node: PrefixNode) -> None:
        self._writer.note_ended(node)
        self._wake.set()

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._wake.wait(self._writer.wait_s())
                self._is_working = True
                self._wake.clear()
                while self._reads:
                    self.prefixes.read(self._reads[0])
                    self._reads.popleft()
                if not self._flushed.is_set():
                    self._writer.flush(_FLUSH_S)
                    self._flushed.set()
                self._writer.write_next()
                self._is_working = False
        except BaseException:
            logger.exception("the prefix store's thread has died: nothing is written to disk or read from now on")
            self._memory.prefixes.on_release = None
        finally:
            self._is_working = False
            self._give_up_reads()

    def _give_up_reads(self) -> None:
        while self._reads:
            prefix = self._reads.popleft()
            prefix.num_units, prefix.is_intact, prefix.is_done = prefix.first_units, False, True
