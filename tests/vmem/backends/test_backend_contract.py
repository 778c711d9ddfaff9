"""Contract of all backends: host, and CUDA over the stand-in and the real driver (marker gpu)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch

from folio.vmem import (
    AddressRange,
    Backend,
    CudaBackend,
    DevicePages,
    HostBackend,
    IntegrityError,
    MapError,
    MirroredBackend,
    OutOfPages,
)
from folio.vmem.backends.cuda import CPU
from tests.vmem.backends.stand_in_driver import GRANULARITY_BYTES, StandInDriver
from tests.vmem.direct_peers import DirectPeers

NUM_PAGES = 8


def host() -> tuple[Backend, int]:
    page_bytes = 16384
    return HostBackend(NUM_PAGES * page_bytes), page_bytes


def stand_in_cuda() -> tuple[Backend, int]:
    driver = StandInDriver(NUM_PAGES * GRANULARITY_BYTES)
    return CudaBackend(driver=driver, tensor_device=CPU), GRANULARITY_BYTES


def mirrored_host() -> tuple[Backend, int]:
    page_bytes = 16384
    capacity = NUM_PAGES * page_bytes
    return MirroredBackend(
        HostBackend(capacity), DirectPeers(HostBackend, HostBackend), capacity_bytes=capacity
    ), page_bytes


def mirrored_cuda() -> tuple[Backend, int]:
    local, page_bytes = stand_in_cuda()
    peers = DirectPeers(HostBackend)
    return MirroredBackend(local, peers, capacity_bytes=NUM_PAGES * page_bytes), page_bytes


def shared_host() -> tuple[Backend, int]:
    page_bytes = 16384
    return HostBackend(0, pages=DevicePages(NUM_PAGES * page_bytes)), page_bytes


def shared_cuda() -> tuple[Backend, int]:
    driver, pages = StandInDriver(1 << 30), DevicePages(NUM_PAGES * GRANULARITY_BYTES)
    return CudaBackend(driver=driver, tensor_device=CPU, pages=pages), GRANULARITY_BYTES


def real_cuda() -> tuple[Backend, int]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.zeros(1, device="cuda")  # torch's context first, as in the engine
    backend = CudaBackend()
    return backend, backend.granularity_bytes


WITHOUT_A_DEVICE = [host, stand_in_cuda, mirrored_host, mirrored_cuda, shared_host, shared_cuda]


@pytest.fixture(params=[*WITHOUT_A_DEVICE, pytest.param(real_cuda, marks=pytest.mark.gpu)])
def case(request: pytest.FixtureRequest) -> Iterator[tuple[Backend, int]]:
    make: Callable[[], tuple[Backend, int]] = request.param
    backend, page_bytes = make()
    yield backend, page_bytes
    close(backend)
    driver = driver_of(backend)
    if isinstance(driver, StandInDriver):
        assert (driver.leftovers, driver.violations) == ((0, 0, 0, 0, 0), [])


def close(backend: Backend) -> None:
    """Raises if a test left anything behind."""
    backend.close()
    if (pages := getattr(backend, "_pages", None)) is not None:
        pages.check_integrity()
        assert not pages.idle_bytes
        pages.close()


def driver_of(backend: Backend) -> object:
    return getattr(getattr(backend, "_local", backend), "_driver", None)


def test_two_addresses_show_one_page(case: tuple[Backend, int]) -> None:
    backend, size = case
    reserved = backend.reserve(4 * size)
    handle = backend.create(size)
    backend.map(reserved.address, [handle])
    backend.map(reserved.address + 2 * size, [handle])
    memory = backend.tensor(reserved)
    memory[:size] = 3
    assert bool((memory[2 * size : 3 * size] == 3).all())
    memory[2 * size] = 9
    assert memory[0] == 9
    assert backend.num_mappings == 2
    backend.unmap(AddressRange(reserved.address, size))
    backend.unmap(AddressRange(reserved.address + 2 * size, size))
    backend.destroy(handle)
    backend.release(reserved)


def test_an_exported_page_shows_its_bytes(case: tuple[Backend, int]) -> None:
    backend, size = case
    if not isinstance(backend, CudaBackend) or not backend.exports_pages:
        pytest.skip("pages of this backend are not exported")
    reserved, handle = backend.reserve(2 * size), backend.create(size)
    backend.map(reserved.address, [handle])
    memory = backend.tensor(reserved)
    memory[:size] = 7
    fd = backend.export_page(handle)
    backend.map_exported(reserved.address + size, [fd])
    os.close(fd)
    assert bool((memory[size:] == 7).all())
    if isinstance(driver := driver_of(backend), StandInDriver):
        assert driver.cuMemcpyHtoDAsync(reserved.address + size, reserved.address, size, 0) == (1,), "it is read-only"
    backend.unmap(AddressRange(reserved.address, size))
    backend.destroy(handle)
    assert bool((memory[size:] == 7).all())  # the mapping keeps the memory
    backend.unmap_exported(AddressRange(reserved.address + size, size))
    backend.release(reserved)


def test_remapped_pages_keep_their_bytes(case: tuple[Backend, int]) -> None:
    backend, size = case
    reserved = backend.reserve(4 * size)
    handles = [backend.create(size) for _ in range(3)]
    backend.map(reserved.address, handles)
    memory = backend.tensor(reserved)
    for i in range(3):
        memory[i * size : (i + 1) * size] = i
    backend.wait(backend.fence())  # a device does not wait for its kernels before it unmaps what they write to
    backend.unmap(AddressRange(reserved.address, 3 * size))
    backend.map(reserved.address + size, handles[::-1])
    assert [memory[i * size].item() for i in (1, 2, 3)] == [2, 1, 0]
    backend.unmap(AddressRange(reserved.address + 2 * size, 2 * size))  # a part of a run, whole pages
    backend.unmap(AddressRange(reserved.address + size, size))
    for handle in handles:
        backend.destroy(handle)
    backend.release(reserved)


def test_physical_bytes_follow_the_pages(case: tuple[Backend, int]) -> None:
    backend, size = case
    reserved = backend.reserve(4 * size)
    handles = [backend.create(size) for _ in range(4)]
    backend.map(reserved.address, handles)
    backend.tensor(reserved).fill_(1)
    backend.wait(backend.fence())
    assert backend.memory_info().physical_bytes == 4 * size
    backend.unmap(reserved)
    for handle in handles:
        backend.destroy(handle)
    assert backend.memory_info().physical_bytes == 0
    backend.release(reserved)


def test_fences_pass(case: tuple[Backend, int]) -> None:
    backend, _ = case
    first, second = backend.fence(), backend.fence()
    driver = driver_of(backend)
    if isinstance(driver, StandInDriver):
        assert not backend.completed(first)
        driver.finish_work()
    elif driver is not None:
        torch.cuda.synchronize()
    assert backend.completed(second)
    assert backend.completed(first)
    third = backend.fence()
    backend.wait(third)
    assert backend.completed(third)


@pytest.mark.parametrize("waits", [False, True])
def test_peers_unmap_after_the_orders_before_the_passed_fence(waits: bool) -> None:
    """And destroy and close with rank 0."""
    calls: list[str] = []

    class Peer(HostBackend):
        def unmap(self, mapped: AddressRange) -> None:
            calls.append("unmap")
            super().unmap(mapped)

        def destroy(self, handle: int) -> None:
            calls.append("destroy")
            super().destroy(handle)

        def close(self) -> None:
            calls.append("close")
            super().close()

    class Peers(DirectPeers):
        num_ordered = 0  # type: ignore[assignment]

    size = 16384
    peers = Peers(Peer)
    [peer] = peers.memories
    backend = MirroredBackend(HostBackend(size), peers, capacity_bytes=size)
    reserved, handle = backend.reserve(size), backend.create(size)
    backend.map(reserved.address, [handle])
    peers.num_ordered = 2
    fence = backend.fence()
    peers.num_ordered = 3  # the peer may unmap before it has carried out this one
    if waits:
        backend.wait(fence)
    else:
        assert backend.completed(fence)
    peer.done()
    with ThreadPoolExecutor(1) as pool:
        unmapping = pool.submit(backend.unmap, reserved)
        assert not wait([unmapping], 0.05).done
        assert not calls
        peer.done()
        unmapping.result(10)
    peer.done()
    backend.destroy(handle)
    assert calls == ["unmap", "destroy"]
    backend.release(reserved)
    backend.close()
    assert calls == ["unmap", "destroy", "close"]


def test_rules_are_enforced(case: tuple[Backend, int]) -> None:
    backend, size = case
    reserved = backend.reserve(2 * size)
    handle = backend.create(size)
    with pytest.raises(MapError, match="multiple of"):
        backend.reserve(100)
    with pytest.raises(MapError, match="one size"):
        backend.create(2 * size)
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
    backend.unmap(AddressRange(reserved.address, size))
    with pytest.raises(IntegrityError, match="does not exist"):
        backend.map(reserved.address, [handle + size])
    backend.destroy(handle)
    backend.release(reserved)


@pytest.mark.parametrize("make", WITHOUT_A_DEVICE)
def test_out_of_pages_is_transient(make: Callable[[], tuple[Backend, int]]) -> None:
    backend, size = make()
    handles = [backend.create(size) for _ in range(NUM_PAGES)]
    with pytest.raises(OutOfPages):
        backend.create(size)
    backend.destroy(handles.pop())
    handles.append(backend.create(size))
    for handle in handles:
        backend.destroy(handle)
    close(backend)


def test_tensor_covers_a_terabyte(case: tuple[Backend, int]) -> None:
    backend, _ = case
    reserved = backend.reserve(1 << 40)
    assert backend.tensor(reserved).view(torch.float32).shape == (1 << 38,)
    backend.release(reserved)
