"""CUDA backend over the fake driver: statuses, rollback, headroom, events."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch

from folio.vmem import AddressRange, CudaBackend, MapError, OutOfPages
from folio.vmem.backends.cuda import CPU
from folio.vmem.backends.run_bound import RunBound
from tests.vmem.backends.fake_driver import CUresult, FakeDriver

PAGE = FakeDriver.granularity_bytes


def make(num_pages: int = 16, *, refuse_run_unmap: bool = False, **settings: Any) -> tuple[CudaBackend, FakeDriver]:
    driver = FakeDriver(num_pages * PAGE)
    driver.refuse_run_unmap = refuse_run_unmap
    return CudaBackend(driver=driver, tensor_device=CPU, **settings), driver


def test_one_set_access_for_a_run() -> None:
    """Once calls are known to be short."""
    backend, driver = make(clock=lambda: 0.0)
    reserved = backend.reserve(5 * PAGE)
    handles = [backend.create(PAGE) for _ in range(5)]
    for _ in range(2):
        driver.calls.clear()
        backend.map(reserved.address, handles)
        backend.unmap(reserved)
    assert driver.calls == ["cuMemMap"] * 5 + ["cuMemSetAccess", "cuMemUnmap"]
    for handle in handles:
        backend.destroy(handle)
    backend.release(reserved)
    backend.close()
    assert driver.leftovers == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("refuse_run_unmap", [False, True])
@pytest.mark.parametrize(
    ("call_us", "page_us", "num_pages"),
    [(30, 30, 5), (67, 10, 13), (0.5, 0.01, 64), (150, 100, 1), (900, 900, 1)],
)
def test_no_call_takes_longer_than_launches_may_wait(
    call_us: float, page_us: float, num_pages: int, refuse_run_unmap: bool
) -> None:
    """Runs are as long as 200 µs allow by the measured costs, and at least one page."""
    driver = FakeDriver(64 * PAGE)
    driver.refuse_run_unmap = refuse_run_unmap
    driver.costs = dict.fromkeys(("cuMemSetAccess", "cuMemUnmap"), (call_us * 1e-6, page_us * 1e-6))
    backend = CudaBackend(driver=driver, tensor_device=CPU, clock=lambda: driver.now_s)
    reserved = backend.reserve(64 * PAGE)
    handles = [backend.create(PAGE) for _ in range(64)]

    def longest(name: str) -> int:
        return max(pages for call, pages, _ in driver.took if call == name)

    for _ in range(20):
        driver.took.clear()
        backend.map(reserved.address, handles)
        backend.unmap(reserved)
    assert num_pages - 1 <= longest("cuMemSetAccess") <= num_pages  # the last page may be lost to rounding
    if refuse_run_unmap:
        assert longest("cuMemUnmap") == 1
    else:
        assert num_pages - 1 <= longest("cuMemUnmap") <= num_pages
    assert max(seconds for *_, seconds in driver.took) <= max(200e-6, (call_us + page_us) * 1e-6)
    driver.costs["cuMemSetAccess"] = (30e-6, 60e-6)  # a busier device: the bound follows within some calls
    for _ in range(20):
        driver.took.clear()
        backend.map(reserved.address, handles)
        backend.unmap(reserved)
    assert longest("cuMemSetAccess") == 2
    for handle in handles:
        backend.destroy(handle)
    backend.release(reserved)
    backend.close()
    assert driver.leftovers == (0, 0, 0, 0, 0)


def test_one_slow_call_does_not_shorten_the_runs() -> None:
    bound = RunBound()
    for _ in range(20):
        bound.note(bound.num_pages, 30e-6 + bound.num_pages * 30e-6)
    assert bound.num_pages == 5
    bound.note(5, 0.01)
    assert bound.num_pages == 5


@pytest.mark.parametrize("call", range(1, 30))
def test_a_failed_run_undoes_the_runs_before_it(call: int) -> None:
    """Access and unmapping of 8 pages in runs of 2: whatever call fails, everything is as before."""
    driver = FakeDriver(8 * PAGE)
    driver.costs = dict.fromkeys(("cuMemSetAccess", "cuMemUnmap"), (0.0, 100e-6))
    backend = CudaBackend(driver=driver, tensor_device=CPU, clock=lambda: driver.now_s)
    reserved = backend.reserve(8 * PAGE)
    handles = [backend.create(PAGE) for _ in range(8)]
    for _ in range(3):
        backend.map(reserved.address, handles)
        backend.unmap(reserved)
    driver.fail_at = len(driver.calls) + call
    mapped = 0
    try:
        backend.map(reserved.address, handles)
        mapped = 8
        backend.unmap(reserved)
        mapped = 0
    except MapError:
        pass
    driver.fail_at = -1
    assert backend.num_mappings == driver.leftovers[2] == mapped
    if mapped:
        backend.tensor(reserved).fill_(1)  # with access
        backend.unmap(reserved)
    else:
        backend.map(reserved.address, handles)
        backend.unmap(reserved)
    for handle in handles:
        backend.destroy(handle)
    backend.release(reserved)
    backend.close()
    assert driver.leftovers == (0, 0, 0, 0, 0)


def test_errors_say_call_address_and_status() -> None:
    backend, driver = make()
    reserved = backend.reserve(2 * PAGE)
    handles = [backend.create(PAGE) for _ in range(2)]
    for i in range(2):
        driver.fail_at, address = len(driver.calls) + 1 + i, reserved.address + i * PAGE
        with pytest.raises(MapError, match=rf"cuMemMap at {address:#x} failed: CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"):
            backend.map(reserved.address, handles)
    driver.fail_at, driver.fail_status = len(driver.calls) + 1, CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(OutOfPages):
        backend.create(PAGE)
    for handle in handles:
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
    """Whichever of three maps and one set-access fails, nothing stays mapped."""
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


@pytest.mark.parametrize("num_pages", [1, 2])
def test_headroom_is_left_to_torch(num_pages: int) -> None:
    backend, _ = make(4, headroom_bytes=(4 - num_pages) * PAGE)
    handles = [backend.create(PAGE) for _ in range(num_pages)]
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


def test_a_step_without_an_event_is_waited_for() -> None:
    """No fence could say later that the step is done."""
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


def test_a_failed_constructor_releases_the_context() -> None:
    """Regression: the context stayed retained when a later call of the constructor failed."""
    driver = FakeDriver(PAGE)
    driver.granularity_status = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(MapError, match="cuMemGetAllocationGranularity"):
        CudaBackend(driver=driver, tensor_device=CPU)
    assert driver.leftovers == (0, 0, 0, 0, 0)


def test_each_thread_that_calls_the_driver_has_the_context() -> None:
    """Regression: the mapper's thread had no context, on which events and free memory depend."""
    backend, driver = make(headroom_bytes=PAGE)
    reserved = backend.reserve(PAGE)

    def map_one_page() -> None:
        handle = backend.create(PAGE)  # asks how much is free
        backend.map(reserved.address, [handle])
        backend.wait(backend.fence())
        backend.unmap(reserved)
        backend.destroy(handle)

    failures: list[BaseException] = []
    before = driver.num_set_current
    thread = threading.Thread(target=_note_failure, args=(map_one_page, failures))
    thread.start()
    thread.join()
    assert failures == []
    assert driver.num_set_current == before + 1
    map_one_page()
    assert driver.num_set_current == before + 1  # this thread had made it current when the backend was made
    backend.release(reserved)
    backend.close()


def _note_failure(work: Any, failures: list[BaseException]) -> None:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - a thread's boundary
        failures.append(error)


def test_closing_never_destroys_the_context() -> None:
    """Regression: closing a backend before torch had retained the context destroyed it, with torch's tensors and
    kernels. Over a real driver, creating a backend makes torch retain it first."""
    backend, driver = make()
    backend.close()
    backend.close()
    assert driver.leftovers == (0, 0, 0, 0, 0)
    assert driver.violations == []


@pytest.mark.parametrize("num_devices", [0, 1])
def test_torch_takes_the_context_first(num_devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(16 * PAGE)
    order: list[str] = []
    retain = driver.cuDevicePrimaryCtxRetain
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    monkeypatch.setattr(driver, "cuDevicePrimaryCtxRetain", lambda device: order.append("folio") or retain(device))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    monkeypatch.setattr(torch, "empty", lambda *_, device: order.append(f"torch on {device}"))
    if not num_devices:
        with pytest.raises(MapError, match="no CUDA device 0: torch sees 0"):
            CudaBackend()
        return
    CudaBackend(stream=lambda: 0).close()
    assert order == ["torch on cuda:0", "folio"]


def test_drivers_whose_unmap_takes_one_page_a_call() -> None:
    """Unmapping several pages by one call is not documented, so the constructor tries it."""
    backend, driver = make(refuse_run_unmap=True)
    reserved = backend.reserve(4 * PAGE)
    handles = [backend.create(PAGE) for _ in range(4)]
    backend.map(reserved.address, handles)
    memory = backend.tensor(reserved)
    memory[::PAGE] = torch.arange(4, dtype=torch.uint8)
    driver.fail_at = len(driver.calls) + 3  # the third page: the first two are mapped again
    with pytest.raises(MapError, match="cuMemUnmap"):
        backend.unmap(reserved)
    assert backend.num_mappings == driver.leftovers[2] == 4
    assert memory[::PAGE].tolist() == [0, 1, 2, 3]
    driver.calls.clear()
    driver.fail_at = -1
    backend.unmap(AddressRange(reserved.address, PAGE))
    backend.unmap(AddressRange(reserved.address + PAGE, 3 * PAGE))
    assert driver.calls == ["cuMemUnmap"] * 4
    driver.fail_at = len(driver.calls) + 5  # access, after four maps
    with pytest.raises(MapError, match="cuMemSetAccess"):
        backend.map(reserved.address, handles)
    assert driver.leftovers[2] == 0
    for handle in handles:
        backend.destroy(handle)
    backend.release(reserved)
    backend.close()
    assert driver.leftovers == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("fail_at", range(1, 10))
def test_a_failed_probe_of_unmapping_leaves_nothing(fail_at: int) -> None:
    """Whichever call of reserve, two creates, two maps, unmap, two releases and free fails."""
    driver = FakeDriver(16 * PAGE)
    driver.fail_at = fail_at
    try:
        backend = CudaBackend(driver=driver, tensor_device=CPU)
    except MapError:
        pass
    else:
        backend.close()
    assert driver.leftovers == (0, 0, 0, 0, 0)


def test_a_device_too_full_to_probe() -> None:
    backend, driver = make(num_pages=1)
    reserved = backend.reserve(PAGE)
    handle = backend.create(PAGE)
    backend.map(reserved.address, [handle])
    backend.unmap(reserved)
    backend.destroy(handle)
    backend.release(reserved)
    backend.close()
    assert driver.leftovers == (0, 0, 0, 0, 0)


def test_fences_mark_the_stream_that_work_goes_to() -> None:
    """Regression: fences marked the default stream, and pages were unmapped under a step on one of torch's side
    streams."""
    streams = iter((7, 0, 7))
    backend, driver = make(stream=lambda: next(streams))
    driver.finish_work()
    driver.launch(set(), stream=7)
    on_side = backend.fence()
    driver.cuStreamSynchronize(0)
    assert not backend.completed(on_side)
    on_default = backend.fence()
    driver.cuStreamSynchronize(0)
    assert not backend.completed(on_default)  # a later fence is not passed before an earlier one
    driver.finish_work()
    assert backend.completed(on_default)
    driver.launch(set(), stream=7)
    backend.wait(backend.fence())
    assert driver.num_running == 0
    backend.close()
