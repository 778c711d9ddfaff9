"""Memory backends: reserve virtual ranges, create physical pages, and map pages into ranges.

Addresses and handles are plain ints. A handle names one physical page; if it is mapped at several addresses (aliases),
all of them read and write the same bytes.
"""

from __future__ import annotations

import functools
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from folio.vmem.device_pages import DevicePages, PageCalls
from folio.vmem.errors import IntegrityError, MapError, VmemError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class AddressRange:
    """`num_bytes` of virtual addresses from `address` on."""

    address: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.address + self.num_bytes

    def __str__(self) -> str:
        return f"[{self.address:#x}, {self.end:#x})"


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes that the backend has created, and bytes that the device could still give."""

    physical_bytes: int
    available_bytes: int


class FenceQueue(Protocol):
    """A queue whose work another thread of the CPU does. Its fences are those of `Backend`."""

    def fence(self) -> int: ...

    def completed(self, fence: int) -> bool: ...

    def wait(self, fence: int) -> None: ...


class Backend(Protocol):
    """Physical pages and virtual ranges of one device.

    Calls raise `MapError` when the device refuses them, and then change nothing. Calls may come from several threads;
    those that change mappings or pages run one after the other.

    Attributes:
        max_call_bytes: the most that one call should map, so that another thread's call does not wait long.
        granularity_bytes: page sizes and mapped addresses are multiples of this.
        creates_when_mapped: a page is created in part when it is first mapped, so that `map` may raise `OutOfPages`.
    """

    max_call_bytes: int
    granularity_bytes: int
    creates_when_mapped: bool

    def reserve(self, num_bytes: int) -> AddressRange:
        """Reserve virtual addresses without memory; touching them is a fault."""

    def release(self, reserved: AddressRange) -> None:
        """Release a reserved range, in which nothing may be mapped."""

    def create(self, page_bytes: int) -> int:
        """Create one physical page of undefined content and return its handle. Raises `OutOfPages`."""

    def destroy(self, handle: int) -> None:
        """Give the memory of an unmapped page back to the machine."""

    def map(self, address: int, handles: Sequence[int]) -> None:
        """Map pages side by side from `address` on, readable and writable, all or none."""

    def unmap(self, mapped: AddressRange) -> None:
        """Turn whole mapped pages into a hole, all or none."""

    def tensor(self, reserved: AddressRange) -> torch.Tensor:
        """A uint8 tensor `[num_bytes]` over the range, valid until its release. Only mapped parts may be touched;
        printing touches all."""

    def fence(self) -> int:
        """Mark this point in the device's work."""

    def completed(self, fence: int) -> bool:
        """Whether all work submitted before the fence is done."""

    def wait(self, fence: int) -> None:
        """Return once `completed(fence)` is true."""

    def memory_info(self) -> MemoryInfo: ...

    @property
    def num_mappings(self) -> int:
        """Pages mapped now, counted once per address."""

    def close(self) -> None:
        """Close the backend. Raises `IntegrityError` if a page, mapping or reservation is left."""


# Attempts to undo a call before the memory counts as broken.
_UNDO_ATTEMPTS = 3

Method = TypeVar("Method", bound=Callable[..., Any])


def one_at_a_time(method: Method) -> Method:
    """Run a backend's method under its lock, so that check, call and accounting are one step for other threads."""

    @functools.wraps(method)
    def locked(self: Any, *args: Any) -> Any:
        with self._lock:
            return method(self, *args)

    return cast(Method, locked)


def adjacent_runs(numbers: Sequence[int], step: int = 1) -> Iterator[tuple[int, int]]:
    """(start, end) of each longest slice of `numbers` in which every number is the one before plus `step`."""
    start = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + step:
            yield start, i
            start = i


def retry_undo(undo: Callable[[], None]) -> None:
    """Undo a step. Raises `IntegrityError` if three attempts fail."""
    for attempt in range(_UNDO_ATTEMPTS):
        try:
            return undo()
        except VmemError as error:
            if attempt == _UNDO_ATTEMPTS - 1:
                raise IntegrityError(f"a failed change of mappings could not be undone: {error}") from error
    return None


class AccountedBackend(Backend, ABC):
    """Accounting of one backend: checks each call, has the subclass make it, and notes its effect.

    The abstract methods call the device; when they raise, the accounting stays as it was.

    Args:
        device: see `PageCalls`.
        pages: the device's memory, if several backends share it. `create` and `destroy` then exchange pages with the
            other backends, and call the device only where it has too few idle pages.

    Attributes:
        page_bytes: the size of all pages, set by the first one.
        mappings: address → handle.
    """

    creates_when_mapped = False

    def __init__(self, granularity_bytes: int, device: str, pages: DevicePages | None = None) -> None:
        self.granularity_bytes = granularity_bytes
        self.page_bytes = 0
        self.mappings: dict[int, int] = {}
        self._num_aliases: dict[int, int] = {}  # handle → number of addresses it is mapped at
        self._reserved: dict[int, AddressRange] = {}
        self._lock = threading.RLock()
        self._pages = pages
        self._has_left = False
        self._calls = PageCalls(device, self._create, self._destroy)
        if pages is not None:
            pages.join(self._calls)

    @abstractmethod
    def _reserve(self, num_bytes: int) -> int: ...

    @abstractmethod
    def _release(self, reserved: AddressRange) -> None: ...

    @abstractmethod
    def _create(self, page_bytes: int) -> int: ...

    @abstractmethod
    def _destroy(self, handle: int, page_bytes: int) -> None: ...

    @abstractmethod
    def _map(self, address: int, handles: Sequence[int]) -> None: ...

    @abstractmethod
    def _unmap(self, mapped: AddressRange) -> None: ...

    @property
    def num_mappings(self) -> int:
        return len(self.mappings)

    @property
    def _created_bytes(self) -> int:
        return len(self._num_aliases) * self.page_bytes

    @one_at_a_time
    def reserve(self, num_bytes: int) -> AddressRange:
        self._check_size("size", num_bytes)
        reserved = AddressRange(self._reserve(num_bytes), num_bytes)
        self._reserved[reserved.address] = reserved
        return reserved

    @one_at_a_time
    def release(self, reserved: AddressRange) -> None:
        if self._reserved.get(reserved.address) != reserved:
            raise IntegrityError(f"release of {reserved}, which is not reserved")
        for address in self.mappings:
            if reserved.address <= address < reserved.end:
                raise IntegrityError(f"release of {reserved} while a page is mapped at {address:#x}")
        self._release(reserved)
        del self._reserved[reserved.address]

    @one_at_a_time
    def create(self, page_bytes: int) -> int:
        self._check_size("page size", page_bytes)
        if self.page_bytes not in (0, page_bytes):
            raise MapError(f"page size {page_bytes} after pages of {self.page_bytes} bytes: one size per backend")
        pages = self._pages
        handle = self._create(page_bytes) if pages is None else pages.create(self._calls, page_bytes)
        self.page_bytes = page_bytes
        self._num_aliases[handle] = 0
        return handle

    @one_at_a_time
    def destroy(self, handle: int) -> None:
        if self._num_aliases.get(handle) != 0:
            raise IntegrityError(f"destroy of page {handle:#x}, mapped {self._num_aliases.get(handle)} times")
        if self._pages is None:
            self._destroy(handle, self.page_bytes)
        else:
            self._pages.destroy(handle)
        del self._num_aliases[handle]

    @one_at_a_time
    def map(self, address: int, handles: Sequence[int]) -> None:
        span = AddressRange(address, len(handles) * self.page_bytes)
        if not any(r.address <= span.address and span.end <= r.end for r in self._reserved.values()):
            raise IntegrityError(f"map at {span}, outside every reservation")
        placed = {address + i * self.page_bytes: handle for i, handle in enumerate(handles)}
        for at, handle in placed.items():
            if handle not in self._num_aliases:
                raise IntegrityError(f"map of page {handle:#x}, which does not exist")
            if at in self.mappings:
                raise IntegrityError(f"map at {at:#x}, where a page is mapped already")
        self._map(address, handles)
        self.mappings.update(placed)
        for handle in handles:
            self._num_aliases[handle] += 1

    @one_at_a_time
    def unmap(self, mapped: AddressRange) -> None:
        handles = self.handles_at(mapped)
        self._unmap(mapped)
        for address, handle in zip(self._places(mapped), handles, strict=True):
            del self.mappings[address]
            self._num_aliases[handle] -= 1

    def handles_at(self, mapped: AddressRange) -> list[int]:
        """The pages mapped side by side in the range; raises `IntegrityError` at a hole."""
        for address in self._places(mapped):
            if address not in self.mappings:
                raise IntegrityError(f"unmap of {mapped}: no page is mapped at {address:#x}")
        return [self.mappings[address] for address in self._places(mapped)]

    def _places(self, mapped: AddressRange) -> range:
        return range(mapped.address, mapped.end, self.page_bytes)

    def _check_size(self, what: str, num_bytes: int) -> None:
        if num_bytes <= 0 or num_bytes % self.granularity_bytes:
            raise MapError(f"{what} {num_bytes} is not a positive multiple of {self.granularity_bytes} bytes")
        if num_bytes > sys.maxsize:  # ctypes would pass on its lowest 64 bits: a range that is too small
            raise MapError(f"{what} {num_bytes} is above the {sys.maxsize} bytes that can be addressed")

    def _end_accounting(self) -> None:
        """Before a backend is closed: nothing may be left, and the device has one backend less. May be called again."""
        left = (len(self.mappings), len(self._num_aliases), len(self._reserved))
        if any(left):
            raise IntegrityError("closed with {} mappings, {} pages and {} reservations left".format(*left))
        if self._pages is not None and not self._has_left:
            self._pages.leave(self._calls)
            self._has_left = True
