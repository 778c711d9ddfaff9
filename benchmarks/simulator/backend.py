"""Backend that counts pages and maps nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from folio.vmem import AddressRange, MemoryInfo


class CountingBackend:
    """A `Backend` without memory. It does not check its caller; the tests of real backends cover refusals."""

    max_call_bytes = 1 << 40
    granularity_bytes = 4096
    creates_when_mapped = False

    def __init__(self) -> None:
        self._handles = itertools.count(1)
        self._next_address = self.granularity_bytes
        self._page_bytes = 0
        self._num_pages = 0
        self._num_mappings = 0

    def reserve(self, num_bytes: int) -> AddressRange:
        reserved = AddressRange(self._next_address, num_bytes)
        self._next_address += num_bytes
        return reserved

    def release(self, reserved: AddressRange) -> None:
        pass

    def create(self, page_bytes: int) -> int:
        self._page_bytes = page_bytes
        self._num_pages += 1
        return next(self._handles)

    def destroy(self, handle: int) -> None:
        self._num_pages -= 1

    def map(self, address: int, handles: Sequence[int]) -> None:
        self._num_mappings += len(handles)

    def unmap(self, mapped: AddressRange) -> None:
        self._num_mappings -= mapped.num_bytes // self._page_bytes

    def tensor(self, reserved: AddressRange) -> torch.Tensor:
        return torch.empty(reserved.num_bytes, dtype=torch.uint8, device="meta")

    def fence(self) -> int:
        return 0

    def completed(self, fence: int) -> bool:
        return True

    def wait(self, fence: int) -> None:
        pass

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(self._num_pages * self._page_bytes, 1 << 50)

    @property
    def num_mappings(self) -> int:
        return self._num_mappings

    def close(self) -> None:
        pass
