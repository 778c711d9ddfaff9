"""CUDA backend over the stand-in driver: statuses, rollback, headroom, events."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

from folio.vmem import AddressRange, CudaBackend, MapError, OutOfPages
from folio.vmem.backends.cuda import CPU
from folio.vmem.backends.run_bound import RunBound
from tests.vmem.backends.stand_in_driver import GRANULARITY_BYTES as PAGE
from tests.vmem.backends.stand_in_driver import StandInDriver

NOTHING = (0, 0, 0, 0, 0)
Make = Callable[..., tuple[CudaBackend, StandInDriver]]


@pytest.fixture
def make() -> Iterator[Make]:
    """`make(num_pages, **settings)` → a backend and its driver, where a test leaves nothing."""
    made: list[tuple[CudaBackend, StandInDriver]] = []

    def make_one(num_pages: int = 16, **settings: Any) -> tuple[CudaBackend, StandInDriver]:
        driver = StandInDriver(num_pages * PAGE)
        made.append((CudaBackend(driver=driver, tensor_device=CPU, **settings), driver))
        return made[-1]

    yield make_one
    [(backend, driver)] = made
    driver.fail_at = -1
    backend.close()
    assert (driver.leftovers, driver.violations) == (NOTHING, [])


@contextmanager
def some_pages(backend: CudaBackend, count: int) -> Iterator[tuple[AddressRange, list[int]]]:
    """A range and as many pages as fit into it."""
    reserved = backend.reserve(count * PAGE)
    handles = [backend.create(PAGE) for _ in range(count)]
    yield reserved, handles
    for handle in handles:
        backend.destroy(handle)
    backend.release(reserved)


class TimedDriver:
    """A driver whose calls take time on a clock of its own, `now_s`: `costs` are seconds of a call and of each page."""

    def __init__(self, num_pages: int, costs: tuple[float, float], *, refuse_run_unmap: bool = False) -> None:
        self.driver = StandInDriver(num_pages * PAGE)
        self.driver.refuse_run_unmap = refuse_run_unmap
        self.costs = dict.fromkeys(("cuMemSetAccess", "cuMemUnmap"), costs)
        self.now_s = 0.0
        self.took: list[tuple[str, int, float]] = []  # call, pages, seconds
        self.backend = CudaBackend(driver=self, tensor_device=CPU, clock=lambda: self.now_s)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.driver, name)
        if name not in self.costs:
            return call

        def timed(address: int, size: int, *more: Any) -> Any:
            call_s, page_s = self.costs[name]
            self.took.append((name, size // PAGE, call_s + size // PAGE * page_s))
            self.now_s += self.took[-1][2]
            return call(address, size, *more)

        return timed

    def longest(self, name: str) -> int:
        return max(pages for call, pages, _ in self.took if call == name)

    def learn(self, reserved: AddressRange, handles: list[int]) -> None:
        for _ in range(20):
            self.took.clear()
            self.backend.map(reserved.address, handles)
            self.backend.unmap(reserved)

    def close(self) -> None:
        self.backend.close()
        assert (self.driver.leftovers, self.driver.violations) == (NOTHING, [])


def test_one_set_access_for_a_run(make: Make) -> None:
    """Once calls are known to be short."""
    backend, driver = make(clock=lambda: 0.0)
    with some_pages(backend, 5) as (reserved, handles):
        for _ in range(2):
            driver.calls.clear()
            backend.map(reserved.address, handles)
            backend.unmap(reserved)
        assert driver.calls == ["cuMemMap"] * 5 + ["cuMemSetAccess", "cuMemUnmap"]


@pytest.mark.parametrize("refuse_run_unmap", [False, True])
@pytest.mark.parametrize(
    ("call_us", "page_us", "num_pages"),
    [(30, 30, 5), (67, 10, 13), (0.5, 0.01, 64), (150, 100, 1), (900, 900, 1)],
)
def test_no_call_takes_longer_than_launches_may_wait(
    call_us: float, page_us: float, num_pages: int, refuse_run_unmap: bool
) -> None:
    """Runs are as long as 200 µs allow by the measured costs, and at least one page."""
    driver = TimedDriver(64, (call_us * 1e-6, page_us * 1e-6), refuse_run_unmap=refuse_run_unmap)
    with some_pages(driver.backend, 64) as (reserved, handles):
        driver.learn(reserved, handles)
        assert num_pages - 1 <= driver.longest("cuMemSetAccess") <= num_pages  # the last page may be lost to rounding
        if refuse_run_unmap:
            assert driver.longest("cuMemUnmap") == 1
        else:
            assert num_pages - 1 <= driver.longest("cuMemUnmap") <= num_pages
        assert max(seconds for *_, seconds in driver.took) <= max(200e-6, (call_us + page_us) * 1e-6)
        driver.costs["cuMemSetAccess"] = (30e-6, 60e-6)  # a busier device: the bound follows within some calls
        driver.learn(reserved, handles)
        assert driver.longest("cuMemSetAccess") == 2
    driver.close()


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
    timed = TimedDriver(8, (0.0, 100e-6))
    backend, driver = timed.backend, timed.driver
    with some_pages(backend, 8) as (reserved, handles):
        timed.learn(reserved, handles)
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
        if not mapped:
            backend.map(reserved.address, handles)
        backend.tensor(reserved).fill_(1)  # with access
        backend.unmap(reserved)
    timed.close()


def test_errors_say_call_address_and_status(make: Make) -> None:
    backend, driver = make()
    with some_pages(backend, 2) as (reserved, handles):
        for i in range(2):
            driver.fail_at, address = len(driver.calls) + 1 + i, reserved.address + i * PAGE
            with pytest.raises(MapError, match=rf"cuMemMap at {address:#x} failed: CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"):
                backend.map(reserved.address, handles)
        driver.fail_at = len(driver.calls) + 1
        driver.fail_status = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        with pytest.raises(OutOfPages):
            backend.create(PAGE)


def test_no_such_device() -> None:
    with pytest.raises(MapError, match="cuDeviceGet failed: CUDA_ERROR_INVALID_DEVICE"):
        CudaBackend(3, driver=StandInDriver(PAGE), tensor_device=CPU)


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(MapError, match="no CUDA driver"):
        CudaBackend()


@pytest.mark.parametrize("num_pages", [1, 2])
def test_headroom_is_left_to_torch(make: Make, num_pages: int) -> None:
    backend, _ = make(4, headroom_bytes=(4 - num_pages) * PAGE)
    with some_pages(backend, num_pages):
        with pytest.raises(OutOfPages):
            backend.create(PAGE)
        assert backend.memory_info().available_bytes == 0


def test_events_are_reused(make: Make) -> None:
    backend, driver = make()
    for _ in range(50):
        fence = backend.fence()
        assert not backend.completed(fence)
        driver.finish_work()
        assert backend.completed(fence)
    assert driver.calls.count("cuEventCreate") == 1


def test_a_step_without_an_event_is_waited_for(make: Make) -> None:
    """No fence could say later that the step is done."""
    backend, driver = make()
    driver.launch(set())
    driver.fail_at = len(driver.calls) + 1
    assert backend.completed(backend.fence())
    assert driver.num_running == 0


def test_waiting_for_a_fence(make: Make) -> None:
    backend, driver = make()
    driver.launch(set())
    first = backend.fence()
    driver.launch(set())
    second = backend.fence()
    backend.wait(first)
    assert (backend.completed(first), backend.completed(second)) == (True, False)
    backend.wait(second)
    assert driver.num_running == 0


def test_a_failed_constructor_releases_the_context() -> None:
    """Regression: the context stayed retained when a later call of the constructor failed."""
    driver = StandInDriver(PAGE)
    driver.granularity_status = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(MapError, match="cuMemGetAllocationGranularity"):
        CudaBackend(driver=driver, tensor_device=CPU)
    assert driver.leftovers == NOTHING


def test_each_thread_that_calls_the_driver_has_the_context(make: Make) -> None:
    """Regression: the mapper's thread had no context, on which events and free memory depend."""
    backend, driver = make(headroom_bytes=PAGE)

    def map_one_page() -> None:
        with some_pages(backend, 1) as (reserved, handles):  # asks how much is free
            backend.map(reserved.address, handles)
            backend.wait(backend.fence())
            backend.unmap(reserved)

    before = driver.num_set_current
    with ThreadPoolExecutor(1) as other:
        other.submit(map_one_page).result()
    assert driver.num_set_current == before + 1
    map_one_page()
    assert driver.num_set_current == before + 1  # this thread had made it current when the backend was made


def test_closing_never_destroys_the_context(make: Make) -> None:
    """Regression: closing a backend before torch had retained the context destroyed it, with torch's tensors and
    kernels. Over a real driver, creating a backend makes torch retain it first."""
    backend, _ = make()
    backend.close()  # once more at the end of the test


@pytest.mark.parametrize("num_devices", [0, 1])
def test_torch_takes_the_context_first(num_devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = StandInDriver(16 * PAGE)
    order: list[str] = []
    retain = driver.cuDevicePrimaryCtxRetain
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    driver.cuDevicePrimaryCtxRetain = lambda device: order.append("folio") or retain(device)
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
    driver = StandInDriver(16 * PAGE)
    driver.refuse_run_unmap = True
    backend = CudaBackend(driver=driver, tensor_device=CPU)
    with some_pages(backend, 4) as (reserved, handles):
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
    backend.close()
    assert driver.leftovers == NOTHING


@pytest.mark.parametrize("fail_at", range(1, 13))
def test_a_failed_probe_leaves_nothing(fail_at: int) -> None:
    """Whichever fails of create, export, release; reserve, two creates, two maps, unmap, two releases and free."""
    driver = StandInDriver(16 * PAGE)
    driver.fail_at = fail_at
    with suppress(MapError):
        CudaBackend(driver=driver, tensor_device=CPU).close()
    assert driver.leftovers == NOTHING


@pytest.mark.parametrize("refused", ["cuDeviceGetAttribute", "cuMemCreate", "cuMemExportToShareableHandle"])
def test_pages_that_cannot_be_exported_are_plain(refused: str) -> None:
    """A system may refuse pages for other processes though the device supports them."""
    driver = StandInDriver(16 * PAGE)
    call, refusal = getattr(driver, refused), (driver.CUresult.CUDA_ERROR_NOT_SUPPORTED, 0)

    def refuse(*args: Any) -> Any:
        return call(*args) if refused == "cuMemCreate" and not int(args[1].requestedHandleTypes) else refusal

    setattr(driver, refused, refuse if refused != "cuDeviceGetAttribute" else lambda *_: (driver.CUresult(0), 0))
    backend = CudaBackend(driver=driver, tensor_device=CPU)
    assert not backend.exports_pages
    with some_pages(backend, 2) as (reserved, handles):
        backend.map(reserved.address, handles)
        backend.unmap(reserved)
    backend.close()
    assert (driver.leftovers, driver.violations) == (NOTHING, [])


@pytest.mark.parametrize("call", range(1, 17))
def test_exported_pages_are_mapped_all_or_none(make: Make, call: int) -> None:
    """Whatever call fails: import, map and release of four pages, access in runs of one and three, two unmaps."""
    backend, driver = make()
    with some_pages(backend, 4) as (reserved, handles):
        fds = [backend.export_page(handle) for handle in handles]
        before, mapped = driver.leftovers, False
        driver.fail_at = len(driver.calls) + call
        with suppress(MapError):
            backend.map_exported(reserved.address, fds)
            mapped = True
        assert driver.leftovers == (*before[:2], 4 * mapped, *before[3:])
        if mapped:
            backend.unmap_exported(reserved)
        assert driver.leftovers == before
        assert backend.num_mappings == 0
        for fd in fds:
            os.close(fd)


def test_a_device_too_full_to_probe(make: Make) -> None:
    backend, _ = make(num_pages=1)
    with some_pages(backend, 1) as (reserved, handles):
        backend.map(reserved.address, handles)
        backend.unmap(reserved)


def test_fences_mark_the_stream_that_work_goes_to(make: Make) -> None:
    """Regression: fences marked the default stream, and pages were unmapped under a step on one of torch's side
    streams."""
    current = 0
    backend, driver = make(stream=lambda: current)
    _, side = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    current = int(side)
    driver.launch(set(), side)
    on_side = backend.fence()
    driver.cuStreamSynchronize(0)
    assert not backend.completed(on_side)
    current = 0
    on_default = backend.fence()
    driver.cuStreamSynchronize(0)
    assert not backend.completed(on_default)  # a later fence is not passed before an earlier one
    driver.finish_work()
    assert backend.completed(on_default)
    current = int(side)
    driver.launch(set(), side)
    backend.wait(backend.fence())
    assert driver.num_running == 0
