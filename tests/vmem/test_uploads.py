"""Weight ranges on CUDA: filled from pinned memory and from files, and undone whole whichever call fails."""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from folio.vmem import CudaBackend, DevicePages, IntegrityError, MapError, OutOfPages
from folio.vmem.backends.cuda import CPU
from folio.vmem.uploads import CudaRange, FilePart, PinnedMemory, Uploads
from tests.vmem.backends.stand_in_driver import GRANULARITY_BYTES as GRANULE
from tests.vmem.backends.stand_in_driver import StandInDriver

PAGE, PIECE = 2 * GRANULE, 4 * GRANULE
NUM_BYTES = 9 * GRANULE - 100  # three pieces, the last one short: five pages
OFFSET = 4096


@dataclass
class Setup:
    """A device of 16 pages, which several owners share."""

    driver: Any
    pages: DevicePages
    backend: CudaBackend
    uploads: Uploads
    owned: list[Any] = field(default_factory=list)

    def range(self, num_bytes: int = NUM_BYTES) -> CudaRange:
        """A range that ends with the test."""
        self.owned.append(CudaRange(num_bytes, self.uploads))
        return self.owned[-1]

    def pinned(self, data: bytes) -> PinnedMemory:
        """Pinned memory with these bytes, until the end of the test."""
        memory = self.uploads.pin(len(data))
        self.owned.append(memory)
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            memory.view(start, len(piece))[:] = piece
        return memory

    def check(self, num_pages: int) -> None:
        """So many pages are mapped and used, and nothing is under way."""
        self.pages.check_integrity()
        assert self.pages.used_bytes == num_pages * PAGE
        assert self.driver.leftovers[2] == self.backend.num_mappings == num_pages
        assert self.driver.host_leftovers[2] == 0
        assert self.driver.violations == []

    def close(self) -> None:
        for each in self.owned:
            each.close()
        self.uploads.close()
        self.pages.close()
        assert self.driver.leftovers == (0, 0, 0, 0, 0)
        assert self.driver.host_leftovers == (0, 0, 0)
        assert self.driver.violations == []


@pytest.fixture
def setup() -> Iterator[Setup]:
    driver, pages = StandInDriver(16 * PAGE), DevicePages(16 * PAGE)
    backend = CudaBackend(driver=driver, tensor_device=CPU, pages=pages, clock=lambda: 0.0)
    made = Setup(driver, pages, backend, Uploads(backend, page_bytes=PAGE, piece_bytes=PIECE))
    yield made
    made.close()


def some_bytes(seed: int) -> bytes:
    return random.Random(seed).randbytes(NUM_BYTES)


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """A file with `some_bytes(0)` after `OFFSET`."""
    path = tmp_path / "file"
    path.write_bytes(bytes(OFFSET) + some_bytes(0))
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def test_the_same_tensor_reads_the_weights_whenever_they_are_mapped(setup: Setup, file: int) -> None:
    weights, keep = setup.range(), setup.uploads.pin(NUM_BYTES)
    tensor, other = weights.tensor(), setup.pinned(some_bytes(1))
    assert len(tensor) == NUM_BYTES
    assert weights.reserved.num_bytes == 5 * PAGE
    sources: list[tuple[PinnedMemory | FilePart, int]] = [
        (FilePart(file, OFFSET), 0),
        (other, 1),
        (FilePart(file, OFFSET, keep), 0),
        (other, 1),
        (keep, 0),
        (FilePart(file, OFFSET), 0),
    ]
    for source, seed in sources:
        setup.check(0)
        weights.map(source)
        setup.check(5)
        assert torch.equal(tensor, as_tensor(some_bytes(seed)))
        weights.unmap()
    setup.check(0)
    weights.close()
    keep.close()


@pytest.mark.gpu
def test_a_real_device_shows_the_weights_whenever_they_are_mapped(tmp_path: Path) -> None:
    """From pinned memory and through the staging buffers, of 1 GB, which is not a whole number of pages."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pages = DevicePages(4 << 30)
    uploads = Uploads(CudaBackend(pages=pages))
    data = torch.randint(-(1 << 31), 1 << 31, ((1 << 28) + 1000,), dtype=torch.int32)
    path = tmp_path / "file"
    data.numpy().tofile(path)
    fd = os.open(path, os.O_RDONLY)
    weights, memory = CudaRange(data.nbytes, uploads), uploads.pin(data.nbytes)
    tensor, expected = weights.tensor().view(torch.int32), data.cuda()
    for source in (FilePart(fd, 0), FilePart(fd, 0, memory), memory, memory, FilePart(fd, 0)):
        weights.map(source)
        assert torch.equal(tensor, expected)
        weights.unmap()
        pages.check_integrity()
    weights.close()
    memory.close()
    uploads.close()
    pages.close()
    os.close(fd)


def test_a_staging_buffer_is_not_read_into_while_it_is_copied(setup: Setup, tmp_path: Path) -> None:
    """The device copies as late as it may: of five pieces through two buffers the last two would arrive three times."""
    data = random.Random(5).randbytes(5 * PIECE)
    (tmp_path / "file").write_bytes(data)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    weights = setup.range(len(data))
    weights.map(FilePart(fd, 0))
    assert torch.equal(weights.tensor(), as_tensor(data))
    assert setup.driver.host_leftovers == (2, 1, 0), "two buffers and a stream stay for the next wake"
    os.close(fd)


def test_pages_go_from_one_models_weights_to_the_next(setup: Setup) -> None:
    source = setup.pinned(some_bytes(0))
    ranges = [setup.range() for _ in range(2)]
    for _ in range(3):
        for weights in ranges:
            weights.map(source)
            weights.unmap()
    assert list(setup.driver.calls).count("cuMemCreate") == 3 + 5, "and three to try what the driver can"


def test_small_kv_pages_make_room_for_weights(setup: Setup) -> None:
    """Idle pages of another size are destroyed, as few as are needed; used ones are not."""
    other = CudaBackend(driver=setup.driver, tensor_device=CPU, pages=setup.pages)
    handles = [other.create(GRANULE) for _ in range(32)]
    weights, source = setup.range(), setup.pinned(some_bytes(0))
    for handle in handles[10:]:
        other.destroy(handle)
    weights.map(source)
    assert (setup.pages.used_bytes, setup.pages.idle_bytes) == (20 * GRANULE, 12 * GRANULE)
    for handle in handles[:10]:
        other.destroy(handle)
    other.close()


def test_what_does_not_fit_is_refused_before_a_byte_is_copied(setup: Setup) -> None:
    weights, source = setup.range(), setup.pinned(some_bytes(0))
    setup.pages.charge(12 * PAGE)
    setup.driver.calls.clear()
    with pytest.raises(OutOfPages) as caught:
        weights.map(source)
    assert (caught.value.needed, caught.value.free) == (5 * PAGE, 4 * PAGE)
    assert list(setup.driver.calls) == []
    setup.check(0)
    setup.pages.discharge(PAGE)
    weights.map(source)
    setup.check(5)
    setup.pages.discharge(11 * PAGE)


@pytest.mark.parametrize(("kind", "status"), [("pinned", 700), ("pinned", 2), ("file", 700), ("keep", 700)])
def test_whichever_call_fails_everything_is_as_before(setup: Setup, file: int, kind: str, status: int) -> None:
    """Of all calls of making the first lane, mapping and unmapping, each in turn; also where another process has taken
    the memory."""
    expected, driver = as_tensor(some_bytes(0)), setup.driver
    weights, memory = setup.range(), setup.pinned(some_bytes(0))
    source = memory if kind == "pinned" else FilePart(file, OFFSET, memory if kind == "keep" else None)

    def wake_and_sleep() -> None:
        weights.map(source)
        setup.check(5)
        assert torch.equal(weights.tensor(), expected)
        weights.unmap()

    for call in itertools.count(1):
        setup.pages.trim()
        driver.calls.clear()
        driver.fail_at, driver.fail_status = call, status
        try:
            wake_and_sleep()
        except (MapError, OutOfPages):
            setup.check(5 if weights.is_mapped else 0)
        last = len(driver.calls) < call
        driver.fail_at = -1
        if weights.is_mapped:
            assert torch.equal(weights.tensor(), expected)
            weights.unmap()
        wake_and_sleep()
        setup.check(0)
        if last:
            break
        if call % 2:  # every other round makes a lane, too
            setup.uploads.close_lanes()
    assert call > 20


def test_memory_that_cannot_be_pinned(setup: Setup) -> None:
    """Whichever piece it is, the ones before are freed."""
    for piece in range(3):
        setup.driver.fail_at = len(setup.driver.calls) + 1 + piece
        with pytest.raises(MapError, match="cuMemHostAlloc failed"):
            setup.uploads.pin(NUM_BYTES)
        assert setup.driver.host_leftovers == (0, 0, 0)
    setup.uploads.pin(NUM_BYTES).close()


def test_a_file_that_ends_too_early(setup: Setup, tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(OFFSET) + some_bytes(0)[:-1])
    fd = os.open(path, os.O_RDONLY)
    weights = setup.range()
    with pytest.raises(MapError, match="ends 1 bytes too early"):
        weights.map(FilePart(fd, OFFSET))
    os.close(fd)
    with pytest.raises(MapError, match="cannot be read: Bad file descriptor"):
        weights.map(FilePart(fd, OFFSET))
    setup.check(0)


def test_weights_are_unmapped_after_the_steps_that_read_them(setup: Setup) -> None:
    weights, source = setup.range(), setup.pinned(some_bytes(0))
    for _ in range(3):
        weights.map(source)
        setup.driver.launch(set(range(weights.reserved.address, weights.reserved.end, PAGE)))
        weights.unmap()  # a page under a running step is a violation
        assert setup.driver.num_running == 0


def test_wrong_order(setup: Setup) -> None:
    weights, source = setup.range(), setup.pinned(some_bytes(0))
    with pytest.raises(IntegrityError, match="not mapped"):
        weights.unmap()
    weights.map(source)
    with pytest.raises(IntegrityError, match="which is mapped"):
        weights.map(source)
    weights.close()
    with pytest.raises(IntegrityError, match="which is closed"):
        weights.map(source)


@pytest.mark.parametrize("seed", range(4))
def test_random_wakes_and_sleeps_of_several_models(setup: Setup, tmp_path: Path, seed: int) -> None:
    """With a KV memory beside them, failures of any call, too little memory, and two models that wake at once."""
    pick = random.Random(seed)
    data = [pick.randbytes(pick.randrange(1, 6 * PAGE)) for _ in range(4)]
    fds, pinned = [], [setup.pinned(each) for each in data]
    for i, each in enumerate(data):
        (tmp_path / str(i)).write_bytes(each)
        fds.append(os.open(tmp_path / str(i), os.O_RDONLY))
    ranges = [setup.range(len(each)) for each in data]
    kv, handles = CudaBackend(driver=setup.driver, tensor_device=CPU, pages=setup.pages), []

    def wake(i: int, from_file: bool) -> None:
        with suppress(OutOfPages, MapError):
            ranges[i].map(FilePart(fds[i], 0) if from_file else pinned[i])

    def sleep(i: int) -> None:
        with suppress(MapError):
            ranges[i].unmap()

    def check() -> None:
        setup.pages.check_integrity()
        assert setup.driver.violations == []
        used = sum(weights.reserved.num_bytes for weights in ranges if weights.is_mapped) + len(handles) * GRANULE
        assert setup.pages.used_bytes == used
        for weights, each in zip(ranges, data, strict=True):
            if weights.is_mapped:
                assert torch.equal(weights.tensor(), as_tensor(each))

    for _ in range(150):
        setup.driver.fail_rate = pick.choice([0, 0, 0.03])
        setup.driver.fail_status = setup.driver.CUresult(pick.choice([2, 700]))
        asleep = [i for i, weights in enumerate(ranges) if not weights.is_mapped]
        action = pick.random()
        if action < 0.3 and asleep:
            wake(pick.choice(asleep), pick.random() < 0.5)
        elif action < 0.4 and len(asleep) > 1:
            threads = [threading.Thread(target=wake, args=(i, True)) for i in pick.sample(asleep, 2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        elif action < 0.6 and len(asleep) < len(ranges):
            sleep(pick.choice([i for i in range(len(ranges)) if i not in asleep]))
        elif action < 0.8:
            with suppress(OutOfPages, MapError):
                handles.append(kv.create(GRANULE))
        elif handles:
            kv.destroy(handles.pop(pick.randrange(len(handles))))
        setup.driver.fail_rate = 0.0
        check()
    for handle in handles:
        kv.destroy(handle)
    kv.close()
    for fd in fds:
        os.close(fd)


def test_pinned_memory_that_is_left_is_an_error(setup: Setup) -> None:
    """Regression: `close` promised it, and left the memory pinned without a word."""
    first, second = setup.uploads.pin(NUM_BYTES), setup.uploads.pin(1)
    for num_bytes, memory in ((NUM_BYTES + 1, first), (1, second)):
        assert setup.uploads.pinned_bytes == num_bytes
        with pytest.raises(IntegrityError, match=f"closed with {num_bytes} bytes of memory pinned"):
            setup.uploads.close()
        memory.close()


def test_what_cannot_be_closed_is_closed_by_the_next_attempt(setup: Setup, file: int) -> None:
    driver, weights = setup.driver, setup.range()
    weights.map(FilePart(file, OFFSET))
    weights.close()
    for name in ("cuMemFreeHost", "cuMemFreeHost", "cuStreamDestroy"):
        driver.fail_at = len(driver.calls) + 1
        with pytest.raises(MapError):
            setup.uploads.close()
        assert driver.calls[-1] == name
        driver.fail_at = len(driver.calls) + 2  # the next call is made, and the one after it fails
        with suppress(MapError):
            setup.uploads.close()
    driver.fail_at = -1
