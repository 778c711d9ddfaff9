"""Answers of one batch on disk, appended line by line. These files alone record which requests are done."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import BinaryIO

from pydantic_core import from_json

# The room in the store is checked again each time that so many bytes have been appended.
_CHECKED_BYTES = 1 << 20


class AnswerLog:
    """The output and the error file of a batch. Thread-safe.

    A crash, or a full disk, may leave a part of a line at a file's end, and a loss of power any bytes after the last
    `flush`. A file is therefore truncated before the first line that is not the first answer to a request of the batch;
    requests whose lines are lost are computed again.

    Args:
        custom_ids: of all requests.
        check_room: raises an error if the store cannot take so many bytes more.

    Attributes:
        answered: `custom_id`s of requests with an answer or an error.
        num_failed: those with an error.
    """

    def __init__(
        self, output: Path, errors: Path, custom_ids: Collection[str], check_room: Callable[[int], None]
    ) -> None:
        self._paths = output, errors
        self._check_room = check_room
        self._lock = threading.Lock()
        self._unchecked_bytes = 0
        self.answered: set[str] = set()
        self._files: list[BinaryIO] = []
        known = frozenset(custom_ids)
        num_answered = []
        for path in self._paths:
            self._files.append(self._repaired(path, known))
            num_answered.append(len(self.answered))
        self.num_failed = num_answered[1] - num_answered[0]

    def append(self, custom_id: str, line: bytes, *, is_error: bool) -> None:
        """Append an answer; without effect when the request has one already.

        Raises:
            OSError: the disk is full or broken.
            ValueError: the log is closed.
        """
        with self._lock:
            if custom_id in self.answered:
                return
            self._unchecked_bytes += len(line)
            if self._unchecked_bytes >= _CHECKED_BYTES:
                self._check_room(len(line))
                self._unchecked_bytes = 0
            if self._files[is_error].write(line) != len(line):
                raise OSError(f"{self._paths[is_error]} took only a part of a line: is the disk full?")
            self.answered.add(custom_id)
            self.num_failed += is_error

    def flush(self) -> None:
        """Write to the disk what the system still holds in memory."""
        with self._lock:
            for file in self._files:
                os.fsync(file.fileno())

    def close(self) -> None:
        with self._lock:
            for file in self._files:
                file.close()

    def _repaired(self, path: Path, known: Collection[str]) -> BinaryIO:
        """The file, truncated after its last valid line and open for appending."""
        file = path.open("a+b", buffering=0)
        end = 0
        with path.open("rb") as lines:
            for line in lines:
                custom_id = _custom_id(line)
                if custom_id not in known or custom_id in self.answered:
                    break
                assert custom_id is not None
                self.answered.add(custom_id)
                end += len(line)
        if end != file.seek(0, os.SEEK_END):
            file.truncate(end)
        return file


def _custom_id(line: bytes) -> str | None:
    """The `custom_id` of a complete line; `None` for anything else."""
    if not line.endswith(b"\n"):
        return None
    try:
        answer = from_json(line)
    except ValueError:
        return None
    custom_id = answer.get("custom_id") if isinstance(answer, dict) else None
    return custom_id if isinstance(custom_id, str) else None
