"""Source of a model's weights on CUDA when the model wakes.

    a copy in pinned host memory, as far as `host_memory_bytes` allows; else the weights' file; else the checkpoint

The copy is filled by the first mapping that has room for it, which reads the file anyway, and stays until the model is
closed: pinning memory takes longer than a wake.
"""

from __future__ import annotations

import logging
from typing import Protocol

from folio.vmem.errors import MapError
from folio.vmem.uploads import FilePart, PinnedMemory, Uploads

logger = logging.getLogger(__name__)


class StoredFile(Protocol):
    """The file of the weights, or what takes its place: `StoredWeights`."""

    def open(self) -> tuple[int, int]: ...

    def duplicate(self) -> tuple[int, int] | None: ...

    def forget_memory(self) -> None: ...

    def release(self) -> None: ...

    def close(self) -> None: ...


class HostBytes(Protocol):
    """Host memory for all models of a process: `WeightStore`."""

    def take_host_bytes(self, num_bytes: int) -> bool: ...

    def return_host_bytes(self, num_bytes: int) -> None: ...


class CopiedWeights:
    """The `WeightSource` of a range on CUDA, of `num_bytes` bytes.

    Args:
        name: the model's name, for the log.
        stored: closed by `close`.
    """

    def __init__(self, name: str, num_bytes: int, uploads: Uploads, stored: StoredFile, host: HostBytes) -> None:
        self._name, self._num_bytes = name, num_bytes
        self._uploads, self._stored, self._host = uploads, stored, host
        self._copy: PinnedMemory | None = None
        self._is_filled = self._is_told = False

    def open(self) -> tuple[PinnedMemory | FilePart]:
        if self._copy is not None and self._is_filled:
            return (self._copy,)
        fd, offset = self._stored.open()
        if self._copy is None:
            self._copy = self._pin()
        return (FilePart(fd, offset, self._copy),)

    def mapped(self) -> None:
        self._is_filled = self._copy is not None
        self._stored.forget_memory()  # the device has the bytes, and the copy has them

    def duplicate(self) -> tuple[int, int] | None:
        return None if self._is_filled else self._stored.duplicate()

    def release(self) -> None:
        self._stored.release()

    def close(self) -> None:
        if self._copy is not None:
            self._copy.close()
            self._copy = None
            self._host.return_host_bytes(self._num_bytes)
        self._stored.close()

    def _pin(self) -> PinnedMemory | None:
        """Memory for a copy; `None` if `host_memory_bytes` or the system has too little."""
        if not self._host.take_host_bytes(self._num_bytes):
            if not self._is_told:  # by default all processes of the machine have it together
                logger.info(
                    "%r wakes from the file of its weights: host_memory_bytes has no %d bytes left",
                    self._name,
                    self._num_bytes,
                )
            self._is_told = True
            return None
        try:
            return self._uploads.pin(self._num_bytes)
        except MapError as error:
            self._host.return_host_bytes(self._num_bytes)
            logger.warning(
                "%r wakes from the file of its weights: %d bytes of host memory cannot be pinned (%s); lower "
                "host_memory_bytes",
                self._name,
                self._num_bytes,
                error,
            )
            return None
