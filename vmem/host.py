"""Mapped memory on a Linux host: pages are pieces of a sparse memfd, mapping is `mmap(MAP_FIXED | MAP_SHARED)`.

The semantics are those of a GPU driver: ranges are reserved as holes (`PROT_NONE`: touching one is a SIGSEGV), one page
may be mapped at several addresses, and destroying a page really gives its memory back (`fallocate(PUNCH_HOLE)`, seen in
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
from collections.abc import Iterator, Sequence

import torch

from vmem.backend import AddressRange, MemoryInfo
from vmem.errors import IntegrityError, MapError, OutOfPages

_PROT_NONE, _PROT_READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # Python's mmap has no names for these
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


class HostBackend:
    """The `Backend` of the CPU. A handle is the page's offset in the memfd.

    Args:
        capacity_bytes: what `create` may hand out in all.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._memfd = os.memfd_create("folio-kv", os.MFD_CLOEXEC)
        os.ftruncate(self._memfd, capacity_bytes)
        self._page_bytes = 0  # set by the first create: the memfd is cut into pages of one size
        self._next_offset = 0
        self._freed_offsets: list[int] = []  # heap: low offsets first, so that neighbours merge into one mapping
        self._pages: dict[int, int] = {}  # handle → number of addresses it is mapped at
        self._mappings: dict[int, int] = {}  # address → handle
        self._reserved: dict[int, AddressRange] = {}
        self._can_populate = True

    @property
    def granularity_bytes(self) -> int:
        return mmap.PAGESIZE

    @property
    def num_mappings(self) -> int:
        return len(self._mappings)

    def reserve(self, num_bytes: int) -> AddressRange:
        self._check_aligned("size", num_bytes)
        address = _libc.mmap(None, num_bytes, _PROT_NONE, _HOLE_FLAGS, -1, 0)
        if address == _MAP_FAILED:
            raise _os_error(f"mmap of a reservation of {num_bytes} bytes")
        reserved = AddressRange(address, num_bytes)
        self._reserved[address] = reserved
        return reserved

    def release(self, reserved: AddressRange) -> None:
        if self._reserved.get(reserved.address) != reserved:
            raise IntegrityError(f"release of {reserved}, which is not reserved")
        for address in self._mappings:
            if reserved.address <= address < reserved.end:
                raise IntegrityError(f"release of {reserved} while a page is mapped at {address:#x}")
        if _libc.munmap(reserved.address, reserved.num_bytes):
            raise _os_error(f"munmap of {reserved}")
        del self._reserved[reserved.address]

    def create(self, page_bytes: int) -> int:
        self._check_aligned("page size", page_bytes)
        if self._page_bytes not in (0, page_bytes):
            raise MapError(f"page size {page_bytes} after pages of {self._page_bytes} bytes: one size per backend")
        if self._freed_offsets:
            offset = heapq.heappop(self._freed_offsets)
        elif self._next_offset + page_bytes <= self._capacity_bytes:
            offset = self._next_offset
            self._next_offset += page_bytes
        else:
            raise OutOfPages(1, 0)
        self._page_bytes = page_bytes
        self._pages[offset] = 0
        return offset

    def destroy(self, handle: int) -> None:
        if self._pages.get(handle) != 0:
            raise IntegrityError(f"destroy of page {handle:#x}, mapped {self._pages.get(handle)} times")
        flags = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
        if _libc.fallocate(self._memfd, flags, handle, self._page_bytes):
            raise _os_error(f"fallocate(PUNCH_HOLE) of page {handle:#x}")
        del self._pages[handle]
        heapq.heappush(self._freed_offsets, handle)

    def map(self, address: int, handles: Sequence[int]) -> None:
        size = self._page_bytes
        self._check_inside_reservation(AddressRange(address, len(handles) * size))
        for i, handle in enumerate(handles):
            if handle not in self._pages:
                raise IntegrityError(f"map of page {handle:#x}, which does not exist")
            if address + i * size in self._mappings:
                raise IntegrityError(f"map at {address + i * size:#x}, where a page is mapped already")
        done = 0
        try:
            for start, end in _adjacent_runs(handles, size):
                self._map_run(address + start * size, handles[start], (end - start) * size)
                done = end
        except MapError:
            if done:
                self._punch_range(AddressRange(address, done * size))
            raise
        for i, handle in enumerate(handles):
            self._mappings[address + i * size] = handle
            self._pages[handle] += 1

    def unmap(self, mapped: AddressRange) -> None:
        addresses = self._page_addresses(mapped)
        for address in addresses:
            if address not in self._mappings:
                raise IntegrityError(f"unmap of {mapped}: no page is mapped at {address:#x}")
        self._punch_range(mapped)
        for address in addresses:
            self._pages[self._mappings.pop(address)] -= 1

    def tensor(self, reserved: AddressRange) -> torch.Tensor:
        memory = (ctypes.c_char * reserved.num_bytes).from_address(reserved.address)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def fence(self) -> int:
        return 0  # work on the host is done when the call that did it returns

    def completed(self, fence: int) -> bool:
        return True

    def memory_info(self) -> MemoryInfo:
        physical = os.fstat(self._memfd).st_blocks * 512
        return MemoryInfo(physical, self._capacity_bytes - len(self._pages) * self._page_bytes)

    def close(self) -> None:
        if self._memfd < 0:
            return
        left = (len(self._mappings), len(self._pages), len(self._reserved))
        if any(left):
            raise IntegrityError("closed with {} mappings, {} pages and {} reservations alive".format(*left))
        os.close(self._memfd)
        self._memfd = -1

    def _map_run(self, address: int, offset: int, num_bytes: int) -> None:
        flags = mmap.MAP_SHARED | _MAP_FIXED
        if _libc.mmap(address, num_bytes, _PROT_READ_WRITE, flags, self._memfd, offset) == _MAP_FAILED:
            raise _os_error(f"mmap of {num_bytes} bytes at {address:#x}")
        if self._can_populate:
            self._populate(AddressRange(address, num_bytes))

    def _populate(self, mapped: AddressRange) -> None:
        """Fill the page table now: several times cheaper than one fault per 4 KiB in the middle of a step."""
        for address in range(mapped.address, mapped.end, _POPULATE_PIECE_BYTES):
            length = min(_POPULATE_PIECE_BYTES, mapped.end - address)
            if not _libc.madvise(address, length, _MADV_POPULATE_READ):
                continue
            if ctypes.get_errno() == errno.EINVAL:  # Linux before 5.14
                logger.warning("this kernel cannot populate mappings; pages fault in when they are first touched")
                self._can_populate = False
                return
            error = _os_error(f"madvise(POPULATE_READ) of {length} bytes at {address:#x}")
            self._punch_range(mapped)
            raise error

    def _punch_range(self, target: AddressRange) -> None:
        """Put a hole over the range. At the limit of mappings even this fails; then the range is unmapped first."""
        flags = _HOLE_FLAGS | _MAP_FIXED
        if _libc.mmap(target.address, target.num_bytes, _PROT_NONE, flags, -1, 0) != _MAP_FAILED:
            return
        _libc.munmap(target.address, target.num_bytes)
        if _libc.mmap(target.address, target.num_bytes, _PROT_NONE, flags, -1, 0) == _MAP_FAILED:
            raise _os_error(f"mmap of a hole over {target}")

    def _page_addresses(self, span: AddressRange) -> range:
        return range(span.address, span.end, self._page_bytes)

    def _check_aligned(self, what: str, num_bytes: int) -> None:
        if num_bytes <= 0 or num_bytes % self.granularity_bytes:
            raise MapError(f"{what} {num_bytes} is not a positive multiple of {self.granularity_bytes} bytes")

    def _check_inside_reservation(self, span: AddressRange) -> None:
        if not any(r.address <= span.address and span.end <= r.end for r in self._reserved.values()):
            raise IntegrityError(f"map at {span}, outside every reservation")


def _adjacent_runs(handles: Sequence[int], page_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, end) of each run of handles that are neighbours in the memfd: one mmap call each."""
    start = 0
    for i in range(1, len(handles) + 1):
        if i == len(handles) or handles[i] != handles[i - 1] + page_bytes:
            yield start, i
            start = i


def _os_error(what: str) -> MapError:
    number = ctypes.get_errno()
    return MapError(f"{what} failed: [Errno {number}] {os.strerror(number)}")
