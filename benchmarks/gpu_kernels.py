"""Triton kernels of the probes."""

from __future__ import annotations

import triton
import triton.language as tl


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
