"""The units of mapping work. Each is begun and finished under the memory's lock; `call` in between needs no lock.

So the mapper can run one while the engine goes on, and the engine can run one itself when it cannot wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from vmem.backends.base import Backend
from vmem.budget import PagePool
from vmem.errors import OutOfPages, VmemError
from vmem.group import GroupMemory
from vmem.region import Region


@dataclass(slots=True)
class MappingCounts:
    """Calls and pages since the start, the mapper's and the engine's together."""

    maps: int = 0
    unmaps: int = 0
    aliases: int = 0
    creates: int = 0
    destroys: int = 0


class MappingWork(Protocol):
    """Constructing it claims what it works on, so that nobody else touches that until `finish`.

    `gives_back`: it only returns memory; no step waits for it.
    """

    gives_back: bool

    def call(self) -> None:
        """Call the backend. When it raises, the device is as before."""
        ...

    def finish(self, counts: MappingCounts, now: float, *, failed: bool) -> None:
        """Enter the outcome into the books, and let go of what was claimed."""
        ...


class AttachPages:
    """Give pages to up to `count` cold blocks, and map them at home. They are loose afterwards.

    When the device is out of memory the pages it still gave are spare afterwards.
    """

    gives_back = False

    def __init__(self, backend: Backend, pages: PagePool, group: GroupMemory, count: int) -> None:
        self._backend, self._pages, self._group = backend, pages, group
        self.block_ids = group.pool.begin_attach(min(count, pages.num_claimable // group.num_slices))
        self._spare, self._to_create = pages.claim(len(self.block_ids) * group.num_slices)
        self._created: list[int] = []
        self._handles: list[tuple[int, ...]] = []

    def call(self) -> None:
        try:
            for _ in range(self._to_create):
                self._created.append(self._backend.create(self._pages.page_bytes))
        except OutOfPages:
            raise
        except VmemError:
            self._destroy_created()
            raise
        try:
            handles, slices = self._spare + self._created, self._group.num_slices
            self._handles = [tuple(handles[i : i + slices]) for i in range(0, len(handles), slices)]
            self._group.map_home(self.block_ids, self._handles)
        except VmemError:
            self._destroy_created()
            raise

    def finish(self, counts: MappingCounts, now: float, *, failed: bool) -> None:
        self._pages.settle(self._to_create, len(self._created))
        counts.creates += len(self._created)
        if failed:
            self._pages.spare += self._spare + self._created  # what could not be destroyed among them
            self._group.pool.end_move(self.block_ids, has_pages=False)
            return
        counts.maps += len(self.block_ids) * self._group.num_slices
        self._group.handles.update(zip(self.block_ids, self._handles, strict=True))
        self._group.pool.end_attach(self.block_ids, now)

    def _destroy_created(self) -> None:
        """Undo; what cannot be destroyed stays, and is spare."""
        with suppress(VmemError):
            while self._created:
                self._backend.destroy(self._created[-1])
                self._created.pop()


class DetachPages:
    """Unmap loose blocks at home; their pages are spare afterwards."""

    gives_back = True

    def __init__(self, pages: PagePool, group: GroupMemory, block_ids: Sequence[int]) -> None:
        self._pages, self._group, self._block_ids = pages, group, block_ids
        group.pool.begin_detach(block_ids)

    def call(self) -> None:
        self._group.unmap_home(self._block_ids)

    def finish(self, counts: MappingCounts, now: float, *, failed: bool) -> None:
        self._group.pool.end_move(self._block_ids, has_pages=failed)
        if failed:
            return
        counts.unmaps += len(self._block_ids) * self._group.num_slices
        for block_id in self._block_ids:
            self._pages.spare += self._group.handles.pop(block_id)


class DestroyPages:
    """Give up to `count` spare pages back to the machine."""

    gives_back = True

    def __init__(self, backend: Backend, pages: PagePool, count: int) -> None:
        self._backend, self._pages = backend, pages
        kept = max(len(pages.spare) - count, 0)
        pages.spare, self._left = pages.spare[:kept], pages.spare[kept:]
        self._count = len(self._left)

    def call(self) -> None:
        while self._left:
            self._backend.destroy(self._left[-1])
            self._left.pop()

    def finish(self, counts: MappingCounts, now: float, *, failed: bool) -> None:
        done = self._count - len(self._left)
        counts.destroys += done
        self._pages.spare += self._left
        self._pages.destroyed(done)


class MapRegion:
    """Map blocks behind places of a region. They must be owned while this runs.

    Args:
        ahead: nobody's yet: they came from `BlockPool.begin_show`, and are free again afterwards.
    """

    gives_back = False

    def __init__(
        self, group: GroupMemory, region: Region, start: int, block_ids: Sequence[int], *, ahead: bool
    ) -> None:
        self._group, self._region, self._start, self._block_ids, self._ahead = group, region, start, block_ids, ahead
        region.busy = True

    def call(self) -> None:
        self._group.map_places(self._region, self._start, self._block_ids)

    def finish(self, counts: MappingCounts, now: float, *, failed: bool) -> None:
        region, pool = self._region, self._group.pool
        region.busy = False
        if not failed:
            counts.maps += len(self._block_ids) * self._group.num_slices
            counts.aliases += sum(pool.num_region_mappings(b) > 0 for b in self._block_ids) * self._group.num_slices
            region.put(self._start, self._block_ids)
            region.touched = now
        if self._ahead:
            pool.end_show(self._block_ids, now, failed=failed)
        elif not failed:
            pool.note_region_mapped(self._block_ids)
        if failed:
            self._group.discard_if_empty(region)


class UnmapRegion:
    """Turn places of a region, all of which show a block, into holes."""

    gives_back = True

    def __init__(self, group: GroupMemory, region: Region, start: int, end: int) -> None:
        self._group, self._region, self._start, self._end = group, region, start, end
        region.busy = True

    def call(self) -> None:
        self._group.unmap_places(self._region, self._start, self._region.mapped_blocks[self._start : self._end])

    def finish(self, counts: MappingCounts, now: float, *, failed: bool) -> None:
        self._region.busy = False
        if failed:
            return
        block_ids = self._region.clear(self._start, self._end)
        counts.unmaps += len(block_ids) * self._group.num_slices
        self._group.pool.note_region_unmapped(block_ids)
        self._group.discard_if_empty(self._region)
