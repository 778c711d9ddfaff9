"""CUDA backend: the driver's virtual memory management API.

Addresses, handles and events are ints. The device's primary context is used, the one torch uses, so tensors over mapped
ranges and torch's own tensors meet in one kernel. Torch takes it first and holds it, so that closing a backend never
destroys it. It is made current once in each thread that calls the driver; such a thread stays with this device.
Creating a page that does not fit is `OutOfPages`; every other status that is not success is a `MapError` with the call,
its address and the status.

Tensors over addresses that may be holes are exported by DLPack, which states the device. Other ways to wrap a pointer
ask the driver for its device and fail on unmapped addresses.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.utils.dlpack

from folio.vmem.backends.base import AccountedBackend, AddressRange, MemoryInfo, one_at_a_time, retry_undo
from folio.vmem.backends.run_bound import RunBound
from folio.vmem.device_pages import DevicePages
from folio.vmem.errors import MapError, OutOfPages, VmemError

CPU, CUDA = 1, 2  # DLDeviceType

# Asking for the free memory costs about as much as creating a page: ask once for so many bytes.
_HEADROOM_CHECK_BYTES = 64 << 20

logger = logging.getLogger(__name__)


class CudaBackend(AccountedBackend):
    """The `Backend` of one CUDA device.

    Args:
        device: the device's ordinal.
        headroom_bytes: device memory that `create` leaves free for torch.
        stream: the CUDA stream that the calling thread's work goes to, which fences mark; by default torch's current
            stream, or 0, the legacy default stream, with a `driver` given.
        driver: `cuda.bindings.driver`, or an object that behaves like it.
        tensor_device: the device of tensors; CPU only over a fake driver.
        clock: in seconds, to measure calls with.
        pages: see `AccountedBackend`.

    Attributes:
        exports_pages: other processes can map this one's pages.

    Raises:
        MapError: there is no such device.
    """

    # Sixteen pages of 2 MiB: a step that waits for this much waits for about a millisecond. Single driver calls are
    # shorter, see `RunBound`.
    max_call_bytes = 32 << 20

    def __init__(
        self,
        device: int = 0,
        *,
        headroom_bytes: int = 0,
        stream: Callable[[], int] | None = None,
        driver: Any = None,
        tensor_device: int = CUDA,
        clock: Callable[[], float] = time.perf_counter,
        pages: DevicePages | None = None,
    ) -> None:
        if driver is None:
            driver = _load_driver(device)
            stream = stream or (lambda: torch.cuda.current_stream(device).cuda_stream)
        self._driver = driver
        self._device = device
        self._headroom_bytes = headroom_bytes
        self._stream = stream or (lambda: 0)
        self._thread = threading.local()
        self._tensor_device = tensor_device
        self._clock = clock
        self._access_bound, self._unmap_bound = RunBound(), RunBound()
        self._check("cuInit", *driver.cuInit(0))
        status, ordinal = driver.cuDeviceGet(device)
        self._check("cuDeviceGet", status)
        status, self._context = driver.cuDevicePrimaryCtxRetain(ordinal)
        self._check("cuDevicePrimaryCtxRetain", status)
        try:
            granularity_bytes = self._describe_pages()
            self.exports_pages = self._probe_exports(granularity_bytes)
            self._unmaps_runs = self._probe_run_unmap(granularity_bytes)
            super().__init__(granularity_bytes, f"cuda:{device}", pages)
        except VmemError:
            self.call("cuDevicePrimaryCtxRelease", device)
            raise
        self._unchecked_bytes = 0  # may be created before the device is asked again how much is free
        self._next_fence = 1
        self._events: deque[tuple[int, Any]] = deque()  # (fence, event) of fences not seen to be passed
        self._spare_events: list[Any] = []
        self._fence_lock = threading.Lock()  # a thread may wait for a fence while another sets one

    def _describe_pages(self) -> int:
        """Fill in the driver's description of a page and of access to it, and return the granularity."""
        driver = self._driver
        location_type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._page_properties = driver.CUmemAllocationProp()
        self._page_properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._page_properties.location.type = location_type
        self._page_properties.location.id = self._device
        self._access, self._read_access = driver.CUmemAccessDesc(), driver.CUmemAccessDesc()
        for access in (self._access, self._read_access):
            access.location.type = location_type
            access.location.id = self._device
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._read_access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self.call("cuMemGetAllocationGranularity", self._page_properties, minimum))

    def _probe_exports(self, size: int) -> bool:
        """Whether a page can be exported, by trial: a system may refuse what the device supports. All pages are created
        so that they can be, or none."""
        attribute = self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        kinds = self._driver.CUmemAllocationHandleType
        self._export_type = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        try:
            if not self.call("cuDeviceGetAttribute", attribute, self._device):
                return False
            self._page_properties.requestedHandleTypes = self._export_type
            handle = int(self.call("cuMemCreate", size, self._page_properties, 0))
            try:
                os.close(self.export_page(handle))
            finally:
                retry_undo(partial(self.call, "cuMemRelease", handle))
            return True
        except (MapError, OutOfPages) as error:
            logger.warning("pages are not exported: blocks go to other processes through host memory: %s", error)
            self._page_properties.requestedHandleTypes = kinds.CU_MEM_HANDLE_TYPE_NONE
            return False

    def _probe_run_unmap(self, size: int) -> bool:
        """Whether one `cuMemUnmap` takes several adjacent mappings, which is not documented; False if the device is too
        full to try."""
        address = int(self.call("cuMemAddressReserve", 2 * size, size, 0, 0))
        handles: list[int] = []
        mapped: list[int] = []  # what must be unmapped one by one
        try:
            for at in (address, address + size):
                handles.append(int(self.call("cuMemCreate", size, self._page_properties, 0)))
                self.call("cuMemMap", at, size, 0, handles[-1], 0, at=at)
                mapped.append(at)
            (status,) = self._driver.cuMemUnmap(address, 2 * size)
            if status == self._driver.CUresult.CUDA_SUCCESS:
                mapped.clear()
            else:
                logger.warning("cuMemUnmap takes one mapping at a time here (%s): giving memory back is slower", status)
            return not mapped
        except OutOfPages:
            logger.warning("no room to try cuMemUnmap over several mappings: memory is unmapped page by page")
            return False
        finally:
            for at in mapped:
                retry_undo(partial(self.call, "cuMemUnmap", at, size, at=at))
            for handle in handles:
                retry_undo(partial(self.call, "cuMemRelease", handle))
            retry_undo(partial(self.call, "cuMemAddressFree", address, 2 * size, at=address))

    def _reserve(self, num_bytes: int) -> int:
        return int(self.call("cuMemAddressReserve", num_bytes, self.granularity_bytes, 0, 0))

    def _release(self, reserved: AddressRange) -> None:
        self.call("cuMemAddressFree", reserved.address, reserved.num_bytes, at=reserved.address)

    def _create(self, page_bytes: int) -> int:
        if self._headroom_bytes and self._unchecked_bytes < page_bytes:
            self._unchecked_bytes = min(self._free_bytes, _HEADROOM_CHECK_BYTES)
            if self._unchecked_bytes < page_bytes:
                raise OutOfPages(1, 0)
        handle = int(self.call("cuMemCreate", page_bytes, self._page_properties, 0))
        self._unchecked_bytes -= page_bytes
        return handle

    def _destroy(self, handle: int, page_bytes: int) -> None:
        self.call("cuMemRelease", handle)

    def _map(self, address: int, handles: Sequence[int]) -> None:
        size, done = self.page_bytes, 0
        try:
            for handle in handles:
                self.call("cuMemMap", address + done * size, size, 0, handle, 0, at=address + done * size)
                done += 1
            self._set_access(AddressRange(address, len(handles) * size), self._access)
        except MapError:
            self._undo_map(AddressRange(address, done * size))
            raise

    def _undo_map(self, mapped: AddressRange) -> None:
        for span in self._unmap_spans(mapped):
            retry_undo(partial(self._unmap_span, span))

    def _set_access(self, mapped: AddressRange, access: Any) -> None:
        """In runs of pages: access is what costs, and it costs per call as well as per page."""
        size, at = self.page_bytes, mapped.address
        while at < mapped.end:
            length = min(self._access_bound.num_pages * size, mapped.end - at)
            start = self._clock()
            self.call("cuMemSetAccess", at, length, [access], 1, at=at)
            self._access_bound.note(length // size, self._clock() - start)
            at += length

    def export_page(self, handle: int) -> int:
        """A file descriptor of a page, which the caller closes. The page's memory is given back once all descriptors
        are closed and no process maps it. Raises `MapError`."""
        return int(self.call("cuMemExportToShareableHandle", handle, self._export_type, 0))

    @one_at_a_time
    def map_exported(self, address: int, fds: Sequence[int]) -> None:
        """Map pages that a process has exported side by side from `address` on, in a range of `reserve`, read-only, all
        or none. They are not among this backend's pages and mappings; `unmap_exported` unmaps them.

        Args:
            fds: stay the caller's.

        Raises:
            MapError: a page has another size, this device cannot read it, or the driver refuses.
        """
        size, done = self.page_bytes, 0
        try:
            for fd in fds:
                handle = int(self.call("cuMemImportFromShareableHandle", fd, self._export_type))
                try:
                    self.call("cuMemMap", address + done * size, size, 0, handle, 0, at=address + done * size)
                    done += 1
                finally:
                    retry_undo(partial(self.call, "cuMemRelease", handle))  # mapped memory stays
            self._set_access(AddressRange(address, len(fds) * size), self._read_access)
        except VmemError:
            self._undo_map(AddressRange(address, done * size))
            raise

    @one_at_a_time
    def unmap_exported(self, mapped: AddressRange) -> None:
        """Unmap adjacent pages of `map_exported`."""
        self._undo_map(mapped)

    def _unmap(self, mapped: AddressRange) -> None:
        done: list[AddressRange] = []
        try:
            for span in self._unmap_spans(mapped):
                self._unmap_span(span)
                done.append(span)
        except MapError:
            for span in done:
                retry_undo(partial(self._map, span.address, self.handles_at(span)))
            raise

    def _unmap_spans(self, mapped: AddressRange) -> list[AddressRange]:
        """The spans to unmap with one call each: runs, or single pages if the driver takes no more."""
        size = self.page_bytes * (self._unmap_bound.num_pages if self._unmaps_runs else 1)
        starts = range(mapped.address, mapped.end, size or 1)
        return [AddressRange(at, min(size, mapped.end - at)) for at in starts]

    def _unmap_span(self, span: AddressRange) -> None:
        start = self._clock()
        self.call("cuMemUnmap", span.address, span.num_bytes, at=span.address)
        self._unmap_bound.note(span.num_bytes // self.page_bytes, self._clock() - start)

    def tensor(self, reserved: AddressRange) -> torch.Tensor:
        return export_uint8(reserved, self._tensor_device, self._device if self._tensor_device != CPU else 0)

    def fence(self) -> int:
        with self._fence_lock:
            fence = self._next_fence
            self._next_fence += 1
            if self._record(fence):
                self._forget_passed()
                return fence
        # Without an event, wait now, so that the fence has passed already. Without the lock, so that other threads can
        # ask for other fences.
        self.call("cuStreamSynchronize", self._stream())
        return fence

    def _record(self, fence: int) -> bool:
        """Mark the fence in the stream by an event; False if the device has none."""
        try:
            if not self._spare_events:
                self._spare_events.append(self.create_event())
            self.call("cuEventRecord", self._spare_events[-1], self._stream())
        except MapError:
            return False
        self._events.append((fence, self._spare_events.pop()))
        return True

    def completed(self, fence: int) -> bool:
        with self._fence_lock:
            self._forget_passed()
            return not self._events or self._events[0][0] > fence

    def wait(self, fence: int) -> None:
        while not self.completed(fence):
            with self._fence_lock:
                event = self._events[0][1] if self._events else None
            if event is not None:  # if the event is reused meanwhile, this waits a little longer
                self.call("cuEventSynchronize", event)

    def memory_info(self) -> MemoryInfo:
        available = self._free_bytes
        if self._pages is not None:
            available = min(available + self._pages.idle_bytes, self._pages.available_bytes)
        return MemoryInfo(self._created_bytes, available)

    @property
    def _free_bytes(self) -> int:
        free, _ = self.call("cuMemGetInfo")
        return max(0, int(free) - self._headroom_bytes)

    def close(self) -> None:
        if self._context is None:
            return
        self._end_accounting()
        self._spare_events += (event for _, event in self._events)
        self._events.clear()
        while self._spare_events:
            self.call("cuEventDestroy", self._spare_events[-1])
            self._spare_events.pop()
        self.call("cuDevicePrimaryCtxRelease", self._device)
        self._context = None

    def _forget_passed(self) -> None:
        """Reuse the events of fences that the device has passed. With the fence lock held."""
        self._enter()
        while self._events:
            (status,) = self._driver.cuEventQuery(self._events[0][1])
            if status == self._driver.CUresult.CUDA_ERROR_NOT_READY:
                return
            self._check("cuEventQuery", status)
            self._spare_events.append(self._events.popleft()[1])

    def create_event(self) -> Any:
        """An event that a thread can wait for, to be destroyed by its owner. Raises `MapError`."""
        kinds = self._driver.CUevent_flags
        return self.call("cuEventCreate", int(kinds.CU_EVENT_DISABLE_TIMING) | int(kinds.CU_EVENT_BLOCKING_SYNC))

    def create_stream(self) -> Any:
        """A stream that does not wait for the default stream, to be destroyed by its owner. Raises `MapError`."""
        return self.call("cuStreamCreate", int(self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def call(self, name: str, *args: Any, at: int | None = None) -> Any:
        """Call the driver and return its values without the status. Raises `MapError`, for `cuMemCreate` `OutOfPages`.

        Args:
            at: the address for the error.
        """
        self._enter()
        status, *values = getattr(self._driver, name)(*args)
        self._check(name, status, at)
        return values[0] if len(values) == 1 else values

    def _enter(self) -> None:
        """Make the context current in the calling thread, once: events and sizes are of the thread's context."""
        if not getattr(self._thread, "entered", False):
            self._check("cuCtxSetCurrent", *self._driver.cuCtxSetCurrent(self._context))
            self._thread.entered = True

    def _check(self, name: str, status: Any, at: int | None = None) -> None:
        result = self._driver.CUresult
        if status == result.CUDA_SUCCESS:
            return
        if status == result.CUDA_ERROR_OUT_OF_MEMORY and name == "cuMemCreate":
            raise OutOfPages(1, 0)  # of other calls it means that a table of the driver is full
        place = "" if at is None else f" at {at:#x}"
        raise MapError(f"{name}{place} failed: {status.name} ({int(status)})")


def _load_driver(device: int) -> Any:
    """`cuda.bindings.driver`, once it has found the driver's library and torch has the device's primary context.
    Imported only here: not every machine has it."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
        driver.cuInit(0)
    except (ImportError, RuntimeError) as error:  # the package is missing, or the library it binds
        raise MapError(f"no CUDA driver can be used: {error}") from error
    if device >= torch.cuda.device_count():
        raise MapError(f"there is no CUDA device {device}: torch sees {torch.cuda.device_count()} here")
    torch.empty(1, device=torch.device("cuda", device))
    return driver


_UINT = 1  # DLDataTypeCode


class _Tensor(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _ManagedTensor(ctypes.Structure):
    """DLManagedTensor of dlpack.h."""


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_ManagedTensor))
_ManagedTensor._fields_ = [("tensor", _Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", _Deleter)]

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

# By address, the DLManagedTensors that torch still uses; the deleter removes them.
_alive: dict[int, tuple[_ManagedTensor, Any]] = {}


@_Deleter
def _delete(managed: Any) -> None:
    _alive.pop(ctypes.addressof(managed.contents), None)


def export_uint8(span: AddressRange, device_type: int, device_id: int) -> torch.Tensor:
    """A uint8 tensor `[num_bytes]` over the range. It owns nothing; only mapped parts may be touched."""
    shape = (ctypes.c_int64 * 1)(span.num_bytes)
    tensor = _Tensor(span.address, device_type, device_id, 1, _UINT, 8, 1, shape, None, 0)
    managed = _ManagedTensor(tensor, None, _delete)
    _alive[ctypes.addressof(managed)] = (managed, shape)
    return torch.utils.dlpack.from_dlpack(_new_capsule(ctypes.addressof(managed), b"dltensor", None))
