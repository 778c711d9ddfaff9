"""Weight store: files of weights in a folder, each written once and then mapped by every process that needs it.

    NAME-PLACE-VERSION.weights    of a checkpoint: place is a digest of its path and of settings, version of its content
    digests.json                  of the checkpoints' files, see `FileDigests`
    RANDOM.tmp                    being written, locked by its writer

A file is published by a hard link, which never replaces another one: of two processes that write the same weights the
second one uses the first one's file, and so they share the page cache. Files are never changed afterwards. Only the
folder's owner can read or write them: to change or truncate a mapped file is to change a model or end its server.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from folio.app.errors import ConfigError, ModelError
from folio.app.models.weights.arena import ModelTensors, WeightArena, WeightRange, WeightSource
from folio.app.models.weights.file import (
    WeightFileError,
    WeightHeader,
    WeightTable,
    Write,
    check_contents,
    read_header,
    write_all,
    write_weights,
)
from folio.app.models.weights.file_digests import FileDigests
from folio.app.models.weights.folder import create_locked, make_room, open_shared, remove_unfinished, sync_folder
from folio.app.models.weights.guard import WeightGuard
from folio.app.models.weights.key import WeightKey
from folio.app.models.weights.pinned_copy import CopiedWeights
from folio.app.models.weights.pinned_share import PinnedShare
from folio.vmem.errors import MapError
from folio.vmem.uploads import CudaRange, Uploads
from folio.vmem.weights import HUGE_PAGE_BYTES, Charges, FileRange, read_ahead

logger = logging.getLogger(__name__)

# Errors of opening something that is no plain file: a link, a FIFO. Others, such as too many open files, are the
# system's, and not the file's.
_NO_FILE = (errno.ELOOP, errno.ENXIO)
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class Contents:
    """An open file of weights.

    Attributes:
        offset: of the contents in it.
        in_memory: the file is a memfd, whose memory is the only copy.
        state: device, inode, size and time of the last change.
    """

    fd: int
    offset: int
    in_memory: bool
    state: tuple[int, ...]

    @classmethod
    def of(cls, fd: int, offset: int, *, in_memory: bool = False) -> Contents:
        return cls(fd, offset, in_memory, _state(fd))

    @property
    def unchanged(self) -> bool:
        return _state(self.fd) == self.state

    def close(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of weights that has been checked."""

    contents: Contents
    header: WeightHeader

    def close(self) -> None:
        self.contents.close()


def _state(fd: int) -> tuple[int, ...]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class WeightStore:
    """Weights of the models of one process. Models may be loaded by several threads.

    Args:
        folder: on a local disk; made if it is missing. Weights that cannot be written there are kept in memory.
        charges: where the bytes of mapped weights are counted on a CPU, and those of models that are being made from
            their checkpoints on CUDA.
        uploads: of the CUDA device on which the weights are used; `None`: on the CPU, which reads their file.
        most_bytes: of all files in the folder, see `make_room`. Weights beyond it are kept in memory.
        host_memory_bytes: on CUDA, for pinned copies of weights; others are read from their files. On a CPU, for
            weights without a file while they are not mapped. Weights that have neither are made again from the
            checkpoint.
        pinned: of all processes of the machine, for the copies; `None`: this process's bound is the only one.
        write: writes bytes of a file.

    Attributes:
        digests: of the checkpoints' files.
        guard: of files that are mapped.

    Raises:
        ConfigError: the folder belongs to another user, or others can write to it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        charges: Charges | None = None,
        uploads: Uploads | None = None,
        most_bytes: int | None = None,
        host_memory_bytes: int = 0,
        pinned: PinnedShare | None = None,
        write: Write = write_all,
    ) -> None:
        self._folder = folder
        self._charges, self._uploads = charges, uploads
        self._most_bytes = most_bytes
        self._host_bytes_left, self._pinned = host_memory_bytes, pinned
        self._write = write
        self._lock = threading.Lock()
        self._checked: set[tuple[int, ...]] = set()  # states of files whose contents this process has checked
        self._warned = False
        self.guard = WeightGuard()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.stat()
        except OSError:
            self.digests = FileDigests()
            return  # writing a file will fail, too, and log the reason
        if found.st_uid != os.geteuid() or found.st_mode & _OTHERS_WRITE:
            raise ConfigError(
                f"weights_dir is {str(folder)!r}, of user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}: "
                "others could change weights there; use a folder of the server's user with mode 700"
            )
        remove_unfinished(folder)
        self.digests = FileDigests(folder)

    def move(self, tensors: ModelTensors, key: WeightKey, again: Callable[[], ModelTensors]) -> WeightArena:
        """Move the tensors of a model into an arena, which is mapped. Whatever fails, they have lost their memory.

        Args:
            again: makes the same tensors from the checkpoint, when neither file nor memory has them any more.

        Raises:
            OutOfPages: the device has too little memory left.
            MapError: the system refused.
            ModelError: the weights cannot be kept.
        """
        try:
            arena = self._arena(key, tensors.table, self.provide(key, tensors), again)
            try:
                tensors.attach(arena.contents)  # first, so that the memory is not needed twice
            except BaseException:
                arena.close()
                raise
        except BaseException:
            tensors.drop()
            raise
        return _mapped(arena)

    def room_to_make(self, num_bytes: int) -> Callable[[], None]:
        """Charge memory for a model that is made on the device, before its tensors are in an arena. Returns a function
        to call when they have given up their memory. Raises `OutOfPages`."""
        charges = self._charges
        if self._uploads is None or charges is None:
            return lambda: None
        charges.charge(num_bytes)

        def end() -> None:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # memory that torch caches is not free for others
            charges.discharge(num_bytes)

        return end

    def find(self, key: WeightKey) -> StoredFile | None:
        """The file of these weights, checked; `None` if there is none."""
        return self._open(key)

    def map(self, key: WeightKey, found: StoredFile, again: Callable[[], ModelTensors]) -> WeightArena:
        """An arena over a file that was found, which is mapped; closes the file if that fails. See `move`."""
        return _mapped(self._arena(key, found.header.table, found.contents, again))

    def _arena(
        self, key: WeightKey, table: WeightTable, contents: Contents, again: Callable[[], ModelTensors]
    ) -> WeightArena:
        """An arena that is not mapped; closes the contents if it cannot be made."""
        stored = StoredWeights(self, key, table, contents, again)
        source: WeightSource
        reserved: WeightRange
        try:
            if self._uploads is None:
                source, reserved = stored, (mapped := FileRange(table.num_bytes, self._charges))
                stored.protect(mapped.detach)
            else:
                source = CopiedWeights(key.name, table.num_bytes, self._uploads, stored, self)
                reserved = CudaRange(table.num_bytes, self._uploads)
        except BaseException:
            stored.close()
            raise
        return WeightArena(reserved, source)

    def provide(self, key: WeightKey, tensors: ModelTensors) -> Contents:
        """The contents of these tensors, from their file, which is written unless it exists; else from memory.

        Raises:
            ModelError: neither is possible.
        """
        if (found := self._open(key, tensors.table)) is not None:
            return found.contents
        try:
            make_room(self._folder, key, tensors.table.num_bytes + HUGE_PAGE_BYTES, self._most_bytes)
            return self._write_file(key, tensors)
        except OSError as error:
            if not self._warned:
                logger.warning(
                    "weights cannot be written to %s (%s): they stay in memory, up to host_memory_bytes while their "
                    "model is asleep, and other processes cannot share them",
                    self._folder,
                    error.strerror,
                )
            self._warned = True
        fd = os.memfd_create("folio-weights", os.MFD_CLOEXEC)
        try:
            header = write_weights(fd, key.document, tensors.facts, tensors.table, tensors.pieces)
        except OSError as error:
            os.close(fd)
            raise ModelError(
                f"no memory for {tensors.table.num_bytes} bytes of weights of {key.name!r}: {error.strerror}"
            ) from error
        return Contents.of(fd, header.offset, in_memory=True)

    def take_host_bytes(self, num_bytes: int) -> bool:
        """Take a part of the host memory; False if too little is left."""
        with self._lock:
            if num_bytes > self._host_bytes_left or (self._pinned is not None and not self._pinned.take(num_bytes)):
                return False
            self._host_bytes_left -= num_bytes
            return True

    def return_host_bytes(self, num_bytes: int) -> None:
        with self._lock:
            if self._pinned is not None:
                self._pinned.give_back(num_bytes)
            self._host_bytes_left += num_bytes

    def _open(self, key: WeightKey, table: WeightTable | None = None) -> StoredFile | None:
        """The file of these weights, checked; `None` if there is none. A wrong one is removed, and so is one with
        other tensors than the `table`."""
        path, fd = self._folder / key.file_name, -1
        try:
            fd = open_shared(path)
            header = self._check(fd, key)
            if table not in (None, header.table):
                raise WeightFileError("its tensors are not those of the model")
            with suppress(OSError):  # the folder may be read-only
                # The time of access, by which old files are removed, whether or not the file system keeps it.
                os.utime(fd, ns=(time.time_ns(), os.fstat(fd).st_mtime_ns))
            return StoredFile(Contents.of(fd, header.offset), header)
        except FileNotFoundError:
            return None
        except (WeightFileError, MapError, OSError) as error:
            is_wrong = isinstance(error, WeightFileError) or getattr(error, "errno", None) in _NO_FILE
            rebuilds = "; rebuilding it from the checkpoint" if is_wrong else ""
            logger.warning("ignoring weight file %s (%s)%s", path, error, rebuilds)
            with suppress(OSError):
                # Another process may have replaced it.
                if is_wrong and (fd < 0 or os.path.samestat(os.fstat(fd), path.lstat())):
                    path.unlink()
            if fd >= 0:
                os.close(fd)
            return None

    def _check(self, fd: int, key: WeightKey) -> WeightHeader:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & _OTHERS_WRITE:
            raise WeightFileError(f"its user is {found.st_uid}, its mode {found.st_mode:o}: others could change it")
        header = read_header(fd)
        if header.key != key.document:
            raise WeightFileError("it is of another checkpoint")
        state = _state(fd)
        if state not in self._checked:
            for _ in read_ahead(fd, header.offset, header.table.num_bytes):  # in huge pages, as it will be mapped
                pass
            check_contents(fd, header)
            self._checked.add(state)
        return header

    def _write_file(self, key: WeightKey, tensors: ModelTensors) -> Contents:
        """Write and publish a file, or use that of another process which was faster. Raises `OSError`."""
        path = self._folder / key.file_name
        unfinished, fd = create_locked(self._folder)
        try:
            start = time.monotonic()
            header = write_weights(fd, key.document, tensors.facts, tensors.table, tensors.pieces, self._write)
            os.fsync(fd)
            self._checked.add(_state(fd))
            logger.info("wrote %s, %d bytes, in %.1f s", path, header.file_bytes, time.monotonic() - start)
            for _ in range(2):  # the first attempt may find and remove a wrong file
                with suppress(FileExistsError):
                    os.link(unfinished, path)
                fcntl.flock(fd, fcntl.LOCK_SH)  # readers wait for it
                if (found := self._open(key, tensors.table)) is not None:
                    sync_folder(self._folder)
                    return found.contents
            raise OSError(errno.EEXIST, "it cannot be replaced", path)
        finally:
            os.close(fd)
            with suppress(OSError):
                unfinished.unlink()


class StoredWeights:
    """The contents of one model's weights, which are rebuilt when they are lost."""

    def __init__(
        self,
        store: WeightStore,
        key: WeightKey,
        table: WeightTable,
        contents: Contents,
        again: Callable[[], ModelTensors],
    ) -> None:
        self._store, self._key, self._table, self._again = store, key, table, again
        self._contents: Contents | None = contents
        self._host_bytes = 0
        self._detach: Callable[[], bool] | None = None

    def protect(self, detach: Callable[[], bool]) -> None:
        """Copy what is mapped of the file before another process changes it. Args: `detach`: see `WeightGuard`."""
        self._detach = detach
        if self._contents is not None and not self._contents.in_memory:
            self._store.guard.watch(self._contents.fd, self._key.name, detach)

    def open(self) -> tuple[int, int]:
        if self._contents is not None:
            self._store.guard.hold(self._contents.fd)  # first, so that what is unchanged stays so while it is mapped
        if self._contents is not None and not self._contents.unchanged:
            logger.warning("rebuilding the weights of %r: their file was changed or truncated", self._key.name)
            self._forget()
        if self._contents is None:
            tensors = self._again()
            try:
                if tensors.table != self._table:
                    raise ModelError(f"{self._key.name!r} has other tensors than when it was loaded; load it again")
                self._contents = self._store.provide(self._key, tensors)
                if self._detach is not None:
                    self.protect(self._detach)
                    self._store.guard.hold(self._contents.fd)
            finally:
                tensors.drop()
        return self._contents.fd, self._contents.offset

    def duplicate(self) -> tuple[int, int] | None:
        if self._contents is None or self._contents.in_memory:
            return None
        return os.dup(self._contents.fd), self._contents.offset

    def mapped(self) -> None:
        if self._contents is not None:
            self._store.guard.let_go(self._contents.fd, is_mapped=True)
        self._return_host_bytes()  # they are the device's now

    def forget_memory(self) -> None:
        """Give up contents that are in memory only."""
        if self._contents is not None and self._contents.in_memory:
            self._forget()

    def release(self) -> None:
        if self._contents is not None:
            self._store.guard.let_go(self._contents.fd, is_mapped=False)
        if self._contents is not None and self._contents.in_memory and not self._host_bytes:
            num_bytes = self._table.num_bytes
            if self._store.take_host_bytes(num_bytes):
                self._host_bytes = num_bytes
            else:
                self._forget()

    def close(self) -> None:
        self._forget()

    def _forget(self) -> None:
        if self._contents is not None:
            self._store.guard.unwatch(self._contents.fd)
            self._contents.close()
        self._contents = None
        self._return_host_bytes()

    def _return_host_bytes(self) -> None:
        self._store.return_host_bytes(self._host_bytes)
        self._host_bytes = 0


def _mapped(arena: WeightArena) -> WeightArena:
    """The arena once it is mapped; it is closed if that fails."""
    try:
        arena.map()
    except BaseException:
        arena.close()
        raise
    return arena
