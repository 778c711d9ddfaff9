"""Device time of kernels: replays of a CUDA graph between two events, so that no host time is in it.

Two limits of a device are measured in the same way, `read_limit` and `product_limit`.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.facts import record

LEAST_S = 0.02  # of one measurement: long against an event's resolution of half a microsecond
READ_BYTES = 1 << 30  # many times what a cache holds: 50 MiB on an H100, 60 on an H200
PRODUCT_SIZES = {"cpu": 2048, "cuda": 8192}
LIMIT_REPEATS = 3


def device_timer(work: Callable[[], object], device: torch.device, least_s: float = LEAST_S) -> Callable[[], float]:
    """A function that measures the seconds of one call of `work` on the device.

    On CUDA, `work` is run three times to compile and allocate, captured once, and replayed as often as `least_s` needs;
    it must not synchronise or read values on the host. On a CPU, calls are timed by the clock. The function keeps
    `work`, which must keep the tensors that it reads.
    """
    if device.type != "cuda":
        return lambda: _repeat(work, least_s)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may map memory meanwhile
        work()
    replays = _Replays(work, graph, torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
    replays.seconds(3)
    count = max(1, round(least_s / replays.seconds(3)))
    return lambda: replays.seconds(count)


@dataclass(frozen=True, slots=True)
class _Replays:
    """Replays of a graph, timed. It keeps `work`, because the graph does not keep the tensors that `work` reads."""

    work: Callable[[], object]
    graph: torch.cuda.CUDAGraph
    begin: torch.cuda.Event
    end: torch.cuda.Event

    def seconds(self, count: int) -> float:
        """Of one replay, on average."""
        self.begin.record()
        for _ in range(count):
            self.graph.replay()
        self.end.record()
        self.end.synchronize()
        return self.begin.elapsed_time(self.end) / 1e3 / count  # milliseconds


def _repeat(work: Callable[[], object], least_s: float) -> float:
    num_calls, start = 0, time.perf_counter()
    while True:
        work()
        num_calls += 1
        if (seconds := time.perf_counter() - start) > least_s:
            return seconds / num_calls


def read_limit(device: torch.device, num_bytes: int = READ_BYTES, least_s: float = LEAST_S) -> Callable[[], float]:
    """A function that measures the bytes a second that the device reads from its memory, best of several times.

    The kernel is torch's sum or, on CUDA, that of `gpu.kernels.READS` or torch's which is fastest now. A copy reads and
    writes by turns, and is slower.
    """
    numbers = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    reads: dict[str, Callable[[], torch.Tensor]] = {"torch": numbers.sum}
    if device.type == "cuda":
        kernels = importlib.import_module("benchmarks.gpu.kernels")  # Triton takes time to import
        for tile, num_warps in kernels.READS:
            reads[f"tile of {tile}"] = partial(kernels.read_sums, numbers, tile, num_warps)
            if not (kernels.read_sums(numbers, tile, num_warps) == tile).all():
                raise RuntimeError(f"the read kernel with a tile of {tile} does not read every number")
    timers = {name: device_timer(read, device, least_s) for name, read in reads.items()}
    seconds = {name: timer() for name, timer in timers.items()}
    chosen = min(seconds, key=lambda name: seconds[name])
    if len(seconds) > 1:
        rates = {name: round(num_bytes / of / 1e9, 1) for name, of in seconds.items()}
        record("read limit", f"GB/s by kernel: {', '.join(f'{name} {of}' for name, of in rates.items())}", rates=rates)
    return lambda: num_bytes / min(timers[chosen]() for _ in range(LIMIT_REPEATS))


def product_limit(
    device: torch.device, dtype: torch.dtype, size: int = 0, least_s: float = LEAST_S
) -> Callable[[], float]:
    """A function that measures the floating-point operations a second of a product of two square matrices, best of
    several times. `size` is the side; 0 for that of the device."""
    size = size or PRODUCT_SIZES[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    timer = device_timer(lambda: a @ b, device, least_s)
    return lambda: 2 * size**3 / min(timer() for _ in range(LIMIT_REPEATS))


def compare(
    fact: str,
    variants: Mapping[str, Callable[[], torch.Tensor]],
    device: torch.device,
    *,
    num_bytes: float = 0.0,
    num_calls: int = 1,
    tolerance: float = 2e-2,
    repeats: int = 5,
    least_s: float = LEAST_S,
) -> dict[str, float]:
    """Measure variants of one computation in turn and record one fact, whose first variant is today's.

    Args:
        variants: functions that return the result; each may write to the same tensor.
        num_bytes: what one call has to read and write, for the share of it a second.
        num_calls: calls that a variant makes each time, over other memory, say.
        tolerance: largest difference from the first variant's result, relative to its largest value.

    Returns:
        The median seconds by variant.

    Raises:
        RuntimeError: a variant's result differs.
    """
    results = {name: work().float().clone() for name, work in variants.items()}
    first = next(iter(results.values()))
    off = {name: ((result - first).abs().max() / first.abs().max()).item() for name, result in results.items()}
    timers = {name: device_timer(work, device, least_s) for name, work in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, timer in timers.items():
            times[name].append(timer() / num_calls)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    today = next(iter(medians.values()))
    shown = (
        f"{name} {1e6 * seconds:.1f} µs"
        + (f" {num_bytes / seconds / 1e12:.2f} TB/s" if num_bytes else "")
        + (f" ×{today / seconds:.2f}" if seconds is not today else "")
        for name, seconds in medians.items()
    )
    record(
        fact,
        ", ".join(shown),
        us={name: round(1e6 * seconds, 2) for name, seconds in medians.items()},
        num_bytes=num_bytes,
        off={name: float(f"{value:.2g}") for name, value in off.items()},
    )
    if bad := {name: value for name, value in off.items() if not value <= tolerance}:
        raise RuntimeError(f"{fact}: results differ from the first variant's by {bad}, more than {tolerance:g}")
    return medians
