"""Logs of the Ray sessions of a stage's jobs: their last lines as facts, all of them in an archive."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

LAST_LINES, LINE_CHARACTERS = 40, 400
_MOST_OF_A_KIND = 2  # a replica that hung, and the one in its place
# The most of a log that is packed, from its end; text shrinks to a tenth, and an archive of 16 MiB may be too large.
_PACKED_BYTES = 2 << 20
# In the order in which they explain a server that does not come up.
_RELEVANT = (
    "serve/*EngineReplica*.log",
    "serve/*controller*.log",
    "serve/*proxy*.log",
    "serve/*Ingress*.log",
    "raylet.err",
    "gcs_server.err",
    "raylet.out",
    "worker-*.err",
)


def last_lines(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The end of each relevant log below the folder of a job's Ray session, the newest of each kind first."""
    for logs in _log_folders(folder):
        for pattern in _RELEVANT:
            found = [path for path in logs.glob(pattern) if path.stat().st_size]
            for path in sorted(found, key=lambda path: -path.stat().st_mtime)[:_MOST_OF_A_KIND]:
                lines = path.read_text(errors="replace").splitlines()[-LAST_LINES:]
                yield str(path.relative_to(logs)), [line[:LINE_CHARACTERS] for line in lines]


def pack(folder: Path, archive: Path) -> None:
    """Pack the logs of all sessions below the folder, if there are any."""
    sessions = list(_log_folders(folder))
    if not sessions:
        return
    with tarfile.open(archive, "w:gz") as packed:
        for logs in sessions:
            for path in sorted(logs.rglob("*")):
                if path.is_file() and not path.is_symlink() and path.stat().st_size:
                    entry = packed.gettarinfo(str(path), str(path.relative_to(folder)))
                    with path.open("rb") as file:
                        file.seek(max(0, entry.size - _PACKED_BYTES))
                        entry.size = min(entry.size, _PACKED_BYTES)
                        packed.addfile(entry, file)


def _log_folders(folder: Path) -> Iterator[Path]:
    for logs in sorted(folder.glob("**/session_2*/logs")):
        if not any(parent.is_symlink() for parent in (logs, logs.parent)):
            yield logs
