"""The pages of a checkpoint's files that a process has mapped: read once, and not needed again."""

from __future__ import annotations

import ctypes
from pathlib import Path

_MADV_DONTNEED = 4
_EVERY_BYTES = 64 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class MappedFiles:
    """Lets go of the pages of weight files that are mapped after this was made, now and then. Whoever reads them again
    gets them from the system's cache; nobody may have written to them."""

    def __init__(self) -> None:
        self._earlier = set(_mapped_weights())
        self._num_read = 0

    def note_read(self, num_bytes: int) -> None:
        self._num_read += num_bytes
        if self._num_read < _EVERY_BYTES:
            return
        self._num_read = 0
        for start, end in set(_mapped_weights()) - self._earlier:
            _libc.madvise(start, end - start, _MADV_DONTNEED)  # if it cannot be done, memory is a little fuller


def _mapped_weights() -> list[tuple[int, int]]:
    """(start, end) of mapped safetensors files; in a Hub cache these have no suffix."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, _, *path = line.split(maxsplit=5)
        if path and (path[0].endswith(".safetensors") or "/blobs/" in path[0]):
            start, _, end = addresses.partition("-")
            found.append((int(start, 16), int(end, 16)))
    return found
