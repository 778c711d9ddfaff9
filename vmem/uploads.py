"""Weights on a CUDA device: ranges whose addresses never move, and the copies that fill them.

    pinned copy ──────────────────────────────────┐
                                                  ├── asynchronous copies ──> pages mapped into the range
    file ── read ──> two pinned staging buffers ──┘

A range's pages have 16 MiB. A driver call costs about the same for a page of any size (benchmarks/results/cuda), so
waking and sleeping take an eighth of the calls that 2 MiB pages, the usual KV pages, would take. That saves more than
taking over pages of KV caches would, at two calls for each. Only other weights take over the pages of weights.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from folio.vmem.backends.base import AddressRange, retry_undo
from folio.vmem.backends.cuda import CudaBackend
from folio.vmem.errors import IntegrityError, MapError, OutOfPages, VmemError

PAGE_BYTES = 16 << 20
# Bytes of one copy, and of a staging buffer: long enough that its start and end cost little, short enough that the
# pages of the next one are mapped meanwhile.
PIECE_BYTES = 32 << 20
# One thread reads about 5 GB/s from the page cache.
_READ_THREADS = 4


class PinnedMemory:
    """Host memory that the device reads by itself, in pieces: the driver may hold up launches while it pins memory.

    Args:
        piece_bytes: of all pieces but the last one.
        note: called with the bytes of each piece that is pinned, and with their negative when it is freed.

    Raises:
        MapError: there is too little memory, or it cannot be pinned. Nothing is allocated then.
    """

    def __init__(
        self, backend: CudaBackend, num_bytes: int, piece_bytes: int, note: Callable[[int], None] = lambda _: None
    ) -> None:
        self.num_bytes = num_bytes
        self._backend, self._piece_bytes, self._note = backend, piece_bytes, note
        self._addresses: list[int] = []
        try:
            for start in range(0, num_bytes, piece_bytes):
                self._addresses.append(int(backend.call("cuMemHostAlloc", self._size_of(start), 0)))
                note(self._size_of(start))
        except MapError:
            retry_undo(self.close)
            raise

    def address_of(self, start: int) -> int:
        """Address of the piece that begins with byte `start`."""
        return self._addresses[start // self._piece_bytes]

    def view(self, start: int, num_bytes: int) -> memoryview:
        """The first bytes of the piece that begins with byte `start`, valid until `close`."""
        return memoryview((ctypes.c_char * num_bytes).from_address(self.address_of(start))).cast("B")

    def close(self) -> None:
        """Free it. No copy may be under way. Raises `MapError`; call again."""
        while self._addresses:
            self._backend.call("cuMemFreeHost", self._addresses[-1], at=self._addresses[-1])
            self._addresses.pop()
            self._note(-self._size_of(len(self._addresses) * self._piece_bytes))

    def _size_of(self, start: int) -> int:
        return min(self._piece_bytes, self.num_bytes - start)


@dataclass(frozen=True, slots=True)
class FilePart:
    """Bytes of an open file, from `offset` on.

    Attributes:
        keep: memory for all of them, which has them once a range is mapped from here.
    """

    fd: int
    offset: int
    keep: PinnedMemory | None = None


class Uploads:
    """Backend, streams and pinned memory of a device's weight ranges. From any thread; ranges may be mapped together.

    Args:
        backend: of the weights alone, whose pages have another size than those of a KV memory; closed by `close`.
        page_bytes: of the ranges, a multiple of the backend's granularity.
        piece_bytes: of one copy and of pinned memory, a multiple of `page_bytes`.

    Attributes:
        pinned_bytes: host memory that is pinned now, for copies and staging.
    """

    def __init__(self, backend: CudaBackend, *, page_bytes: int = PAGE_BYTES, piece_bytes: int = PIECE_BYTES) -> None:
        self.backend, self.page_bytes, self.piece_bytes = backend, page_bytes, piece_bytes
        self._lock = threading.RLock()
        self._lanes: list[_Lane] = []  # that no range uses
        self.pinned_bytes = 0

    def pin(self, num_bytes: int) -> PinnedMemory:
        """Memory for a range's bytes, to be closed by its owner. Raises `MapError`."""
        return PinnedMemory(self.backend, num_bytes, self.piece_bytes, self._note_pinned)

    @contextmanager
    def lane(self) -> Iterator[_Lane]:
        """A stream for the copies of one range. Raises `MapError`."""
        with self._lock:
            lane = self._lanes.pop() if self._lanes else None
        lane = lane or _Lane(self.backend, self.piece_bytes, self._note_pinned)
        try:
            yield lane
        finally:
            with self._lock:
                self._lanes.append(lane)

    def close_lanes(self) -> None:
        """Free staging buffers and streams that no range uses; new ones are made when they are needed. Raises
        `MapError`; call again."""
        with self._lock:
            while self._lanes:
                self._lanes[-1].close()
                self._lanes.pop()

    def close(self) -> None:
        """No range and no pinned memory may be left. Raises `IntegrityError` otherwise, and `MapError`; call again."""
        self.close_lanes()
        if self.pinned_bytes:
            raise IntegrityError(f"closed with {self.pinned_bytes} bytes of memory pinned")
        self.backend.close()

    def _note_pinned(self, change: int) -> None:
        with self._lock:
            self.pinned_bytes += change


class _Lane:
    """A stream, and two staging buffers once a file is read through them."""

    def __init__(self, backend: CudaBackend, piece_bytes: int, note: Callable[[int], None]) -> None:
        self._backend, self._piece_bytes, self._note = backend, piece_bytes, note
        self._stream = backend.create_stream()
        self._buffers: list[tuple[PinnedMemory, int]] = []  # with the event of its last copy; the next one first

    def copy(self, target: AddressRange, source: int) -> None:
        """Begin to copy pinned bytes to the device."""
        self._backend.call("cuMemcpyHtoDAsync", target.address, source, target.num_bytes, self._stream)

    def stage(self, target: AddressRange, file: FilePart, start: int, readers: ThreadPoolExecutor) -> None:
        """Read a piece of a file while the piece before is copied, and begin to copy it."""
        if len(self._buffers) < 2:
            self._add_buffer()
        buffer, event = self._buffers[0]
        self._backend.call("cuEventSynchronize", event)
        _read(file, start, buffer.view(0, target.num_bytes), readers)
        self.copy(target, buffer.address_of(0))
        self._backend.call("cuEventRecord", event, self._stream)
        self._buffers.reverse()

    def wait(self) -> None:
        """Return once all copies are done. Raises `MapError`."""
        self._backend.call("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        while self._buffers:
            buffer, event = self._buffers[-1]
            buffer.close()
            self._backend.call("cuEventDestroy", event)
            self._buffers.pop()
        self._backend.call("cuStreamDestroy", self._stream)

    def _add_buffer(self) -> None:
        buffer = PinnedMemory(self._backend, self._piece_bytes, self._piece_bytes, self._note)
        try:
            event = self._backend.create_event()
        except MapError:
            retry_undo(buffer.close)
            raise
        self._buffers.insert(0, (buffer, event))


class CudaRange:
    """Device addresses for weights. Used by one thread at a time.

    Args:
        num_bytes: of the weights, more than 0.

    Attributes:
        reserved: the addresses, whole pages.
        is_mapped: the weights are there; otherwise any access is a fault of the device that ends all its work.

    Raises:
        MapError: the addresses cannot be reserved.
    """

    def __init__(self, num_bytes: int, uploads: Uploads) -> None:
        self.num_bytes = num_bytes
        self.is_mapped = self._is_closed = False
        self._uploads, self._backend = uploads, uploads.backend
        self.reserved = self._backend.reserve(-(-num_bytes // uploads.page_bytes) * uploads.page_bytes)

    def tensor(self) -> torch.Tensor:
        """A uint8 tensor `[num_bytes]` on the device, valid until `close`; only to be read, and only while mapped."""
        return self._backend.tensor(AddressRange(self.reserved.address, self.num_bytes))

    def map(self, source: PinnedMemory | FilePart) -> None:
        """Map pages and fill them; all bytes have arrived when this returns. Pages are mapped while the ones before are
        filled.

        Raises:
            OutOfPages: the device has too little memory left.
            MapError: the device refused, or the file cannot be read. Nothing is mapped then.
        """
        if self.is_mapped or self._is_closed:
            raise IntegrityError(f"map at {self.reserved}, which is {'closed' if self._is_closed else 'mapped'}")
        available = self._backend.memory_info().available_bytes
        if available < self.reserved.num_bytes:  # it would be found after most bytes were copied
            raise OutOfPages(self.reserved.num_bytes, available, unit="bytes")
        at, mapped_bytes = self.reserved.address, 0
        with self._uploads.lane() as lane, ThreadPoolExecutor(_READ_THREADS) as readers:
            try:
                for start in range(0, self.reserved.num_bytes, self._uploads.piece_bytes):
                    piece_bytes = min(self._uploads.piece_bytes, self.reserved.num_bytes - start)
                    self._map_pages(AddressRange(at + start, piece_bytes))
                    mapped_bytes += piece_bytes
                    target = AddressRange(at + start, min(piece_bytes, self.num_bytes - start))
                    if isinstance(source, PinnedMemory):
                        lane.copy(target, source.address_of(start))
                    elif source.keep is not None:
                        _read(source, start, source.keep.view(start, target.num_bytes), readers)
                        lane.copy(target, source.keep.address_of(start))
                    else:
                        lane.stage(target, source, start, readers)
                lane.wait()
            except BaseException:
                retry_undo(lane.wait)  # a copy may still write what is given back
                if mapped_bytes:
                    self._give_back(AddressRange(at, mapped_bytes), undoes=True)
                raise
        self.is_mapped = True

    def unmap(self) -> None:
        """Give the pages back once the work that this thread has submitted is done. Raises `MapError`; the weights are
        still mapped then."""
        if not self.is_mapped:
            raise IntegrityError(f"unmap of {self.reserved}, which is not mapped")
        self._backend.wait(self._backend.fence())
        self._give_back(self.reserved, undoes=False)
        self.is_mapped = False

    def close(self) -> None:
        """Unmap and release the range; calls that fail are made again."""
        if self._is_closed:
            return
        if self.is_mapped:
            retry_undo(self.unmap)
        retry_undo(partial(self._backend.release, self.reserved))
        self._is_closed = True

    def _map_pages(self, span: AddressRange) -> None:
        page_bytes = self._uploads.page_bytes
        handles: list[int] = []
        try:
            for _ in range(span.num_bytes // page_bytes):
                handles.append(self._backend.create(page_bytes))
            self._backend.map(span.address, handles)
        except VmemError:
            for handle in handles:
                retry_undo(partial(self._backend.destroy, handle))
            raise

    def _give_back(self, mapped: AddressRange, *, undoes: bool) -> None:
        handles = self._backend.handles_at(mapped)
        unmap = partial(self._backend.unmap, mapped)
        retry_undo(unmap) if undoes else unmap()
        for handle in handles:
            retry_undo(partial(self._backend.destroy, handle))


def _read(file: FilePart, start: int, target: memoryview, readers: ThreadPoolExecutor) -> None:
    """Read a part of a file, from byte `start` of it on. Raises `MapError`."""
    slice_bytes = -(-len(target) // _READ_THREADS)

    def read(first: int) -> None:
        end, at = min(first + slice_bytes, len(target)), first
        while at < end:
            num_bytes = os.preadv(file.fd, [target[at:end]], file.offset + start + at)
            if not num_bytes:
                raise MapError(f"the file of weights ends {end - at} bytes too early")
            at += num_bytes

    try:
        list(readers.map(read, range(0, len(target), slice_bytes)))
    except OSError as error:
        raise MapError(f"the file of weights cannot be read: {error.strerror}") from error
