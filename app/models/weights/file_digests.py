"""File digests of checkpoints: computed once, and reused as long as a file is unchanged.

A size and a time of modification do not tell one file from another: `rsync -t`, image builders and package managers set
the time. The time of the last change of the inode (ctime) is the system's, and no program sets it. So a file is
unchanged if its inode, size and both times are; otherwise all of it is read again. Two cases give no such proof:

- A file that has changed within the last seconds may change again within one tick of the clock.
- File systems without that time, such as SquashFS, EROFS and FAT, report whole seconds: the digest lasts as long as the
  process there, and is not stored.

The device is no part of the proof, because overlays have another number after each mount.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from folio.app.models.weights.folder import create_locked

logger = logging.getLogger(__name__)

_FILE_NAME = "digests.json"
_SECOND_NS = 10**9
_SETTLED_NS = 2 * _SECOND_NS
# Read and hashed at once by each thread; more than a few threads wait for memory or disk.
_PIECE_BYTES = 8 << 20
_THREADS = 4

# Inode, size, times of modification and of change, in nanoseconds.
FileState: TypeAlias = tuple[int, int, int, int]


class FileDigests:
    """Digests of files by path and state. From any thread.

    Args:
        folder: stores them for other processes, and only this user can write to it; `None`, or a folder that cannot be
            written: they last as long as the process.
        most_stored: the most digests that are stored, the latest ones; a digest that is not stored is computed again.
        clock: of the files' times, in nanoseconds.
    """

    def __init__(
        self, folder: Path | None = None, most_stored: int = 4096, clock: Callable[[], int] = time.time_ns
    ) -> None:
        self._most_stored, self._clock = most_stored, clock
        self._path = None if folder is None else folder / _FILE_NAME
        self._lock = threading.Lock()
        self._known: dict[str, tuple[FileState, str]] = {} if self._path is None else _load(self._path)

    def of(self, path: Path) -> str:
        """SHA-256 over the pieces' SHA-256, in hexadecimal. Raises `OSError`, also if the file changes meanwhile."""
        name = str(path.resolve())
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            state = _state(fd)
            with self._lock:
                known = self._known.get(name)
            if known is not None and known[0] == state:
                return known[1]
            start = time.monotonic()
            digest = _digest(fd, state[1])
            if _state(fd) != state:
                raise OSError(errno.ESTALE, "the file changes while it is read", name)
        finally:
            os.close(fd)
        if state[1] >= _PIECE_BYTES:
            logger.info("computed the digest of %s, %d bytes, in %.1f s", name, state[1], time.monotonic() - start)
        if self._clock() - state[3] >= _SETTLED_NS:
            with self._lock:
                self._known[name] = state, digest
                if self._path is not None and state[3] % _SECOND_NS:
                    _store(self._path, name, state, digest, self._most_stored)
        return digest


def _state(fd: int) -> FileState:
    found = os.fstat(fd)
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _digest(fd: int, num_bytes: int) -> str:
    """Hash a file's bytes, which are read and not mapped: truncation of a mapped file would end the process."""

    def of_piece(start: int) -> bytes:
        data, end = b"", min(start + _PIECE_BYTES, num_bytes)
        while start + len(data) < end:
            part = os.pread(fd, end - start - len(data), start + len(data))
            if not part:
                raise OSError(errno.ESTALE, "the file is truncated while it is read")
            data = data + part if data else part
        return hashlib.sha256(data).digest()

    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        return hashlib.sha256(b"".join(threads.map(of_piece, range(0, num_bytes, _PIECE_BYTES)))).hexdigest()


def _load(path: Path) -> dict[str, tuple[FileState, str]]:
    """The stored digests; none if the file is missing or damaged."""
    known: dict[str, tuple[FileState, str]] = {}
    with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        for name, (inode, size, modified, changed, digest) in json.loads(path.read_bytes()).items():
            known[name] = (inode, size, modified, changed), digest
    return known


def _store(path: Path, name: str, state: FileState, digest: str, most: int) -> None:
    """Add a digest to the stored ones, by replacing their file. Two processes may do so at the same time: then one
    digest is lost, and computed again."""
    stored = _load(path)
    stored.pop(name, None)
    stored[name] = state, digest
    newest = list(stored.items())[-most:]
    content = json.dumps({name: [*state, digest] for name, (state, digest) in newest})
    try:
        unfinished, fd = create_locked(path.parent)
        try:
            with open(fd, "w", closefd=False) as file:
                file.write(content)
            os.replace(unfinished, path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
    except OSError as error:
        logger.info("the digest of %s is not stored (%s): the next process reads the file again", name, error.strerror)
