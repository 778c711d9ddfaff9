"""What a memory backend can do: reserve virtual ranges, create physical pages, and map the one into the other.

An implementation is small and keeps no policy. Addresses and handles are plain ints. A handle names one physical
page; the same handle may be mapped at several addresses (aliasing), and all of them then read and write the same bytes.

Which pages exist and what is mapped where: rules that every backend keeps, checked before the device is asked.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

import torch

from vmem.errors import IntegrityError, MapError, VmemError


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
    """Bytes the backend holds, and bytes the device could still give."""

    physical_bytes: int
    available_bytes: int


class Backend(Protocol):
    """Physical pages and virtual ranges of one device. Calls raise `MapError` when the device refuses them.

    A failed call leaves nothing behind. Calls may come from several threads; those that change mappings or pages run
    one after the other.
    """

    @property
    def max_call_bytes(self) -> int:
        """How much one call should map at most, so that another thread's call need not wait for long."""
        ...

    @property
    def granularity_bytes(self) -> int:
        """Page sizes and mapped addresses are multiples of this."""
        ...

    def reserve(self, num_bytes: int) -> AddressRange:
        """Reserve virtual addresses without memory behind them; touching them is a fault."""
        ...

    def release(self, reserved: AddressRange) -> None:
        """Give back a range that `reserve` returned. Nothing may be mapped in it any more."""
        ...

    def create(self, page_bytes: int) -> int:
        """Create one physical page and return its handle. Its content is undefined. Raises `OutOfPages`."""
        ...

    def destroy(self, handle: int) -> None:
        """Give the page's memory back to the machine. It may not be mapped anywhere any more."""
        ...

    def map(self, address: int, handles: Sequence[int]) -> None:
        """Map pages of one size side by side from `address` on, readable and writable. All of them or none."""
        ...

    def unmap(self, mapped: AddressRange) -> None:
        """Turn whole mapped pages back into a hole."""
        ...

    def tensor(self, reserved: AddressRange) -> torch.Tensor:
        """A uint8 tensor `[num_bytes]` over the range. It owns nothing: it dies with the reservation, and only mapped
        parts of it may be touched (printing it touches all)."""
        ...

    def fence(self) -> int:
        """Mark this point in the device's work; later `completed` says whether the device has passed it."""
        ...

    def completed(self, fence: int) -> bool:
        """Whether all work submitted before the fence is done, so that its mappings may change."""
        ...

    def wait(self, fence: int) -> None:
        """Return once `completed(fence)` is true."""
        ...

    def memory_info(self) -> MemoryInfo: ...

    @property
    def num_mappings(self) -> int:
        """Pages mapped now, counted once per address."""
        ...

    def close(self) -> None:
        """Give everything back. Raises `IntegrityError` if a page, mapping or reservation was still alive."""
        ...


# A call that undoes another is tried this often before memory counts as broken.
_UNDO_ATTEMPTS = 3

S = TypeVar("S", bound="Locked")
P = ParamSpec("P")
R = TypeVar("R")


class Locked(Protocol):
    """Has the lock that `one_at_a_time` takes."""

    _lock: threading.RLock


def one_at_a_time(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A backend's method that changes pages or mappings: check, call and note are one step for other threads."""

    @functools.wraps(method)
    def locked(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return cast(Callable[Concatenate[S, P], R], locked)


def adjacent_runs(numbers: Sequence[int], step: int = 1) -> Iterator[tuple[int, int]]:
    """(start, end) of each longest slice of `numbers` in which every number is the one before plus `step`."""
    start = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + step:
            yield start, i
            start = i


def retry_undo(undo: Callable[[], None]) -> None:
    """Call what undoes a step. Raises `IntegrityError` if it fails again and again."""
    for attempt in range(_UNDO_ATTEMPTS):
        try:
            return undo()
        except VmemError as error:
            if attempt == _UNDO_ATTEMPTS - 1:
                raise IntegrityError(f"a failed change of mappings could not be undone: {error}") from error
    return None


class BackendAccounting:
    """The accounting of one backend. Checks raise and change nothing; notes follow a call that succeeded."""

    def __init__(self, granularity_bytes: int) -> None:
        self._granularity_bytes = granularity_bytes
        self.page_bytes = 0  # set by the first page: all have one size
        self._pages: dict[int, int] = {}  # handle → number of addresses it is mapped at
        self._mappings: dict[int, int] = {}  # address → handle
        self._reserved: dict[int, AddressRange] = {}

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    @property
    def num_mappings(self) -> int:
        return len(self._mappings)

    def check_size(self, what: str, num_bytes: int) -> None:
        if num_bytes <= 0 or num_bytes % self._granularity_bytes:
            raise MapError(f"{what} {num_bytes} is not a positive multiple of {self._granularity_bytes} bytes")
        if num_bytes > sys.maxsize:  # ctypes would pass on its lowest 64 bits: a range that is too small
            raise MapError(f"{what} {num_bytes} is above the {sys.maxsize} bytes that can be addressed")

    def note_reserved(self, reserved: AddressRange) -> None:
        self._reserved[reserved.address] = reserved

    def check_release(self, reserved: AddressRange) -> None:
        if self._reserved.get(reserved.address) != reserved:
            raise IntegrityError(f"release of {reserved}, which is not reserved")
        for address in self._mappings:
            if reserved.address <= address < reserved.end:
                raise IntegrityError(f"release of {reserved} while a page is mapped at {address:#x}")

    def note_released(self, reserved: AddressRange) -> None:
        del self._reserved[reserved.address]

    def check_create(self, page_bytes: int) -> None:
        self.check_size("page size", page_bytes)
        if self.page_bytes not in (0, page_bytes):
            raise MapError(f"page size {page_bytes} after pages of {self.page_bytes} bytes: one size per backend")

    def note_created(self, handle: int, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self._pages[handle] = 0

    def check_destroy(self, handle: int) -> None:
        if self._pages.get(handle) != 0:
            raise IntegrityError(f"destroy of page {handle:#x}, mapped {self._pages.get(handle)} times")

    def note_destroyed(self, handle: int) -> None:
        del self._pages[handle]

    def check_map(self, address: int, handles: Sequence[int]) -> None:
        span = AddressRange(address, len(handles) * self.page_bytes)
        if not any(r.address <= span.address and span.end <= r.end for r in self._reserved.values()):
            raise IntegrityError(f"map at {span}, outside every reservation")
        for i, handle in enumerate(handles):
            if handle not in self._pages:
                raise IntegrityError(f"map of page {handle:#x}, which does not exist")
            if address + i * self.page_bytes in self._mappings:
                raise IntegrityError(f"map at {address + i * self.page_bytes:#x}, where a page is mapped already")

    def note_mapped(self, address: int, handles: Sequence[int]) -> None:
        for i, handle in enumerate(handles):
            self._mappings[address + i * self.page_bytes] = handle
            self._pages[handle] += 1

    def handles_at(self, mapped: AddressRange) -> list[int]:
        """The pages behind a range, in order."""
        return [self._mappings[address] for address in range(mapped.address, mapped.end, self.page_bytes)]

    def check_unmap(self, mapped: AddressRange) -> None:
        for address in range(mapped.address, mapped.end, self.page_bytes):
            if address not in self._mappings:
                raise IntegrityError(f"unmap of {mapped}: no page is mapped at {address:#x}")

    def note_unmapped(self, mapped: AddressRange) -> None:
        for address in range(mapped.address, mapped.end, self.page_bytes):
            self._pages[self._mappings.pop(address)] -= 1

    def check_closed(self) -> None:
        left = (len(self._mappings), len(self._pages), len(self._reserved))
        if any(left):
            raise IntegrityError("closed with {} mappings, {} pages and {} reservations alive".format(*left))
