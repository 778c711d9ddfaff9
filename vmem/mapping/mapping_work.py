"""Mapping work: units that the mapper runs beside a step, and the engine when a step cannot wait.

A unit is created and finished with the memory's lock held; `call` in between runs without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from folio.vmem.backends.base import Backend
from folio.vmem.budget import MemoryCounts, PagePool
from folio.vmem.errors import OutOfPages, VmemError
from folio.vmem.group import GroupMemory
from folio.vmem.mapping.region import Region


class MappingWork(Protocol):
    """One unit of work. Its constructor claims blocks, pages or a region until `finish`.

    Attributes:
        gives_back: whether the unit only returns memory, so that no step waits for it.
    """

    gives_back: bool

    def call(self) -> None:
        """Call the backend. A call that raises leaves the device unchanged."""

    def finish(self, counts: MemoryCounts, now: float, *, failed: bool) -> None:
        """Record the outcome and end the claim."""


class AttachPages:
    """Attach pages to up to `count` unbacked blocks, in whole extents: they become free.

    If the device runs out of memory, the pages created until then become spare.

    Args:
        at_home: map them at home, because they will be read there or must be in memory now.
    """

    gives_back = False

    def __init__(self, backend: Backend, pages: PagePool, group: GroupMemory, count: int, *, at_home: bool) -> None:
        self._backend, self._pages, self._group = backend, pages, group
        self._at_home = at_home or not group.region_blocks or backend.creates_when_mapped
        self.block_ids = group.pool.begin_attach(min(count, group.blocks_in(pages.num_claimable)))
        self._extents = group.extents_of(self.block_ids)
        self._spare, self._to_create = pages.claim(len(self._extents) * group.num_slices)
        self._created: list[int] = []
        self._handles: list[tuple[int, ...]] = []

    def call(self) -> None:
        try:
            for _ in range(self._to_create):
                self._created.append(self._backend.create(self._pages.handle_bytes))
        except OutOfPages:
            raise
        except VmemError:
            self._destroy_created()
            raise
        try:
            handles, slices = self._spare + self._created, self._group.num_slices
            self._handles = [tuple(handles[i : i + slices]) for i in range(0, len(handles), slices)]
            if self._at_home:
                self._group.map_pages(self._group.home_spans(self._extents, self._handles))
        except VmemError:
            self._destroy_created()
            raise

    def finish(self, counts: MemoryCounts, now: float, *, failed: bool) -> None:
        self._pages.settle(self._to_create, len(self._created))
        counts.create_calls += len(self._created)
        if failed:
            self._pages.spare += self._spare + self._created  # with those that could not be destroyed
            self._group.pool.end_move(self.block_ids, has_pages=False)
            return
        self._group.handles.update(zip(self._extents, self._handles, strict=True))
        if self._at_home:
            counts.map_calls += len(self._extents) * self._group.num_slices
            self._group.at_home.update(self._extents)
        self._group.pool.end_move(self.block_ids, has_pages=True, freed_at=now)

    def _destroy_created(self) -> None:
        """Undo; pages that cannot be destroyed become spare."""
        with suppress(VmemError):
            while self._created:
                self._backend.destroy(self._created[-1])
                self._created.pop()


class MapHomes:
    """Map extents at home that have pages and are not mapped there. Some of their blocks are owned while the work
    runs; only the engine's thread runs it."""

    gives_back = False

    def __init__(self, group: GroupMemory, extents: Sequence[int]) -> None:
        self._group, self._extents = group, extents

    def call(self) -> None:
        handles = [self._group.handles[extent] for extent in self._extents]
        self._group.map_pages(self._group.home_spans(self._extents, handles))

    def finish(self, counts: MemoryCounts, now: float, *, failed: bool) -> None:
        if not failed:
            counts.map_calls += len(self._extents) * self._group.num_slices
            self._group.at_home.update(self._extents)


class DetachPages:
    """Take the pages of free blocks, whole extents: they become unbacked, their pages spare."""

    gives_back = True

    def __init__(self, pages: PagePool, group: GroupMemory, block_ids: Sequence[int]) -> None:
        self._pages, self._group, self._block_ids = pages, group, block_ids
        self._extents = group.extents_of(block_ids)
        self._at_home = [extent for extent in self._extents if extent in group.at_home]
        group.pool.begin_detach(block_ids)

    def call(self) -> None:
        handles = [self._group.handles[extent] for extent in self._at_home]
        self._group.unmap_pages(self._group.home_spans(self._at_home, handles))

    def finish(self, counts: MemoryCounts, now: float, *, failed: bool) -> None:
        self._group.pool.end_move(self._block_ids, has_pages=failed)
        if failed:
            return
        counts.unmap_calls += len(self._at_home) * self._group.num_slices
        self._group.at_home.difference_update(self._at_home)
        for extent in self._extents:
            self._pages.spare += self._group.handles.pop(extent)


class DestroyPages:
    """Destroy up to `count` spare pages, in whole handles rounded up."""

    gives_back = True

    def __init__(self, backend: Backend, pages: PagePool, count: int) -> None:
        self._backend, self._pages = backend, pages
        kept = max(len(pages.spare) - -(-count // pages.handle_pages), 0)
        pages.spare, self._left = pages.spare[:kept], pages.spare[kept:]
        self._count = len(self._left)

    def call(self) -> None:
        while self._left:
            self._backend.destroy(self._left[-1])
            self._left.pop()

    def finish(self, counts: MemoryCounts, now: float, *, failed: bool) -> None:
        done = self._count - len(self._left)
        counts.destroy_calls += done
        self._pages.spare += self._left
        self._pages.num_created -= done * self._pages.handle_pages


class MapRegion:
    """Map blocks in places of a region.

    Args:
        block_ids: owned while the work runs, or with `ahead` taken by `BlockPool.begin_map_ahead`.
    """

    gives_back = False

    def __init__(
        self, group: GroupMemory, region: Region, start: int, block_ids: Sequence[int], *, ahead: bool
    ) -> None:
        self._group, self._region, self._start, self._block_ids, self._ahead = group, region, start, block_ids, ahead
        region.busy = True

    def call(self) -> None:
        self._group.map_pages(self._group.place_spans(self._region, self._start, self._block_ids))

    def finish(self, counts: MemoryCounts, now: float, *, failed: bool) -> None:
        region, pool = self._region, self._group.pool
        region.busy = False
        if not failed:
            counts.map_calls += len(self._block_ids) * self._group.num_slices
            counts.alias_calls += sum(pool.region_mappings[b] > 0 for b in self._block_ids) * self._group.num_slices
            region.put(self._start, self._block_ids)
            region.touched = now
        if self._ahead:
            pool.end_map_ahead(self._block_ids, now, failed=failed)
        elif not failed:
            pool.note_region_mapped(self._block_ids)
        if failed:
            self._group.discard_if_empty(region)


class UnmapRegion:
    """Unmap places of a region; all of them must be mapped."""

    gives_back = True

    def __init__(self, group: GroupMemory, region: Region, start: int, end: int) -> None:
        self._group, self._region, self._start, self._end = group, region, start, end
        region.busy = True

    def call(self) -> None:
        block_ids = self._region.mapped_blocks[self._start : self._end]
        self._group.unmap_pages(self._group.place_spans(self._region, self._start, block_ids))

    def finish(self, counts: MemoryCounts, now: float, *, failed: bool) -> None:
        self._region.busy = False
        if failed:
            return
        block_ids = self._region.clear(self._start, self._end)
        counts.unmap_calls += len(block_ids) * self._group.num_slices
        self._group.pool.note_region_unmapped(block_ids)
        self._group.discard_if_empty(self._region)
