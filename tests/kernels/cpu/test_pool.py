"""The pool of threads (`csrc/pool.h`): one for all libraries of a process, asleep while nothing is computed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import os, sys, time
from pathlib import Path
import torch
from folio.kernels import CpuLinear
from folio.kernels.cpu.row_max import CpuRowMax

def pool():
    return [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text().strip() == "folio-team"]

def compute():  # nothing by torch: libgomp's threads do not survive a fork
    assert torch.equal(row_max(x)[1], largest)
    assert torch.equal(linear(x, packed), products)

torch.set_num_threads(3)
linear, row_max, x = CpuLinear(), CpuRowMax(), torch.randn(64, 4096)
packed = linear.pack(torch.randn(256, 4096))
largest, products = row_max(x)[1], linear(x, packed)
for _ in range(20):
    compute()
assert len(pool()) == 2, pool()  # beside this one; of two libraries
"""

_ASLEEP = """
def switches():
    # Of sleeping threads, the number stays as it is.
    return [line for task in pool() for line in (task / "status").read_text().splitlines() if "ctxt" in line]

deadline = time.monotonic() + 30
while (before := switches()) != switches() or any(
    "S (sleeping)" not in (task / "status").read_text() for task in pool()
):
    assert time.monotonic() < deadline, before
compute()
"""

_FORK = """
child = os.fork()
if child == 0:
    assert not pool()
    compute()
    os._exit(0 if len(pool()) == 2 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
compute()
"""


@pytest.mark.processes
@pytest.mark.parametrize("then", ["", _ASLEEP, _FORK], ids=["one pool", "asleep", "after a fork"])
def test_the_pool(then: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    subprocess.run([sys.executable, "-c", _PROGRAM + then], check=True, env=environment, timeout=120)
