"""Read ahead: prefixes of waiting requests are copied from host memory, read from disk, or fetched from the process
that has begun the request, where that takes less time than computing them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from folio.app.engine.request.request import Request
from folio.app.engine.schedule.preemption import PreemptionCostModel, ReadFrom
from folio.vmem.prefix.store.handover import PrefixReceiver
from folio.vmem.prefix.store.installer import FoundPrefix, PrefixInstaller
from folio.vmem.prefix.store.kept_prefixes import KeptPrefixes
from folio.vmem.prefix.store.prefix_store import PrefixStore

# Bytes that are read from disk for a request before they are installed, and those that are read for all requests but
# the queue's head: both bound the host memory that read prefixes take.
_PART_BYTES, _MOST_BYTES = 64 << 20, 256 << 20
# The queue's head waits for a part as long as computing it would take, or at least so long, and at most so long for all
# parts: a head that does not begin for some seconds more fails (`step_loop`).
_LEAST_WAIT_S, _MOST_WAIT_S = 0.1, 3.0


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a request's prefix may come from. `start`: begins to read a found prefix."""

    name: ReadFrom
    find: Callable[[], FoundPrefix | None]
    start: Callable[[FoundPrefix], None]
    installer: PrefixInstaller


@dataclass(frozen=True, slots=True)
class _Read:
    source: _Source
    prefix: FoundPrefix
    began: float
    wait_s: float


class ReadAhead:
    """Reads of waiting requests' prefixes, part by part, each continued when the last part is installed.

    Args:
        kept: prefixes in host memory; `None`: none are kept.
        store: of the memory's prefixes; `None`: there is none.
        receiver: of prefixes from other processes; `None`: these are computed.
        recovery: measures reads, and compares them with computing.
    """

    def __init__(
        self,
        kept: KeptPrefixes | None,
        store: PrefixStore | None,
        receiver: PrefixReceiver | None,
        recovery: PreemptionCostModel,
    ) -> None:
        self._kept = kept
        self._store, self._receiver, self._recovery = store, receiver, recovery
        self._reads: dict[Request, _Read] = {}
        self._head: tuple[Request | None, float] = None, 0.0  # the queue's head, and since when

    def __contains__(self, request: Request) -> bool:
        return request in self._reads

    def begin(self, request: Request, is_head: bool = False, least_units: int = 0) -> None:
        """Begin to read a waiting request's prefix, if that is worth it and not too much is being read.

        Args:
            is_head: of the queue.
            least_units: only what comes after so many cached units.
        """
        for ended in [other for other in self._reads if not other.sequences]:
            read = self._reads.pop(ended)
            read.source.installer.cancel(read.prefix)
        sequence = request.sequences[0]
        num_bytes = sum(read.prefix.num_bytes for read in self._reads.values())
        if request in self._reads or (num_bytes >= _MOST_BYTES and not is_head) or sequence.reads_whole_prompt:
            return
        found = ((source, prefix) for source in self._sources(request) if (prefix := source.find()) is not None)
        source, prefix = next(found, (None, None))
        if source is None or prefix is None or prefix.first_units < least_units:
            return
        compute_s = self._compute_s(prefix)
        if self._recovery.read_s(source.name, prefix.num_bytes) <= compute_s:
            source.start(prefix)
            wait_s = max(compute_s or _MOST_WAIT_S, _LEAST_WAIT_S)
            self._reads[request] = _Read(source, prefix, time.perf_counter(), wait_s)

    def _compute_s(self, prefix: FoundPrefix) -> float:
        """The time to compute a prefix; of one that was fetched before its request came, most has come."""
        if prefix.is_awaited:
            return math.inf
        unit_tokens = prefix.chain.unit_tokens
        num_before = prefix.first_units * unit_tokens
        return self._recovery.compute_s(prefix.num_units * unit_tokens - num_before, num_before)

    def is_awaited(self, request: Request, fits: Callable[[int], bool]) -> bool:
        """Whether the queue's head should wait for its prefix. Installs what has been read.

        Args:
            fits: whether so many pages are free.
        """
        now = time.perf_counter()
        if request is not self._head[0]:
            self._head = request, now
            self.begin(request, is_head=True)
        if (read := self._reads.get(request)) is None:
            return False
        head_since, prefix = self._head[1], read.prefix
        latest = min(max(read.began, head_since) + read.wait_s, head_since + _MOST_WAIT_S)
        is_late = now > latest and read.source.name != "memory"  # there it waits for pages only
        if not prefix.is_done:
            if not is_late:
                return True
            del self._reads[request]
            read.source.installer.cancel(prefix)
            self._recovery.observe_read(read.source.name, prefix.num_bytes, now - read.began)
            return False
        if not fits(read.source.installer.pages_needed(prefix)):
            return True
        del self._reads[request]
        if read.source.name in ("process", "machine"):
            request.held_at = ""  # it has been asked
        if self._install(read) and not is_late:
            self.begin(request, is_head=True, least_units=prefix.num_units)
        return request in self._reads

    def _sources(self, request: Request) -> Iterator[_Source]:
        """Where the prefix may be, the quickest first."""
        chain, token_ids = request.sequences[0].chain, request.sequences[0].token_ids
        if (kept := self._kept) is not None:
            yield _Source("memory", partial(kept.find, chain, token_ids, _PART_BYTES), kept.read, kept)
        if (receiver := self._receiver) is not None and request.held_at:
            read = partial(receiver.read, address=request.held_at)
            name: ReadFrom = "machine" if receiver.is_remote(request.held_at) else "process"
            yield _Source(name, partial(receiver.find, chain, token_ids), read, receiver)
        elif self._store is not None:
            prefixes = self._store.prefixes
            yield _Source("disk", partial(prefixes.find, chain, token_ids, _PART_BYTES), self._store.read, prefixes)

    def _install(self, read: _Read) -> bool:
        """Install what was read; whether all of it was intact, and is cached."""
        began, prefix = time.perf_counter(), read.prefix
        if prefix.num_units == prefix.first_units or not read.source.installer.install(prefix):
            return False
        if not prefix.is_awaited:  # else most of the time was the giver's, for computing
            seconds = prefix.seconds + time.perf_counter() - began
            self._recovery.observe_read(read.source.name, prefix.num_bytes, seconds)
        return prefix.is_intact
