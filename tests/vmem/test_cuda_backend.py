"""What only the CUDA backend does, over the fake driver: statuses, unwinding, headroom, events."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.vmem.fake_driver import CUresult, FakeDriver
from vmem import CudaBackend, KVMemory, LayerSpec, MapError, OutOfPages, plan_layout
from vmem.dlpack import CPU

PAGE = FakeDriver.granularity_bytes


def make(num_pages: int = 16, **settings: int) -> tuple[CudaBackend, FakeDriver]:
    driver = FakeDriver(num_pages * PAGE)
    return CudaBackend(driver=driver, tensor_device=CPU, **settings), driver


def test_one_set_access_for_a_run() -> None:
    backend, driver = make()
    reserved = backend.reserve(5 * PAGE)
    handles = [backend.create(PAGE) for _ in range(5)]
    driver.calls.clear()
    backend.map(reserved.address, handles)
    backend.unmap(reserved)
    assert driver.calls == ["cuMemMap"] * 5 + ["cuMemSetAccess", "cuMemUnmap"]
    for handle in handles:
        backend.destroy(handle)
    backend.release(reserved)
    backend.close()
    assert driver.leftovers == (0, 0, 0, 0, 0)


def test_errors_say_call_address_and_status() -> None:
    backend, driver = make()
    reserved = backend.reserve(PAGE)
    handle = backend.create(PAGE)
    driver.fail_at = len(driver.calls) + 1
    with pytest.raises(
        MapError, match=rf"cuMemMap at {reserved.address:#x} failed: CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"
    ):
        backend.map(reserved.address, [handle])
    driver.fail_at, driver.fail_status = len(driver.calls) + 1, CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(OutOfPages):
        backend.create(PAGE)
    backend.destroy(handle)
    backend.release(reserved)
    backend.close()


def test_no_such_device() -> None:
    with pytest.raises(MapError, match="cuDeviceGet failed: CUDA_ERROR_INVALID_DEVICE"):
        CudaBackend(3, driver=FakeDriver(PAGE), tensor_device=CPU)


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(MapError, match="no CUDA driver"):
        CudaBackend()


@pytest.mark.parametrize("fail_at", range(1, 5))
def test_a_failed_map_is_undone(fail_at: int) -> None:
    """Three maps and one set-access: whichever fails, nothing stays mapped."""
    backend, driver = make()
    reserved = backend.reserve(3 * PAGE)
    handles = [backend.create(PAGE) for _ in range(3)]
    driver.fail_at = len(driver.calls) + fail_at
    with pytest.raises(MapError):
        backend.map(reserved.address, handles)
    assert driver.leftovers[2] == backend.num_mappings == 0
    backend.map(reserved.address, handles)
    backend.unmap(reserved)
    for handle in handles:
        backend.destroy(handle)
    backend.release(reserved)
    backend.close()


def test_headroom_is_left_to_torch() -> None:
    backend, _ = make(4, headroom_bytes=2 * PAGE)
    handles = [backend.create(PAGE) for _ in range(2)]
    with pytest.raises(OutOfPages):
        backend.create(PAGE)
    assert backend.memory_info().available_bytes == 0
    for handle in handles:
        backend.destroy(handle)
    backend.close()


def test_events_are_reused() -> None:
    backend, driver = make()
    for _ in range(50):
        fence = backend.fence()
        assert not backend.completed(fence)
        driver.finish_work()
        assert backend.completed(fence)
    assert driver.calls.count("cuEventCreate") == 1
    backend.close()
    assert driver.leftovers == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("fail_at", range(1, 30))
def test_memory_survives_a_failure_at_every_call(fail_at: int) -> None:
    """Append, map, free and close over the CUDA backend with driver call k failing: nothing leaks, the books add up."""
    backend, driver = make()
    layout = plan_layout([LayerSpec(2, 64, 64)] * 4, torch.float32, granularity_bytes=PAGE)
    memory = KVMemory(backend, layout, num_blocks=8, num_regions=2, max_tokens=8 * layout.block_tokens)
    driver.fail_at = len(driver.calls) + fail_at
    sequences = [memory.open("region"), memory.open("region")]
    for num_blocks in (1, 3):
        for sequence in sequences:
            for _ in range(2):  # a failed call may be tried again
                try:
                    memory.append(sequence, num_blocks * layout.block_tokens)
                    memory.ensure([sequence])
                    break
                except MapError:
                    memory.check_integrity()
    driver.fail_at = -1
    memory.check_integrity()
    key, _ = memory.region_view(3)
    key[sequences[1].region, : 3 * layout.block_tokens] = 5.0
    home, _ = memory.home_view(3)
    assert bool((home[sequences[1].block_ids] == 5.0).all())
    memory.launched()
    for sequence in sequences:
        memory.free(sequence)
    assert memory.num_free_blocks == 2  # the step may still be reading
    driver.finish_work()
    memory.check_idle()
    memory.close()
    assert driver.leftovers == (0, 0, 0, 0, 0)
