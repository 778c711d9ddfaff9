"""What a memory backend can do: reserve virtual ranges, create physical pages, and map the one into the other.

An implementation is small and keeps no policy. Addresses and handles are plain ints. A handle names one physical
page; the same handle may be mapped at several addresses (aliasing), and all of them then read and write the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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
    """Bytes the backend holds, and bytes the device could still give."""

    physical_bytes: int
    available_bytes: int


class Backend(Protocol):
    """Physical pages and virtual ranges of one device. Calls raise `MapError` when the device refuses them.

    A failed call leaves nothing behind. Calls may come from several threads; those that change mappings or pages run
    one after the other.
    """

    @property
    def unit_bytes(self) -> int:
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
