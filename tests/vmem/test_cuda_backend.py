"""What only the CUDA backend does, over the fake driver: statuses, unwinding, headroom, events."""

from __future__ import annotations

import sys

import pytest

from tests.vmem.fake_driver import CUresult, FakeDriver
from vmem import CudaBackend, MapError, OutOfPages
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


def test_a_step_that_no_event_marks_is_waited_for() -> None:
    """No fence could ever tell that it is done."""
    backend, driver = make()
    driver.launch(set())
    driver.fail_at = len(driver.calls) + 1
    assert backend.completed(backend.fence())
    assert driver.num_running == 0
    backend.close()
    assert driver.leftovers == (0, 0, 0, 0, 0)


def test_waiting_for_a_fence() -> None:
    backend, driver = make()
    driver.launch(set())
    first = backend.fence()
    driver.launch(set())
    second = backend.fence()
    backend.wait(first)
    assert backend.completed(first)
    assert not backend.completed(second)
    backend.wait(second)
    assert driver.num_running == 0
    backend.close()


def test_a_device_that_cannot_be_described_is_let_go() -> None:
    """The context was retained and never released when a later call of the constructor failed."""
    driver = FakeDriver(PAGE)
    driver.granularity_status = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(MapError, match="cuMemGetAllocationGranularity"):
        CudaBackend(driver=driver, tensor_device=CPU)
    assert driver.leftovers == (0, 0, 0, 0, 0)
