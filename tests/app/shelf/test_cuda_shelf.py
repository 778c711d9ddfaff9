"""A shelf on CUDA, over the stand-in driver: weights and KV caches are pages of one device."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from folio.app.config.engine import EngineConfig, ResolvedConfig
from folio.app.config.shelf import ModelConfig
from folio.app.engine import async_engine
from folio.app.engine.async_engine import AsyncEngine
from folio.app.engine.memory import kv_plan
from folio.app.engine.model import checkpoint_files
from folio.app.engine.model.device import resolve
from folio.app.engine.sampling.params import SamplingParams
from folio.app.errors import ConfigError, EngineError, UnavailableError
from folio.app.models.weights.pinned_share import PinnedShare
from folio.app.shelf import device, measure
from folio.app.shelf import shelf as shelf_module
from folio.vmem import CudaBackend, DevicePages
from folio.vmem.backends.cuda import CPU
from folio.vmem.uploads import Uploads
from tests.app.engine.conftest import without_compiler  # noqa: F401 (fixture)
from tests.app.engine.execution.conftest import replays  # noqa: F401 (fixture)
from tests.app.shelf.shelf_faults import Mount
from tests.app.shelf.shelves import TinyModels, device_of, in_step_thread, outputs, put_to_sleep, sleep_now
from tests.conftest import tokens
from tests.fakes.recorded_graph import RecordedGraph
from tests.processes import until_async
from tests.vmem.backends.stand_in_driver import StandInDriver

NAMES = ("llama", "gemma2", "bamba", "draft")
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
KV_BYTES = 1 << 20
DEVICE_BYTES = 1 << 28
PAGE = 4096


@pytest.fixture
def driver(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInDriver]:
    """Shelves are on this device, with small pages; models still compute on the CPU.

    On a GPU launched work ends by itself. On the stand-in driver it ends where a thread waits for it, and here after
    each query, too: what is given back after that work is only asked for, and no thread may wait."""
    for name in NAMES:
        models.reference(name)  # whose memory stays on the CPU
    made = StandInDriver(DEVICE_BYTES)
    made.granularity_bytes = PAGE
    ask = made.cuEventQuery

    def ask_while_time_passes(event: Any) -> Any:
        answer = ask(event)
        made.finish_work()
        return answer

    made.cuEventQuery = ask_while_time_passes

    def backend(*_: object, pages: DevicePages | None = None, **__: object) -> CudaBackend:
        return CudaBackend(driver=made, tensor_device=CPU, pages=pages)

    for module in (kv_plan, device):
        monkeypatch.setattr(module, "select_backend", backend)
    monkeypatch.setattr(device, "resolve", lambda _: SimpleNamespace(device="cuda"))
    monkeypatch.setattr(device, "Uploads", partial(Uploads, page_bytes=4 * PAGE, piece_bytes=8 * PAGE))
    yield made
    assert made.leftovers == (0, 0, 0, 0, 0)
    assert made.host_leftovers == (0, 0, 0)
    assert made.violations == []


def cases(name: str) -> list[tuple[list[int], SamplingParams]]:
    return [(tokens(5 + 13 * i, i), GREEDY) for i in range(3)]


async def found(model: Any, name: str) -> list[Any]:
    return await asyncio.gather(*(outputs(model, *case) for case in cases(name)))


async def test_models_take_turns_in_memory_for_some_of_them(models: TinyModels, driver: StandInDriver) -> None:
    """Each gives the tokens that it gives alone."""
    alone = {name: [await models.alone(name, *case) for case in cases(name)] for name in NAMES}
    memory_bytes = models.memory_for("draft", "llama", room_bytes=KV_BYTES, beside=NAMES)
    async with models.opened([models.config(name) for name in NAMES], memory_bytes) as shelf:
        for _ in range(2):
            together = await asyncio.gather(*(found(shelf.model(name), name) for name in NAMES))
            assert dict(zip(NAMES, together, strict=True)) == alone
            await shelf.check_integrity()
        assert sum(status.num_evictions for status in shelf.statuses()) > 0
        pages = device_of(shelf).shared.pages
        awake = sum(status.device_weight_bytes for status in shelf.statuses())
        assert pages.used_bytes >= awake > 0
        assert driver.host_leftovers[0] > 0, "copies are pinned"


@pytest.mark.daily(1)
@pytest.mark.parametrize(("mixed", "room"), [("off", 4), ("on", 16)])
async def test_graphs_are_charged_and_leave_with_their_model(
    mixed: str,
    room: int,
    models: TinyModels,
    driver: StandInDriver,
    without_compiler: None,  # noqa: F811
    replays: list[RecordedGraph],  # noqa: F811
    tmp_path: Path,
) -> None:
    """Regression: they were charged to nothing, and stayed while their model slept. Requests of models that take turns
    get the tokens that they get without graphs, graphs are replayed in every turn, and capturing one again is no late
    compilation."""
    names, alone = NAMES[:2], {}
    for name in names:
        engine = AsyncEngine(models.engine(name, kv_memory_bytes=4 << 20, decode_graphs="off"))
        alone[name] = await found(engine, name)
        engine.close()
    engines = [models.engine(name, decode_graphs="on", mixed_graphs=mixed) for name in names]
    configs = [ModelConfig(name=name, engine=engine) for name, engine in zip(names, engines, strict=True)]
    memory_bytes = models.memory_for("llama", room_bytes=room * KV_BYTES, beside=names)
    async with models.opened(configs, memory_bytes, weights_dir=tmp_path) as shelf:
        pages = device_of(shelf).shared.pages
        num_late, kinds = [], set[str]()
        for _ in range(3):
            together = await asyncio.gather(*(found(shelf.model(name), name) for name in names))
            assert dict(zip(names, together, strict=True)) == alone
            await shelf.check_integrity()
            loaded = shelf.engines()
            num_late.append(min(engine.take_activity().num_late_compilations for engine in loaded.values()))
            for name in names:
                assert await found(shelf.model(name), name) == alone[name]
                footprint = loaded[name].driver.engine.footprint
                kinds |= {kind for kind, _ in footprint.graphs[0].captured}
                before = await in_step_thread(shelf, lambda f=footprint: (f.graph_bytes, pages.charged_bytes))
                await put_to_sleep(shelf, name)
                after = await in_step_thread(shelf, lambda f=footprint: (f.graph_bytes, pages.charged_bytes))
                assert after == (0, before[1] - before[0])
                assert before[0] > 0
            assert len(replays) > 40
            replays.clear()
        # Times decide which batches there are: one may be new in a later round.
        assert any(before == after for before, after in pairwise(num_late)), num_late
        assert ("mixed" in kinds) == (mixed == "on")


async def test_graphs_give_way_to_requests(
    models: TinyModels,
    driver: StandInDriver,
    without_compiler: None,  # noqa: F811
    replays: list[RecordedGraph],  # noqa: F811
    tmp_path: Path,
) -> None:
    """They are dropped for a request that needs their memory, which is never refused for them."""
    config = ModelConfig(name="llama", engine=models.engine("llama", decode_graphs="on"))
    memory_bytes = models.memory_for("llama", room_bytes=8 * KV_BYTES)
    async with models.opened([config], memory_bytes, weights_dir=tmp_path) as shelf:
        model = shelf.model("llama")
        expected = await found(model, "llama")
        engine = shelf.engines()["llama"].driver.engine

        def graphs_beside(room_bytes: int, least_bytes: int) -> int:
            engine.set_room(room_bytes)
            measure._graph_bytes(engine, least_bytes)
            return engine.footprint.graph_bytes  # without what a step has wanted since

        held = await in_step_thread(shelf, lambda: engine.footprint.graph_bytes)
        assert held > 0
        for room_bytes, least_bytes, is_kept in (
            (8 * held, 0, True),
            (8 * held, 8 * held - 1, False),
            (held, 0, False),
        ):
            assert await found(model, "llama") == expected
            after = await in_step_thread(shelf, partial(graphs_beside, room_bytes, least_bytes))
            assert (after > 0) == is_kept
            if not is_kept:
                assert await in_step_thread(shelf, lambda: engine.footprint.graph_bytes) == 0
        assert await found(model, "llama") == expected
        await shelf.check_integrity()


async def test_sleeps_and_wakes_while_calls_of_the_driver_fail(models: TinyModels, driver: StandInDriver) -> None:
    """Requests give their tokens or end with the reason, and memory adds up."""
    names = NAMES[:2]
    alone = {name: [await models.alone(name, *case) for case in cases(name)] for name in names}
    pick = random.Random(0)
    memory_bytes = models.memory_for("llama", "gemma2", room_bytes=KV_BYTES)
    async with models.opened([models.config(name) for name in names], memory_bytes) as shelf:
        for name in names:
            assert await found(shelf.model(name), name) == alone[name]
        num_right = 0
        for _ in range(15):
            name = pick.choice(names)
            task = asyncio.create_task(found(shelf.model(name), name))
            driver.fail_rate = pick.choice([0.0, 0.005])
            try:
                await put_to_sleep(shelf, pick.choice(names))
                assert await task == alone[name]
                num_right += 1
            except (EngineError, UnavailableError):
                await asyncio.sleep(0.2)  # the longest time for which a failed model refuses requests, here
            finally:
                driver.fail_rate = 0.0
            await shelf.check_integrity()
            assert driver.violations == []
        assert num_right > 5
        for name in names:
            while True:
                try:
                    assert await found(shelf.model(name), name) == alone[name]
                    break
                except (EngineError, UnavailableError):  # its engine is being loaded again
                    await asyncio.sleep(0.05)


async def test_steps_go_on_while_a_checkpoint_is_read(
    models: TinyModels, driver: StandInDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: engines are created by the thread of all steps, which read the files, too. If these did not answer,
    no model did."""
    mount = Mount(monkeypatch, checkpoint_files, "_read", "gemma2")

    def on_cuda(config: EngineConfig) -> ResolvedConfig:
        return replace(resolve(config), device="cuda")

    monkeypatch.setattr(async_engine, "resolve", on_cuda)
    alone = {name: [await models.alone(name, *case) for case in cases(name)] for name in NAMES[:2]}
    memory_bytes = models.memory_for("llama", "gemma2", room_bytes=2 * KV_BYTES)
    async with models.opened([models.config(name) for name in NAMES[:2]], memory_bytes) as shelf:
        assert await found(shelf.model("llama"), "llama") == alone["llama"]
        load = asyncio.create_task(found(shelf.model("gemma2"), "gemma2"))
        await until_async(mount.asked.is_set, 30.0)
        async with asyncio.timeout(30):
            assert await found(shelf.model("llama"), "llama") == alone["llama"]
        mount.answers.set()
        assert await load == alone["gemma2"]
        await shelf.check_integrity()


class FakeTorch:
    """`DeviceMemory`: what the driver's pages leave, and what torch has of it."""

    total, cached, num_emptied = 2 * DEVICE_BYTES, 1 << 16, 0

    def __init__(self, driver: StandInDriver) -> None:
        self._driver = driver

    def free_and_total(self) -> tuple[int, int]:
        return self.total - self._driver.used_bytes - self.reserved() - 1000, self.total

    def reserved(self) -> int:
        return self.cached

    def pinned(self) -> int:
        return 50

    def give_back(self) -> None:
        self.num_emptied, self.cached = self.num_emptied + 1, 1 << 16


async def test_the_devices_memory_is_told_by_part_and_leaves_with_the_models(
    models: TinyModels, driver: StandInDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While models sleep no page is left but anchors, once idle pages have gone back; and what torch has kept of a load
    beyond a step's workspace is given back."""
    torch_ = FakeTorch(driver)
    for module in (device, shelf_module):
        monkeypatch.setattr(module, "TorchMemory", lambda: torch_)
    names = ("llama", "gemma2")
    memory_bytes = models.memory_for(*names, room_bytes=2 * KV_BYTES)
    async with models.opened([models.config(name) for name in names], memory_bytes) as shelf:
        torch_.cached = 1 << 40
        for name in names:
            await found(shelf.model(name), name)
        assert torch_.num_emptied == 1, "the second load leaves no more than a workspace"
        footprints = [engine.driver.engine.footprint for engine in shelf.engines().values()]
        anchors = sum(footprint.anchor_bytes for footprint in footprints)
        shared = device_of(shelf)
        assert shared.uploads is not None

        def check(num_awake: int) -> None:
            """In one turn of the thread for all, which wakes models ahead otherwise."""
            for name in names[num_awake:]:
                if shelf.model(name).state == "awake":
                    sleep_now(shelf, name)
            shared.shared.pages.trim()
            weights = sum(status.device_weight_bytes for status in shelf.statuses())
            kv = sum(footprint.held_bytes for footprint in footprints)
            gpu = shelf.gpu_memory()
            assert gpu is not None
            assert gpu.parts == {
                "weights": weights,
                "kv": kv + anchors,
                "graphs": 0,
                "activations": torch_.cached,
                "idle": 0,
                "other": 1000,
                "free": torch_.free_and_total()[0],
            }
            assert sum(gpu.parts.values()) == torch_.total
            assert (weights > 0, kv > 0) == (num_awake > 0, num_awake > 0)
            assert gpu.pinned_bytes == shared.uploads.pinned_bytes + 50
            if not num_awake:
                assert driver.leftovers[0] == len(names), "anchor pages"

        await in_step_thread(shelf, lambda: [check(num_awake) for num_awake in (2, 1, 0)])


async def test_replicas_of_a_machine_pin_no_more_than_a_share_together(
    models: TinyModels, driver: StandInDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """What another one has pinned counts; without a copy in pinned memory a model wakes from its file."""
    monkeypatch.setattr(device, "default_folder", lambda: tmp_path / "pinned")
    caplog.set_level("INFO", "folio.app.models.weights.pinned_copy")
    most_bytes = int(device._HOST_SHARE * device.Machine.detect().memory_bytes)
    other = PinnedShare(most_bytes, tmp_path / "pinned")
    alone = [await models.alone("llama", *case) for case in cases("llama")]
    for left_bytes, num_copied in ((0, 0), (most_bytes, 1)):
        taken = most_bytes - left_bytes
        assert other.take(taken)
        async with models.opened([models.config("llama")], models.memory_for("llama", room_bytes=KV_BYTES)) as shelf:
            for _ in range(2):
                assert await found(shelf.model("llama"), "llama") == alone
                await put_to_sleep(shelf, "llama")
            uploads_ = device_of(shelf).uploads
            staged = 2 * 8 * PAGE if not num_copied else 0
            assert (uploads_.pinned_bytes > staged) == bool(num_copied)  # type: ignore[union-attr]
        other.give_back(taken)
    other.close()
    assert caplog.text.count("wakes from the file of its weights") == 1


def test_more_memory_than_the_device_has(models: TinyModels, driver: StandInDriver) -> None:
    with pytest.raises(ConfigError, match=rf"device_memory_bytes is {DEVICE_BYTES + 1}; .* set at most {DEVICE_BYTES}"):
        device.ShelfDevice([models.config("llama")], DEVICE_BYTES + 1, 0, models.weights_dir, None)
    device.ShelfDevice([models.config("llama")], DEVICE_BYTES, 0, models.weights_dir, None).close()
