"""Host backend: pages are pieces of a sparse memfd, mapping is `mmap(MAP_FIXED | MAP_SHARED)`.

The semantics are those of a GPU driver: ranges are reserved as holes (`PROT_NONE`: touching one is a SIGSEGV), one page
may be mapped at several addresses, and destroying a page gives its memory back (`fallocate(PUNCH_HOLE)`, visible in
`st_blocks` and in the RSS). Backends that share `DevicePages` share the memfd.
"""

from __future__ import annotations

import ctypes
import heapq
import logging
import mmap
import os
from collections.abc import Sequence

import torch

from folio.vmem.backends import host_calls
from folio.vmem.backends.base import AccountedBackend, AddressRange, FenceQueue, MemoryInfo, adjacent_runs
from folio.vmem.device_pages import DevicePages
from folio.vmem.errors import MapError, OutOfPages

_PROT_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
# Size of a memfd for several backends, whose pages `DevicePages` bounds. Pages of one size are created side by side.
_SHARED_FILE_BYTES = 1 << 60

logger = logging.getLogger(__name__)


class PageFile:
    """A memfd and its pages, which may be of several sizes. Used by one thread at a time.

    Args:
        capacity_bytes: the most that may be created of one size.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self.memfd = os.memfd_create("folio-kv", os.MFD_CLOEXEC)
        os.ftruncate(self.memfd, capacity_bytes)
        self._next_offset = 0
        # By page size, a heap: low offsets first, so that neighbours merge into one mapping.
        self._freed_offsets: dict[int, list[int]] = {}

    def create(self, page_bytes: int) -> int:
        """The offset of a new page. Raises `OutOfPages`."""
        if freed := self._freed_offsets.get(page_bytes):
            return heapq.heappop(freed)
        offset = self._next_offset
        if offset + page_bytes > self._capacity_bytes:
            raise OutOfPages(1, 0)
        self._next_offset += page_bytes
        return offset

    def destroy(self, offset: int, page_bytes: int) -> None:
        """Give a page's memory back. Raises `MapError`."""
        flags = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
        if host_calls.libc.fallocate(self.memfd, flags, offset, page_bytes):
            raise host_calls.os_error(f"fallocate(PUNCH_HOLE) of page {offset:#x}")
        heapq.heappush(self._freed_offsets.setdefault(page_bytes, []), offset)

    @property
    def physical_bytes(self) -> int:
        return os.fstat(self.memfd).st_blocks * 512

    def close(self) -> None:
        os.close(self.memfd)


class HostBackend(AccountedBackend):
    """The `Backend` of the CPU. A handle is the page's offset in the memfd.

    Args:
        capacity_bytes: the most that may be created; `pages` have a capacity of their own.
        queue: where another thread computes; by default a call returns when its work is done.
        pages: see `AccountedBackend`.
    """

    # Fresh pages take about a millisecond for each of these, zeroing included.
    max_call_bytes = 2 << 20

    def __init__(self, capacity_bytes: int, queue: FenceQueue | None = None, pages: DevicePages | None = None) -> None:
        self._queue = queue
        self._capacity_bytes = capacity_bytes
        if pages is None:
            self._file = PageFile(capacity_bytes)
        else:
            self._file = pages.share(PageFile, lambda: PageFile(_SHARED_FILE_BYTES))
        self._can_populate = True
        self._is_closed = False
        super().__init__(mmap.PAGESIZE, "cpu", pages)

    def _reserve(self, num_bytes: int) -> int:
        return host_calls.reserve(num_bytes)

    def _release(self, reserved: AddressRange) -> None:
        host_calls.release(reserved)

    def _create(self, page_bytes: int) -> int:
        return self._file.create(page_bytes)

    def _destroy(self, handle: int, page_bytes: int) -> None:
        self._file.destroy(handle, page_bytes)

    def _map(self, address: int, handles: Sequence[int]) -> None:
        size, done = self.page_bytes, 0
        try:
            for start, end in adjacent_runs(handles, size):  # neighbours in the memfd: one mmap call
                self._map_run(address + start * size, handles[start], (end - start) * size)
                done = end
        except MapError:
            if done:
                self._unmap(AddressRange(address, done * size))
            raise

    def tensor(self, reserved: AddressRange) -> torch.Tensor:
        memory = (ctypes.c_char * reserved.num_bytes).from_address(reserved.address)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def fence(self) -> int:
        return 0 if self._queue is None else self._queue.fence()

    def completed(self, fence: int) -> bool:
        return self._queue is None or self._queue.completed(fence)

    def wait(self, fence: int) -> None:
        if self._queue is not None:
            self._queue.wait(fence)

    def memory_info(self) -> MemoryInfo:
        if self._pages is not None:
            return MemoryInfo(self._created_bytes, self._pages.available_bytes)
        return MemoryInfo(self._file.physical_bytes, self._capacity_bytes - self._created_bytes)

    def close(self) -> None:
        if self._is_closed:
            return
        self._end_accounting()
        if self._pages is None:
            self._file.close()
        self._is_closed = True

    def _map_run(self, address: int, offset: int, num_bytes: int) -> None:
        host_calls.map_file(address, num_bytes, _PROT_READ_WRITE, self._file.memfd, offset)
        if not self._can_populate:
            return
        mapped = AddressRange(address, num_bytes)
        try:
            self._can_populate = host_calls.populate(mapped)
        except MapError:
            self._unmap(mapped)
            raise
        if not self._can_populate:
            logger.warning("this kernel cannot populate mappings; pages fault in when they are first touched")

    def _unmap(self, mapped: AddressRange) -> None:
        host_calls.make_hole(mapped)
