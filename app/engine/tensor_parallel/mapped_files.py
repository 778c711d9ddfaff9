"""The pages of a checkpoint's files that a process has mapped: read once, and not needed again."""

from __future__ import annotations

import ctypes
from pathlib import Path

_MADV_DONTNEED = 4
_EVERY_BYTES = 64 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class MappedFiles:
    """Lets go of the mapped pages of a checkpoint's weights, now and then. Whoever reads them again gets them from the
    system's cache; nobody may have written to them.

    Args:
        model: the checkpoint's folder; for a model that is on the Hub nothing is let go of.
    """

    def __init__(self, model: str) -> None:
        self._files = {str(file.resolve()) for file in Path(model).glob("*.safetensors")}
        self._num_read = 0

    def note_read(self, num_bytes: int) -> None:
        self._num_read += num_bytes
        if self._num_read < _EVERY_BYTES:
            return
        self._num_read = 0
        for start, end in self._mapped():
            _libc.madvise(start, end - start, _MADV_DONTNEED)  # if it cannot be done, memory is a little fuller

    def _mapped(self) -> list[tuple[int, int]]:
        """(start, end) of what is mapped of the files."""
        found = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, _, _, _, _, *path = line.split(maxsplit=5)
            if path and path[0] in self._files:
                start, _, end = addresses.partition("-")
                found.append((int(start, 16), int(end, 16)))
        return found
