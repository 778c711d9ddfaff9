"""Weight stores of a CUDA device: from a pinned copy, from the file, or from the checkpoint."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from folio.app.errors import ModelError
from folio.app.models.weights.arena import ModelTensors, WeightArena, collect
from folio.app.models.weights.store import WeightStore
from folio.vmem import CudaBackend, DevicePages, MapError, OutOfPages, VmemError
from folio.vmem.backends.cuda import CPU
from folio.vmem.uploads import Uploads
from tests.app.models.weights.stored import KEY, Model, is_right
from tests.vmem.backends.stand_in_driver import GRANULARITY_BYTES as GRANULE
from tests.vmem.backends.stand_in_driver import StandInDriver

PAGE, PIECE, CAPACITY = 2 * GRANULE, 4 * GRANULE, 64 * GRANULE


Small = partial(Model, num_parameters=9 * GRANULE // 4)
SIZE = collect(Small()).table.num_bytes


class Device:
    """Stores of one fake device, whose models are made of seeds."""

    def __init__(self) -> None:
        self.driver, self.pages = StandInDriver(CAPACITY), DevicePages(CAPACITY)
        backend = CudaBackend(driver=self.driver, tensor_device=CPU, pages=self.pages)
        self.uploads = Uploads(backend, page_bytes=PAGE, piece_bytes=PIECE)
        self.made: list[int] = []

    def store(self, folder: Path, host_memory_bytes: int = 0, **settings: Any) -> WeightStore:
        return WeightStore(
            folder, charges=self.pages, uploads=self.uploads, host_memory_bytes=host_memory_bytes, **settings
        )

    def move(self, store: WeightStore, seed: int = 0) -> tuple[Model, WeightArena]:
        def make() -> ModelTensors:
            self.made.append(seed)
            return self.on_device(store, Small(seed))

        model = Small(seed)
        key = replace(KEY, name=f"model-{seed}")
        return model, store.move(self.on_device(store, model), key, make)

    def on_device(self, store: WeightStore, model: Model) -> ModelTensors:
        return collect(model, dropped=store.room_to_make(SIZE))

    def check(self, *awake: WeightArena) -> None:
        self.pages.check_integrity()
        assert self.pages.used_bytes == sum(arena.num_bytes for arena in awake)
        assert self.pages.charged_bytes == 0
        assert self.driver.leftovers[2] * PAGE == self.pages.used_bytes
        assert self.driver.violations == []

    def close(self) -> None:
        self.uploads.close()
        self.pages.close()
        assert self.driver.leftovers == (0, 0, 0, 0, 0)
        assert self.driver.host_leftovers == (0, 0, 0)
        assert self.driver.violations == []

    @property
    def num_pinned(self) -> int:
        return self.driver.host_leftovers[0]


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()
    yield made
    made.close()


def test_a_model_wakes_from_its_pinned_copy_without_its_file(device: Device, tmp_path: Path) -> None:
    store = device.store(tmp_path, host_memory_bytes=SIZE + 100)
    model, arena = device.move(store)
    address = model.weight.data_ptr()
    assert arena.num_bytes == 5 * PAGE
    for path in tmp_path.iterdir():
        os.truncate(path, 0)
    for _ in range(3):
        device.check(arena)
        assert is_right(model)
        arena.unmap()
        device.check()
        arena.map()
    assert model.weight.data_ptr() == address
    assert device.made == []
    assert device.num_pinned == 3, "pieces of the copy, and no staging buffers"
    arena.close()
    assert device.num_pinned == 0
    assert store.take_host_bytes(SIZE + 100)


def test_models_beyond_the_host_memory_wake_from_their_files(device: Device, tmp_path: Path) -> None:
    """A file that has changed is made again from the checkpoint. When a copy is given up, the next wake has room."""
    store = device.store(tmp_path, host_memory_bytes=2 * SIZE - 1)
    (first, kept), (second, arena) = device.move(store, 0), device.move(store, 1)
    for _ in range(3):
        arena.unmap()
        arena.map()
        assert is_right(second, 1)
        device.check(kept, arena)
    assert device.num_pinned == 3 + 2, "the first one's copy, and two staging buffers"
    assert is_right(first)
    arena.unmap()
    (path,) = tmp_path.glob("model-1*")
    os.truncate(path, 100)
    arena.map()
    assert (device.made, is_right(second, 1)) == ([1], True)
    kept.close()
    for _ in range(2):
        arena.unmap()
        arena.map()
        assert device.num_pinned == 3 + 2
    path.unlink()
    os.truncate(next(tmp_path.glob("model-0*")), 0)
    arena.unmap()
    arena.map()
    assert is_right(second, 1)
    arena.close()


@pytest.mark.parametrize("host_memory_bytes", [0, SIZE])
def test_without_a_file_there_is_the_copy_or_the_checkpoint(
    device: Device, tmp_path: Path, host_memory_bytes: int
) -> None:
    """And nothing beside, in host memory, while the model is awake or asleep."""
    folder = tmp_path / "file"
    folder.write_text("no folder")

    def num_memfds() -> int:
        links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return sum("folio-weights" in link for link in links)

    model, arena = device.move(device.store(folder, host_memory_bytes))
    for _ in range(2):
        assert num_memfds() == 0
        arena.unmap()
        assert num_memfds() == 0
        device.check()
        arena.map()
        assert is_right(model)
        device.check(arena)
    assert device.made == ([] if host_memory_bytes else [0, 0])
    arena.close()


def test_memory_that_cannot_be_pinned_leaves_the_file(
    device: Device, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = device.store(tmp_path, host_memory_bytes=SIZE)
    alloc = device.driver.cuMemHostAlloc
    device.driver.cuMemHostAlloc = lambda size, flags: (device.driver.CUresult(2), 0)
    with pytest.raises(MapError):  # not even staging buffers
        device.move(store)
    assert "cannot be pinned" in caplog.text
    device.check()
    device.driver.cuMemHostAlloc = alloc
    model, arena = device.move(store)
    assert is_right(model)
    arena.close()
    assert store.take_host_bytes(SIZE)


def test_a_model_that_is_made_on_the_device_takes_its_memory_once(device: Device, tmp_path: Path) -> None:
    """While it is made it has torch's memory, for which others' idle pages make room, and afterwards pages."""
    other = CudaBackend(driver=device.driver, tensor_device=CPU, pages=device.pages)
    handles = [other.create(GRANULE) for _ in range(64)]
    for handle in handles[:10]:
        other.destroy(handle)
    store = device.store(tmp_path)
    model = Small(0)
    tensors = device.on_device(store, model)
    assert (device.pages.idle_bytes, device.pages.charged_bytes) == (0, SIZE)
    assert device.pages.available_bytes < SIZE
    arena = store.move(tensors, KEY, lambda: tensors)
    assert is_right(model)
    assert (device.pages.charged_bytes, device.pages.available_bytes) == (0, 0)
    with pytest.raises(OutOfPages):
        store.room_to_make(1)
    arena.close()
    for handle in handles[10:]:
        other.destroy(handle)
    other.close()


def test_whichever_call_of_the_driver_fails_in_a_load(device: Device, tmp_path: Path) -> None:
    """The load fails, or does without a pinned copy; nothing is left of a failed one."""
    num_failed, driver = 0, device.driver
    for call in itertools.count(1):
        store = device.store(tmp_path / str(call), host_memory_bytes=SIZE)
        device.pages.trim()
        driver.calls.clear()
        driver.fail_at = call
        try:
            model, arena = device.move(store)
        except MapError:
            num_failed += 1
            device.check()
            assert (device.num_pinned, driver.leftovers[1]) == (0, 0)
        else:
            device.check(arena)
            assert is_right(model)
            driver.fail_at = -1
            arena.close()
        is_last = len(driver.calls) < call
        driver.fail_at = -1
        assert store.take_host_bytes(SIZE)
        device.uploads.close_lanes()
        if is_last:
            break
    assert num_failed > 10


def test_tensors_that_cannot_move_leave_nothing(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: their addresses stayed reserved and their memory charged, until the process ended."""

    def fail(*_: object) -> None:
        raise RuntimeError("cannot swap a tensor that has a weak reference")

    monkeypatch.setattr(ModelTensors, "attach", fail)
    with pytest.raises(RuntimeError, match="weak reference"):
        device.move(device.store(tmp_path))
    device.check()


def test_a_closed_arena_is_not_mapped(device: Device, tmp_path: Path) -> None:
    """Regression: the weights were made again from the checkpoint, and their pinned copy was never freed."""
    store = device.store(tmp_path, host_memory_bytes=SIZE)
    arena = device.move(store)[1]
    arena.close()
    with pytest.raises(ModelError, match="given back: the engine of their model has stopped"):
        arena.map()
    assert (device.made, device.num_pinned) == ([], 0)
    assert store.take_host_bytes(SIZE)


def test_weights_of_another_checkpoint_are_an_error(device: Device, tmp_path: Path) -> None:
    store = device.store(tmp_path)

    def other() -> ModelTensors:
        return device.on_device(store, Small(num_extra=4))

    arena = store.move(collect(Small(0)), KEY, other)
    arena.unmap()
    os.truncate(next(tmp_path.iterdir()), 0)
    with pytest.raises(ModelError, match="has other tensors than when it was loaded"):
        arena.map()
    device.check()
    arena.close()


def test_a_wake_that_fails_is_tried_again(device: Device, tmp_path: Path) -> None:
    """From every kind of source, with any calls failing."""
    makes: list[Callable[[], tuple[Model, WeightArena]]] = [
        lambda: device.move(device.store(tmp_path / "copy", SIZE), 0),
        lambda: device.move(device.store(tmp_path / "file"), 1),
        lambda: device.move(device.store(Path("/dev/null/none")), 2),
    ]
    models = [make() for make in makes]
    for _ in range(60):
        for seed, (model, arena) in enumerate(models):
            device.driver.fail_rate = 0.02
            with suppress(VmemError):
                arena.unmap() if arena.is_mapped else arena.map()
            device.driver.fail_rate = 0.0
            device.check(*[arena for _, arena in models if arena.is_mapped])
            assert not arena.is_mapped or is_right(model, seed)
    for _, arena in models:
        arena.close()
