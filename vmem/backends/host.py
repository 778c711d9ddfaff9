"""Host backend: pages are pieces of a sparse memfd, mapping is `mmap(MAP_FIXED | MAP_SHARED)`.

The semantics are those of a GPU driver: ranges are reserved as holes (`PROT_NONE`: touching one is a SIGSEGV), one page
may be mapped at several addresses, and destroying a page gives its memory back (`fallocate(PUNCH_HOLE)`, visible in
`st_blocks` and in the RSS). The operating system is called through ctypes because Python's `mmap` cannot map at a
fixed address.
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
from vmem.errors import MapError, OutOfPages

_PROT_NONE, _PROT_READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED, _MAP_FIXED_NOREPLACE, _MAP_NORESERVE = 0x10, 0x100000, 0x4000  # Python's mmap has no names for these
_HOLE_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_MADV_POPULATE_READ = 22
_MAP_FAILED = ctypes.c_void_p(-1).value
# A longer populate holds the process's memory map lock for milliseconds and stalls other threads' mmap.
_POPULATE_PIECE_BYTES = 2 << 20

logger = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


class HostBackend(AccountedBackend):
    """The `Backend` of the CPU. A handle is the page's offset in the memfd.

    Args:
        capacity_bytes: the most that may be created.
        queue: where another thread computes; by default a call returns when its work is done.
    """

    # Fresh pages take about a millisecond for each of these, zeroing included.
    max_call_bytes = 2 << 20

    def __init__(self, capacity_bytes: int, queue: FenceQueue | None = None) -> None:
        super().__init__(mmap.PAGESIZE)
        self._queue = queue
        self._capacity_bytes = capacity_bytes
        self._memfd = os.memfd_create("folio-kv", os.MFD_CLOEXEC)
        os.ftruncate(self._memfd, capacity_bytes)
        self._next_offset = 0
        self._freed_offsets: list[int] = []  # heap: low offsets first, so that neighbours merge into one mapping
        self._can_populate = True

    def _reserve(self, num_bytes: int) -> int:
        address: int = _libc.mmap(None, num_bytes, _PROT_NONE, _HOLE_FLAGS, -1, 0)
        if address == _MAP_FAILED:
            raise _os_error(f"mmap of a reservation of {num_bytes} bytes")
        return address

    def _release(self, reserved: AddressRange) -> None:
        if _libc.munmap(reserved.address, reserved.num_bytes):
            raise _os_error(f"munmap of {reserved}")

    def _create(self, page_bytes: int) -> int:
        if self._freed_offsets:
            return heapq.heappop(self._freed_offsets)
        offset = self._next_offset
        if offset + page_bytes > self._capacity_bytes:
            raise OutOfPages(1, 0)
        self._next_offset += page_bytes
        return offset

    def _destroy(self, handle: int) -> None:
        flags = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
        if _libc.fallocate(self._memfd, flags, handle, self.page_bytes):
            raise _os_error(f"fallocate(PUNCH_HOLE) of page {handle:#x}")
        heapq.heappush(self._freed_offsets, handle)

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
        physical = os.fstat(self._memfd).st_blocks * 512
        return MemoryInfo(physical, self._capacity_bytes - self._created_bytes)

    def close(self) -> None:
        if self._memfd < 0:
            return
        self._check_closed()
        os.close(self._memfd)
        self._memfd = -1

    def _map_run(self, address: int, offset: int, num_bytes: int) -> None:
        flags = mmap.MAP_SHARED | _MAP_FIXED
        if _libc.mmap(address, num_bytes, _PROT_READ_WRITE, flags, self._memfd, offset) == _MAP_FAILED:
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
