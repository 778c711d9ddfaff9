"""Blocks of requests whose prompts were computed at another replica, in simulated time."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

from folio.app.engine.request.request import Request
from folio.app.engine.schedule.preemption import PreemptionCostModel
from folio.app.engine.schedule.read_ahead import ReadAhead
from folio.vmem import KVMemory
from folio.vmem.prefix.store.installer import FoundPrefix, Item, PrefixInstaller
from folio.vmem.prefix.store.records import Records


class ReceivedBlocks(ReadAhead):
    """Requests that wait for room, with their blocks beside the KV cache: these are cached when there is room. The
    blocks have no content."""

    def __init__(self, memory: KVMemory, recovery: PreemptionCostModel) -> None:
        super().__init__(None, None, None, recovery)
        self._memory, self._installer = memory, PrefixInstaller(memory, _Empty(memory))
        self._ids: set[str] = set()  # of requests

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._ids

    def add(self, request_id: str) -> None:
        """Note that the blocks of a request, about to be added, are here."""
        self._ids.add(request_id)

    def begin(self, request: Request, is_head: bool = False, least_units: int = 0) -> None:
        pass

    def is_awaited(self, request: Request, fits: Callable[[int], bool]) -> bool:
        if request not in self:
            return False
        chain = request.sequences[0].chain
        first, count = len(self._memory.prefixes.match(chain, request.sequences[0].token_ids).nodes), len(chain.units)
        found = FoundPrefix(chain, first, count, 0, [Item(i, 0, 0) for i in range(first, count)], buffer=_BUFFER)
        if not fits(self._installer.pages_needed(found)):
            return True
        self._ids.remove(request.request_id)
        if count > first:
            self._installer.install(found)
        return False


class _Empty(Records):
    """Records without content, of one layer group whose blocks are units."""

    def __init__(self, memory: KVMemory) -> None:
        self.num_blocks, self.num_bytes = [1], [0]

    def copy_in(self, g: int, record: memoryview, block_ids: Sequence[int]) -> None:
        pass


_BUFFER = mmap.mmap(-1, 1)
