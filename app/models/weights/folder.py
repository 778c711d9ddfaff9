"""Folder of weight files: locks on files in use, and room for new ones.

A process holds a shared lock (flock) on the file of each of its models, asleep or awake, and an exclusive one on a file
that it writes. A file that can be locked exclusively is used by no process and may be removed.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from folio.app.models.weights.key import WeightKey

logger = logging.getLogger(__name__)

SUFFIX, UNFINISHED = ".weights", ".tmp"
# Default bound of all files, as a share of the space that is free or theirs: a full disk harms others, too.
_DISK_SHARE = 0.8
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def open_shared(path: Path) -> int:
    """Open a file; no process removes it to make room before it is closed. Raises `OSError`."""
    while True:
        fd = os.open(path, _FLAGS)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            if os.fstat(fd).st_nlink:
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # it was removed before it was locked


def create_locked(folder: Path) -> tuple[Path, int]:
    """A new file for this process alone, open and locked. Raises `OSError`."""
    while True:
        path = folder / f"{secrets.token_hex(8)}{UNFINISHED}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return path, fd
        os.close(fd)  # another process took it for an abandoned one before it was locked


def remove_unfinished(folder: Path) -> None:
    """Remove files whose writers have ended."""
    for path in folder.glob(f"*{UNFINISHED}"):
        with ExitStack() as locks, suppress(OSError):
            if _lock_unused(path, locks):
                path.unlink()


def make_room(folder: Path, key: WeightKey, num_bytes: int, most_bytes: int | None) -> None:
    """Remove files that no process uses: unfinished ones, outdated ones of this key's place, and then the least
    recently used, until the others and a new one fit into `most_bytes`.

    Args:
        most_bytes: `None` is a share of the space that is free or taken by these files.

    Raises:
        OSError: the files in use leave too little room, and then only unfinished and outdated ones are removed.
    """
    with ExitStack() as locks:
        # One process at a time, so that another one's locks do not pass for use.
        locks.callback(os.close, lock := os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_unfinished(folder)
        unused: list[tuple[int, int, Path]] = []  # (time of use, bytes, path)
        total = unused_bytes = 0
        for path in (*folder.glob(f"*{SUFFIX}"), *folder.glob(f"*{UNFINISHED}")):
            if path.name == key.file_name:  # another process has just published it
                continue
            with suppress(FileNotFoundError):
                is_unused, found = _lock_unused(path, locks), path.lstat()
                if is_unused and path.name.startswith(key.file_prefix):
                    path.unlink()
                    continue
                total += found.st_size
                if is_unused:
                    unused.append((found.st_atime_ns, found.st_size, path))
                    unused_bytes += found.st_size
        if most_bytes is None:
            disk = os.statvfs(folder)
            most_bytes = int(_DISK_SHARE * (disk.f_bavail * disk.f_frsize + total))
        if (used_bytes := total - unused_bytes) + num_bytes > most_bytes:
            raise OSError(
                errno.EDQUOT,
                f"{num_bytes} bytes beside {used_bytes} in use would exceed weights_dir_bytes, {most_bytes}",
            )
        for _, size, path in sorted(unused):
            if total + num_bytes <= most_bytes:
                return
            logger.info("removing the least recently used weight file %s: all may take %d bytes", path, most_bytes)
            path.unlink(missing_ok=True)
            total -= size


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _lock_unused(path: Path, locks: ExitStack) -> bool:
    """Whether no process uses or writes the file, which none can use before `locks` are closed."""
    with suppress(OSError):
        fd = os.open(path, _FLAGS)
        locks.callback(os.close, fd)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
