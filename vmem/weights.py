"""Weight ranges: reserved addresses that show a model's weights while these are mapped, and are a hole otherwise.

The addresses never change, so tensors over the range and pointers into it stay valid. On a CPU the mapped file is the
weights: replicas on one machine share the page cache, and mapping copies nothing.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import Protocol

import torch

from vmem.backends.base import AddressRange
from vmem.errors import IntegrityError, MapError

# Where files are mapped page by page, a huge page takes one entry of the page table instead of 512. It needs large
# folios in the page cache (ext4, XFS), and equal offsets within a huge page in the file and in memory.
HUGE_PAGE_BYTES = 2 << 20

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # Python's mmap has no names for these
_HOLE_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_PROT_NONE = 0
_MADV_HUGEPAGE, _MADV_POPULATE_READ = 14, 22
_MAP_FAILED = ctypes.c_void_p(-1).value
# A longer populate holds the process's memory map lock for milliseconds and stalls other threads' mmap.
_POPULATE_PIECE_BYTES = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Charges(Protocol):
    """A device's memory, as far as it is not made of pages: `DevicePages`."""

    def charge(self, num_bytes: int) -> None:
        """Count memory as used. Raises `OutOfPages`; then nothing is charged."""

    def discharge(self, num_bytes: int) -> None:
        """End a charge."""


class FileRange:
    """Host addresses for a part of a file, read-only. Not for several threads at once.

    Args:
        num_bytes: of the file's part, more than 0.
        charges: where mapped bytes are counted, in whole pages.

    Attributes:
        reserved: the addresses, a multiple of `HUGE_PAGE_BYTES` first.
        is_mapped: the file's part is there; otherwise any touch is a SIGSEGV.

    Raises:
        MapError: the addresses cannot be reserved.
    """

    def __init__(self, num_bytes: int, charges: Charges | None = None) -> None:
        whole_pages = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        # One mapping, with up to a huge page before and after the range.
        self._reservation = AddressRange(_reserve(whole_pages + HUGE_PAGE_BYTES), whole_pages + HUGE_PAGE_BYTES)
        start = -(-self._reservation.address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self.reserved = AddressRange(start, whole_pages)
        self.num_bytes = num_bytes
        self.is_mapped = False
        self._charges = charges
        self._is_closed = False

    def tensor(self) -> torch.Tensor:
        """A uint8 tensor `[num_bytes]` over the range, valid until `close`; only to be read, and only while mapped."""
        return torch.frombuffer((ctypes.c_char * self.num_bytes).from_address(self.reserved.address), dtype=torch.uint8)

    def map(self, fd: int, offset: int) -> None:
        """Map the file's bytes from `offset` on, a multiple of `HUGE_PAGE_BYTES`, and fill the page table. The file may
        be closed afterwards.

        Raises:
            OutOfPages: the device has too little memory left.
            MapError: the system refused, or the file cannot be read. Nothing is mapped or charged then.
        """
        if self.is_mapped or self._is_closed:
            raise IntegrityError(f"map at {self.reserved}, which is {'closed' if self._is_closed else 'mapped'}")
        if self._charges is not None:
            self._charges.charge(self.reserved.num_bytes)
        try:
            flags = mmap.MAP_SHARED | _MAP_FIXED
            at, length = self.reserved.address, self.reserved.num_bytes
            if _libc.mmap(at, length, mmap.PROT_READ, flags, fd, offset) == _MAP_FAILED:
                raise _os_error(f"mmap of {length} bytes of weights at {at:#x}")
            try:
                self._populate()
            except MapError:
                self._make_hole()
                raise
        except MapError:
            self._discharge()
            raise
        self.is_mapped = True

    def unmap(self) -> None:
        """Turn the range into a hole. Raises `MapError`; it is still mapped then."""
        if not self.is_mapped:
            raise IntegrityError(f"unmap of {self.reserved}, which is not mapped")
        self._make_hole()
        self.is_mapped = False
        self._discharge()

    def close(self) -> None:
        """Unmap and release the range."""
        if self._is_closed:
            return
        if self.is_mapped:
            self.unmap()
        if _libc.munmap(self._reservation.address, self._reservation.num_bytes):
            raise _os_error(f"munmap of {self._reservation}")
        self._is_closed = True

    def _populate(self) -> None:
        """Fill the page table now: the first step would else have a fault for every 4 to 64 KiB. An error of the disk
        shows here and not as a SIGBUS in a step."""
        _libc.madvise(self.reserved.address, self.reserved.num_bytes, _MADV_HUGEPAGE)  # EINVAL without huge pages
        for address in range(self.reserved.address, self.reserved.end, _POPULATE_PIECE_BYTES):
            length = min(_POPULATE_PIECE_BYTES, self.reserved.end - address)
            if _libc.madvise(address, length, _MADV_POPULATE_READ):
                if ctypes.get_errno() == errno.EINVAL:  # Linux before 5.14: pages fault in when they are first touched
                    return
                raise _os_error(f"reading {length} bytes of weights at {address:#x}")

    def _make_hole(self) -> None:
        flags = _HOLE_FLAGS | _MAP_FIXED
        if _libc.mmap(self.reserved.address, self.reserved.num_bytes, _PROT_NONE, flags, -1, 0) == _MAP_FAILED:
            raise _os_error(f"mmap of a hole over {self.reserved}")

    def _discharge(self) -> None:
        if self._charges is not None:
            self._charges.discharge(self.reserved.num_bytes)


def _reserve(num_bytes: int) -> int:
    address: int = _libc.mmap(None, num_bytes, _PROT_NONE, _HOLE_FLAGS, -1, 0)
    if address == _MAP_FAILED:
        raise _os_error(f"mmap of a reservation of {num_bytes} bytes")
    return address


def _os_error(what: str) -> MapError:
    number = ctypes.get_errno()
    return MapError(f"{what} failed: [Errno {number}] {os.strerror(number)}")
