"""Device pages: bounds, pages that pass between owners, and what happens when the device refuses."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from folio.vmem import CudaBackend, DevicePages, HostBackend, IntegrityError, MapError, OutOfPages
from folio.vmem.backends.cuda import CPU
from folio.vmem.backends.host import PageFile
from folio.vmem.device_pages import PageCalls
from tests.vmem.backends.stand_in_driver import StandInDriver
from tests.vmem.small_memory import PAGE_BYTES, FlakyCuda

SMALL, LARGE = 100, 300


class Device:
    """Counts calls; has `capacity_bytes`, and refuses to destroy while `refuses`."""

    def __init__(self, capacity_bytes: int = 1 << 40) -> None:
        self.left, self.refuses = capacity_bytes, False
        self.pages: dict[int, int] = {}
        self.num_created = 0

    def calls(self, device: str = "cpu") -> PageCalls:
        return PageCalls(device, self.create, self.destroy)

    def create(self, page_bytes: int) -> int:
        if page_bytes > self.left:
            raise OutOfPages(1, 0)
        self.left -= page_bytes
        self.num_created += 1
        self.pages[self.num_created] = page_bytes
        return self.num_created

    def destroy(self, handle: int, page_bytes: int) -> None:
        if self.refuses:
            raise MapError("injected")
        assert self.pages.pop(handle) == page_bytes
        self.left += page_bytes


def shared(capacity_bytes: int, device: Device | None = None) -> tuple[DevicePages, Device, PageCalls, PageCalls]:
    pages, device = DevicePages(capacity_bytes), device or Device()
    first, second = device.calls(), device.calls()
    pages.join(first)
    pages.join(second)
    return pages, device, first, second


def figures(pages: DevicePages) -> tuple[int, int, int, int]:
    pages.check_integrity()
    return pages.used_bytes, pages.idle_bytes, pages.charged_bytes, pages.available_bytes


def test_a_page_passes_to_another_owner_without_calls_of_the_device() -> None:
    pages, device, first, second = shared(1000)
    handles = [pages.create(first, SMALL) for _ in range(3)]
    assert figures(pages) == (300, 0, 0, 700)
    for handle in reversed(handles):
        pages.destroy(handle)
    assert figures(pages) == (0, 300, 0, 1000)
    assert [pages.create(second, SMALL) for _ in range(3)] == handles  # neighbours stay neighbours
    assert device.num_created == 3
    other = pages.create(second, LARGE)
    assert other not in handles
    assert figures(pages) == (600, 0, 0, 400)


def test_idle_pages_of_other_sizes_make_room() -> None:
    """As few of them as are needed, and none if the rest is too little anyway."""
    pages, device, first, second = shared(1000)
    kept = [pages.create(first, SMALL) for _ in range(4)]
    for handle in [pages.create(first, SMALL) for _ in range(6)]:
        pages.destroy(handle)
    assert figures(pages) == (400, 600, 0, 600)
    large = pages.create(second, LARGE)
    assert figures(pages) == (700, 300, 0, 300)
    pages.charge(SMALL)
    assert figures(pages) == (700, 200, 100, 200)
    with pytest.raises(OutOfPages, match="1 pages needed, 0 free"):
        pages.create(second, LARGE)
    with pytest.raises(OutOfPages, match="201 bytes needed, 200 free"):
        pages.charge(201)
    assert figures(pages) == (700, 200, 100, 200)
    pages.charge(200)
    assert figures(pages) == (700, 0, 300, 0)
    assert sorted(device.pages) == sorted([*kept, large])
    with pytest.raises(OutOfPages):
        pages.create(first, SMALL)
    pages.discharge(50)
    assert figures(pages) == (700, 0, 250, 50)


def test_idle_pages_are_destroyed_when_the_device_has_less_than_the_account() -> None:
    """Another process takes memory of a GPU."""
    pages, device, first, second = shared(2000, Device(500))
    for handle in [pages.create(first, SMALL) for _ in range(4)]:
        pages.destroy(handle)
    pages.create(second, LARGE)
    assert figures(pages) == (300, 200, 0, 1700)
    with pytest.raises(OutOfPages):
        pages.create(second, LARGE)
    assert figures(pages) == (300, 0, 0, 1700)  # everything was tried
    assert device.left == 200


def test_a_page_that_the_device_will_not_destroy_stays_idle() -> None:
    pages, device, first, second = shared(300)
    for handle in [pages.create(first, SMALL) for _ in range(3)]:
        pages.destroy(handle)
    device.refuses = True
    refused: list[Callable[[], object]] = [
        lambda: pages.create(second, LARGE),
        lambda: pages.charge(1),
        pages.trim,
        lambda: (pages.leave(first), pages.leave(second)),
    ]
    for call in refused:
        with pytest.raises(MapError, match="injected"):
            call()
        assert figures(pages) == (0, 300, 0, 300)
    device.refuses = False
    assert pages.trim() == 300
    assert figures(pages) == (0, 0, 0, 300)
    assert not device.pages
    pages.leave(second)
    pages.close()


def test_the_last_backend_destroys_what_is_idle() -> None:
    pages, device, first, second = shared(1000)
    for handle in [pages.create(first, SMALL), pages.create(second, LARGE)]:
        pages.destroy(handle)
    pages.leave(first)
    assert figures(pages) == (0, 400, 0, 1000)
    assert pages.create(second, SMALL) == 1  # of a backend that is gone
    pages.destroy(1)
    pages.leave(second)
    assert figures(pages) == (0, 0, 0, 1000)
    assert not device.pages
    pages.close()


def test_broken_invariants_are_raised() -> None:
    pages, device, first, _ = shared(1000)
    with pytest.raises(IntegrityError, match="discharge of 1 bytes where 0 are charged"):
        pages.discharge(1)
    with pytest.raises(IntegrityError, match="charge of -1 bytes"):
        pages.charge(-1)
    with pytest.raises(IntegrityError, match="destroy of page 7"):
        pages.destroy(7)
    handle = pages.create(first, SMALL)
    pages.destroy(handle)
    with pytest.raises(IntegrityError, match=f"destroy of page {handle}"):
        pages.destroy(handle)
    with pytest.raises(IntegrityError, match="2 backends open, 0 pages used, 0 bytes charged and 0 swapped"):
        pages.close()
    with pytest.raises(MapError, match="pages of cpu cannot be mapped on cuda:0"):
        pages.join(device.calls("cuda:0"))


def test_backends_of_two_kinds_do_not_share() -> None:
    pages = DevicePages(1 << 20)
    driver = StandInDriver(1 << 20)
    cuda = FlakyCuda(1 << 20, pages, driver)
    with pytest.raises(MapError, match="pages of cuda:0 cannot be mapped on cpu"):
        HostBackend(1 << 20, pages=pages)
    cuda.close()
    assert driver.leftovers == (0, 0, 0, 0, 0)
    pages.close()


def test_threads_never_exceed_the_capacity() -> None:
    """Creators, chargers and trimmers at once; the device sees each page once, and never too many bytes."""
    device = Device(1000)  # `left` would go below 0
    pages, _, *backends = shared(1000, device)
    failures: list[BaseException] = []

    def use(seed: int) -> None:
        rng, handles, charged = random.Random(seed), [], 0
        try:
            for _ in range(400):
                try:
                    match rng.randrange(5):
                        case 0 | 1:
                            handles.append(pages.create(backends[seed % 2], rng.choice([SMALL, LARGE, 70])))
                        case 2 if handles:
                            pages.destroy(handles.pop(rng.randrange(len(handles))))
                        case 3:
                            pages.charge(50)
                            charged += 50
                        case 4 if rng.random() < 0.2:
                            pages.trim()
                        case 4 if charged:
                            pages.discharge(50)
                            charged -= 50
                except OutOfPages:
                    if handles:
                        pages.destroy(handles.pop())
                pages.check_integrity()
            for handle in handles:
                pages.destroy(handle)
            pages.discharge(charged)
        except BaseException as failure:
            failures.append(failure)
            raise

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert pages.used_bytes == pages.charged_bytes == 0
    pages.trim()
    assert not device.pages
    assert device.left == 1000


def test_the_memory_of_a_host_page_follows_its_state() -> None:
    """It stays while the page is idle, and goes when it is destroyed."""
    pages = DevicePages(10 * PAGE_BYTES)
    first, second = HostBackend(0, pages=pages), HostBackend(0, pages=pages)
    file = pages.share(PageFile, lambda: PageFile(0))
    reserved = first.reserve(4 * PAGE_BYTES)
    handles = [first.create(PAGE_BYTES) for _ in range(4)]
    first.map(reserved.address, handles)
    first.tensor(reserved).fill_(7)
    first.unmap(reserved)
    for handle in handles:
        first.destroy(handle)
    assert (file.physical_bytes, pages.idle_bytes) == (4 * PAGE_BYTES, 4 * PAGE_BYTES)
    assert first.memory_info().physical_bytes == 0
    assert first.memory_info().available_bytes == 10 * PAGE_BYTES

    other = second.reserve(2 * PAGE_BYTES)
    taken = second.create(PAGE_BYTES)
    second.map(other.address, [taken])
    assert second.tensor(other)[:PAGE_BYTES].eq(7).all()  # what the last owner wrote: content is undefined
    assert (file.physical_bytes, second.memory_info().physical_bytes) == (4 * PAGE_BYTES, PAGE_BYTES)
    assert pages.trim() == 3 * PAGE_BYTES
    assert file.physical_bytes == PAGE_BYTES

    second.unmap(type(other)(other.address, PAGE_BYTES))
    second.destroy(taken)
    second.release(other)
    first.release(reserved)
    first.close()
    second.close()
    assert file.physical_bytes == 0
    pages.close()


@pytest.mark.parametrize(("status", "error"), [(2, OutOfPages), (700, MapError)])
def test_a_failed_create_changes_nothing(status: int, error: type[Exception]) -> None:
    driver, pages = StandInDriver(1 << 20), DevicePages(4 * PAGE_BYTES)
    backend = FlakyCuda(0, pages, driver)
    backend.fail_at = backend.num_calls + 1
    driver.fail_status = status
    with pytest.raises(error):
        backend.create(PAGE_BYTES)
    assert figures(pages) == (0, 0, 0, 4 * PAGE_BYTES)
    backend.close()
    pages.close()


def test_headroom_of_torch_counts_beside_the_account() -> None:
    """Memory that torch needs is not given to pages, though the account has it; idle pages make room first."""
    driver, pages = StandInDriver(8 * PAGE_BYTES), DevicePages(100 * PAGE_BYTES)
    driver.granularity_bytes = PAGE_BYTES
    first, second = (
        CudaBackend(driver=driver, tensor_device=CPU, headroom_bytes=2 * PAGE_BYTES, pages=pages) for _ in range(2)
    )
    for handle in [first.create(PAGE_BYTES) for _ in range(6)]:
        first.destroy(handle)
    assert second.memory_info().available_bytes == 6 * PAGE_BYTES
    handle = second.create(2 * PAGE_BYTES)
    assert figures(pages)[:2] == (2 * PAGE_BYTES, 4 * PAGE_BYTES)
    second.destroy(handle)
    first.close()
    second.close()
    pages.close()
    assert driver.leftovers == (0, 0, 0, 0, 0)
