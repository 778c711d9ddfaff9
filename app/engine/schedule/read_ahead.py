"""Read ahead: prefixes of waiting requests are read from disk where that takes less time than computing them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from folio.app.engine.request.request import Request
from folio.app.engine.schedule.preemption import PreemptionCostModel
from folio.vmem.prefix.store.prefix_store import PrefixStore
from folio.vmem.prefix.store.stored_prefixes import StoredPrefix

# Bytes that are read for a request before they are installed, and requests for which that is done at once: both bound
# the host memory that read prefixes take.
_PART_BYTES, _MOST_READS = 64 << 20, 4
# A request waits for a part at most so long, and no longer than computing the part takes if that is in between.
_LEAST_WAIT_S, _MOST_WAIT_S = 0.1, 3.0


@dataclass(frozen=True, slots=True)
class _Read:
    prefix: StoredPrefix
    began: float
    deadline: float


class ReadAhead:
    """Reads of waiting requests' prefixes, part by part, each continued when the last part is installed.

    Args:
        store: of the memory's prefixes.
        recovery: measures reads, and compares them with computing.
        clock: the current time in seconds.
    """

    def __init__(
        self,
        store: PrefixStore,
        recovery: PreemptionCostModel,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._store, self._recovery, self._clock = store, recovery, clock
        self._reads: dict[Request, _Read] = {}
        self._looked_up: Request | None = None  # the latest head of the queue of which there is nothing (more) to read

    def __contains__(self, request: Request) -> bool:
        return request in self._reads

    def begin(self, request: Request) -> None:
        """Begin to read a waiting request's prefix, if that is worth it and not too many are being read."""
        for ended in [other for other in self._reads if not other.sequences]:
            self._reads.pop(ended).prefix.is_cancelled = True
        if request in self._reads or len(self._reads) >= _MOST_READS:
            return
        sequence = request.sequences[0]
        if sequence.reads_whole_prompt:
            return
        prefix = self._store.prefixes.find(sequence.chain, sequence.token_ids, _PART_BYTES)
        if prefix is None:
            self._looked_up = request
            return
        unit_tokens = sequence.chain.unit_tokens
        num_before = prefix.first_units * unit_tokens
        compute_s = self._recovery.compute_s(prefix.num_units * unit_tokens - num_before, num_before)
        if self._recovery.read_s(prefix.num_bytes) > compute_s:
            return
        self._store.read(prefix)
        now = self._clock()
        self._reads[request] = _Read(prefix, now, now + min(max(compute_s, _LEAST_WAIT_S), _MOST_WAIT_S))

    def is_awaited(self, request: Request, fits: Callable[[int], bool]) -> bool:
        """Whether the queue's head should wait for its prefix. Installs what has been read.

        Args:
            fits: whether so many pages are free.
        """
        if request not in self._reads and request is not self._looked_up:
            self.begin(request)
        read = self._reads.get(request)
        if read is not None and read.prefix.is_done:
            if not fits(self._store.prefixes.pages_needed(read.prefix)):
                return True
            del self._reads[request]
            if self._install(read.prefix):
                self.begin(request)
        elif read is not None and self._clock() > read.deadline:
            del self._reads[request]
            read.prefix.is_cancelled = True
            self._recovery.observe_read(read.prefix.num_bytes, self._clock() - read.began)
        self._looked_up = request
        return request in self._reads

    def _install(self, prefix: StoredPrefix) -> bool:
        """Install what was read; whether all of it was intact."""
        if prefix.num_units > prefix.first_units:
            began = self._clock()
            self._store.prefixes.install(prefix)
            self._recovery.observe_read(prefix.num_bytes, prefix.seconds + self._clock() - began)
        return prefix.is_intact
