"""Pinned share: host memory that all Folio processes of a machine pin together.

Each process notes its bytes in a file of its own, which it keeps locked: an unlocked file belongs to a process that has
ended, whose memory is free. Containers that do not share `/dev/shm` count for themselves, as their limits do.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from folio.app.errors import ConfigError
from folio.vmem import IntegrityError

logger = logging.getLogger(__name__)


def default_folder() -> Path:
    shared = Path("/dev/shm")
    return (shared if shared.is_dir() else Path(tempfile.gettempdir())) / f"folio-pinned-{os.geteuid()}"


class PinnedShare:
    """This process's part of a bound for all of them. From any thread.

    Args:
        most_bytes: of all processes together.
        folder: the same for all of them; made if it is missing.

    Raises:
        ConfigError: the folder cannot be made or is full, belongs to another user, or is open to others.
    """

    def __init__(self, most_bytes: int, folder: Path) -> None:
        self._most_bytes, self._folder = most_bytes, folder
        self._guard = threading.Lock()
        try:
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            found = folder.lstat()
        except OSError as error:
            raise ConfigError(f"{folder} cannot be made ({error.strerror}): set host_memory_bytes") from error
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ConfigError(
                f"{folder} is not a private folder of this user (mode 700): remove it, or set host_memory_bytes"
            )
        self._is_lost = False
        try:
            self._lock_fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                with self._locked():
                    self._path = folder / f"{os.getpid()}-{os.urandom(4).hex()}"
                    self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                    try:
                        fcntl.flock(self._fd, fcntl.LOCK_EX)
                        self._note(0)  # allocates the page: later notes cannot find the file system full
                    except OSError:
                        self._path.unlink(missing_ok=True)
                        os.close(self._fd)
                        raise
            except OSError:
                os.close(self._lock_fd)
                raise
        except OSError as error:
            raise ConfigError(f"{folder} cannot be written ({error.strerror}): set host_memory_bytes") from error

    def take(self, num_bytes: int) -> bool:
        """Take memory for this process if the bound allows it beside the memory of all. Returns whether it is taken;
        false, too, if the others' memory cannot be read."""
        with self._locked():
            try:
                total = self._total()
            except OSError as error:
                if not self._is_lost:
                    logger.warning(
                        "%s: %s: no more weights are copied to pinned memory; start the server again, or set "
                        "host_memory_bytes",
                        *(self._folder, error.strerror),
                    )
                self._is_lost = True
                return False
            self._is_lost = False
            if total + num_bytes > self._most_bytes:
                return False
            self._note(self._bytes + num_bytes)
            return True

    def give_back(self, num_bytes: int) -> None:
        with self._locked():
            if not 0 <= num_bytes <= self._bytes:
                raise IntegrityError(f"{num_bytes} pinned bytes given back, {self._bytes} are taken")
            self._note(self._bytes - num_bytes)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._fd)
        os.close(self._lock_fd)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One thread of one process at a time."""
        with self._guard:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def _note(self, num_bytes: int) -> None:
        os.pwrite(self._fd, b"%20d" % num_bytes, 0)
        self._bytes = num_bytes

    def _total(self) -> int:
        """Bytes of all living processes. Raises `OSError` if their files cannot be read."""
        total = 0
        # Systems remove a user's files there at the end of a session (systemd's RemoveIPC).
        self._path.lstat()
        for path in self._folder.glob("*-*"):
            with suppress(FileNotFoundError):
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    path.unlink()
                except BlockingIOError:
                    total += int(os.pread(fd, 20, 0) or 0)
                finally:
                    os.close(fd)
        return total
