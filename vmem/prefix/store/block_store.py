"""Block store: segment files of a folder, and where in them each unit is.

    FOLDER/lock                          held while a file is made or deleted
    FOLDER/FINGERPRINT/RECORD-NAME.kv    a segment with records of that size

Several engines may share the folder. Each writes to files of its own and reads those of all with its fingerprint. A
file whose writer is gone is continued by the next engine that needs one. Before a file is made, the files unused for
longest are deleted until all fit into the limit, those of other models and versions included.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from folio.vmem.errors import SegmentError, VmemError
from folio.vmem.prefix.store.segment import ALIGNMENT, SUFFIX, Segment, SegmentShape, StoredUnit

logger = logging.getLogger(__name__)

# The limit is kept by deleting whole files, so that there are at least so many; at most, because all are kept open.
_LEAST_FILES, _MOST_FILES = 16, 256
_USUAL_FILE_BYTES = 256 << 20

Place = tuple[Segment, int]


@dataclass(slots=True)
class StoreCounts:
    """Counts since the start, and bytes now. A record is a unit of tokens in one layer group.

    Attributes:
        written, read: records written, and read and used.
        dropped: records that were not written: evicted before their turn, or refused by the disk.
        refused: records that were read and not used, because they were damaged.
        disk_bytes: of all segment files in the folder, when this engine last made one.
    """

    written: int = 0
    read: int = 0
    dropped: int = 0
    refused: int = 0
    disk_bytes: int = 0


class BlockStore:
    """The records of one model. `find` may be called by any thread, all else by one thread at a time.

    Args:
        most_bytes: of all segment files in the folder.
        fingerprint: 16 bytes; of all that gives the records their meaning.
        record_bytes: of each layer group.
        unit_bytes: of a unit's tokens.

    Raises:
        OSError: the folder cannot be used.
        VmemError: the limit is too low.
    """

    def __init__(
        self, folder: Path, most_bytes: int, fingerprint: bytes, record_bytes: Sequence[int], unit_bytes: int
    ) -> None:
        self._root, self._most_bytes = folder, most_bytes
        self._folder = folder / fingerprint.hex()
        self._shapes = [_shape(fingerprint, size, unit_bytes, most_bytes) for size in record_bytes]
        if (least := sum(shape.num_bytes for shape in set(self._shapes))) > most_bytes:
            raise VmemError(f"a file of each kind takes {least} bytes in all, and the limit is {most_bytes}")
        self._fingerprint = fingerprint
        self.counts = StoreCounts()
        self._segments: dict[Path, Segment] = {}
        self._places: list[dict[bytes, Place]] = [{} for _ in record_bytes]  # of each group, digest → place
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked():
            self._refresh()
        self.counts.disk_bytes = sum(size for _, size, _ in self._files())

    def find(self, group: int, digest: bytes) -> Place | None:
        """Where the unit may be: `read` verifies it."""
        return self._places[group].get(digest)

    def read(self, place: Place, unit: StoredUnit, buffer: memoryview) -> bool:
        """Read a unit's record; false if it is not there or not intact, and then it is forgotten."""
        segment, slot = place
        if self._places[unit.group].get(unit.digest) != place:  # the file was deleted meanwhile
            return False
        is_read = False
        try:
            is_read = segment.read(slot, unit, buffer)
        except OSError as error:
            logger.warning("%s cannot be read: %s", segment.path, error)
        if is_read:
            self.counts.read += 1
            segment.note_read()
        else:
            self.counts.refused += 1
            self._places[unit.group].pop(unit.digest, None)
        return is_read

    def write(self, unit: StoredUnit, buffer: memoryview) -> None:
        """Write a unit's record. Raises `OSError`; then it is not there."""
        segment = self._own_segment(self._shapes[unit.group])
        slot = segment.append(unit, buffer)
        self._places[unit.group][unit.digest] = segment, slot
        self.counts.written += 1

    def close(self) -> None:
        """Leave the files to other engines."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        for places in self._places:
            places.clear()

    # ---- files ----

    def _own_segment(self, shape: SegmentShape) -> Segment:
        """The file to write to, made if there is none with room."""
        if (segment := self._with_room(shape.record_bytes)) is not None:
            return segment
        with self._locked():
            self._refresh()
            if (segment := self._with_room(shape.record_bytes)) is not None:
                return segment
            self._make_room(shape.num_bytes)
            path = self._folder / f"{shape.record_bytes}-{secrets.token_hex(8)}{SUFFIX}"
            self._segments[path] = segment = Segment.create(path, shape)
            self.counts.disk_bytes += shape.num_bytes
            return segment

    def _with_room(self, record_bytes: int) -> Segment | None:
        for segment in self._segments.values():
            if segment.is_own and segment.shape.record_bytes == record_bytes and segment.is_linked:
                return segment
        return None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _make_room(self, num_bytes: int) -> None:
        """Delete the files unused for longest until another of `num_bytes` fits. Raises `OSError`."""
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total + num_bytes <= self._most_bytes:
                break
            if self._delete(path):
                total -= size
        self.counts.disk_bytes = total
        if total + num_bytes > self._most_bytes:
            raise OSError(f"{self._root}: other engines write to all files, {total} bytes of {self._most_bytes}")

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """(last use, bytes, path) of this user's segment files in the folder."""
        for path in self._root.glob(f"*/*{SUFFIX}"):
            with suppress(OSError):  # another engine has deleted it
                found = path.lstat()
                if found.st_uid == os.geteuid():
                    yield found.st_mtime, found.st_size, path

    def _delete(self, path: Path) -> bool:
        """Delete a file, unless another engine writes to it."""
        own = self._segments.get(path)
        try:
            if own is None or not own.is_own:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                finally:
                    os.close(fd)
            path.unlink()
        except OSError:
            return False
        self._forget(path)
        return True

    def _refresh(self) -> None:
        """Read the indexes that are new, or have grown, since the last call."""
        for path, segment in list(self._segments.items()):
            if not segment.is_linked:
                self._forget(path)
            elif not segment.is_own and not segment.is_full:
                start = segment.num_used
                with suppress(OSError, SegmentError):
                    segment.reload()
                    self._note(segment, start)
        for path in self._folder.glob(f"*{SUFFIX}"):
            if path not in self._segments:
                try:
                    self._segments[path] = Segment.open(path, self._fingerprint)
                    self._note(self._segments[path])
                except (OSError, SegmentError) as error:
                    logger.warning("%s is not used: %s", path, error)

    def _note(self, segment: Segment, start: int = 0) -> None:
        for group, shape in enumerate(self._shapes):
            if shape.record_bytes == segment.shape.record_bytes:
                digests, slots = segment.entries(group, start)
                self._places[group].update(zip(digests, zip(itertools.repeat(segment), slots), strict=False))

    def _forget(self, path: Path) -> None:
        if (segment := self._segments.pop(path, None)) is None:
            return
        for group, places in enumerate(self._places):
            for digest in segment.entries(group)[0]:
                if places.get(digest, (None,))[0] is segment:
                    del places[digest]
        segment.close()


def _shape(fingerprint: bytes, record_bytes: int, unit_bytes: int, most_bytes: int) -> SegmentShape:
    record_bytes = -(-record_bytes // ALIGNMENT) * ALIGNMENT
    num_bytes = min(most_bytes // _LEAST_FILES, max(most_bytes // _MOST_FILES, _USUAL_FILE_BYTES)) - 2 * ALIGNMENT
    entry_bytes = SegmentShape(fingerprint, record_bytes, 1, unit_bytes).entry_bytes
    return SegmentShape(fingerprint, record_bytes, max(num_bytes // (record_bytes + entry_bytes), 1), unit_bytes)
