"""Segment file: records of one size, and an index that a start reads without them.

    | header, 4 KiB | index: an entry a record, to a multiple of 4 KiB | record 0 | record 1 | …

A record is the content of one unit's blocks in one layer group. It is written before its entry, which has the checksums
of both, so that a process that ends in between leaves a free place. A file never grows: its room is allocated when it
is made, which is when a full disk is noticed. Records and entries are written, and records read, past the page cache
where the file system can (O_DIRECT).
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import stat
import struct
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from folio.vmem.errors import SegmentError

logger = logging.getLogger(__name__)

# Files are read and written in multiples of it: O_DIRECT needs multiples of the device's sector.
ALIGNMENT = 4096
SUFFIX = ".kv"
_MAGIC = b"FolioKV1"
_HEADER = struct.Struct("<8s16sQII")  # magic, fingerprint, bytes of a record, records, bytes of a unit's tokens
_CRC = struct.Struct("<I")
_ENTRY = struct.Struct(
    "<16s16s16sIII"
)  # digest, parent, root, group, slot, CRC-32 of the record; CRC-32, tokens follow
_DIGEST_BYTES = 16
_MODE = 0o600
# The time of a file's last use is this exact.
_TOUCH_PERIOD_S = 60.0


@dataclass(frozen=True, slots=True)
class StoredUnit:
    """One unit of tokens in one layer group: a record is a hit only if all of it is equal.

    Attributes:
        root: hash of what prefixes must have in common beside their tokens, see `TokenChain`.
        parent: hash of the prefix before the unit.
        digest: hash of the prefix that ends with it.
    """

    group: int
    root: bytes
    parent: bytes
    digest: bytes
    tokens: bytes


@dataclass(frozen=True, slots=True)
class SegmentShape:
    """What files of one kind have in common.

    Attributes:
        fingerprint: 16 bytes; of all that gives the records their meaning.
        record_bytes: a multiple of 4,096.
        unit_bytes: of a unit's tokens.
    """

    fingerprint: bytes
    record_bytes: int
    num_records: int
    unit_bytes: int

    @property
    def entry_bytes(self) -> int:
        return _ENTRY.size + _CRC.size + self.unit_bytes

    @property
    def index_bytes(self) -> int:
        return -(-self.num_records * self.entry_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def num_bytes(self) -> int:
        return ALIGNMENT + self.index_bytes + self.num_records * self.record_bytes

    def header(self) -> bytes:
        fields = _HEADER.pack(_MAGIC, self.fingerprint, self.record_bytes, self.num_records, self.unit_bytes)
        return fields + _CRC.pack(zlib.crc32(fields))

    @classmethod
    def of_header(cls, header: bytes) -> SegmentShape:
        """Raises `SegmentError`."""
        fields = header[: _HEADER.size]
        if len(header) < _HEADER.size + _CRC.size or header[: len(_MAGIC)] != _MAGIC:
            raise SegmentError("it is no segment file of this version")
        if _CRC.unpack_from(header, _HEADER.size)[0] != zlib.crc32(fields):
            raise SegmentError("its header is damaged")
        _, fingerprint, record_bytes, num_records, unit_bytes = _HEADER.unpack(fields)
        return cls(fingerprint, record_bytes, num_records, unit_bytes)


class Segment:
    """One open file. Used by one thread at a time.

    Attributes:
        num_used: records from the first one on that are written or spoilt.
        is_own: whether this process holds the writer's lock, until the file is full.
    """

    def __init__(self, path: Path, fd: int, shape: SegmentShape, *, is_own: bool) -> None:
        self.path, self.shape, self.is_own = path, shape, is_own
        self._fd = fd
        self._index = mmap.mmap(-1, shape.index_bytes)  # aligned, as O_DIRECT needs it
        self.num_used = 0
        self._touch_at = 0.0

    @classmethod
    def create(cls, path: Path, shape: SegmentShape) -> Segment:
        """Make a file with room for all records. Raises `OSError`; then there is none."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, _MODE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(fd, 0, shape.num_bytes)
            os.pwrite(fd, shape.header(), 0)
            _set_direct(fd)
            return cls(path, fd, shape, is_own=True)
        except BaseException:
            path.unlink()
            os.close(fd)
            raise

    @classmethod
    def open(cls, path: Path, fingerprint: bytes) -> Segment:
        """Open a file and read its index. It is this process's to write to if it has room and its writer is gone.

        Raises:
            SegmentError: it is foreign, damaged, or of another user.
            OSError: it cannot be read.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o7777 != _MODE:
                raise SegmentError(f"it must be this user's file with mode 0600, not {found.st_mode:o}")
            shape = SegmentShape.of_header(os.pread(fd, ALIGNMENT, 0))
            if shape.fingerprint != fingerprint:
                raise SegmentError("it is of another model or version")
            if found.st_size != shape.num_bytes:
                raise SegmentError(f"it has {found.st_size} bytes instead of {shape.num_bytes}")
            segment = cls(path, fd, shape, is_own=_try_lock(fd))
            segment.reload()
            segment._leave_if_full()
            _set_direct(fd)
            return segment
        except BaseException:
            os.close(fd)
            raise

    @property
    def is_full(self) -> bool:
        return self.num_used == self.shape.num_records

    @property
    def is_linked(self) -> bool:
        """Whether the file still has its name."""
        with suppress(OSError):
            return os.fstat(self._fd).st_nlink > 0
        return False

    def reload(self) -> None:
        """Read the index, which the file's writer may have extended."""
        if os.preadv(self._fd, [self._index], ALIGNMENT) != self.shape.index_bytes:
            raise SegmentError("its index is cut off")
        written = np.flatnonzero(self._table()[:, : _ENTRY.size].any(axis=1))
        self.num_used = max(self.num_used, int(written[-1]) + 1 if len(written) else 0)

    def entries(self, group: int, start: int = 0) -> tuple[list[bytes], list[int]]:
        """Digests and slots of a layer group's records from slot `start` on; not verified."""
        table = self._table()[start : self.num_used]
        groups = table[:, 3 * _DIGEST_BYTES : 3 * _DIGEST_BYTES + 4].copy().view("<u4")[:, 0]
        of_group = np.flatnonzero(groups == group)
        digests: list[bytes] = table[of_group, :_DIGEST_BYTES].copy().view(f"V{_DIGEST_BYTES}")[:, 0].tolist()
        return digests, (of_group + start).tolist()

    def read(self, slot: int, unit: StoredUnit, buffer: memoryview) -> bool:
        """Read the record of this unit into `buffer`, aligned and of the record's size; false if it is another unit's,
        or damaged. Raises `OSError`."""
        start, size = slot * self.shape.entry_bytes, self.shape.entry_bytes
        entry = self._index[start : start + size]
        crc = _ENTRY.unpack_from(entry)[-1]
        if entry != self._entry(slot, unit, crc):
            return False
        offset = ALIGNMENT + self.shape.index_bytes + slot * self.shape.record_bytes
        return os.preadv(self._fd, [buffer], offset) == len(buffer) and zlib.crc32(buffer) == crc

    def append(self, unit: StoredUnit, buffer: memoryview) -> int:
        """Write a record; returns its slot. Raises `OSError`; then its place is spoilt."""
        slot, self.num_used = self.num_used, self.num_used + 1
        try:
            self._write(buffer, ALIGNMENT + self.shape.index_bytes + slot * self.shape.record_bytes)
            start, size = slot * self.shape.entry_bytes, self.shape.entry_bytes
            self._index[start : start + size] = self._entry(slot, unit, zlib.crc32(buffer))
            first = start // ALIGNMENT * ALIGNMENT
            past = -(-(start + size) // ALIGNMENT) * ALIGNMENT
            self._write(memoryview(self._index)[first:past], ALIGNMENT + first)
        finally:
            self._leave_if_full()
        return slot

    def note_read(self) -> None:
        """Make the file the last to be deleted, of those that are not in use."""
        now = time.monotonic()
        if now >= self._touch_at:
            self._touch_at = now + _TOUCH_PERIOD_S
            with suppress(OSError):
                os.utime(self._fd)

    def close(self) -> None:
        os.close(self._fd)
        self._index.close()

    def _table(self) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        """The entries, `[num_records, entry_bytes]`."""
        num_records, size = self.shape.num_records, self.shape.entry_bytes
        return np.frombuffer(self._index, np.uint8, num_records * size).reshape(num_records, size)

    def _leave_if_full(self) -> None:
        """Let others delete the file."""
        if self.is_own and self.is_full:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self.is_own = False

    def _entry(self, slot: int, unit: StoredUnit, crc: int) -> bytes:
        fields = _ENTRY.pack(unit.digest, unit.parent, unit.root, unit.group, slot, crc)
        check = zlib.crc32(unit.tokens, zlib.crc32(fields, zlib.crc32(self.shape.fingerprint)))
        return fields + _CRC.pack(check) + unit.tokens

    def _write(self, buffer: memoryview, offset: int) -> None:
        written = os.pwritev(self._fd, [buffer], offset)
        if written != len(buffer):
            raise OSError(f"{self.path}: {written} of {len(buffer)} bytes written")


def _try_lock(fd: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _set_direct(fd: int) -> None:
    """Read and write past the page cache from now on, where the file system can."""
    with suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
