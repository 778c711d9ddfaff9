"""Device pages: the physical memory of one device, shared by several backends.

    capacity | used: pages of a backend | idle: pages between two owners | charged: memory without pages | free |

A page that a backend destroys becomes idle and goes to the next backend that creates one of its size, without a call of
the device. Idle pages are destroyed when others need their memory, or by `trim`.
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from folio.vmem.errors import IntegrityError, MapError, OutOfPages
from folio.vmem.mapping.mapping_count import MappingCount
from folio.vmem.swap.swap_space import SwapSpace


@dataclass(frozen=True, slots=True, eq=False)
class PageCalls:
    """How one backend calls its device. Calls may come from any thread, one at a time.

    Attributes:
        device: equal for backends whose pages each of them can map.
        create: page size in bytes → handle. Raises `OutOfPages`, `MapError`.
        destroy: called with a handle and its page size in bytes. Raises `MapError`.
    """

    device: str
    create: Callable[[int], int]
    destroy: Callable[[int, int], None]


class Closeable(Protocol):
    def close(self) -> None: ...


Shared = TypeVar("Shared", bound=Closeable)


class DevicePages:
    """Physical memory of one device, at most `capacity_bytes` at any time. From any thread.

    The content of a page is undefined: it may be another backend's.

    Args:
        swap_bytes: bound of `swap_space`.

    Attributes:
        mappings, swap_space: of all KV memories over these pages.
    """

    def __init__(self, capacity_bytes: int, swap_bytes: float = math.inf) -> None:
        self.capacity_bytes = capacity_bytes
        self.mappings = MappingCount()
        self.swap_space = SwapSpace(swap_bytes)
        self._lock = threading.Lock()
        self._backends: list[PageCalls] = []
        self._shared: Closeable | None = None
        self._used: dict[int, int] = {}  # handle → page size
        self._idle: dict[int, list[int]] = {}  # page size → handles, a heap: neighbours in a memfd share a mapping
        self._used_bytes = self._idle_bytes = self._charged_bytes = 0

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def idle_bytes(self) -> int:
        return self._idle_bytes

    @property
    def charged_bytes(self) -> int:
        return self._charged_bytes

    @property
    def available_bytes(self) -> int:
        """Bytes that could still be created or charged, idle pages included."""
        return self.capacity_bytes - self._used_bytes - self._charged_bytes

    def charge(self, num_bytes: int) -> None:
        """Count memory without pages, such as a mapped file. Raises `OutOfPages`; then nothing is charged."""
        if num_bytes < 0:
            raise IntegrityError(f"charge of {num_bytes} bytes")
        while True:  # without the lock between two pages: destroying many takes long
            with self._lock:
                if self._fits(num_bytes):
                    self._charged_bytes += num_bytes
                    return
                self._destroy_idle(self._backends[-1])

    def discharge(self, num_bytes: int) -> None:
        """End a charge, or a part of one."""
        with self._lock:
            if not 0 <= num_bytes <= self._charged_bytes:
                raise IntegrityError(f"discharge of {num_bytes} bytes where {self._charged_bytes} are charged")
            self._charged_bytes -= num_bytes

    def trim(self, limit_s: float = math.inf) -> int:
        """Destroy idle pages for at most `limit_s`; returns their bytes. Raises `MapError`; others stay idle."""
        num_bytes, began = 0, time.monotonic()
        while time.monotonic() - began < limit_s:
            with self._lock:
                if not self._idle:
                    return num_bytes
                num_bytes += self._destroy_idle(self._backends[-1])
        return num_bytes

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless bytes add up within the capacity and every page has one state."""
        with self._lock:
            idle = [handle for handles in self._idle.values() for handle in handles]
            counted = sum(self._used.values()), sum(size * len(handles) for size, handles in self._idle.items())
            if counted != (self._used_bytes, self._idle_bytes) or not all(self._idle.values()):
                raise IntegrityError(
                    f"pages of {counted} bytes are used and idle, {self._used_bytes} and {self._idle_bytes} counted"
                )
            if len({*idle, *self._used}) < len(idle) + len(self._used):
                raise IntegrityError(f"{len(idle)} idle pages and {len(self._used)} used ones have handles in common")
            if idle and not self._backends:
                raise IntegrityError(f"{len(idle)} pages are idle without a backend")
            if self._used_bytes + self._idle_bytes + self._charged_bytes > self.capacity_bytes:
                raise IntegrityError(
                    f"{self._used_bytes} bytes used, {self._idle_bytes} idle and {self._charged_bytes} charged exceed "
                    f"the capacity of {self.capacity_bytes}"
                )

    def close(self) -> None:
        """Close the shared object. Raises `IntegrityError` if a backend is open, or memory charged or swapped out."""
        with self._lock:
            if self._backends or self._used or self._charged_bytes or self.swap_space.used_bytes:
                raise IntegrityError(
                    f"closed with {len(self._backends)} backends open, {len(self._used)} pages used, "
                    f"{self._charged_bytes} bytes charged and {self.swap_space.used_bytes} swapped out"
                )
            if self._shared is not None:
                self._shared.close()
                self._shared = None

    # ---- for backends ----

    def join(self, backend: PageCalls) -> None:
        """Let a backend create pages. Raises `MapError` if there are backends of another device."""
        with self._lock:
            if self._backends and self._backends[0].device != backend.device:
                raise MapError(f"pages of {self._backends[0].device} cannot be mapped on {backend.device}")
            self._backends.append(backend)

    def leave(self, backend: PageCalls) -> None:
        """End `join`; the backend has no page left. The last one destroys the idle pages. Raises `MapError`; then the
        backend has not left."""
        with self._lock:
            while self._idle and self._backends == [backend]:
                self._destroy_idle(backend)
            self._backends.remove(backend)

    def share(self, kind: type[Shared], make: Callable[[], Shared]) -> Shared:
        """The object that this device's backends share, made for the first one and closed by `close`."""
        with self._lock:
            if self._shared is None:
                self._shared = make()
            if not isinstance(self._shared, kind):
                raise MapError(f"backends share a {type(self._shared).__name__}, not a {kind.__name__}")
            return self._shared

    def create(self, backend: PageCalls, page_bytes: int) -> int:
        """Take an idle page of this size, or create one. Idle pages of other sizes are destroyed if their memory is
        needed. Raises `OutOfPages`, `MapError`."""
        while True:
            with self._lock:
                if (handle := self._take_idle(page_bytes)) is None and self._fits(page_bytes, num_pages=1):
                    handle = self._create(backend, page_bytes)
                if handle is not None:
                    self._used[handle] = page_bytes
                    self._used_bytes += page_bytes
                    return handle
                self._destroy_idle(backend)

    def destroy(self, handle: int) -> None:
        """Make a used page, which is mapped nowhere, idle."""
        with self._lock:
            if handle not in self._used:
                raise IntegrityError(f"destroy of page {handle}, which no backend has")
            page_bytes = self._used.pop(handle)
            self._used_bytes -= page_bytes
            heapq.heappush(self._idle.setdefault(page_bytes, []), handle)
            self._idle_bytes += page_bytes

    # ---- with the lock held ----

    def _fits(self, num_bytes: int, num_pages: int = 0) -> bool:
        """Whether so much more fits beside the idle pages. Raises `OutOfPages` if it does not fit without them."""
        available = self.available_bytes
        if num_bytes > available:
            raise OutOfPages(num_pages, 0) if num_pages else OutOfPages(num_bytes, available, unit="bytes")
        return num_bytes <= available - self._idle_bytes

    def _create(self, backend: PageCalls, page_bytes: int) -> int | None:
        """Create a page; `None` if the device has too little memory, of which idle pages take a part."""
        try:
            return backend.create(page_bytes)
        except OutOfPages:
            if not self._idle:
                raise
            return None

    def _take_idle(self, page_bytes: int) -> int | None:
        handles = self._idle.get(page_bytes)
        if handles is None:
            return None
        handle = heapq.heappop(handles)
        self._forget_idle(page_bytes)
        return handle

    def _destroy_idle(self, backend: PageCalls) -> int:
        """Destroy a page of the size that takes the most memory; returns its bytes."""
        page_bytes = max(self._idle, key=lambda size: size * len(self._idle[size]))
        handles = self._idle[page_bytes]
        backend.destroy(handles[-1], page_bytes)  # the last one of a heap may go, and is among the highest
        handles.pop()
        self._forget_idle(page_bytes)
        return page_bytes

    def _forget_idle(self, page_bytes: int) -> None:
        """Note that a page of this size is no longer idle."""
        self._idle_bytes -= page_bytes
        if not self._idle[page_bytes]:
            del self._idle[page_bytes]
