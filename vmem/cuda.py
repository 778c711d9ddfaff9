"""Mapped memory on a CUDA device, through the driver's virtual memory management API.

Addresses, handles and events are ints. The device's primary context is used, the one torch uses, so tensors over mapped
ranges and torch's own tensors meet in one kernel. Creating a page that does not fit is `OutOfPages`; every other status
that is not success is a `MapError` with the call, its address and the status.
"""

from __future__ import annotations

import importlib
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from vmem.backend import AddressRange, MemoryInfo
from vmem.books import Books, must, one_at_a_time
from vmem.dlpack import CPU, CUDA, export_uint8
from vmem.errors import MapError, OutOfPages, VmemError

# Sixteen pages of 2 MiB to a call: fewer calls are cheaper a page, longer ones keep others waiting.
_UNIT_BYTES = 32 << 20
# Asking how much is free costs about as much as creating a page: once for so many bytes.
_HEADROOM_CHECK_BYTES = 64 << 20


class CudaBackend:
    """The `Backend` of one CUDA device.

    Args:
        device: the device's ordinal.
        headroom_bytes: device memory that `create` leaves free for torch; below it the answer is `OutOfPages`.
        stream: the CUDA stream whose work fences mark, 0 for the legacy default stream.
        driver: `cuda.bindings.driver`, or an object that behaves like it.
        tensor_device: where `tensor` says the memory is; CPU only over a fake driver.

    Raises:
        MapError: there is no such device.
    """

    def __init__(
        self,
        device: int = 0,
        *,
        headroom_bytes: int = 0,
        stream: int = 0,
        driver: Any = None,
        tensor_device: int = CUDA,
    ) -> None:
        if driver is None:
            driver = _load_driver()
        self._driver = driver
        self._device = device
        self._headroom_bytes = headroom_bytes
        self._stream = stream
        self._tensor_device = tensor_device
        self._lock = threading.RLock()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", device)
        self._context = self._call("cuDevicePrimaryCtxRetain", device)
        try:
            self._call("cuCtxSetCurrent", self._context)
            self._granularity_bytes = self._describe_pages()
        except VmemError:
            self._call("cuDevicePrimaryCtxRelease", device)
            raise
        self._books = Books(self._granularity_bytes)
        self._unchecked_bytes = 0  # may be created before the device is asked again how much is free
        self._next_fence = 1
        self._events: deque[tuple[int, Any]] = deque()  # (fence, event) of fences not seen to be passed
        self._spare_events: list[Any] = []
        self._fence_lock = threading.Lock()  # a thread may wait for a fence while another sets one

    def _describe_pages(self) -> int:
        """Fill in what the driver wants to know of every page, and return its granularity."""
        driver = self._driver
        location_type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._page_properties = driver.CUmemAllocationProp()
        self._page_properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._page_properties.location.type = location_type
        self._page_properties.location.id = self._device
        self._access = driver.CUmemAccessDesc()
        self._access.location.type = location_type
        self._access.location.id = self._device
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", self._page_properties, minimum))

    @property
    def unit_bytes(self) -> int:
        return _UNIT_BYTES

    @property
    def granularity_bytes(self) -> int:
        return self._granularity_bytes

    @property
    def num_mappings(self) -> int:
        return self._books.num_mappings

    @one_at_a_time
    def reserve(self, num_bytes: int) -> AddressRange:
        self._books.check_size("size", num_bytes)
        address = int(self._call("cuMemAddressReserve", num_bytes, self._granularity_bytes, 0, 0))
        reserved = AddressRange(address, num_bytes)
        self._books.note_reserved(reserved)
        return reserved

    @one_at_a_time
    def release(self, reserved: AddressRange) -> None:
        self._books.check_release(reserved)
        self._call("cuMemAddressFree", reserved.address, reserved.num_bytes, at=reserved.address)
        self._books.note_released(reserved)

    @one_at_a_time
    def create(self, page_bytes: int) -> int:
        self._books.check_create(page_bytes)
        if self._headroom_bytes and self._unchecked_bytes < page_bytes:
            self._unchecked_bytes = min(self.memory_info().available_bytes, _HEADROOM_CHECK_BYTES)
            if self._unchecked_bytes < page_bytes:
                raise OutOfPages(1, 0)
        handle = int(self._call("cuMemCreate", page_bytes, self._page_properties, 0))
        self._unchecked_bytes -= page_bytes
        self._books.note_created(handle, page_bytes)
        return handle

    @one_at_a_time
    def destroy(self, handle: int) -> None:
        self._books.check_destroy(handle)
        self._call("cuMemRelease", handle)
        self._books.note_destroyed(handle)

    @one_at_a_time
    def map(self, address: int, handles: Sequence[int]) -> None:
        self._books.check_map(address, handles)
        size = self._books.page_bytes
        done = 0
        try:
            for handle in handles:
                self._call("cuMemMap", address + done * size, size, 0, handle, 0, at=address + done * size)
                done += 1
            # One call for the whole run: access is what costs, and it costs per call as well as per page.
            self._call("cuMemSetAccess", address, len(handles) * size, [self._access], 1, at=address)
        except MapError:
            if done:
                must(lambda: self._call("cuMemUnmap", address, done * size, at=address))
            raise
        self._books.note_mapped(address, handles)

    @one_at_a_time
    def unmap(self, mapped: AddressRange) -> None:
        self._books.check_unmap(mapped)
        self._call("cuMemUnmap", mapped.address, mapped.num_bytes, at=mapped.address)
        self._books.note_unmapped(mapped)

    def tensor(self, reserved: AddressRange) -> torch.Tensor:
        return export_uint8(reserved, self._tensor_device, self._device if self._tensor_device != CPU else 0)

    def fence(self) -> int:
        self._call("cuCtxSetCurrent", self._context)  # per thread, and events need it
        with self._fence_lock:
            return self._set_fence()

    def _set_fence(self) -> int:
        fence = self._next_fence
        try:
            if not self._spare_events:
                kinds = self._driver.CUevent_flags
                flags = int(kinds.CU_EVENT_DISABLE_TIMING) | int(kinds.CU_EVENT_BLOCKING_SYNC)
                self._spare_events.append(self._call("cuEventCreate", flags))
            self._call("cuEventRecord", self._spare_events[-1], self._stream)
        except MapError:
            # A step that nothing marks could never be waited for: wait now, and the fence is passed already.
            self._call("cuStreamSynchronize", self._stream)
        else:
            self._events.append((fence, self._spare_events.pop()))
        self._next_fence += 1
        self._forget_passed()
        return fence

    def completed(self, fence: int) -> bool:
        self._call("cuCtxSetCurrent", self._context)
        with self._fence_lock:
            self._forget_passed()
            return not self._events or self._events[0][0] > fence

    def wait(self, fence: int) -> None:
        self._call("cuCtxSetCurrent", self._context)
        while not self.completed(fence):
            with self._fence_lock:
                event = self._events[0][1] if self._events else None
            if event is not None:  # used again meanwhile, at worst: then this waits a little longer
                self._call("cuEventSynchronize", event)

    def memory_info(self) -> MemoryInfo:
        self._call("cuCtxSetCurrent", self._context)
        free, _ = self._call("cuMemGetInfo")
        physical = self._books.num_pages * self._books.page_bytes
        return MemoryInfo(physical, max(0, int(free) - self._headroom_bytes))

    def close(self) -> None:
        if self._context is None:
            return
        self._books.check_closed()
        for event in (*self._spare_events, *(event for _, event in self._events)):
            self._call("cuEventDestroy", event)
        self._spare_events.clear()
        self._events.clear()
        self._call("cuDevicePrimaryCtxRelease", self._device)
        self._context = None

    def _forget_passed(self) -> None:
        """Take back the events of fences that the device has passed, in order. With the lock held."""
        while self._events:
            (status,) = self._driver.cuEventQuery(self._events[0][1])
            if status == self._driver.CUresult.CUDA_ERROR_NOT_READY:
                return
            self._check("cuEventQuery", status, None)
            self._spare_events.append(self._events.popleft()[1])

    def _call(self, name: str, *args: Any, at: int | None = None) -> Any:
        """Call the driver and return what it returned beside the status, if anything."""
        status, *values = getattr(self._driver, name)(*args)
        self._check(name, status, at)
        return values[0] if len(values) == 1 else values

    def _check(self, name: str, status: Any, at: int | None) -> None:
        result = self._driver.CUresult
        if status == result.CUDA_SUCCESS:
            return
        if status == result.CUDA_ERROR_OUT_OF_MEMORY and name == "cuMemCreate":
            raise OutOfPages(1, 0)  # elsewhere it means that some table of the driver is full
        place = "" if at is None else f" at {at:#x}"
        raise MapError(f"{name}{place} failed: {status.name} ({int(status)})")


def _load_driver() -> Any:
    """`cuda.bindings.driver`, once it has found the driver's library. Imported only here: not every machine has it."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
        driver.cuInit(0)
    except (ImportError, RuntimeError) as error:  # the package is missing, or the library it binds
        raise MapError(f"no CUDA driver can be used: {error}") from error
    return driver
