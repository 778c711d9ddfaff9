"""Host backend, beyond the contract of all backends (`test_backend_contract.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from folio.vmem import HostBackend, MapError, select_backend

PAGE = 16384


@pytest.fixture
def backend() -> Iterator[HostBackend]:
    backend = HostBackend(8 * PAGE)
    yield backend
    backend.close()  # raises if a test left anything behind


class FailingSecond(HostBackend):
    """Its second run of mappings fails."""

    num_runs = 0

    def _map_run(self, *args: int) -> None:
        self.num_runs += 1
        if self.num_runs == 2:
            raise MapError("injected")
        super()._map_run(*args)


def test_a_failed_map_leaves_holes() -> None:
    """When the second of two runs fails, the first does not stay mapped."""
    backend = FailingSecond(8 * PAGE)
    reserved = backend.reserve(4 * PAGE)
    handles = [backend.create(PAGE) for _ in range(3)]
    with pytest.raises(MapError, match="injected"):
        backend.map(reserved.address, [handles[0], handles[2]])
    assert backend.num_mappings == 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(address, 16) for address in line.split()[0].split("-"))
        assert "folio-kv" not in line or end <= reserved.address or reserved.end <= start
    for handle in handles:
        backend.destroy(handle)
    backend.release(reserved)
    backend.close()


@pytest.mark.parametrize("num_bytes", [0, -PAGE, PAGE + 1])
def test_sizes_are_whole_pages(backend: HostBackend, num_bytes: int) -> None:
    with pytest.raises(MapError, match=f"{num_bytes} is not a positive multiple"):
        backend.reserve(num_bytes)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        pytest.param(
            "cuda",
            "torch sees no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here"),
        ),
        ("meta", "there is no memory backend for meta"),
    ],
)
def test_a_device_that_is_not_here(device: str, message: str) -> None:
    with pytest.raises(MapError, match=message):
        select_backend(torch.device(device), capacity_bytes=PAGE)


@pytest.mark.processes
def test_access_to_a_hole_kills_the_process() -> None:
    """A wrong address never reads other data."""
    code = (
        "from folio.vmem import HostBackend; b = HostBackend(65536); r = b.reserve(16384); print(b.tensor(r)[0].item())"
    )
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert result.returncode == -11
