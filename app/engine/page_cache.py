"""A checkpoint's files, read from disk once however many processes of a machine load them at the same time.

Loaders map the files, and take pages from the system's cache. When several start together, each would wait for the disk
at the same places, or, where the cache cannot follow, read everything again. So the first one reads what is not cached
yet, in order, and the others wait for it. Where something of this does not work, files are loaded without.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import logging
import mmap
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from huggingface_hub import try_to_load_from_cache

from app.config.machine import Machine

logger = logging.getLogger(__name__)

_PAGE_BYTES = mmap.PAGESIZE
_WINDOW_BYTES = 1 << 30  # whose pages are looked at in one call
_READ_BYTES, _AHEAD_BYTES = 4 << 20, 32 << 20
# Of the memory that is free or can be made free: more would only push out what was read first.
_MOST_OF_AVAILABLE = 0.8

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

Run = tuple[int, int]


@dataclass(frozen=True, slots=True)
class FilesRead:
    """Bytes of the files, those of them that were read because they were not cached, and the seconds that it took,
    waiting for other processes included."""

    num_bytes: int
    read_bytes: int
    seconds: float


def weight_files(model: str) -> list[Path]:
    """The files of a checkpoint's weights: of a folder, or of a Hub id as far as they have been downloaded."""
    folder = Path(model)
    if not folder.is_dir():
        config = try_to_load_from_cache(model, "config.json")
        if not isinstance(config, str):
            return []
        folder = Path(config).parent
    # Other files may lie beside them (consolidated.safetensors, variants, adapters): these are the ones, in the order,
    # that transformers looks for.
    if (whole := folder / "model.safetensors").is_file():
        return [whole]
    indexed = [folder / name for name in _indexed(folder / "model.safetensors.index.json")]
    if files := [file for file in indexed if file.is_file()]:
        return files
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def _indexed(index: Path) -> list[str]:
    """The names of files that an index says weights are in; none if it cannot be read."""
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        return sorted(name for name in names if isinstance(name, str))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # not there, or not an index
        return []


def read_once(files: Sequence[Path]) -> FilesRead:
    """Bring files into the page cache, unless they are there or memory has no room for them."""
    start = time.perf_counter()
    num_bytes = read_bytes = 0
    try:
        with _turn(files):
            missing = {path: missing_runs(path) for path in files}
            num_bytes = sum(path.stat().st_size for path in files)
            wanted = sum(end - begin for runs in missing.values() for begin, end in runs)
            room = int(_MOST_OF_AVAILABLE * Machine.read().available_bytes)
            if wanted > room:
                logger.warning(
                    "%d bytes of weights are not read ahead: memory has room for %d; loading may be slow", wanted, room
                )
                missing = {}
            for path, runs in missing.items():
                read_bytes += _read(path, runs)
    except OSError as error:
        logger.warning("weights are not read ahead: %s", error)
    return FilesRead(num_bytes, read_bytes, time.perf_counter() - start)


def missing_runs(path: Path) -> list[Run]:
    """(start, end) in bytes of what is not in the page cache; all of a file of which the system does not tell us.

    Raises:
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    if not size:
        return []
    if path.stat().st_uid != os.geteuid() and not os.access(path, os.W_OK):
        return [(0, size)]  # mincore(2): of other people's files it says that everything is there
    runs: list[Run] = []
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped:
        content = np.frombuffer(mapped, dtype=np.uint8)
        try:
            for begin in range(0, size, _WINDOW_BYTES):
                length = min(_WINDOW_BYTES, size - begin)
                pages = np.zeros(-(-length // _PAGE_BYTES), dtype=np.uint8)
                if _libc.mincore(content.ctypes.data + begin, length, pages.ctypes.data):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
                runs += [(begin + start, min(begin + end, size)) for start, end in _runs_of(pages & 1 == 0)]
        finally:
            del content  # or the mapping could not be closed
    return runs


def _runs_of(missing: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> list[Run]:
    """Where pages in a row are missing, in bytes."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], missing.astype(np.int8), [0])))) * _PAGE_BYTES
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _read(path: Path, runs: Sequence[Run]) -> int:
    """Read these parts of a file, one after the other; returns how many bytes they were."""
    buffer = bytearray(_READ_BYTES)
    num_read = 0
    with path.open("rb", buffering=0) as file:
        for start, end in runs:
            for at in range(start, end, _READ_BYTES):
                os.posix_fadvise(file.fileno(), at, min(_AHEAD_BYTES, end - at), os.POSIX_FADV_WILLNEED)
                num_read += os.preadv(file.fileno(), [memoryview(buffer)[: min(_READ_BYTES, end - at)]], at)
    return num_read


@contextmanager
def _turn(files: Sequence[Path]) -> Iterator[None]:
    """Wait until no other process of this user and machine reads these files. Checkpoints may be on a file system that
    is read-only or shared by machines, so the lock is on a file of its own. It goes with the process that has it."""
    names = "\n".join(str(path.resolve()) for path in files)
    name = f"folio-{os.geteuid()}-{hashlib.blake2b(names.encode(), digest_size=8).hexdigest()}.lock"
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    lock = os.open(Path(tempfile.gettempdir()) / name, flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
