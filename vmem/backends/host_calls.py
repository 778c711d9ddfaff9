"""Calls of the operating system that map memory. Through ctypes: Python's `mmap` cannot map at a fixed address."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

from folio.vmem.backends.base import AddressRange
from folio.vmem.errors import MapError

PROT_NONE = 0
MAP_FIXED, MAP_FIXED_NOREPLACE, MAP_NORESERVE = 0x10, 0x100000, 0x4000  # Python's mmap has no names for these
HOLE_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
MREMAP_MAYMOVE, MREMAP_FIXED = 1, 2
MADV_HUGEPAGE, MADV_POPULATE_READ = 14, 22
MAP_FAILED = ctypes.c_void_p(-1).value
# A longer populate holds the process's memory map lock for milliseconds and stalls other threads' mmap.
POPULATE_PIECE_BYTES = 2 << 20

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mremap.restype = ctypes.c_void_p
libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


def reserve(num_bytes: int) -> int:
    """The address of a new hole. Raises `MapError`."""
    address: int = libc.mmap(None, num_bytes, PROT_NONE, HOLE_FLAGS, -1, 0)
    if address == MAP_FAILED:
        raise os_error(f"mmap of a reservation of {num_bytes} bytes")
    return address


def release(reserved: AddressRange) -> None:
    if libc.munmap(reserved.address, reserved.num_bytes):
        raise os_error(f"munmap of {reserved}")


def map_file(address: int, num_bytes: int, protection: int, fd: int, offset: int) -> None:
    """Map a part of a file, shared. Raises `MapError`."""
    flags = mmap.MAP_SHARED | MAP_FIXED
    if libc.mmap(address, num_bytes, protection, flags, fd, offset) == MAP_FAILED:
        raise os_error(f"mmap of {num_bytes} bytes at {address:#x}")


def populate(mapped: AddressRange) -> bool:
    """Fill the page table: several times cheaper than one fault per 4 KiB. False on Linux before 5.14, which cannot.
    Raises `MapError` where the memory cannot be read."""
    for address in range(mapped.address, mapped.end, POPULATE_PIECE_BYTES):
        length = min(POPULATE_PIECE_BYTES, mapped.end - address)
        if libc.madvise(address, length, MADV_POPULATE_READ):
            if ctypes.get_errno() == errno.EINVAL:
                return False
            raise os_error(f"madvise(POPULATE_READ) of {length} bytes at {address:#x}")
    return True


def resident_pages(mapped: AddressRange) -> bytes:
    """For each system page of a mapped file, 1 if it is in the page cache, else 0. Raises `MapError`."""
    pages = (ctypes.c_ubyte * (-(-mapped.num_bytes // mmap.PAGESIZE)))()
    if libc.mincore(mapped.address, mapped.num_bytes, pages):
        raise os_error(f"mincore of {mapped}")
    return bytes(pages)  # Linux leaves the other bits 0


def make_hole(mapped: AddressRange) -> None:
    """Map a hole over the range. At the limit of mappings even this fails; then the range is unmapped first. Raises
    `MapError`."""
    flags = HOLE_FLAGS | MAP_FIXED
    if libc.mmap(mapped.address, mapped.num_bytes, PROT_NONE, flags, -1, 0) != MAP_FAILED:
        return
    # Another thread may map something in the gap meanwhile: this call must then fail and not replace it.
    flags = HOLE_FLAGS | MAP_FIXED_NOREPLACE
    if libc.munmap(mapped.address, mapped.num_bytes) or (
        libc.mmap(mapped.address, mapped.num_bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED
    ):
        raise os_error(f"mmap of a hole over {mapped}")


def replace_by_copy(mapped: AddressRange) -> None:
    """Replace a mapped range by a copy of its bytes in memory, only to be read. Threads that read the range see either,
    and the same bytes. Raises `MapError`; the range is as it was then."""
    size = mapped.num_bytes
    copy = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if copy == MAP_FAILED:
        raise os_error(f"mmap of {size} bytes for a copy of {mapped}")
    ctypes.memmove(copy, mapped.address, size)
    moved = not libc.mprotect(copy, size, mmap.PROT_READ) and (
        libc.mremap(copy, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, mapped.address) != MAP_FAILED
    )
    if not moved:
        error = os_error(f"mremap to {mapped}")
        libc.munmap(copy, size)
        raise error


def os_error(what: str) -> MapError:
    """The error of the last call."""
    number = ctypes.get_errno()
    return MapError(f"{what} failed: [Errno {number}] {os.strerror(number)}")
