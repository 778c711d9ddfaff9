"""CUDA driver and device for the probes of `benchmarks.gpu_probes`, and a stand-in without a device."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from folio.vmem.backends.base import AddressRange
from folio.vmem.backends.cuda import CPU, CUDA, export_uint8


class DriverError(RuntimeError):
    """A call of the driver did not succeed."""


class Driver:
    """The driver's calls by name, and short forms of those on pages. The thread that creates it gets the primary
    context."""

    def __init__(self) -> None:
        self.api: Any = importlib.import_module("cuda.bindings.driver")
        self.call("cuInit", 0)
        self.context = self.call("cuDevicePrimaryCtxRetain", self.call("cuDeviceGet", 0))  # kept until the process ends
        self.enter_thread()
        location = self.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self.properties = self.api.CUmemAllocationProp()
        self.properties.type = self.api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self.properties.location.type, self.properties.location.id = location, 0
        self.access = self.api.CUmemAccessDesc()
        self.access.location.type, self.access.location.id = location, 0
        self.access.flags = self.api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.page_bytes = self.granularity("MINIMUM")

    def enter_thread(self) -> None:
        self.call("cuCtxSetCurrent", self.context)

    def granularity(self, kind: str) -> int:
        flags = self.api.CUmemAllocationGranularity_flags
        flag = getattr(flags, f"CU_MEM_ALLOC_GRANULARITY_{kind}")
        return int(self.call("cuMemGetAllocationGranularity", self.properties, flag))

    def status(self, name: str, *args: Any) -> tuple[str, Any]:
        """The status's name, and the other results of the call."""
        status, *values = getattr(self.api, name)(*args)
        return status.name, values[0] if len(values) == 1 else values

    def call(self, name: str, *args: Any) -> Any:
        status, value = self.status(name, *args)
        if status != "CUDA_SUCCESS":
            raise DriverError(f"{name}{args} failed: {status}")
        return value

    def reserve(self, num_bytes: int) -> int:
        return int(self.call("cuMemAddressReserve", num_bytes, 0, 0, 0))

    def create(self, num_bytes: int) -> int:
        return int(self.call("cuMemCreate", num_bytes, self.properties, 0))

    def map(self, address: int, handle: int, num_bytes: int) -> None:
        self.call("cuMemMap", address, num_bytes, 0, handle, 0)

    def allow(self, address: int, num_bytes: int) -> None:
        self.call("cuMemSetAccess", address, num_bytes, [self.access], 1)

    def unmap(self, address: int, num_bytes: int, run: int) -> None:
        """Unmap `run` adjacent pages, in one call if the driver allows that."""
        status, _ = self.status("cuMemUnmap", address, run * num_bytes)
        if status != "CUDA_SUCCESS":
            for i in range(run):
                self.call("cuMemUnmap", address + i * num_bytes, num_bytes)

    def show(self, address: int, handle: int) -> None:
        """Map a page of the smallest size, readable and writable."""
        self.map(address, handle, self.page_bytes)
        self.allow(address, self.page_bytes)

    def pointer_status(self, address: int) -> str:
        """The driver's answer to Triton's launcher about an address."""
        attribute = self.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER
        return self.status("cuPointerGetAttribute", attribute, address)[0]


class Device:
    """The device's operations that probes use beside the driver's calls."""

    fake = False
    where = "cuda"

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")  # torch's context first, as in the engine
        torch.cuda.synchronize()
        self._cycles_per_s = 0.0
        self._kernels: Any = importlib.import_module("benchmarks.gpu_kernels")  # Triton takes time to import

    def tensor(self, address: int, num_bytes: int) -> torch.Tensor:
        return export_uint8(AddressRange(address, num_bytes), CUDA, 0)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def busy(self, seconds: float, piece_s: float = 0.005) -> None:
        """Launch kernels of `piece_s` each that take this long together, without waiting for them."""
        if not self._cycles_per_s:
            for _ in range(2):  # the second time at the clock of a busy device
                torch.cuda.synchronize()
                start = time.perf_counter()
                torch.cuda._sleep(50_000_000)
                torch.cuda.synchronize()
                self._cycles_per_s = 50_000_000 / (time.perf_counter() - start)
        for _ in range(max(1, round(seconds / piece_s))):
            torch.cuda._sleep(int(piece_s * self._cycles_per_s))

    def is_busy(self) -> bool:
        return not torch.cuda.current_stream().query()

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """Capture the launches of `work` in a graph. Returns a function that replays it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def tick(self, times: torch.Tensor, index: int, spin_ns: int) -> None:
        self._kernels.tick[(1,)](times, index, spin_ns, num_warps=1)


class NoDevice(Device):
    """Stand-in on a CPU: work is done at its launch, and a graph is the captured function."""

    fake = True
    where = "cpu"

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def tensor(self, address: int, num_bytes: int) -> torch.Tensor:
        return export_uint8(AddressRange(address, num_bytes), CPU, 0)

    def synchronize(self) -> None:
        pass

    def busy(self, seconds: float, piece_s: float = 0.005) -> None:
        pass

    def is_busy(self) -> bool:
        return False

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        return work

    def tick(self, times: torch.Tensor, index: int, spin_ns: int) -> None:
        times[index, 0] = time.perf_counter_ns()
        times[index, 1] = time.perf_counter_ns()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile, maximum and count."""
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"median": statistics.median(ordered), "p99": p99, "max": ordered[-1], "n": len(ordered)}


def show_spread(of: Mapping[str, float]) -> str:
    return f"{of['median']:.1f} (p99 {of['p99']:.1f}, max {of['max']:.1f})"
