"""Fake CUDA driver over memfds and mmap, with the real driver's rules, for tests on machines without a GPU.

It stands in for `cuda.bindings.driver`: same functions, same return tuples, CPU memory. Aliasing is real. Breaking a
rule gives the status the real driver gives: a page maps at offset 0 and whole, no address twice, unmap takes whole
mappings, access must be granted before use (touching memory without it is a SIGSEGV), released handles are gone,
events need a context in the calling thread. Call number `fail_at` fails with `fail_status`, and so does each with
probability `fail_rate`; with probability `slow_rate` a call takes a millisecond. `costs` are seconds of a call and of
each page in it, which pass on a clock of the driver's own, `now_s`. With `refuse_run_unmap` an unmap takes one
mapping only. Work takes as long as the test likes: `launch` says what a step reads and on which stream, events pass
when `finish_work` has finished what was before them on their stream. A copy from host memory reads its source only
when it is finished, so a buffer that is used again too early shows. Violations are unmapping what an unfinished step
reads or an unfinished copy writes, launching a step that reads what is not mapped, copying from memory that is not
pinned or freeing it before the copy is finished, and giving up the last reference on the primary context, of which
torch holds one from the start. Calls may come from several threads.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import mmap
import os
import random
import threading
import time
from types import SimpleNamespace
from typing import Any

from folio.vmem.backends.host_calls import libc

_MAP_FIXED = 0x10
_HOLE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_ALREADY_MAPPED = 208
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


OK = CUresult.CUDA_SUCCESS
INVALID = CUresult.CUDA_ERROR_INVALID_VALUE


def _serialised(driver: type) -> type:
    """Let every driver call hold the driver's lock."""

    def locked(call: Any) -> Any:
        @functools.wraps(call)
        def hold(self: Any, *args: Any) -> Any:
            with self._lock:
                return call(self, *args)

        return hold

    for name, call in list(vars(driver).items()):
        if name.startswith("cu"):
            setattr(driver, name, locked(call))
    return driver


@_serialised
class FakeDriver:
    """One fake device with `capacity_bytes` of memory."""

    CUresult = CUresult
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2, CU_EVENT_BLOCKING_SYNC=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_DEVICE_POINTER=3)
    granularity_bytes = 65536
    granularity_status = OK
    refuse_run_unmap = False

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self.calls: list[str] = []
        self.fail_at = -1
        self.fail_status = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
        self._handles: dict[int, tuple[int, int]] = {}  # handle → (memfd, size)
        self._next_handle = 1000
        self._reserved: dict[int, tuple[int, int, int]] = {}  # address → (size, mmap address, mmap size)
        self._mappings: dict[int, int] = {}  # address → size
        self._events: dict[int, tuple[int, int]] = {}  # event → stream and moment it was recorded at
        self._contexts = 1  # torch's
        self._current = threading.local()  # the context of each thread
        self._now = 0
        self._finished: dict[int, int] = {}  # stream → the moment up to which its work is done
        self._launched: list[tuple[int, int, set[int]]] = []  # (stream, moment, addresses of pages that a step reads)
        self._accessible: set[int] = set()
        self._pinned: dict[int, int] = {}  # address → size
        self._streams: set[int] = {0}
        self._copies: list[tuple[int, int, int, int, int]] = []  # (stream, moment, target, source, size), in order
        self._lock = threading.RLock()
        self._random = random.Random(0)
        self.fail_rate = self.slow_rate = 0.0
        self.num_set_current = 0
        self.violations: list[str] = []
        self.costs: dict[str, tuple[float, float]] = {}
        self.now_s = 0.0
        self.took: list[tuple[str, int, float]] = []  # call, pages, seconds

    # ---- for tests ----

    def launch(self, addresses: set[int], stream: int = 0) -> None:
        """Run a step that reads these pages on the stream until `finish_work`."""
        with self._lock:
            self._now += 1
            if holes := addresses - self._accessible:
                self.violations.append(f"a step reads {len(holes)} pages that are not mapped, {min(holes):#x} first")
            self._launched.append((stream, self._now, addresses))

    @property
    def num_running(self) -> int:
        """Steps launched and not finished."""
        with self._lock:
            return len(self._launched)

    def finish_work(self, num_steps: int | None = None) -> None:
        """Finish the oldest `num_steps` steps of all streams; by default everything submitted."""
        with self._lock:
            del self._launched[: len(self._launched) if num_steps is None else num_steps]
            first = {stream: moment for stream, moment, _ in reversed(self._launched)}
            for stream in {*self._streams, *first, *(stream for stream, _ in self._events.values())}:
                self._finish(stream, first.get(stream, self._now + 1) - 1)

    def _finish(self, stream: int, moment: int) -> None:
        self._finished[stream] = max(self._finished.get(stream, 0), moment)
        self._launched = [work for work in self._launched if work[0] != stream or work[1] > moment]
        for _, _, target, source, size in [copy for copy in self._copies if copy[0] == stream and copy[1] <= moment]:
            ctypes.memmove(target, source, size)
        self._copies = [copy for copy in self._copies if copy[0] != stream or copy[1] > moment]

    @property
    def leftovers(self) -> tuple[int, int, int, int, int]:
        """Numbers of handles, reservations, mappings, events and contexts left, without torch's."""
        return len(self._handles), len(self._reserved), len(self._mappings), len(self._events), self._contexts - 1

    @property
    def host_leftovers(self) -> tuple[int, int, int]:
        """Numbers of pinned host allocations, streams and unfinished copies left."""
        return len(self._pinned), len(self._streams) - 1, len(self._copies)

    def is_reserved(self, address: int) -> bool:
        """Whether the address is in a range reserved here."""
        with self._lock:
            return any(start <= address < start + size for start, (size, _, _) in self._reserved.items())

    # ---- the driver ----

    @staticmethod
    def CUmemAllocationProp() -> Any:  # noqa: N802
        return SimpleNamespace(location=SimpleNamespace())

    @staticmethod
    def CUmemAccessDesc() -> Any:  # noqa: N802
        return SimpleNamespace(location=SimpleNamespace())

    def _fails(self, name: str) -> bool:
        self.calls.append(name)
        if self.slow_rate and self._random.random() < self.slow_rate:
            time.sleep(0.001)
        return len(self.calls) == self.fail_at or self._random.random() < self.fail_rate

    def _spend(self, name: str, size: int) -> None:
        if name in self.costs:
            call_s, page_s = self.costs[name]
            num_pages = size // self.granularity_bytes
            self.took.append((name, num_pages, call_s + num_pages * page_s))
            self.now_s += self.took[-1][2]

    def cuInit(self, flags: int) -> tuple[CUresult]:  # noqa: N802
        return (OK,)

    def cuDeviceGet(self, ordinal: int) -> tuple[CUresult, int]:  # noqa: N802
        return (OK if ordinal == 0 else CUresult.CUDA_ERROR_INVALID_DEVICE), ordinal

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[CUresult, object]:  # noqa: N802
        self._contexts += 1
        return OK, object()

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[CUresult]:  # noqa: N802
        self._contexts -= 1
        if not self._contexts:
            self.violations.append("the primary context was destroyed")
        return (OK,)

    def cuCtxSetCurrent(self, context: object) -> tuple[CUresult]:  # noqa: N802
        self._current.context = context
        self.num_set_current += 1
        return (OK,)

    @property
    def _in_context(self) -> bool:
        return getattr(self._current, "context", None) is not None

    def cuMemGetAllocationGranularity(self, properties: Any, option: int) -> tuple[CUresult, int]:  # noqa: N802
        return self.granularity_status, self.granularity_bytes

    def cuMemGetInfo(self) -> tuple[CUresult, int, int]:  # noqa: N802
        if not self._in_context:
            return CUresult.CUDA_ERROR_INVALID_CONTEXT, 0, 0
        return OK, self._num_free_bytes, self._capacity_bytes

    @property
    def _num_free_bytes(self) -> int:
        used = sum(size for _, size in self._handles.values())
        return self._capacity_bytes - used

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[CUresult, int]:  # noqa: N802
        if self._fails("cuMemAddressReserve"):
            return self.fail_status, 0
        if size <= 0 or size % self.granularity_bytes:
            return INVALID, 0
        whole = size + self.granularity_bytes
        start = libc.mmap(None, whole, 0, _HOLE | 0x4000, -1, 0)
        if start == ctypes.c_void_p(-1).value:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        aligned = -(-start // self.granularity_bytes) * self.granularity_bytes
        self._reserved[aligned] = (size, start, whole)
        return OK, aligned

    def cuMemAddressFree(self, address: int, size: int) -> tuple[CUresult]:  # noqa: N802
        if self._fails("cuMemAddressFree"):
            return (self.fail_status,)
        if address not in self._reserved or self._reserved[address][0] != size:
            return (INVALID,)
        if any(address <= mapped < address + size for mapped in self._mappings):
            return (INVALID,)
        _, start, whole = self._reserved.pop(address)
        libc.munmap(start, whole)
        return (OK,)

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[CUresult, int]:  # noqa: N802
        if self._fails("cuMemCreate"):
            return self.fail_status, 0
        if size <= 0 or size % self.granularity_bytes or properties.type != 1 or properties.location.id != 0:
            return INVALID, 0
        if size > self._num_free_bytes:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        memfd = os.memfd_create("fake-cuda", os.MFD_CLOEXEC)
        os.ftruncate(memfd, size)
        self._next_handle += 1
        self._handles[self._next_handle] = (memfd, size)
        return OK, self._next_handle

    def cuMemRelease(self, handle: int) -> tuple[CUresult]:  # noqa: N802
        if self._fails("cuMemRelease"):
            return (self.fail_status,)
        if handle not in self._handles:
            return (CUresult.CUDA_ERROR_INVALID_HANDLE,)
        os.close(self._handles.pop(handle)[0])
        return (OK,)

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[CUresult]:  # noqa: N802
        if self._fails("cuMemMap"):
            return (self.fail_status,)
        if handle not in self._handles:
            return (CUresult.CUDA_ERROR_INVALID_HANDLE,)
        memfd, handle_size = self._handles[handle]
        inside = any(start <= address and address + size <= start + r[0] for start, r in self._reserved.items())
        if offset or flags or size != handle_size or address % self.granularity_bytes or not inside:
            return (INVALID,)
        if any(address < mapped + n and mapped < address + size for mapped, n in self._mappings.items()):
            return (CUresult.CUDA_ERROR_ALREADY_MAPPED,)
        libc.mmap(address, size, 0, mmap.MAP_SHARED | _MAP_FIXED, memfd, 0)
        self._mappings[address] = size
        return (OK,)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[CUresult]:  # noqa: N802
        if self._fails("cuMemSetAccess"):
            return (self.fail_status,)
        if count != 1 or access[0].flags != 3 or not self._whole_mappings(address, size):
            return (INVALID,)
        self._spend("cuMemSetAccess", size)
        libc.mprotect(address, size, mmap.PROT_READ | mmap.PROT_WRITE)
        self._accessible.update(m for m in self._mappings if address <= m < address + size)
        return (OK,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[CUresult]:  # noqa: N802
        if self._fails("cuMemUnmap"):
            return (self.fail_status,)
        several = self._mappings.get(address) != size
        if not self._whole_mappings(address, size) or (self.refuse_run_unmap and several):
            return (INVALID,)
        self._spend("cuMemUnmap", size)
        for mapped in [m for m in self._mappings if address <= m < address + size]:
            del self._mappings[mapped]
            self._accessible.discard(mapped)
            if any(mapped in addresses for *_, addresses in self._launched):
                self.violations.append(f"{mapped:#x} was unmapped under a running step")
        kept = [c for c in self._copies if not (c[2] < address + size and address < c[2] + c[4])]
        if len(kept) < len(self._copies):
            self.violations.append(f"{address:#x} was unmapped under a running copy")
            self._copies = kept
        libc.mmap(address, size, 0, _HOLE | _MAP_FIXED | 0x4000, -1, 0)
        return (OK,)

    def cuPointerGetAttribute(self, attribute: int, address: int) -> tuple[CUresult, int]:  # noqa: N802
        if int(attribute) != 3:
            return INVALID, 0
        there = any(mapped <= address < mapped + self._mappings[mapped] for mapped in self._accessible)
        return (OK, address) if there else (INVALID, 0)

    def cuMemHostAlloc(self, size: int, flags: int) -> tuple[CUresult, int]:  # noqa: N802
        if self._fails("cuMemHostAlloc"):
            return self.fail_status, 0
        if not self._in_context:
            return CUresult.CUDA_ERROR_INVALID_CONTEXT, 0
        if size <= 0 or flags:
            return INVALID, 0
        address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, _HOLE, -1, 0)
        if address == ctypes.c_void_p(-1).value:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        self._pinned[address] = size
        return OK, address

    def cuMemFreeHost(self, address: int) -> tuple[CUresult]:  # noqa: N802
        if self._fails("cuMemFreeHost"):
            return (self.fail_status,)
        if not self._in_context:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if address not in self._pinned:
            return (INVALID,)
        size = self._pinned.pop(address)
        if any(address <= source < address + size for *_, source, _ in self._copies):
            self.violations.append(f"{address:#x} was freed under a running copy")
            self._copies = [copy for copy in self._copies if not address <= copy[3] < address + size]
        libc.munmap(address, size)
        return (OK,)

    def cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: int) -> tuple[CUresult]:  # noqa: N802
        if self._fails("cuMemcpyHtoDAsync"):
            return (self.fail_status,)
        if not self._in_context:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if stream not in self._streams:
            return (CUresult.CUDA_ERROR_INVALID_HANDLE,)
        if not self._is_accessible(target, size):
            return (INVALID,)
        if not any(start <= source and source + size <= start + n for start, n in self._pinned.items()):
            self.violations.append(f"{size} bytes are copied from {source:#x}, which is not pinned")
        self._now += 1
        self._copies.append((stream, self._now, target, source, size))
        return (OK,)

    def _is_accessible(self, address: int, size: int) -> bool:
        end = address + size
        for mapped in sorted(self._accessible):
            if mapped <= address < mapped + self._mappings[mapped]:
                address = mapped + self._mappings[mapped]
        return address >= end

    def cuStreamCreate(self, flags: int) -> tuple[CUresult, int]:  # noqa: N802
        if self._fails("cuStreamCreate"):
            return self.fail_status, 0
        if not self._in_context:
            return CUresult.CUDA_ERROR_INVALID_CONTEXT, 0
        if flags != 1:
            return INVALID, 0
        self._next_handle += 1
        self._streams.add(self._next_handle)
        return OK, self._next_handle

    def cuStreamDestroy(self, stream: int) -> tuple[CUresult]:  # noqa: N802
        if self._fails("cuStreamDestroy"):
            return (self.fail_status,)
        if not self._in_context:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if stream == 0 or stream not in self._streams:
            return (CUresult.CUDA_ERROR_INVALID_HANDLE,)
        self._streams.remove(stream)
        return (OK,)

    def cuEventCreate(self, flags: int) -> tuple[CUresult, int]:  # noqa: N802
        if self._fails("cuEventCreate"):
            return self.fail_status, 0
        if not self._in_context:
            return CUresult.CUDA_ERROR_INVALID_CONTEXT, 0
        self._next_handle += 1
        self._events[self._next_handle] = (0, 0)
        return OK, self._next_handle

    def cuEventRecord(self, event: int, stream: int) -> tuple[CUresult]:  # noqa: N802
        if self._fails("cuEventRecord"):
            return (self.fail_status,)
        if not self._in_context:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        self._now += 1
        self._events[event] = (stream, self._now)
        return (OK,)

    def cuEventQuery(self, event: int) -> tuple[CUresult]:  # noqa: N802
        stream, moment = self._events[event]
        return (OK if moment <= self._finished.get(stream, 0) else CUresult.CUDA_ERROR_NOT_READY,)

    def cuEventSynchronize(self, event: int) -> tuple[CUresult]:  # noqa: N802
        if (
            event in self._events
            and self._events[event][0] in self._streams - {0}
            and self._fails("cuEventSynchronize")
        ):
            return (self.fail_status,)
        if not self._in_context:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        self._finish(*self._events[event])  # the device takes no time at all
        return (OK,)

    def cuStreamSynchronize(self, stream: int) -> tuple[CUresult]:  # noqa: N802
        if stream in self._streams - {0} and self._fails("cuStreamSynchronize"):
            return (self.fail_status,)
        if not self._in_context:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        self._finish(stream, self._now)
        return (OK,)

    def cuEventDestroy(self, event: int) -> tuple[CUresult]:  # noqa: N802
        if not self._in_context:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if self._events.pop(event, None) is None:
            return (CUresult.CUDA_ERROR_INVALID_HANDLE,)
        return (OK,)

    def _whole_mappings(self, address: int, size: int) -> bool:
        """Whether the range is covered exactly by whole mappings."""
        end = address + size
        while address < end and address in self._mappings:
            address += self._mappings[address]
        return size > 0 and address == end
