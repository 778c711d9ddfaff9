"""Weight guard: copies a mapped weight file into memory before another process can change it.

The pages of a mapped file are gone when the file is truncated, and the next access to them ends the process (SIGBUS),
with all its models. So the process has a read lease (`fcntl(2)`, F_SETLEASE) on each of these files: another process
that opens one for writing, or truncates it, waits until the lease is given back, up to
`/proc/sys/fs/lease-break-time`, 45 s. Meanwhile a copy replaces the mapped pages, at the same addresses.

Removing or replacing a file needs no lease: its bytes stay as long as it is mapped.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from folio.vmem import MapError

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
# Time for a process that has a file open for writing to close it: a process that has just published it does so at once.
_WRITER_S = 1.0


@dataclass(slots=True)
class _Watched:
    """An open file.

    Attributes:
        has_lease: `None` where the file system has no leases.
        is_held: the lease is not given back, because the file is being mapped.
    """

    fd: int
    name: str
    detach: Callable[[], bool]
    has_lease: bool | None = False
    is_held: bool = False


class WeightGuard:
    """Leases on files that are mapped, checked by a thread while there are any. Usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[int, _Watched] = {}
        self._is_told = self._is_running = False

    def watch(self, fd: int, name: str, detach: Callable[[], bool]) -> None:
        """Watch a file that this user owns, until `unwatch`, which must come before the file is closed.

        Args:
            name: the model's name, for the log.
            detach: replaces what is mapped of the file by a copy, and returns whether that is done: `FileRange.detach`.
        """
        watched = _Watched(fd, name, detach)
        with self._lock:
            self._watched[fd] = watched
            self._take(watched)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="folio-weight-guard", daemon=True).start()

    def unwatch(self, fd: int) -> None:
        with self._lock:
            self._watched.pop(fd, None)

    def hold(self, fd: int) -> None:
        """Keep the lease of a watched file until `let_go`, while the file is examined and mapped. There is none if a
        process has had the file open for writing for `_WRITER_S`."""
        end = time.monotonic() + _WRITER_S
        while True:
            with self._lock:
                if (watched := self._watched.get(fd)) is None:
                    return
                watched.is_held = True
                if watched.has_lease is False:
                    self._take(watched)
                if watched.has_lease is not False or time.monotonic() >= end:
                    return
            time.sleep(_LOOK_S / 10)

    def let_go(self, fd: int, *, is_mapped: bool) -> None:
        """End `hold`. A file that has been mapped without a lease is copied now, since its writer does not wait."""
        with self._lock:
            if (watched := self._watched.get(fd)) is None:
                return
            watched.is_held = False
            has_none = watched.has_lease is False
        if has_none and is_mapped:
            self._detach(watched)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._watched:
                    self._is_running = False
                    return
                broken = [watched for watched in self._watched.values() if self._is_broken(watched)]
            for watched in broken:
                self._detach(watched)
            time.sleep(_LOOK_S)

    def _take(self, watched: _Watched) -> None:
        """Take the lease, unless a process has the file open for writing, as its writer may for another moment."""
        try:
            # The signal of a lease that ends: by default one that ends the process; this one is ignored.
            fcntl.fcntl(watched.fd, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(watched.fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            watched.has_lease = True
        except OSError as error:
            if error.errno == errno.EAGAIN:
                return
            watched.has_lease = None
            if not self._is_told:
                logger.warning(
                    "weights_dir is on a file system without leases (%s): truncating a file there while its model is "
                    "awake ends this process; remove files instead",
                    error.strerror,
                )
            self._is_told = True

    def _is_broken(self, watched: _Watched) -> bool:
        """Whether a process waits for a lease that can be given back. A missing lease is taken."""
        if watched.is_held:
            return False
        if watched.has_lease is False:
            self._take(watched)
        return watched.has_lease is True and fcntl.fcntl(watched.fd, fcntl.F_GETLEASE) != fcntl.F_RDLCK

    def _detach(self, watched: _Watched) -> None:
        start = time.monotonic()
        try:
            if not watched.detach():
                return  # it is being mapped or unmapped: the next check tries again
        except MapError as error:
            logger.error("the weights of %r cannot be copied into memory: %s", watched.name, error)
            return
        with self._lock:
            if self._watched.get(watched.fd) is watched:
                logger.warning(
                    "another process writes to the weights of %r, %s: they have been copied into memory in %.1f s",
                    watched.name,
                    os.readlink(f"/proc/self/fd/{watched.fd}"),
                    time.monotonic() - start,
                )
                if watched.has_lease:
                    watched.has_lease = False
                    fcntl.fcntl(watched.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
