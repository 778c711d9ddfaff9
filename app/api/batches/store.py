"""Store of files and batches in a folder: `BatchStore` for the routes of every ingress, and for the one runner.

    lock                        of the runner
    changes                     locked while files or batches are added or deleted
    open/OWNER.BATCH            a batch that has not ended; OWNER.BATCH.cancel: it is to be cancelled
    OWNER/uploads/…             uploads in progress
    OWNER/files/ID.jsonl        a file's content; it exists for its owner once ID.json, its description, exists
    OWNER/batches/ID.json       a batch

The store makes all names: an owner's is a hash, ids are random. Descriptions and batches are replaced atomically: a
temporary file is written and renamed, so that a reader, or a server after a crash, sees the old or the new one. After a
batch has been created only the runner changes it.

The folder is on a disk, or a file system that all ingresses' machines share and that has file locks (NFS has). The
system releases the locks of a process that ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, Self

from pydantic import BaseModel

from folio.app.api.batches.body import BatchRequest
from folio.app.api.batches.documents import read_document, write_document
from folio.app.api.batches.endpoints import ENDPOINTS
from folio.app.api.batches.replies import BatchObject, FileObject, Purpose
from folio.app.config.http import BatchSettings
from folio.app.errors import ConfigError, RequestError, UnknownBatchError, UnknownFileError

WINDOW_S = 86400
# A file takes whole blocks of the disk.
_BLOCK_BYTES = 4096
# An upload checks the store's size each time that so many bytes have arrived.
_CHECKED_BYTES = 4 << 20
# Uploads, contents without description and marks without batch are leftovers of a crash when they are older.
_LEFTOVER_S = 3600.0
_FILE_ID, _BATCH_ID = re.compile(r"file-[0-9a-f]{32}"), re.compile(r"batch_[0-9a-f]{32}")
_OPEN = re.compile(r"([0-9a-f]{32})\.(batch_[0-9a-f]{32})")
_CANCEL = ".cancel"

Ending = Literal["completed", "failed", "expired", "cancelled"]


class StoreFullError(RequestError):
    """There is no room in the store, or in the caller's part of it."""

    code = "store_full"


class BatchRecord(BaseModel):
    """A batch on disk.

    Attributes:
        owner: the caller's name.
        output_id, error_id: ids of the files with answers, which the caller sees once the batch has ended.
        keep_s: lifetime of these files.
        ends_as: the final status, known while the batch is finalised.
    """

    owner: str
    output_id: str
    error_id: str
    keep_s: float
    ends_as: Ending | None = None
    batch: BatchObject


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds for one owner, because lists and counts of bytes read all of the owner's files."""

    files: int = 1000
    batches: int = 1000
    open_batches: int = 100


class BatchStore:
    """Files and batches of all owners. Methods block; call them in threads.

    Args:
        root: made if it does not exist.
        clock: seconds since 1970.
        most: bounds for each owner.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(
        self, root: Path, settings: BatchSettings, clock: Callable[[], float] = time.time, most: Bounds = Bounds()
    ) -> None:
        self._root, self._settings, self._most = root, settings, most
        self._open = root / "open"
        self.clock = clock
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open.mkdir(mode=0o700, exist_ok=True)
            with self._changes():
                pass
        except OSError as error:
            raise ConfigError(
                f"http.batches.store is {str(settings.store)!r}, where files cannot be written and locked: "
                f"{error.strerror}; use a folder of the server's user"
            ) from error

    # ---- files ----

    def new_upload(self, owner: str) -> Upload:
        """Begin an upload. Raises `StoreFullError`."""
        self.check_room(owner, 0)
        return Upload(self, self._folder(owner, "uploads") / secrets.token_hex(16), owner)

    def add_file(self, owner: str, upload: Path, filename: str, purpose: Purpose, keep_s: float | None) -> FileObject:
        """Make a complete upload a file. Raises `StoreFullError`."""
        file_id = new_file_id()
        with self._changes():
            self.check_room(owner, 0)
            if len(self._names(owner, "files", ".json")) >= self._most.files:
                raise StoreFullError(f"you have {self._most.files} files, the most that are kept; delete some")
            upload.rename(self.content_path(owner, file_id))
            return self.describe_file(owner, file_id, filename, purpose, keep_s)

    def describe_file(
        self, owner: str, file_id: str, filename: str, purpose: Purpose, keep_s: float | None
    ) -> FileObject:
        """Describe a content, so that its owner sees the file. Idempotent."""
        path = self._folder(owner, "files") / f"{file_id}.json"
        if (known := read_document(path, FileObject)) is not None:
            return known
        now = self.clock()
        found = FileObject(
            id=file_id,
            bytes=self.content_path(owner, file_id).stat().st_size,
            created_at=int(now),
            expires_at=int(now + min(keep_s or self._settings.keep_s, self._settings.keep_s)),
            filename=filename,
            purpose=purpose,
        )
        write_document(path, found)
        return found

    def files(self, owner: str) -> list[FileObject]:
        """The owner's files, the latest first."""
        folder, now = self._folder(owner, "files"), self.clock()
        found = [read_document(folder / name, FileObject) for name in self._names(owner, "files", ".json")]
        alive = [file for file in found if file is not None and file.expires_at > now]
        return sorted(alive, key=lambda file: (file.created_at, file.id), reverse=True)

    def file(self, owner: str, file_id: str) -> FileObject:
        """A file's description. Raises `UnknownFileError`."""
        if _FILE_ID.fullmatch(file_id):
            found = read_document(self._folder(owner, "files") / f"{file_id}.json", FileObject)
            if found is not None and found.expires_at > self.clock():
                return found
        raise UnknownFileError("there is no such file, or it has expired; GET /v1/files lists yours")

    def content_path(self, owner: str, file_id: str) -> Path:
        """Path of a file's content, or of a batch's answers. The id must be one that the store has made."""
        return self._folder(owner, "files") / f"{file_id}.jsonl"

    def delete_file(self, owner: str, file_id: str) -> None:
        """Delete a file. Raises `UnknownFileError`, or `RequestError` while a batch reads the file."""
        with self._changes():
            self.file(owner, file_id)
            if (user := self._inputs(owner).get(file_id)) is not None:
                raise RequestError(f"the batch {user} reads the file; cancel it, or wait for its end", "file_id")
            self._remove_file(owner, file_id)

    # ---- batches ----

    def create_batch(self, owner: str, request: BatchRequest) -> BatchObject:
        """Create a batch. Raises `RequestError`, `UnknownFileError` or `StoreFullError`."""
        if request.endpoint not in ENDPOINTS:
            raise RequestError(f"endpoint is {request.endpoint!r}; it must be {' or '.join(ENDPOINTS)}", "endpoint")
        with self._changes():
            found = self.file(owner, request.input_file_id)
            if found.purpose != "batch":
                raise RequestError(
                    f"the file's purpose is {found.purpose!r}; upload requests with 'batch'", "input_file_id"
                )
            self.check_room(owner, 0)
            if len(self._names(owner, "batches", ".json")) >= self._most.batches:
                raise StoreFullError(
                    f"you have {self._most.batches} batches, the most that are kept; wait until some expire"
                )
            if len(self.open_batches(owner_folder(owner))) >= self._most.open_batches:
                raise StoreFullError(
                    f"{self._most.open_batches} of your batches have not ended; wait for some, or cancel them"
                )
            now = int(self.clock())
            batch = BatchObject(
                id=f"batch_{secrets.token_hex(16)}",
                endpoint=request.endpoint,
                input_file_id=found.id,
                created_at=now,
                expires_at=now + WINDOW_S,
                metadata=request.metadata,
            )
            keep = request.output_expires_after
            record = BatchRecord(
                owner=owner,
                output_id=new_file_id(),
                error_id=new_file_id(),
                keep_s=self._settings.keep_s if keep is None else keep.seconds,
                batch=batch,
            )
            self._mark(record).touch()  # first: a batch without it would never run
            self.save(record)
            return batch

    def batches(self, owner: str) -> list[BatchObject]:
        """The owner's batches, the latest first."""
        ids = [name.removesuffix(".json") for name in self._names(owner, "batches", ".json")]
        records = [self._record(owner_folder(owner), batch_id) for batch_id in ids]
        found = [self._shown(record) for record in records if record is not None]
        return sorted(found, key=lambda batch: (batch.created_at, batch.id), reverse=True)

    def batch(self, owner: str, batch_id: str) -> BatchObject:
        """A batch as its owner sees it. Raises `UnknownBatchError`."""
        if _BATCH_ID.fullmatch(batch_id):
            record = self._record(owner_folder(owner), batch_id)
            if record is not None:
                return self._shown(record)
        raise UnknownBatchError("there is no such batch, or it has expired; GET /v1/batches lists yours")

    def cancel_batch(self, owner: str, batch_id: str) -> BatchObject:
        """Ask the runner to cancel a batch. Raises `UnknownBatchError`, or `RequestError` if the batch has ended."""
        batch = self.batch(owner, batch_id)
        mark = self._open / f"{owner_folder(owner)}.{batch_id}"
        if batch.has_ended or not mark.exists():
            raise RequestError(f"the batch has ended: its status is {batch.status}")
        mark.with_name(mark.name + _CANCEL).touch()
        return self.batch(owner, batch_id)

    # ---- for the runner ----

    def open_batches(self, folder: str | None = None) -> list[BatchRecord]:
        """Batches that have not ended, the oldest first; `folder`: only those of one owner."""
        marks = [match.groups() for name in os.listdir(self._open) if (match := _OPEN.fullmatch(name)) is not None]
        records = [self._record(*mark) for mark in marks if folder is None or mark[0] == folder]
        found = [record for record in records if record is not None]
        return sorted(found, key=lambda record: (record.batch.created_at, record.batch.id))

    def record(self, known: BatchRecord) -> BatchRecord | None:
        """A batch's record as it is now."""
        return self._record(owner_folder(known.owner), known.batch.id)

    def cancelled_at(self, record: BatchRecord) -> float | None:
        """When the batch was cancelled; `None` if it was not."""
        try:
            return self._mark(record, _CANCEL).stat().st_mtime
        except FileNotFoundError:
            return None

    def save(self, record: BatchRecord) -> None:
        """Replace a batch's record."""
        write_document(self._folder(record.owner, "batches") / f"{record.batch.id}.json", record)

    def close_batch(self, record: BatchRecord) -> None:
        """Note that a batch has ended, after its last `save`."""
        self._mark(record, _CANCEL).unlink(missing_ok=True)
        self._mark(record).unlink(missing_ok=True)

    def check_room(self, owner: str, num_bytes: int) -> None:
        """Raise `StoreFullError` if the store cannot take so many bytes more of an owner."""
        most = self._settings.max_bytes_per_key
        if self.used_bytes(owner) + num_bytes > most:
            raise StoreFullError(f"your files and batches would exceed {most} bytes (max_bytes_per_key); delete files")
        most = self._settings.max_bytes
        if self.used_bytes() + num_bytes > most:
            raise StoreFullError(f"the store's files would exceed {most} bytes (max_bytes); delete files")

    def used_bytes(self, owner: str | None = None) -> int:
        """Bytes on disk of everything in the store, or of one owner's part."""
        top = self._root if owner is None else self._root / owner_folder(owner)
        used = 0
        for folder, _, names in os.walk(top):
            for name in names:
                with suppress(FileNotFoundError):  # files come and go
                    used += -(-os.stat(os.path.join(folder, name)).st_size // _BLOCK_BYTES) * _BLOCK_BYTES
        return used

    def delete_old(self) -> None:
        """Delete files and ended batches that have expired, and leftovers of crashes."""
        now = self.clock()
        with self._changes():
            running = self.open_batches()
            kept = {file_id for record in running for file_id in (record.output_id, record.error_id)}
            kept |= {record.batch.input_file_id for record in running}
            kept |= {record.batch.id for record in running}
            for path in list(self._root.glob("*/*/*")):
                name = path.name.partition(".")[0]
                if name not in kept and self._is_old(path, now):
                    path.unlink(missing_ok=True)
            for mark in list(self._open.iterdir()):
                match = _OPEN.fullmatch(mark.name.removesuffix(_CANCEL))
                if (match is None or match[2] not in kept) and now - mark.stat().st_mtime > _LEFTOVER_S:
                    mark.unlink(missing_ok=True)

    def _is_old(self, path: Path, now: float) -> bool:
        if path.suffix == ".json":
            file = read_document(path, FileObject) if path.parent.name == "files" else None
            if file is not None:
                return file.expires_at <= now
            return now - path.stat().st_mtime > self._settings.keep_s
        if path.suffix == ".jsonl" and path.with_suffix(".json").exists():
            return False
        return now - path.stat().st_mtime > _LEFTOVER_S

    def try_lock_runner(self) -> IO[bytes] | None:
        """The lock of the one runner, until it is closed or the process ends; `None` while another one has it."""
        file = (self._root / "lock").open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return file

    @contextmanager
    def _changes(self) -> Iterator[None]:
        """Hold the lock on additions and deletions, over the threads of all ingresses."""
        with (self._root / "changes").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _inputs(self, owner: str) -> dict[str, str]:
        """Input file → batch, of the owner's open batches."""
        batches = [record.batch for record in self.open_batches(owner_folder(owner))]
        return {batch.input_file_id: batch.id for batch in batches if not batch.has_ended}

    def _shown(self, record: BatchRecord) -> BatchObject:
        """The batch as its owner sees it: with a cancellation that the runner may not have seen yet."""
        batch = record.batch
        if batch.status in ("validating", "in_progress") and (at := self.cancelled_at(record)) is not None:
            return batch.model_copy(update={"status": "cancelling", "cancelling_at": int(at)})
        return batch

    def _record(self, folder: str, batch_id: str) -> BatchRecord | None:
        return read_document(self._root / folder / "batches" / f"{batch_id}.json", BatchRecord)

    def _mark(self, record: BatchRecord, suffix: str = "") -> Path:
        return self._open / f"{owner_folder(record.owner)}.{record.batch.id}{suffix}"

    def _remove_file(self, owner: str, file_id: str) -> None:
        """Delete a file, its description first: a content without one is a leftover."""
        (self._folder(owner, "files") / f"{file_id}.json").unlink(missing_ok=True)
        self.content_path(owner, file_id).unlink(missing_ok=True)

    def _names(self, owner: str, kind: str, suffix: str) -> list[str]:
        return [name for name in os.listdir(self._folder(owner, kind)) if name.endswith(suffix)]

    def _folder(self, owner: str, kind: str) -> Path:
        folder = self._root / owner_folder(owner)
        for private in (folder, folder / kind):  # `parents` would have another mode
            private.mkdir(mode=0o700, exist_ok=True)
        return folder / kind


class Upload:
    """An upload in progress: a context that deletes the file unless it is kept."""

    def __init__(self, store: BatchStore, path: Path, owner: str) -> None:
        self._store = store
        self._path = path
        self._owner = owner
        self._file = path.open("xb")
        self._unchecked_bytes = 0
        self.num_bytes = 0

    def write(self, data: bytes) -> None:
        """Append data. Raises `StoreFullError`."""
        self._unchecked_bytes += len(data)
        if self._unchecked_bytes >= _CHECKED_BYTES:
            self._store.check_room(self._owner, len(data))
            self._unchecked_bytes = 0
        self._file.write(data)
        self.num_bytes += len(data)

    def keep(self, filename: str, purpose: Purpose, keep_s: float | None) -> FileObject:
        """Make the complete upload a file. Raises `StoreFullError`."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._store.add_file(self._owner, self._path, filename, purpose, keep_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


def owner_folder(owner: str) -> str:
    """The name of an owner's folder: a hash, which does not reveal the owner's name."""
    return hashlib.sha256(owner.encode()).hexdigest()[:32]


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"
