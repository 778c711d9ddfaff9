"""Weight ranges: reserved addresses that show a model's weights while these are mapped, and are a hole otherwise.

The addresses never change, so tensors over the range and pointers into it stay valid. On a CPU the mapped file is the
weights: replicas on one machine share the page cache, and mapping copies nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from typing import Protocol

import torch

from folio.vmem.backends import host_calls
from folio.vmem.backends.base import AddressRange
from folio.vmem.errors import IntegrityError, MapError

# Where files are mapped page by page, a huge page takes one entry of the page table instead of 512. It needs large
# folios in the page cache (ext4, XFS), and equal offsets within a huge page in the file and in memory.
HUGE_PAGE_BYTES = 2 << 20
# Bytes of one read-ahead call: enough for the rate of a disk, and over in a few milliseconds.
_PIECE_BYTES = 2 * HUGE_PAGE_BYTES


class Charges(Protocol):
    """The account of a device's memory without pages: `DevicePages`."""

    def charge(self, num_bytes: int) -> None:
        """Count memory as used. Raises `OutOfPages`; then nothing is charged."""

    def discharge(self, num_bytes: int) -> None:
        """End a charge."""


class FileRange:
    """Host addresses for a part of a file, read-only. Used by one thread at a time, except for `detach`.

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
        reserved_bytes = whole_pages + HUGE_PAGE_BYTES
        self._reservation = AddressRange(host_calls.reserve(reserved_bytes), reserved_bytes)
        start = -(-self._reservation.address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self.reserved = AddressRange(start, whole_pages)
        self.num_bytes = num_bytes
        self.is_mapped = False
        self._charges = charges
        self._is_closed = False
        self._changing = threading.Lock()

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
        with self._changing:
            self._map(fd, offset)

    def _map(self, fd: int, offset: int) -> None:
        if self.is_mapped or self._is_closed:
            raise IntegrityError(f"map at {self.reserved}, which is {'closed' if self._is_closed else 'mapped'}")
        if self._charges is not None:
            self._charges.charge(self.reserved.num_bytes)
        try:
            host_calls.map_file(self.reserved.address, self.reserved.num_bytes, mmap.PROT_READ, fd, offset)
            try:
                # Before the page table is filled, so that it can be with huge pages; fails without support for them.
                host_calls.libc.madvise(self.reserved.address, self.reserved.num_bytes, host_calls.MADV_HUGEPAGE)
                # Otherwise the first step would have a fault for every 4 to 64 KiB, and a SIGBUS where the disk cannot
                # be read.
                host_calls.populate(self.reserved)
            except MapError:
                host_calls.make_hole(self.reserved)
                raise
        except MapError:
            self._discharge()
            raise
        self.is_mapped = True

    def unmap(self) -> None:
        """Turn the range into a hole. Raises `MapError`; it is still mapped then."""
        with self._changing:
            self._unmap()

    def _unmap(self) -> None:
        if not self.is_mapped:
            raise IntegrityError(f"unmap of {self.reserved}, which is not mapped")
        host_calls.make_hole(self.reserved)
        self.is_mapped = False
        self._discharge()

    def detach(self) -> bool:
        """Replace the mapped file, if there is one, by a copy of its bytes at the same addresses, while other threads
        read them. Returns false if another thread is mapping or unmapping it. Raises `MapError`; nothing has changed
        then."""
        if not self._changing.acquire(blocking=False):
            return False
        try:
            if self.is_mapped:
                host_calls.replace_by_copy(self.reserved)
        finally:
            self._changing.release()
        return True

    def close(self) -> None:
        """Unmap and release the range."""
        with self._changing:
            if self._is_closed:
                return
            if self.is_mapped:
                self._unmap()
            host_calls.release(self._reservation)
            self._is_closed = True

    def _discharge(self) -> None:
        if self._charges is not None:
            self._charges.discharge(self.reserved.num_bytes)


def read_ahead(fd: int, offset: int, num_bytes: int) -> Iterator[int]:
    """Read a part of a file into the page cache; yields after each piece the bytes of it that were not there.

    Through a mapping: its faults read whole huge pages, as `FileRange` maps them, where `readahead` reads small ones.
    Linux before 5.14 cannot fill page tables on demand: there the bytes are copied out of the file instead.

    Args:
        offset: a multiple of `HUGE_PAGE_BYTES`.

    Raises:
        MapError: the system refused, or the file cannot be read.
    """
    part = FileRange(num_bytes)
    try:
        reserved = part.reserved
        host_calls.map_file(reserved.address, reserved.num_bytes, mmap.PROT_READ, fd, offset)
        host_calls.libc.madvise(reserved.address, reserved.num_bytes, host_calls.MADV_HUGEPAGE)
        resident = host_calls.resident_pages(reserved)  # of all, as the system itself reads ahead of a fault
        for start in range(0, reserved.num_bytes, _PIECE_BYTES):
            piece = AddressRange(reserved.address + start, min(_PIECE_BYTES, reserved.num_bytes - start))
            first, last = start // mmap.PAGESIZE, (start + piece.num_bytes) // mmap.PAGESIZE
            missing_bytes = resident.count(0, first, last) * mmap.PAGESIZE
            if missing_bytes and not host_calls.populate(piece):
                _read(fd, offset + start, min(_PIECE_BYTES, num_bytes - start))
            yield missing_bytes
    finally:
        part.close()


def _read(fd: int, offset: int, num_bytes: int) -> None:
    """Read a part of a file, for its pages in the cache. Raises `MapError`."""
    buffer, done = memoryview(bytearray(num_bytes)), 0
    try:
        while done < num_bytes:
            got = os.preadv(fd, [buffer[done:]], offset + done)
            if not got:
                raise MapError(f"the file ends {num_bytes - done} bytes too early")
            done += got
    except OSError as error:
        raise MapError(f"the file cannot be read: {error.strerror}") from error
