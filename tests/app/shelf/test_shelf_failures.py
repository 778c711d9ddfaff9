"""Models that fail: their requests end with the reason, those of others go on, and they are loaded again."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from folio.app.engine.engine import Engine
from folio.app.errors import EngineError, UnavailableError
from folio.app.models.weights.store import StoredWeights
from folio.app.shelf import control, moves
from folio.app.shelf.arbiter import Arbiter
from folio.vmem import IntegrityError, MapError, OutOfPages
from folio.vmem.backends import host_calls
from folio.vmem.backends.host import HostBackend
from tests.app.engine.engines import stall_after
from tests.app.shelf.shelf_faults import Mount
from tests.app.shelf.shelves import (
    GREEDY,
    LONG,
    TinyModels,
    control_of,
    in_step_thread,
    outputs,
    put_to_sleep,
    served,
    until_state,
)
from tests.processes import until_async

BOTH = ("llama", "qwen3")

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


class Panic(BaseException):
    """As a library in Rust raises it."""


@contextmanager
def failing(
    owner: Any, name: str, error: BaseException, fails: Callable[..., bool] = lambda *_: True
) -> Iterator[None]:
    real = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        if fails(*args):
            raise error
        return real(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield


def in_move(*_: Any) -> bool:
    return threading.current_thread().name == "folio-move-llama"


@contextmanager
def damaged(folder: Path, damage: Callable[[Path], object]) -> Iterator[None]:
    shutil.copytree(folder, whole := folder.with_name("whole"))
    damage(folder)
    yield
    shutil.rmtree(folder, ignore_errors=True)
    whole.rename(folder)


Fails = Callable[[Engine, Path], AbstractContextManager[None]]
LOADS: list[Fails] = [
    *(
        lambda _, __, error=error: failing(control, "AsyncEngine", error, in_move)
        for error in (OSError("no space left"), Panic("index out of bounds"), SystemExit(1))
    ),
    lambda _, __: failing(  # regression: it ended the thread of all steps
        threading.Thread, "start", RuntimeError("can't start new thread"), lambda t: t.name == "folio-move-llama"
    ),
    lambda _, folder: damaged(folder, shutil.rmtree),
    lambda _, folder: damaged(folder, lambda path: (path / "config.json").write_text("{")),
    lambda _, folder: damaged(folder, lambda path: os.truncate(path / "model.safetensors", 1000)),
]
STEPS: list[Fails] = [
    lambda engine, _, error=error: failing(engine, "step", error)
    for error in (IntegrityError("injected"), OSError("no space left on device"), Panic("bounds"))
]
SLEEPS: list[Fails] = [
    *(
        lambda engine, _, name=name: failing(engine, name, MapError("injected"))
        for name in ("sleep", "wake", "set_kv_budget")
    ),
    lambda engine, _: failing(engine.footprint, "map_weights", MapError("injected")),
]


FAILURES = {"load": LOADS, "step": STEPS, "sleep": SLEEPS}


@pytest.mark.parametrize("at", FAILURES)
async def test_a_model_that_fails_is_loaded_again(models: TinyModels, tmp_path: Path, at: str) -> None:
    alone = {name: await models.alone(name, [1, 2], LONG) for name in BOTH}
    short = [alone["llama"][0][:24]]
    folder = tmp_path / "model"
    shutil.copytree(models.checkpoint("llama"), folder)
    config = models.config("llama")
    config = replace(config, engine=replace(config.engine, model=str(folder)))
    async with models.shelf(config, "qwen3", memory_of=BOTH) as shelf:
        for fails in FAILURES[at]:
            model = shelf.model("llama")
            engine: Any = None if at == "load" else (await model.ready()).driver.engine
            other = asyncio.create_task(outputs(shelf.model("qwen3"), [1, 2], LONG))
            with fails(engine, folder):
                ends = []
                for _ in range(3 if at == "step" else 1):  # an engine stops after several failures
                    requests = [asyncio.create_task(outputs(model, [1, 2], LONG)) for _ in range(3)]
                    if at == "sleep":
                        await put_to_sleep(shelf, "llama")
                    ends += await asyncio.gather(*requests, return_exceptions=True)
                assert all(isinstance(end, EngineError) or (at == "sleep" and end == alone["llama"]) for end in ends)
                if at != "sleep":
                    await until_state(shelf, "llama", "failed")
                if at == "load":
                    error = model.status.error
                    assert error is not None
                    assert error in str(ends[0])
                assert shelf.healthy
                shelf.check()
                await shelf.check_integrity()
            await until_async(lambda: served(shelf, "llama", short))
            assert await other == alone["qwen3"]
            assert {status.error for status in shelf.statuses()} == {None}
            await shelf.check_integrity()
            if at == "load":
                await shelf.remove("llama")
                shelf.add(config)


@pytest.mark.parametrize("error", [OutOfPages(1, 0), MapError("injected")])
async def test_a_page_that_a_load_cannot_have(models: TinyModels, error: Exception) -> None:
    """Regression: a load that found no page failed, although one that finds no memory for weights waits for it. A
    self-test that found no page left its memfd open."""
    alone = await models.alone("draft", [1, 2], GREEDY)
    config = models.config("llama", of="draft")
    async with models.shelf(config, memory_of=("draft", "llama")) as shelf:
        num_files = len(os.listdir("/proc/self/fd"))
        for page in range(3):
            pages = itertools.count()

            def is_page(*_: Any, page: int = page, pages: Iterator[int] = pages) -> bool:
                return in_move() and next(pages) == page

            with failing(HostBackend, "create", error, is_page):
                if isinstance(error, OutOfPages):
                    assert await outputs(shelf.model("llama"), [1, 2], GREEDY) == alone
                else:
                    with pytest.raises(UnavailableError, match="injected"):
                        await outputs(shelf.model("llama"), [1, 2], GREEDY)
            await until_async(lambda: served(shelf, "llama", alone))
            assert next(pages) > page
            await shelf.remove("llama")
            shelf.add(config)
    assert len(os.listdir("/proc/self/fd")) == num_files


@pytest.mark.parametrize(
    ("phase", "owner", "name"),
    [("load", control, "AsyncEngine"), ("wake", StoredWeights, "open"), ("wake", host_calls, "populate")],
)
async def test_a_load_or_wake_that_hangs_ends_the_process_and_is_not_repeated_at_once(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, phase: str, owner: Any, name: str
) -> None:
    """Regression: its requests waited for ever, and so did every other model's once its engine was stopped. Files that
    do not answer must not end each new process either."""
    alone = {name: await models.alone(name, [1, 2], GREEDY) for name in BOTH}
    async with models.shelf(*BOTH, memory_of=BOTH, room_bytes=32 << 20) as shelf:
        model, other = shelf.model("llama"), shelf.model("qwen3")
        for waked in (model, other) if phase == "wake" else (other,):
            await waked.ready()
        mount = Mount(monkeypatch, owner, name, "llama")
        await put_to_sleep(shelf, "llama")
        waiting = asyncio.create_task(outputs(model, [1, 2], GREEDY))
        await until_async(mount.asked.is_set, 30.0)
        assert shelf.healthy
        assert await outputs(other, [1, 2], GREEDY) == alone["qwen3"]
        with monkeypatch.context() as patch:
            patch.setattr(moves, "_LOAD_S", 0.0)
            await until_async(lambda: not shelf.healthy, 30.0)
        message = rf"the {phase} of the model 'llama' hangs: .* files of '.*'\. A new process .* after 300 s"
        with pytest.raises(UnavailableError, match=message):
            shelf.check()
        with pytest.raises(UnavailableError, match=message):
            await waiting
        monkeypatch.undo()
        async with models.shelf(*BOTH, memory_of=BOTH, room_bytes=32 << 20) as next_process:
            for _ in range(2):
                with pytest.raises(UnavailableError, match=r"its load hung .* tried again in 300 s") as refused:
                    await outputs(next_process.model("llama"), [1, 2], GREEDY)
                assert refused.value.retry_after_s == pytest.approx(5, abs=4)
            assert await outputs(next_process.model("qwen3"), [1, 2], GREEDY) == alone["qwen3"]
            assert next_process.healthy
            control.HungLoads(control.default_folder().parent).forget(models.config("llama"))
            await until_async(lambda: served(next_process, "llama", alone["llama"]), 30.0)
        mount.answers.set()


async def test_a_load_fails_after_its_request_was_cancelled(
    models: TinyModels, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: asyncio logged "Future exception was never retrieved" for each of these requests."""
    begun, released = threading.Event(), threading.Event()

    def begin(*_: Any) -> bool:
        begun.set()
        return released.wait(60)

    async with models.shelf("llama") as shelf:
        with failing(control, "AsyncEngine", OSError("injected"), begin):
            task = asyncio.create_task(outputs(shelf.model("llama"), [1, 2], GREEDY))
            await until_async(begun.is_set)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            released.set()
            await until_state(shelf, "llama", "failed")
            await asyncio.sleep(0)
    del task  # and the frames of its error
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_a_model_that_is_refused_while_it_is_loaded_is_loaded_once(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: its next request began a second load, whose end was lost: the request waited for ever, and the
    second engine's memory was never given back."""
    alone = await models.alone("llama", [1, 2], GREEDY)
    mount = Mount(monkeypatch, control, "AsyncEngine", "llama")
    async with models.shelf("llama") as shelf:
        model = shelf.model("llama")
        first = asyncio.create_task(outputs(model, [1, 2], GREEDY))
        await until_async(mount.asked.is_set, 30.0)
        await in_step_thread(shelf, partial(model.refuse, UnavailableError("there is no memory for it now")))
        with pytest.raises(UnavailableError, match="no memory for it now"):
            await first
        await asyncio.sleep(0.2)  # until it may be loaded again
        second = asyncio.create_task(outputs(model, [1, 2], GREEDY))
        await until_async(lambda: model.is_wanted, 30.0)
        for _ in range(3):  # plans
            control_of(shelf).note_change()
            await in_step_thread(shelf, lambda: None)
        mount.answers.set()
        assert await second == alone
        assert mount.num_calls == 1
        await shelf.check_integrity()


@pytest.mark.parametrize("call", ["step", "map_weights"])
async def test_a_lost_device_takes_all_models_with_it(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Regression: its models would have been loaded again for ever, by a replica that says that it is healthy."""
    async with models.shelf("llama", "qwen3", memory_of=BOTH) as shelf:
        engine = (await shelf.model("llama").ready()).driver.engine
        for module in ("folio.app.engine.driver", "folio.app.shelf.control"):
            monkeypatch.setattr(f"{module}.device_fault", lambda _: RuntimeError("lost"))
        assert shelf.healthy
        with failing(engine.footprint if call == "map_weights" else engine, call, RuntimeError("CUDA error")):
            task = asyncio.create_task(outputs(shelf.model("llama"), [1, 2], LONG))
            if call == "map_weights":
                await put_to_sleep(shelf, "llama")
            with pytest.raises(EngineError):
                await task
        await until_async(lambda: not shelf.healthy)
        with pytest.raises(UnavailableError, match="send the request again"):
            shelf.check()


async def test_a_stopped_engine_is_noticed_at_once(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: until the next plan, which may be a second later, the model was "awake" and refused requests."""
    monkeypatch.setattr(control, "_IDLE_S", 60.0)
    monkeypatch.setattr(control, "_WORKING_S", 60.0)
    async with models.shelf("llama") as shelf:
        await outputs(shelf.model("llama"), [1, 2], GREEDY)
        (await shelf.model("llama").ready()).stop()
        await until_async(lambda: shelf.model("llama").state == "failed", 5.0)


async def test_a_plan_that_fails_ends_requests_and_not_the_shelf(models: TinyModels) -> None:
    """Regression: the thread of all steps ended, and every request waited for ever."""
    alone = await models.alone("llama", [1, 2], GREEDY)
    async with models.shelf("llama") as shelf:
        for is_loaded in (False, True):
            if is_loaded:
                await shelf.model("llama").ready()
            with failing(Arbiter, "plan", KeyError("injected")):
                [result] = await asyncio.gather(outputs(shelf.model("llama"), [1, 2], LONG), return_exceptions=True)
                assert isinstance(result, EngineError) or is_loaded  # it may end before the next plan
                assert shelf.healthy
            await until_async(lambda: served(shelf, "llama", alone))


async def test_a_thread_that_hangs_is_found(models: TinyModels) -> None:
    """Regression: `check` looked at no engine."""
    released = threading.Event()
    async with models.shelf("llama", "qwen3", memory_of=BOTH) as shelf:
        engine = await shelf.model("llama").ready()
        await shelf.model("qwen3").ready()

        def hang(*_: object) -> None:
            released.wait(60)

        engine.driver.engine.model.module.register_forward_pre_hook(hang)
        stall_after(engine, 0.1)
        task = asyncio.create_task(outputs(shelf.model("llama"), [1, 2], GREEDY))
        await until_async(lambda: not shelf.healthy, 10)
        with pytest.raises(UnavailableError):
            shelf.check()
        with pytest.raises(UnavailableError):
            await task
        released.set()
