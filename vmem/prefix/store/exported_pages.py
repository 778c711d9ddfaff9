"""Exported pages: cached prefixes for another process of the machine, copied on the device alone.

    receiver                                                           giver
      a request that says that it imports ────────── link ──────────> notes the units' blocks
      <── where the blocks are in the pages ────────────────────────────┤
      <── descriptors of the pages (SCM_RIGHTS), some at a time ────────┤ exports them
      maps the pages, read-only
      copies the blocks into its own, once it has room
      which records were intact? ─────────────────── link ──────────> compares the units' blocks with those noted
      indexes these

The giver keeps no block for the receiver, which may hang or die: blocks are evicted, written and given back as ever. An
indexed block is never written, and a unit that is indexed again has a new tuple of blocks. So a unit that has the noted
tuple after the copy has had this content all the time; other copies are dropped. The memory of a page that the giver
has given back exists until the receiver unmaps it.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from folio.vmem.backends.base import AddressRange, retry_undo
from folio.vmem.backends.cuda import CudaBackend
from folio.vmem.errors import MapError, VmemError
from folio.vmem.memory import KVMemory
from folio.vmem.prefix.prefix_tree import PrefixNode
from folio.vmem.prefix.store.installer import FoundPrefix, Item, PrefixInstaller
from folio.vmem.prefix.store.link import Address, Link, connect
from folio.vmem.prefix.store.records import Records

logger = logging.getLogger(__name__)

# Pages that are exported, passed and mapped at once: their descriptors are open, or on the way, at the same time.
_PART_PAGES = 16
# Exports that a giver can still be asked about.
_MOST_EXPORTS = 64
# Longest wait for the giver's answer after the copy: the receiver's steps wait, too.
_ANSWER_S = 0.25


def exporting(memory: KVMemory) -> CudaBackend | None:
    """The memory's backend, if its pages can be exported."""
    backend = memory.backend
    return backend if isinstance(backend, CudaBackend) and backend.exports_pages else None


class PageExport:
    """Blocks that a receiver may copy. With the lock held.

    Args:
        units: cached ones, each with a layer group.

    Attributes:
        handles: the pages that have their blocks.
        offsets: in bytes, of the blocks in these pages side by side, in the order in which their records have them.
    """

    def __init__(self, memory: KVMemory, units: Sequence[tuple[PrefixNode, int]], num_units: int) -> None:
        self.num_units, self.handles, self.offsets = num_units, list[int](), list[int]()
        self._noted = [(node, g, node.blocks[g] or ()) for node, g in units]
        first_page: dict[tuple[int, int, int], int] = {}  # of an extent at a home
        for _, g, block_ids in self._noted:
            group, layout = memory.group_memories[g], memory.groups[g].layout
            count = layout.num_slices // layout.num_homes
            for home, block_id in itertools.product(range(layout.num_homes), block_ids):
                extent, place = divmod(block_id, layout.extent_blocks)
                if (g, extent, home) not in first_page:
                    first_page[g, extent, home] = len(self.handles)
                    self.handles += group.handles[extent][home * count : (home + 1) * count]
                self.offsets.append(first_page[g, extent, home] * layout.handle_bytes + place * layout.home_bytes)

    @property
    def num_intact(self) -> int:
        """The units, from the first one on, that have had the same blocks all the time."""
        return sum(1 for _ in itertools.takewhile(lambda unit: unit[0].blocks[unit[1]] is unit[2], self._noted))

    @property
    def is_intact(self) -> bool:
        return self.num_intact == len(self._noted)


class PageExporter:
    """The giver's side. From any thread."""

    def __init__(self, memory: KVMemory, parts: PrefixInstaller) -> None:
        self._memory, self._parts, self._backend = memory, parts, exporting(memory)
        self._exports: OrderedDict[int, PageExport] = OrderedDict()
        self._numbers = itertools.count()

    def note(self, nodes: Sequence[PrefixNode], num_units: int, first_units: int) -> PageExport | None:
        """Note what `num_units` units need after the first ones, as far as it is cached; `None` if pages cannot be
        exported. The device must pass the fence of now before `give`."""
        if self._backend is None:
            return None
        needed = [(nodes[i], g) for i, g in self._parts.needed(num_units, first_units)]
        with self._memory.lock:
            there = list(itertools.takewhile(lambda at: at[0].blocks[at[1]] is not None and not at[0].pending, needed))
            num_units = self._parts.units_after(num_units, first_units, len(there))
            return PageExport(self._memory, there if num_units > first_units else (), num_units)

    def give(self, link: Link, export: PageExport) -> None:
        """Send the pages. Raises `OSError`, and `VmemError` if the driver refuses, or blocks were evicted meanwhile."""
        number = next(self._numbers)
        with self._memory.lock:
            self._exports[number] = export
            if len(self._exports) > _MOST_EXPORTS:
                self._exports.popitem(last=False)
        pages = {"export": number, "num_pages": len(export.handles), "offsets": export.offsets}
        link.send_json({"num_units": export.num_units} | pages)
        for start in range(0, len(export.handles), _PART_PAGES):
            with self._descriptors(export, export.handles[start : start + _PART_PAGES]) as fds:
                link.send_fds(fds)
            link.receive()  # they are mapped

    def num_intact(self, number: int) -> int:
        """The records of an export, from the first one on, that a receiver may install; 0 if it is not known."""
        with self._memory.lock:
            return self._exports[number].num_intact if number in self._exports else 0

    @contextmanager
    def _descriptors(self, export: PageExport, handles: Sequence[int]) -> Iterator[list[int]]:
        assert self._backend is not None
        lock, fds = self._memory.lock, list[int]()
        with ExitStack() as opened:
            with lock.exclusive():  # nothing is evicted, and so no page destroyed, until they are exported
                if not export.is_intact:
                    raise VmemError("blocks were evicted meanwhile")
                with lock.unlocked():
                    for handle in handles:
                        fds.append(self._backend.export_page(handle))
                        opened.callback(os.close, fds[-1])
            yield fds


class NotImported(Exception):
    """The giver's pages cannot be had. Nothing is left of them."""


class ImportedPages:
    """A giver's pages, mapped side by side, read-only, until `close`.

    Args:
        link: on which they come.
        offsets: as in `PageExport`.

    Raises:
        OSError, VmemError: they cannot be had. Nothing is left.
    """

    def __init__(self, backend: CudaBackend, link: Link, num_pages: int, offsets: Sequence[int]) -> None:
        self._backend, self._offsets = backend, offsets
        self._reserved = backend.reserve(num_pages * backend.page_bytes)
        self._mapped = AddressRange(self._reserved.address, 0)
        self._words = backend.tensor(self._reserved).view(torch.int64)
        try:
            while left := (self._reserved.end - self._mapped.end) // backend.page_bytes:
                self._map(link.receive_fds(min(_PART_PAGES, left)))
                link.send(b"")
        except BaseException:
            self.close()
            raise

    def place(self, number: int, num_words: int) -> torch.Tensor:
        """A block's content at one of its homes, `[num_words]` int64. Raises `MapError` if it is not in the pages."""
        at = self._offsets[number] // 8
        if not 0 <= at <= len(self._words) - num_words:
            raise MapError(f"a block at byte {8 * at} of {8 * len(self._words)} of another process's pages")
        return self._words[at : at + num_words]

    def close(self) -> None:
        """Unmap the pages; the device must have read them. Raises `IntegrityError` if the driver keeps refusing."""
        self._backend.unmap_exported(self._mapped)
        retry_undo(partial(self._backend.release, self._reserved))

    def _map(self, fds: Sequence[int]) -> None:
        try:
            self._backend.map_exported(self._mapped.end, fds)
        finally:
            for fd in fds:
                os.close(fd)
        num_bytes = self._mapped.num_bytes + len(fds) * self._backend.page_bytes
        self._mapped = AddressRange(self._reserved.address, num_bytes)


class PageImporter(PrefixInstaller):
    """The receiver's side: installs from imported pages what has come that way. `import_pages` is called by the threads
    that fetch, all else by the engine's."""

    def __init__(self, memory: KVMemory, records: Records) -> None:
        super().__init__(memory, records)
        self._backend = exporting(memory)
        self._imported: dict[FoundPrefix, tuple[ImportedPages, Address, int]] = {}  # with the giver, and the export
        self._unmapper = ThreadPoolExecutor(1, "folio-unmap")  # so that no step waits for the driver

    @property
    def imports(self) -> bool:
        return self._backend is not None

    def import_pages(
        self, prefix: FoundPrefix, link: Link, reply: Any, needed: Sequence[tuple[int, int]], address: Address
    ) -> list[Item]:
        """Map the pages that a giver has announced; returns the records in them. Raises `NotImported`."""
        starts = list(itertools.accumulate((self._records.num_places[g] for _, g in needed), initial=0))
        try:
            number, num_pages, offsets = int(reply["export"]), int(reply["num_pages"]), list(map(int, reply["offsets"]))
            if self._backend is None or len(offsets) != starts[-1]:
                raise ValueError("other pages than asked for")
            self._imported[prefix] = ImportedPages(self._backend, link, num_pages, offsets), address, number
        except (OSError, VmemError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise NotImported(f"{type(error).__name__}: {error}") from error
        return [Item(i, g, start) for (i, g), start in zip(needed, starts, strict=False)]

    def install(self, prefix: FoundPrefix) -> bool:
        try:
            return super().install(prefix)
        finally:
            self._unmap(prefix)

    def cancel(self, prefix: FoundPrefix) -> None:
        super().cancel(prefix)
        self._unmap(prefix)

    def close(self) -> None:
        """Unmap all pages that are left. Nothing may be fetched any more."""
        for prefix in list(self._imported):
            self._unmap(prefix)
        self._unmapper.shutdown()

    def _copy_in(self, prefix: FoundPrefix, item: Item, block_ids: Sequence[int]) -> None:
        if prefix not in self._imported:
            super()._copy_in(prefix, item, block_ids)
            return
        pages, _, _ = self._imported[prefix]
        for number, place in enumerate(self._records.places(item.group, block_ids), start=item.offset):
            self._records.copy(place, pages.place(number, len(place)))

    def _intact_end(self, prefix: FoundPrefix) -> float:
        if prefix not in self._imported:
            return super()._intact_end(prefix)
        _, address, number = self._imported[prefix]
        self._memory.backend.wait(self._memory.backend.fence())  # the copies are made
        num_intact = 0
        try:
            with connect(address, remote=False, message_s=_ANSWER_S) as link:
                link.send_json({"export": number})
                link.send(b"")
                num_intact = int(link.receive_json()["num_intact"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.info("a prefix is computed: its giver does not answer: %s: %s", type(error).__name__, error)
        if num_intact >= len(prefix.items):
            return math.inf
        prefix.is_intact = False
        return prefix.items[num_intact].offset

    def _unmap(self, prefix: FoundPrefix) -> None:
        if (imported := self._imported.pop(prefix, None)) is not None:
            self._unmapper.submit(_close, imported[0])


def _close(pages: ImportedPages) -> None:
    try:
        pages.close()
    except VmemError:
        logger.exception("pages of another process stay mapped")
