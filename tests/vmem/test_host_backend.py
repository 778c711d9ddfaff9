"""The host backend really reserves, maps, aliases and gives back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vmem import AddressRange, HostBackend, IntegrityError, MapError, OutOfPages

PAGE = 16384


@pytest.fixture
def backend() -> Iterator[HostBackend]:
    backend = HostBackend(8 * PAGE)
    yield backend
    backend.close()  # raises if a test left anything behind


def test_two_addresses_show_one_page(backend: HostBackend) -> None:
    reserved = backend.reserve(4 * PAGE)
    handle = backend.create(PAGE)
    backend.map(reserved.address, [handle])
    backend.map(reserved.address + 2 * PAGE, [handle])
    memory = backend.tensor(reserved)
    memory[:PAGE] = 3
    assert bool((memory[2 * PAGE : 3 * PAGE] == 3).all())
    memory[2 * PAGE] = 9
    assert memory[0] == 9
    assert backend.num_mappings == 2
    backend.unmap(AddressRange(reserved.address, PAGE))
    backend.unmap(AddressRange(reserved.address + 2 * PAGE, PAGE))
    backend.destroy(handle)
    backend.release(reserved)


def test_destroyed_pages_go_back_to_the_machine(backend: HostBackend) -> None:
    reserved = backend.reserve(8 * PAGE)
    handles = [backend.create(PAGE) for _ in range(8)]
    backend.map(reserved.address, handles)
    backend.tensor(reserved).fill_(1)
    assert backend.memory_info().physical_bytes == 8 * PAGE
    backend.unmap(reserved)
    for handle in handles:
        backend.destroy(handle)
    assert backend.memory_info().physical_bytes == 0
    backend.release(reserved)


def test_remapped_pages_keep_their_bytes(backend: HostBackend) -> None:
    reserved = backend.reserve(4 * PAGE)
    handles = [backend.create(PAGE) for _ in range(2)]
    backend.map(reserved.address, handles)
    memory = backend.tensor(reserved)
    memory[:PAGE], memory[PAGE : 2 * PAGE] = 1, 2
    backend.unmap(AddressRange(reserved.address, 2 * PAGE))
    backend.map(reserved.address, handles[::-1])  # not neighbours in the memfd any more
    assert memory[0] == 2
    assert memory[PAGE] == 1
    backend.unmap(AddressRange(reserved.address, 2 * PAGE))
    for handle in handles:
        backend.destroy(handle)
    backend.release(reserved)


def test_out_of_pages_is_transient(backend: HostBackend) -> None:
    handles = [backend.create(PAGE) for _ in range(8)]
    with pytest.raises(OutOfPages):
        backend.create(PAGE)
    backend.destroy(handles.pop())
    handles.append(backend.create(PAGE))
    for handle in handles:
        backend.destroy(handle)


def test_rules_are_enforced(backend: HostBackend) -> None:
    reserved = backend.reserve(2 * PAGE)
    handle = backend.create(PAGE)
    with pytest.raises(MapError, match="multiple of 4096"):
        backend.reserve(100)
    with pytest.raises(MapError, match="one size"):
        backend.create(2 * PAGE)
    with pytest.raises(IntegrityError, match="outside every reservation"):
        backend.map(reserved.end, [handle])
    backend.map(reserved.address, [handle])
    with pytest.raises(IntegrityError, match="mapped already"):
        backend.map(reserved.address, [handle])
    with pytest.raises(IntegrityError, match="mapped 1 times"):
        backend.destroy(handle)
    with pytest.raises(IntegrityError, match="while a page is mapped"):
        backend.release(reserved)
    with pytest.raises(IntegrityError, match="no page is mapped"):
        backend.unmap(reserved)
    with pytest.raises(IntegrityError, match="1 mappings, 1 pages and 1 reservations"):
        backend.close()
    backend.unmap(AddressRange(reserved.address, PAGE))
    with pytest.raises(IntegrityError, match="does not exist"):
        backend.map(reserved.address, [handle + PAGE])
    backend.destroy(handle)
    backend.release(reserved)


def test_a_failed_map_leaves_holes(backend: HostBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two runs fails: the first must not stay mapped."""
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
    assert "folio-kv" not in Path("/proc/self/maps").read_text()
    for handle in handles:
        backend.destroy(handle)
    backend.release(reserved)


def test_holes_are_a_bug_trap() -> None:
    """Touching an unmapped address kills the process instead of reading somebody's bytes."""
    code = "from vmem import HostBackend; b = HostBackend(65536); r = b.reserve(16384); print(b.tensor(r)[0].item())"
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert result.returncode == -11


def test_tensor_covers_a_terabyte() -> None:
    backend = HostBackend(PAGE)
    reserved = backend.reserve(1 << 40)
    assert backend.tensor(reserved).view(torch.float32).shape == (1 << 38,)
    backend.release(reserved)
    backend.close()
