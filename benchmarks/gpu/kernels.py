"""Triton kernels that read a device's memory (`benchmarks.device_time`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Tiles of `read_sums`, with the warps of a program: 8 or 16 reads of 16 bytes in flight for each thread.
READS = ((4096, 4), (8192, 4), (16384, 8))


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
