"""Triton kernels of the probes and of the limits (`benchmarks.device_time`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Tiles of `read_sums`, with the warps of a program: 8 or 16 reads of 16 bytes in flight for each thread.
READS = ((4096, 4), (8192, 4), (16384, 8))


@triton.jit
def add_one(data, first, num: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add one to `num` int32 values, beginning with `first`."""
    at = first + tl.arange(0, num)
    tl.store(data + at, tl.load(data + at) + 1)


@triton.jit(do_not_specialize=["index", "spin_ns"])
def tick(times, index, spin_ns):  # type: ignore[no-untyped-def]
    """Spin for `spin_ns`, and store begin and end by the device's clock in row `index` of `times`."""
    start = tl.extra.cuda.globaltimer()
    now = start
    while now - start < spin_ns:
        now = tl.extra.cuda.globaltimer()
    tl.store(times + 2 * index, start)
    tl.store(times + 2 * index + 1, now)


@triton.jit
def _read(data, sums, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    numbers = tl.load(data + program.to(tl.int64) * tile + tl.arange(0, tile))
    tl.store(sums + program, tl.sum(numbers))


def read_sums(data: torch.Tensor, tile: int, num_warps: int) -> torch.Tensor:
    """Read `data`, float32, once. Returns the sum of each tile; `tile` divides the number of elements."""
    sums = data.new_empty(len(data) // tile)
    _read[(len(sums),)](data, sums, tile, num_warps=num_warps)
    return sums
