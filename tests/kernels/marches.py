"""Processors that the tests compile C++ kernels for. `python -m tests.kernels.marches` compiles for them, at set-up: it
takes minutes, and would count as the time of the first test that needs one."""

from __future__ import annotations

import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from folio.kernels import CpuLinear
from folio.kernels.cpu.build import load_library
from folio.kernels.cpu.provider import CpuProvider

# This processor, and lesser ones whose instructions it has: with AVX2 only, and AVX-512 without products of bfloat16.
_NEEDED = {"native": set[str](), "x86-64-v3": {"avx2", "fma"}, "x86-64-v4": {"avx512f", "avx512bw", "avx512vl"}}
MARCHES = [march for march, needed in _NEEDED.items() if needed <= set(Path("/proc/cpuinfo").read_text().split())]
WITHOUT_AVX2 = "x86-64-v2"


def has_layers(dtype: torch.dtype) -> bool:
    """Whether layers run in one call: with Folio's own products."""
    return not CpuLinear().unsupported(dtype)


if __name__ == "__main__":
    lesser = [WITHOUT_AVX2] if platform.machine() == "x86_64" else []
    with ThreadPoolExecutor() as pool:
        made = [pool.submit(CpuProvider, march) for march in MARCHES]
        made += [pool.submit(CpuLinear, march) for march in [*MARCHES, *lesser]]  # type: ignore[misc]
        made += [pool.submit(load_library, "layer", march) for march in MARCHES]  # type: ignore[misc]
    for each in made:
        each.result()
