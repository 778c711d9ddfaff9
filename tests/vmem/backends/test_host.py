"""Host backend, beyond the contract of all backends (`test_backend_contract.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from folio.vmem import HostBackend, MapError

PAGE = 16384


@pytest.fixture
def backend() -> Iterator[HostBackend]:
    backend = HostBackend(8 * PAGE)
    yield backend
    backend.close()  # raises if a test left anything behind


def test_a_failed_map_leaves_holes(backend: HostBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the second of two runs fails, the first does not stay mapped."""
    reserved = backend.reserve(4 * PAGE)
    handles = [backend.create(PAGE) for _ in range(3)]
    real, calls = backend._map_run, []

    def fail_second(address: int, offset: int, num_bytes: int) -> None:
        calls.append(address)
        if len(calls) == 2:
            raise MapError("injected")
        real(address, offset, num_bytes)

    monkeypatch.setattr(backend, "_map_run", fail_second)
    with pytest.raises(MapError, match="injected"):
        backend.map(reserved.address, [handles[0], handles[2]])
    assert backend.num_mappings == 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(address, 16) for address in line.split()[0].split("-"))
        assert "folio-kv" not in line or end <= reserved.address or reserved.end <= start
    for handle in handles:
        backend.destroy(handle)
    backend.release(reserved)


@pytest.mark.processes
def test_access_to_a_hole_kills_the_process() -> None:
    """A wrong address never reads other data."""
    code = (
        "from folio.vmem import HostBackend; b = HostBackend(65536); r = b.reserve(16384); print(b.tensor(r)[0].item())"
    )
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert result.returncode == -11
