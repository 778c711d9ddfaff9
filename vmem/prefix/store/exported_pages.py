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
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from folio.vmem.backends.base import AddressRange, retry_undo
from folio.vmem.backends.cuda import CudaBackend
from folio.vmem.errors import VmemError
from folio.vmem.memory import KVMemory
from folio.vmem.prefix.prefix_tree import PrefixNode
from folio.vmem.prefix.store.installer import FoundPrefix, Item, PrefixInstaller
from folio.vmem.prefix.store.link import Address, Link, connect
from folio.vmem.prefix.store.records import Records

logger = logging.getLogger(__name__)

# Pages that are exported, passed and mapped at once: their descriptors are open, and on the way, at the same time.
_PART_PAGES = 16
# Exports that a giver can still be asked about.
_MOST_EXPORTS = 64
# Longest wait for the giver's answer after the copy, for which all of the receiver's steps wait.
_ANSWER_S = 0.25


def exporting(memory: KVMemory) -> CudaBackend | None:
    """The memory's backend, if its pages can be exported."""
    backend = memory.backend
    return backend if isinstance(backend, CudaBackend) and backend.exports_pages else None


@dataclass(frozen=True, slots=True)
class PageExport:
    """What a receiver may copy.

    Attributes:
        num_units: units that a prompt can continue after with what is noted.
        noted: units, each with a layer group and its blocks.
        handles: the pages that they lie in.
        offsets: in bytes, of their blocks in these pages side by side, in the order of their records' places.
    """

    num_units: int
    noted: list[tuple[PrefixNode, int, tuple[int, ...]]] = field(default_factory=list)
    handles: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    @property
    def num_intact(self) -> int:
        """How many of the units, from the first one on, have had the noted blocks all the time. With the lock held."""
        return sum(1 for _ in itertools.takewhile(lambda noted: noted[0].blocks[noted[1]] is noted[2], self.noted))


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
        units = [(nodes[i], g) for i, g in self._parts.needed(num_units, first_units)]
        with self._memory.lock:
            there = list(itertools.takewhile(lambda at: at[0].blocks[at[1]] is not None and not at[0].pending, units))
            export = PageExport(self._parts.units_after(num_units, first_units, len(there)))
            if export.num_units > first_units:
                self._place(export, there)
        return export

    def _place(self, export: PageExport, units: Sequence[tuple[PrefixNode, int]]) -> None:
        """Fill in an export."""
        first_page: dict[tuple[int, int, int], int] = {}  # of an extent at a home
        for node, g in units:
            block_ids, group = node.blocks[g], self._memory.group_memories[g]
            assert block_ids is not None
            export.noted.append((node, g, block_ids))
            layout, count = group.layout, group.num_slices // group.layout.num_homes
            for home, block_id in itertools.product(range(layout.num_homes), block_ids):
                extent, place = divmod(block_id, layout.extent_blocks)
                if (g, extent, home) not in first_page:
                    first_page[g, extent, home] = len(export.handles)
                    export.handles.extend(group.handles[extent][home * count : (home + 1) * count])
                export.offsets.append(first_page[g, extent, home] * layout.handle_bytes + place * layout.home_bytes)

    def give(self, link: Link, export: PageExport) -> None:
        """Send the pages. Raises `OSError`, and `VmemError` if the driver refuses, or blocks were evicted meanwhile."""
        number = next(self._numbers)
        with self._memory.lock:
            self._exports[number] = export
            if len(self._exports) > _MOST_EXPORTS:
                self._exports.popitem(last=False)
        link.send_json({"num_units": export.num_units, "export": number, "num_pages": len(export.handles)})
        if not export.handles:
            return
        link.send(np.array(export.offsets, np.int64).tobytes())
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
                if export.num_intact < len(export.noted):
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
        link: from which they come.
        sizes: in bytes, of the blocks' places.
        offsets: as in `PageExport`, int64.

    Attributes:
        ask: the giver's address, and the export's number.

    Raises:
        OSError, VmemError, ValueError: they cannot be had. Nothing is left.
    """

    def __init__(
        self,
        backend: CudaBackend,
        link: Link,
        num_pages: int,
        sizes: np.ndarray[Any, np.dtype[np.int64]],
        offsets: np.ndarray[Any, np.dtype[np.int64]],
        ask: tuple[Address, int],
    ) -> None:
        self._backend, self._offsets, self.ask = backend, offsets // 8, ask
        num_bytes = num_pages * backend.page_bytes
        if (
            len(offsets) != len(sizes)
            or (offsets % 8).any()
            or (offsets < 0).any()
            or (offsets > num_bytes - sizes).any()
        ):
            raise ValueError("the blocks are not in the pages")
        self._reserved = backend.reserve(num_bytes)
        self._mapped = AddressRange(self._reserved.address, 0)
        self._words = backend.tensor(self._reserved).view(torch.int64)
        try:
            while (at := self._mapped.end) < self._reserved.end:
                self._map(at, link.receive_fds(min(_PART_PAGES, (self._reserved.end - at) // backend.page_bytes)))
                link.send(b"")
        except BaseException:
            self.close()
            raise

    def place(self, number: int, num_words: int) -> torch.Tensor:
        """The content of a block's place `[num_words]` int64."""
        at = self._offsets[number]
        return self._words[at : at + num_words]

    def close(self) -> None:
        """Unmap the pages; the device must have read them. Raises `IntegrityError` if the driver keeps refusing."""
        self._backend.unmap_exported(self._mapped)
        retry_undo(partial(self._backend.release, self._reserved))

    def _map(self, address: int, fds: Sequence[int]) -> None:
        try:
            self._backend.map_exported(address, fds)
        finally:
            for fd in fds:
                os.close(fd)
        self._mapped = AddressRange(
            self._reserved.address, address - self._reserved.address + len(fds) * self._backend.page_bytes
        )


class PageImporter(PrefixInstaller):
    """The receiver's side: installs from imported pages what has come that way. `import_pages` is called by the threads
    that fetch, all else by the engine's."""

    def __init__(self, memory: KVMemory, records: Records) -> None:
        super().__init__(memory, records)
        self._backend = exporting(memory)
        # Of each layer group, the bytes of a record's places.
        self._sizes = [
            np.array([8 * len(place) for place in records.places(g, range(count))], np.int64)
            for g, count in enumerate(records.num_blocks)
        ]
        self._imported: dict[FoundPrefix, ImportedPages] = {}
        self._unmapper = ThreadPoolExecutor(1, "folio-unmap")  # so that no step waits for the driver

    @property
    def imports(self) -> bool:
        return self._backend is not None

    def import_pages(
        self, prefix: FoundPrefix, link: Link, reply: Any, needed: Sequence[tuple[int, int]], address: Address
    ) -> list[Item]:
        """Map the pages that a giver has announced; returns the records in them. Raises `NotImported`."""
        try:
            if self._backend is None:
                raise ValueError("pages that were not asked for")
            sizes = [self._sizes[g] for _, g in needed]
            starts = itertools.accumulate(map(len, sizes), initial=0)
            offsets, ask = np.frombuffer(link.receive(), np.int64), (address, int(reply["export"]))
            self._imported[prefix] = ImportedPages(
                self._backend, link, int(reply["num_pages"]), np.concatenate(sizes), offsets, ask
            )
            return [Item(i, g, start) for (i, g), start in zip(needed, starts, strict=False)]
        except (OSError, VmemError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise NotImported(f"{type(error).__name__}: {error}") from error

    def install(self, prefix: FoundPrefix) -> bool:
        try:
            return super().install(prefix)
        finally:
            self._unmap(prefix)

    def drop(self, prefix: FoundPrefix) -> None:
        super().drop(prefix)
        self._unmap(prefix)

    def close(self) -> None:
        """Unmap all pages that are left. Nothing may be fetched any more."""
        for prefix in list(self._imported):
            self._unmap(prefix)
        self._unmapper.shutdown()

    def _copy_in(self, prefix: FoundPrefix, item: Item, block_ids: Sequence[int]) -> None:
        if (pages := self._imported.get(prefix)) is None:
            return super()._copy_in(prefix, item, block_ids)
        for number, place in enumerate(self._records.places(item.group, block_ids), start=item.offset):
            self._records.copy(place, pages.place(number, len(place)))
        return None

    def _intact_end(self, prefix: FoundPrefix) -> float:
        if (pages := self._imported.get(prefix)) is None:
            return super()._intact_end(prefix)
        backend, (address, number), num_intact = self._memory.backend, pages.ask, 0
        backend.wait(backend.fence())  # the copies are made
        try:
            with connect(address, remote=False, message_s=_ANSWER_S) as link:
                link.send_json({"export": number})
                link.send(b"")
                num_intact = int(link.receive_json()["num_intact"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.info("a prefix is not installed: its giver does not answer: %s: %s", type(error).__name__, error)
        prefix.is_intact = prefix.is_intact and num_intact == len(prefix.items)
        return math.inf if num_intact == len(prefix.items) else prefix.items[num_intact].offset

    def _unmap(self, prefix: FoundPrefix) -> None:
        if (pages := self._imported.pop(prefix, None)) is not None:
            self._unmapper.submit(_close, pages)


def _close(pages: ImportedPages) -> None:
    try:
        pages.close()
    except VmemError:
        logger.exception("pages of another process stay mapped")
