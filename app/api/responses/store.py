"""Store of responses in a folder, for the routes of every ingress.

    OWNER/KEY.json      a response
    OWNER/KEY.input     the conversation before it; it exists if the response does

An owner's name is a hash, and a key is the hash of the response's id (`document_key`), which is part of the ids of its
items. Files are written atomically and never changed, so that ingresses need no locks. A full store deletes the oldest
responses of the owner with the most bytes.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel

from folio.app.api.batches.documents import Model, read_document, write_document
from folio.app.api.batches.store import owner_folder
from folio.app.api.responses.answers import document_key
from folio.app.api.responses.replies import ResponseObject
from folio.app.config.http import HttpSettings, ResponseSettings
from folio.app.errors import ConfigError, RequestError, UnknownResponseError

logger = logging.getLogger(__name__)

# Old documents are looked for after this time, or once 1/64 of the store's bound has been written.
_SWEEP_S, _SWEEP_PART = 60.0, 64
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_(i?)[0-9]+")

_INPUT = ".input"

Items = list[dict[str, Any]]


class StoredInput(BaseModel):
    """The items before a response, each with an id."""

    items: Items


@dataclass(slots=True)
class _Document:
    """The files of a response."""

    owner: str
    written_at: float = 0.0
    num_bytes: int = 0
    paths: list[Path] = field(default_factory=list)


class ResponseStore:
    """Responses of all owners. Methods block; call them in threads.

    Args:
        root: made if it does not exist, for the server's user alone.
        clock: seconds since 1970.
        max_conversation_bytes: a response with a longer conversation is not kept: every request that continues it
            would read all of it, however small the request's body is.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(
        self,
        root: Path,
        settings: ResponseSettings,
        clock: Callable[[], float] = time.time,
        max_conversation_bytes: int = HttpSettings().max_body_bytes,
    ) -> None:
        self._root = root
        self._settings = settings
        self._most_bytes = min(settings.max_bytes, max_conversation_bytes)
        self._clock = clock
        self._lock = threading.Lock()
        self._swept_at, self._num_unswept_bytes = 0.0, 0
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_own(root)
            self.delete_old()
        except OSError as error:
            raise ConfigError(
                f"http.responses.store is {str(root)!r}, where responses cannot be written: {error.strerror}; use a "
                "folder of the server's user"
            ) from error

    def add(self, owner: str, response: ResponseObject, given: Items) -> bool:
        """Keep a response and the items before it; returns whether there is room for them. Raises `OSError`."""
        path = self._path(owner, document_key(response.id))
        path.parent.mkdir(mode=0o700, exist_ok=True)
        before = path.with_suffix(_INPUT)
        write_document(before, StoredInput(items=given), durable=False)
        write_document(path, response, durable=False)
        if (size := before.stat().st_size + path.stat().st_size) > self._most_bytes:
            _unlink([path, before])
            return False
        with self._lock:
            self._num_unswept_bytes += size
            is_due = self._num_unswept_bytes * _SWEEP_PART > self._settings.max_bytes
            is_due = is_due or self._clock() - self._swept_at > _SWEEP_S
        if is_due:
            self.delete_old()
        return True

    def response(self, owner: str, response_id: str) -> ResponseObject:
        """A stored response. Raises `UnknownResponseError`."""
        return self._read(owner, document_key(response_id), ".json", ResponseObject, response_id)

    def input_of(self, owner: str, response_id: str) -> Items:
        """The items before a response. Raises `UnknownResponseError`."""
        return self._read(owner, document_key(response_id), _INPUT, StoredInput, response_id).items

    def conversation(self, owner: str, response_id: str) -> Items:
        """The items before a response and its own, as the next request has them. Raises `UnknownResponseError`."""
        return [*self.input_of(owner, response_id), *_output_of(self.response(owner, response_id))]

    def delete(self, owner: str, response_id: str) -> None:
        """Delete a response. Raises `UnknownResponseError`."""
        self.response(owner, response_id)
        path = self._path(owner, document_key(response_id))
        _unlink([path, path.with_suffix(_INPUT)])

    def items(self, owner: str, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Stored items by their ids; those that are not stored are left out. Raises `RequestError` if they are longer
        together than a conversation may be."""
        found: dict[str, dict[str, Any]] = {}
        num_bytes = 0
        wanted = {*ids}  # other items of so many responses would fill the memory
        for key, is_input in {match.groups() for item_id in ids if (match := _ITEM_ID.fullmatch(item_id))}:
            with suppress(UnknownResponseError):
                if is_input:
                    items = self._read(owner, key, _INPUT, StoredInput).items
                else:
                    items = _output_of(self._read(owner, key, ".json", ResponseObject))
                chosen = {item["id"]: item for item in items if item["id"] in wanted}
                found |= chosen
                num_bytes += len(json.dumps(chosen))
            if num_bytes > self._most_bytes:
                raise RequestError(f"input refers to items of more than {self._most_bytes} bytes; send fewer", "input")
        return found

    def delete_old(self) -> None:
        """Delete responses that are too old, and the oldest ones of the largest owners until the others have room."""
        with self._lock:
            self._swept_at, self._num_unswept_bytes = self._clock(), 0
        born_after = self._clock() - self._settings.keep_s
        kept: dict[Path, _Document] = {}  # by the path without suffix
        for path in self._root.glob("*/*"):
            with suppress(FileNotFoundError):  # files come and go
                about = path.stat()
                document = kept.setdefault(path.with_suffix(""), _Document(path.parent.name))
                document.written_at = max(document.written_at, about.st_mtime)
                document.num_bytes += about.st_size
                document.paths.append(path)
        by_owner: defaultdict[str, list[_Document]] = defaultdict(list)
        for document in sorted(kept.values(), key=lambda document: document.written_at, reverse=True):
            if document.written_at > born_after:
                by_owner[document.owner].append(document)
            else:
                _unlink(document.paths)
        sizes = {owner: sum(document.num_bytes for document in found) for owner, found in by_owner.items()}
        while sum(sizes.values()) > self._settings.max_bytes:
            largest = max(sizes, key=lambda owner: sizes[owner])
            oldest = by_owner[largest].pop()
            sizes[largest] -= oldest.num_bytes
            _unlink(oldest.paths)

    def _read(self, owner: str, key: str, suffix: str, kind: type[Model], response_id: str = "") -> Model:
        """Read a file. Raises `UnknownResponseError`."""
        path = self._path(owner, key).with_suffix(suffix)
        with suppress(FileNotFoundError):
            is_kept = path.stat().st_mtime > self._clock() - self._settings.keep_s
            if is_kept and (found := read_document(path, kind)) is not None:
                return found
        raise UnknownResponseError(
            f"there is no stored response {response_id!r}: it was not stored (perhaps its conversation is too long), "
            "was deleted, or is too old (http.responses)",
            "response_id",
        )

    def _path(self, owner: str, key: str) -> Path:
        return self._root / owner_folder(owner) / f"{key}.json"


def _output_of(response: ResponseObject) -> Items:
    output: Items = response.model_dump(mode="json", include={"output"}, exclude_none=True)["output"]
    return output


def _unlink(paths: Sequence[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def open_store(http: HttpSettings, application: str) -> ResponseStore | None:
    """The store of an application's ingresses; `None`: nothing is stored. A conversation in it is no longer than a body
    may be.

    Raises:
        ConfigError: the folder of the settings cannot be used. If the settings name none, the error is only logged.
    """
    settings = http.responses
    if not settings.max_bytes:
        return None
    given = settings.store
    folder = given or Path(tempfile.gettempdir()) / f"folio-responses-{os.getuid()}"
    name = f"app-{quote(application, safe='')}"
    try:
        if given is None:
            folder.mkdir(mode=0o700, exist_ok=True)
            _check_own(folder)
        return ResponseStore(folder / name, settings, max_conversation_bytes=http.max_body_bytes)
    except (ConfigError, OSError) as error:
        if given is not None:
            raise
        logger.warning("responses are not stored: %s; set http.responses.store", error)
        return None


def _check_own(folder: Path) -> None:
    """Raise `OSError` for another user's folder, or a link: others may write to the folder for temporary files."""
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
        raise PermissionError(1, "it is not a folder of the server's user", str(folder))
    if about.st_mode & 0o077:
        folder.chmod(0o700)
