"""A GPU machine (the first job of `benchmarks.gpu_day`): versions, clocks, rates, and the driver's most mappings.

Other figures are compared with the rates: copies and reads of the device's memory, products in bfloat16, transfers from
and to pinned memory, the host's time of a launch. The most mappings that the driver allows are counted for one handle,
and for 4,096 handles in turn, until it refuses or the time is over. What the driver does is tested elsewhere, in the
contract of backends (`tests/vmem/backends`).

--fake is small, over the stand-in for the driver with host memory, and measures nothing.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable

import torch

from benchmarks import facts, harness
from benchmarks.engine.device_time import device_timer, product_limit, read_limit
from benchmarks.gpu.parts import Parts, arguments, record_gpu
from folio.vmem import CudaBackend
from folio.vmem.backends.cuda import CPU
from folio.vmem.errors import VmemError

MIB = 1 << 20
MOST_MAPPINGS, RUN, LONGEST_S = 600_064, 256, 20.0
FAKE_MAPPINGS, FAKE_RUN = 256, 16


def versions() -> None:
    found = harness.versions("cuda")
    facts.record("versions", ", ".join(f"{name} {version}" for name, version in found.items()), **found)
    record_gpu("before")


def rates(fake: bool) -> None:
    size, num_bytes, repeats = (256, MIB, 2) if fake else (8192, 1 << 31, 10)
    where = torch.device("cpu" if fake else "cuda")

    def best_s(work: Callable[[], object]) -> float:
        """Least seconds on the host until the device has done the work."""
        times = []
        for _ in range(1 + repeats):
            start = time.perf_counter()
            work()
            if not fake:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return min(times[1:])

    source = torch.ones(num_bytes, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    host = torch.ones(num_bytes // 8, dtype=torch.uint8, pin_memory=not fake)
    small = torch.zeros(1, device=where)
    found = {
        "copy_gb_per_s": 2 * num_bytes / device_timer(lambda: target.copy_(source), where)() / 1e9,
        "read_gb_per_s": read_limit(where, num_bytes)() / 1e9,
        "bf16_tflop_per_s": product_limit(where, torch.bfloat16, size)() / 1e12,
        "to_device_gb_per_s": len(host) / best_s(lambda: target[: len(host)].copy_(host)) / 1e9,
        "to_host_gb_per_s": len(host) / best_s(lambda: host.copy_(source[: len(host)])) / 1e9,
        "torch_launch_us": best_s(lambda: [small.add_(1) for _ in range(200)]) / 200 * 1e6,
    }
    facts.record("rates", ", ".join(f"{key} {value:.4g}" for key, value in found.items()), **found)


def most_mappings(num_handles: int, fake: bool) -> None:
    """Map handles in turn, in runs with a call for their access, until the driver refuses."""
    most, run = (FAKE_MAPPINGS, FAKE_RUN) if fake else (MOST_MAPPINGS, RUN)
    if fake:
        backend = CudaBackend(driver=importlib.import_module("cuda.bindings.driver"), tensor_device=CPU)
    else:
        torch.zeros(1, device="cuda")  # torch's context first, as in the engine
        backend = CudaBackend()
    size = backend.granularity_bytes
    reserved = backend.reserve(most * size)
    handles = [backend.create(size) for _ in range(num_handles)]
    count, reason, times, end = 0, "as many as were tried", list[float](), time.perf_counter() + LONGEST_S
    while count < most:
        if (start := time.perf_counter()) > end:
            reason = "no time left"
            break
        try:
            backend.map(reserved.address + count * size, [handles[(count + i) % num_handles] for i in range(run)])
        except VmemError as error:
            reason = str(error)
            break
        count += run
        times.append((time.perf_counter() - start) / run * 1e6)
    tenth = max(1, len(times) // 10)
    first_us, last_us = (sum(part) / max(len(part), 1) for part in (times[:tenth], times[-tenth:]))
    facts.record(
        f"most mappings of {num_handles} handles",
        f"{count}: {reason}; a mapping {first_us:.1f} µs at first, {last_us:.1f} at last",
        mappings=count,
        reason=reason,
        us=[first_us, last_us],
    )  # the process's end unmaps them, in a call of the driver


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--mappings", type=int, metavar="HANDLES", help="only the most mappings of so many handles")
    args = parser.parse_args()
    parts = Parts(math.inf)
    if args.mappings:
        parts.run("most mappings", lambda: most_mappings(args.mappings, args.fake))
    else:
        parts.run("versions", versions)
        parts.run("rates", lambda: rates(args.fake))
    parts.finish()


if __name__ == "__main__":
    main()
