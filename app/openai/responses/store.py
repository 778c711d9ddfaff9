"""Store of responses in a folder, for the routes of every ingress.

    OWNER/KEY.json      a response with the conversation before it

An owner's name is a hash, and a key is the hash of the response's id (`document_key`), which is part of the ids of its
items. A document is written as a whole and never changed, so that ingresses need no locks. A store that is full loses
the oldest documents of the owner with the most bytes.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel

from app.config.http import ResponseSettings
from app.errors import ConfigError, UnknownResponseError
from app.openai.batches.documents import read_document, write_document
from app.openai.batches.store import owner_folder
from app.openai.responses.answers import document_key
from app.openai.responses.replies import ResponseObject

logger = logging.getLogger(__name__)

# The folder is read for old documents when so many seconds have passed, or so large a part of the store was written.
_SWEEP_S, _SWEEP_PART = 60.0, 64
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_i?[0-9]+")


class StoredResponse(BaseModel):
    """A response on disk, and the items of its conversation before it, each with an id."""

    input: list[dict[str, Any]]
    response: ResponseObject

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """All items, as a next request has them."""
        output = self.response.model_dump(mode="json", include={"output"}, exclude_none=True)["output"]
        return [*self.input, *output]


class ResponseStore:
    """Responses of all owners. Methods block; call them in threads.

    Args:
        root: made if it does not exist, for the server's user alone.
        clock: seconds since 1970.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(self, root: Path, settings: ResponseSettings, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self._settings = settings
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

    def add(self, owner: str, stored: StoredResponse) -> bool:
        """Keep a response; returns whether there is room for one of this size. Raises `OSError`."""
        path = self._path(owner, document_key(stored.response.id))
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_document(path, stored, durable=False)
        if (size := path.stat().st_size) > self._settings.max_bytes:
            path.unlink()
            return False
        with self._lock:
            self._num_unswept_bytes += size
            is_due = self._num_unswept_bytes * _SWEEP_PART > self._settings.max_bytes
            is_due = is_due or self._clock() - self._swept_at > _SWEEP_S
        if is_due:
            self.delete_old()
        return True

    def response(self, owner: str, response_id: str) -> StoredResponse:
        """Raises `UnknownResponseError`."""
        found = self._read(owner, document_key(response_id))
        if found is None:
            raise UnknownResponseError(
                f"there is no stored response {response_id!r}: it was not stored, was deleted, or is older than "
                f"{self._settings.keep_s:g} s (http.responses.keep_s)",
                "response_id",
            )
        return found

    def delete(self, owner: str, response_id: str) -> None:
        """Raises `UnknownResponseError`."""
        self.response(owner, response_id)
        self._path(owner, document_key(response_id)).unlink(missing_ok=True)

    def items(self, owner: str, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Stored items by their ids; those that are not stored are left out."""
        found: dict[str, dict[str, Any]] = {}
        for key in {match[1] for item_id in ids if (match := _ITEM_ID.fullmatch(item_id))}:
            stored = self._read(owner, key)
            for item in stored.conversation if stored is not None else ():
                found.setdefault(item["id"], item)
        return {item_id: found[item_id] for item_id in ids if item_id in found}

    def delete_old(self) -> None:
        """Delete documents that are too old, and the oldest ones of the largest owners until the others have room."""
        with self._lock:
            self._swept_at, self._num_unswept_bytes = self._clock(), 0
        born_after = self._clock() - self._settings.keep_s
        documents: defaultdict[str, list[tuple[float, int, Path]]] = defaultdict(list)
        for path in self._root.glob("*/*"):
            with suppress(FileNotFoundError):  # documents come and go
                about = path.stat()
                if about.st_mtime <= born_after:
                    path.unlink()
                else:
                    documents[path.parent.name].append((about.st_mtime, about.st_size, path))
        sizes = {owner: sum(size for _, size, _ in found) for owner, found in documents.items()}
        for found in documents.values():
            found.sort(reverse=True)
        while sum(sizes.values()) > self._settings.max_bytes:
            largest = max(sizes, key=lambda owner: sizes[owner])
            _, size, path = documents[largest].pop()
            sizes[largest] -= size
            path.unlink(missing_ok=True)

    def _read(self, owner: str, key: str) -> StoredResponse | None:
        path = self._path(owner, key)
        with suppress(FileNotFoundError):
            if path.stat().st_mtime > self._clock() - self._settings.keep_s:
                return read_document(path, StoredResponse)
        return None

    def _path(self, owner: str, key: str) -> Path:
        return self._root / owner_folder(owner) / f"{key}.json"


def open_store(settings: ResponseSettings, application: str) -> ResponseStore | None:
    """The store of an application's ingresses; `None`: nothing is stored.

    Raises:
        ConfigError: the folder of the settings cannot be used. Without such a setting this is logged.
    """
    if not settings.max_bytes:
        return None
    given = settings.store
    folder = given or Path(tempfile.gettempdir()) / f"folio-responses-{os.getuid()}"
    name = f"app-{quote(application, safe='')}"
    try:
        if given is None:
            folder.mkdir(mode=0o700, exist_ok=True)
            _check_own(folder)
        return ResponseStore(folder / name, settings)
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
