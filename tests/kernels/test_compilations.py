"""Count of kernels that were compiled or loaded."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from folio.kernels import num_compilations
from folio.kernels.cpu.row_max import CpuRowMax

ROOT = Path(__file__).parents[2]


def test_a_library_counts_once(uncached_libraries: None) -> None:
    before = num_compilations()
    CpuRowMax()
    assert num_compilations() == before + 1
    CpuRowMax()
    assert num_compilations() == before + 1


@pytest.mark.processes
def test_each_variant_of_a_triton_kernel_counts_once(tmp_path: Path) -> None:
    """In a process without Triton's interpreter, where launches do nothing."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    code = """
import torch
from folio.kernels import num_compilations
from folio.kernels.triton.cache import copy_blocks
from tests.kernels.triton.no_device import use_no_device
use_no_device()
words, rows = torch.zeros(4, 1024, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
counts = [num_compilations()]
for tensor in (words, words, words[:, :1001], words):
    copy_blocks(tensor, tensor, rows, rows)
    counts.append(num_compilations() - counts[0])
print(counts[1:])
"""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[1, 1, 2, 2]\n"
