"""Host backend: pages are pieces of a sparse memfd, mapping is `mmap(MAP_FIXED | MAP_SHARED)`.

The semantics are those of a GPU driver: ranges are reserved as holes (`PROT_NONE`: touching one is a SIGSEGV), one page
may be mapped at several addresses, and destroying a page gives its memory back (`fallocate(PUNCH_HOLE)`, visible in
`st_blocks` and in the RSS). Backends that share `DevicePages` share the memfd. The operating system is
called through ctypes because Python's `mmap` cannot map at a fixed address.
"""

from __future__ import annotations

import ctypes
import errno
import heapq
import logging
import mmap
import os
from collections.abc import Sequence

import torch

from vmem.backends.base import AccountedBackend, AddressRange, FenceQueue, MemoryInfo, adjacent_runs
from vmem.device_pages import DevicePages
from vmem.errors import MapError, OutOfPages

_PROT_NONE, _PROT_READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED, _MAP_FIXED_NOREPLACE, _MAP_NORESERVE = 0x10, 0x100000, 0x4000  # Python's mmap has no names for these
_HOLE_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_MADV_POPULATE_READ = 22
_MAP_FAILED = ctypes.c_void_p(-1).value
# Size of a memfd for several backends, whose pages `DevicePages` bounds. Pages of one size are created side by side.
_SHARED_FILE_BYTES = 1 << 60
# A longer populate holds the process's memory map lock for milliseconds and stalls other threads' mmap.
_POPULATE_PIECE_BYTES = 2 << 20

logger = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


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
        if _libc.fallocate(self.memfd, flags, offset, page_bytes):
            raise _os_error(f"fallocate(PUNCH_HOLE) of page {offset:#x}")
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
        address: int = _libc.mmap(None, num_bytes, _PROT_NONE, _HOLE_FLAGS, -1, 0)
        if address == _MAP_FAILED:
            raise _os_error(f"mmap of a reservation of {num_bytes} bytes")
        return address

    def _release(self, reserved: AddressRange) -> None:
        if _libc.munmap(reserved.address, reserved.num_bytes):
            raise _os_error(f"munmap of {reserved}")

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
        flags = mmap.MAP_SHARED | _MAP_FIXED
        if _libc.mmap(address, num_bytes, _PROT_READ_WRITE, flags, self._file.memfd, offset) == _MAP_FAILED:
            raise _os_error(f"mmap of {num_bytes} bytes at {address:#x}")
        if self._can_populate:
            self._populate(AddressRange(address, num_bytes))

    def _populate(self, mapped: AddressRange) -> None:
        """Fill the page table now: several times cheaper than one fault per 4 KiB during a step."""
        for address in range(mapped.address, mapped.end, _POPULATE_PIECE_BYTES):
            length = min(_POPULATE_PIECE_BYTES, mapped.end - address)
            if not _libc.madvise(address, length, _MADV_POPULATE_READ):
                continue
            if ctypes.get_errno() == errno.EINVAL:  # Linux before 5.14
                logger.warning("this kernel cannot populate mappings; pages fault in when they are first touched")
                self._can_populate = False
                return
            error = _os_error(f"madvise(POPULATE_READ) of {length} bytes at {address:#x}")
            self._unmap(mapped)
            raise error

    def _unmap(self, mapped: AddressRange) -> None:
        """Map a hole over the range. At the limit of mappings even this fails; then the range is unmapped first."""
        flags = _HOLE_FLAGS | _MAP_FIXED
        if _libc.mmap(mapped.address, mapped.num_bytes, _PROT_NONE, flags, -1, 0) != _MAP_FAILED:
            return
        # Another thread may map something in the gap meanwhile: this call must then fail and not replace it.
        flags = _HOLE_FLAGS | _MAP_FIXED_NOREPLACE
        if _libc.munmap(mapped.address, mapped.num_bytes) or (
            _libc.mmap(mapped.address, mapped.num_bytes, _PROT_NONE, flags, -1, 0) == _MAP_FAILED
        ):
            raise _os_error(f"mmap of a hole over {mapped}")


def _os_error(what: str) -> MapError:
    number = ctypes.get_errno()
    return MapError(f"{what} failed: [Errno {number}] {os.strerror(number)}")
