"""A shelf of tiny models: each gives the tokens that it gives alone, whatever happens to the others."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import logging
import math
import os
import re
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from folio.app.config.engine import EngineConfig
from folio.app.config.shelf import SLO, ModelConfig
from folio.app.engine.async_engine import AsyncEngine
from folio.app.engine.engine import Engine
from folio.app.engine.lora.source import AdapterSource, files_version
from folio.app.engine.request.delta import Delta
from folio.app.engine.request.pooled import PoolingParams
from folio.app.engine.sampling.params import SamplingParams
from folio.app.errors import (
    ContextLengthError,
    DeadlineError,
    EngineError,
    OverloadedError,
    RequestError,
    UnavailableError,
    UnknownModelError,
    UnknownPinError,
    UnknownRequestError,
)
from folio.app.models.weights.store import StoredWeights
from folio.app.shelf import control, moves, shelved_model, turns
from folio.app.shelf.allocation import Allocation
from folio.app.shelf.arbiter import Arbiter
from folio.app.shelf.shelf import Shelf
from folio.app.shelf.shelved_model import ShelvedModel
from folio.vmem import IntegrityError, MapError, OutOfPages, PinError, VmemError
from folio.vmem.backends import host_calls
from folio.vmem.backends.host import HostBackend
from tests.app.shelf.shelf_faults import Mount
from tests.app.shelf.shelves import (
    MODELS,
    SWAP_BYTES,
    Outputs,
    TinyModels,
    control_of,
    in_step_thread,
    outputs,
    outputs_of,
    put_to_sleep,
    stream_of,
    until_state,
)
from tests.conftest import tokens
from tests.processes import until_async

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0, seed=7, ignore_eos=True)
PARALLEL = SamplingParams(max_tokens=24, temperature=1.0, seed=3, n=3, ignore_eos=True)
BEAMS = SamplingParams(max_tokens=24, n=2, best_of=3, use_beam_search=True, temperature=0, ignore_eos=True)
STOPPED = SamplingParams(max_tokens=60, temperature=1.0, seed=1, stop=("a", "e", "o"))
KV_BYTES = 400 << 10
EMBED = {"pooling": PoolingParams()}

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture(autouse=True)
def _soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelved_model, "_FIRST_RETRY_S", 0.1)


def requests_of(name: str) -> list[tuple[list[int], SamplingParams, dict[str, Any]]]:
    if name == "embeds":
        return [(tokens(n, n), SamplingParams(max_tokens=1), EMBED) for n in (3, 40, 90)]
    options: list[dict[str, Any]] = [{}, {"adapter": "red"}, {"adapter": "blue"}] if name == "lora" else [{}]
    sampled: Sequence[SamplingParams] = (GREEDY, SAMPLED, STOPPED)
    if name not in ("ngram", "draft"):
        sampled = (*sampled, PARALLEL, BEAMS)
    return [(tokens(5 + 13 * i, i), params, some) for some in options for i, params in enumerate(sampled)]


async def expected(models: TinyModels, name: str) -> list[Outputs]:
    return [await models.alone(name, *case[:2], **case[2]) for case in requests_of(name)]


async def actual(shelf: Shelf, name: str) -> list[Outputs]:
    return await asyncio.gather(*(outputs(shelf.model(name), *case[:2], **case[2]) for case in requests_of(name)))


@pytest.mark.parametrize("rounds", [1, pytest.param(2, marks=pytest.mark.nightly)])
async def test_all_kinds_of_models_share_memory_for_a_few(rounds: int, models: TinyModels) -> None:
    memory_bytes = models.memory_for("llama", "bamba", room_bytes=KV_BYTES, beside=MODELS)
    alone = {name: await expected(models, name) for name in MODELS}
    async with models.opened([models.config(name) for name in MODELS], memory_bytes) as shelf:
        for _ in range(rounds):
            together = await asyncio.gather(*(actual(shelf, name) for name in MODELS))
            await shelf.check_integrity()
            for name, found in zip(MODELS, together, strict=True):
                assert found == alone[name], name
        assert sum(status.num_evictions for status in shelf.statuses()) > 0


@pytest.mark.thirds
@pytest.mark.parametrize("name", MODELS)
async def test_a_model_sleeps_while_its_requests_run(models: TinyModels, name: str) -> None:
    alone = await expected(models, name)
    async with models.opened([models.config(name)], models.memory_for(name, room_bytes=KV_BYTES)) as shelf:
        await shelf.model(name).ready()
        task = asyncio.create_task(actual(shelf, name))
        slept = 0
        while not task.done():
            slept += await put_to_sleep(shelf, name)
            await shelf.check_integrity()
            await asyncio.sleep(0.01)
        assert await task == alone
        assert slept > (name != "embeds")  # one step may do for them


@pytest.mark.parametrize("kind", ["own device", "shared device"])
async def test_one_model_is_served_alike_on_its_own_and_on_a_shared_device(models: TinyModels, kind: str) -> None:
    alone, is_own = await expected(models, "lora"), kind == "own device"
    memory_bytes = None if is_own else models.memory_for("lora", room_bytes=8 << 20, beside=["llama"])
    folder = models.adapter("lora", "red")
    gone = AdapterSource("other", str(folder), files_version(folder), "of older settings")  # a registry outlives them
    loaded = [gone, AdapterSource("loaded", str(folder), files_version(folder))]
    config = ModelConfig(name="lora", engine=models.engine("lora", kv_memory_bytes=8 << 20))
    async with models.opened([config], memory_bytes, loaded=loaded) as shelf:
        model = shelf.model("lora")
        assert (model.state, shelf.device_status() is None) == (("awake", True) if is_own else ("new", False))
        assert await actual(shelf, "lora") == alone
        assert await outputs(model, [1, 2], GREEDY, adapter="loaded") == await outputs(
            model, [1, 2], GREEDY, adapter="red"
        )
        plain = await outputs(model, [1, 2], GREEDY)
        await shelf.check_integrity()
        shelf.check()
        [status] = shelf.statuses()
        assert (status.state, status.num_wakes, status.wake_s, status.error) == ("awake", 1, 0, None)
        assert shelf.gpu_memory() is None
        with pytest.raises(RequestError, match="already"):
            shelf.add(config)
        if is_own:
            with pytest.raises(RequestError, match="has its device alone"):
                shelf.add(models.config("llama"))
            assert shelf.set_budget(6 << 20, 1) in ("applied", "deferred")
        else:
            shelf.add(models.config("llama"))
            assert len((await outputs(shelf.model("llama"), [1, 2], GREEDY))[0]) == 24
            with pytest.raises(RequestError, match="budgets from device_memory_bytes"):
                shelf.set_budget(6 << 20, 1)
        running = asyncio.create_task(outputs(model, [1, 2], LONG))
        await until_async(lambda: model.status.num_running > 0)
        engine = await model.ready()
        engine.stop()
        with pytest.raises(UnavailableError):
            await running
        if not is_own:  # it is loaded again
            await until_async(lambda: served(shelf, "lora", plain))
        assert shelf.healthy is not is_own
    with pytest.raises(UnavailableError, match="send the request again"):
        shelf.check()
    with pytest.raises(UnavailableError, match="the server is stopping"):
        shelf.add(config)


async def test_weights_are_read_ahead_while_requests_wait_for_them(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[tuple[tuple[str, ...], bool]] = []
    alone = await expected(models, "llama")
    async with models.opened([models.config("llama")], models.memory_for("llama", room_bytes=KV_BYTES)) as shelf:
        await shelf.model("llama").ready()
        reads = control_of(shelf)._read_ahead
        monkeypatch.setattr(reads, "want", lambda m, *, beside_steps: wanted.append((tuple(m), beside_steps)))
        await put_to_sleep(shelf, "llama")
        with asleep(shelf, "llama"):
            task = asyncio.create_task(actual(shelf, "llama"))
            await until_async(lambda: (("llama",), False) in wanted, 30.0)
        assert await task == alone
        assert wanted[-1][0] == ()


# ---- requests of models that sleep, wake, or are loaded ----


@contextmanager
def asleep(shelf: Shelf, name: str) -> Iterator[None]:
    """A model that is put to sleep is not woken within."""
    model, real = shelf.model(name), control_of(shelf)._wake

    def wake(other: ShelvedModel) -> None:
        if other is not model:
            real(other)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control_of(shelf), "_wake", wake)
        yield


async def collect(stream: AsyncIterator[list[Delta]]) -> Outputs:
    return outputs_of([delta async for deltas in stream for delta in deltas])


async def test_the_only_request_that_loads_a_model_is_cancelled(models: TinyModels) -> None:
    alone = await models.alone("llama", [1, 2], GREEDY)
    async with models.opened([models.config("llama")], models.memory_for("llama", room_bytes=KV_BYTES)) as shelf:
        task = asyncio.create_task(outputs(shelf.model("llama"), [1, 2], GREEDY))
        await until_state(shelf, "llama", "loading")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert shelf.statuses()[0].num_waiting == 0
        assert await outputs(shelf.model("llama"), [1, 2], GREEDY) == alone


async def test_requests_are_cancelled_while_their_model_sleeps(models: TinyModels) -> None:
    alone = await models.alone("llama", tokens(20), GREEDY)
    async with models.opened([models.config("llama")], models.memory_for("llama", room_bytes=KV_BYTES)) as shelf:
        engine = await shelf.model("llama").ready()
        for params in (LONG, PARALLEL, BEAMS):
            tasks = [asyncio.create_task(outputs(shelf.model("llama"), tokens(20, i), params)) for i in range(5)]
            await until_async(lambda: engine.num_requests[0] > 0)
            with asleep(shelf, "llama"):
                await put_to_sleep(shelf, "llama")
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await until_async(lambda: engine.num_requests == (0, 0))
                await shelf.check_integrity()
                assert shelf.model("llama").state == "asleep"
                assert engine.held_bytes == 0
        assert await outputs(shelf.model("llama"), tokens(20), GREEDY) == alone


async def test_deadlines_hold_while_a_model_is_loaded_and_while_it_sleeps(models: TinyModels) -> None:
    """Regression: the time until the first load did not count."""
    async with models.opened([models.config("llama")], models.memory_for("llama", room_bytes=KV_BYTES)) as shelf:
        model = shelf.model("llama")
        for timeout_s in (1e-6, 0.01):
            with pytest.raises(DeadlineError, match="'mine'"):
                await outputs(model, [1, 2], GREEDY, request_id="mine", timeout_s=timeout_s)
            assert model.engine is None
        with pytest.raises(RequestError, match="timeout_s"):
            await outputs(model, [1, 2], GREEDY, timeout_s=-1.0)
        await model.ready()
        with asleep(shelf, "llama"):
            await put_to_sleep(shelf, "llama")
            began = time.monotonic()
            with pytest.raises(DeadlineError):
                await outputs(model, [1, 2], GREEDY, timeout_s=0.05)
            assert time.monotonic() - began < 2
        assert len((await outputs(model, [1, 2], GREEDY, timeout_s=60.0))[0]) == 24


async def test_outputs_are_forked_while_their_model_sleeps(models: TinyModels) -> None:
    [alone] = await models.alone("llama", tokens(20), LONG)
    async with models.opened([models.config("llama")], models.memory_for("llama", room_bytes=KV_BYTES)) as shelf:
        engine = await shelf.model("llama").ready()
        stream = engine.generate(tokens(20), LONG, "parent")
        got = outputs_of(await anext(stream))[0]
        with asleep(shelf, "llama"):
            await put_to_sleep(shelf, "llama")
            forks = [
                asyncio.create_task(collect(engine.fork("parent", replace(GREEDY, max_tokens=10, n=2), f"fork {i}")))
                for i in range(2)
            ]
            await until_async(lambda: engine.num_requests[1] == 5)
            with pytest.raises(UnknownRequestError):
                await collect(engine.fork("another", GREEDY))
        for outputs_of_fork in await asyncio.gather(*forks):
            assert len(outputs_of_fork) == 2
            for output in outputs_of_fork:  # both are greedy
                assert any(output == alone[i : i + 10] for i in range(len(got), 90))
        async for deltas in stream:
            got += outputs_of(deltas)[0]
        assert got == alone


async def test_pins_survive_a_sleep(models: TinyModels) -> None:
    document = tokens(64, 9)
    alone = await models.alone("llama", [*document, 5], GREEDY)
    async with models.opened([models.config("llama")], models.memory_for("llama", room_bytes=KV_BYTES)) as shelf:
        model = shelf.model("llama")
        engine = await model.ready()
        await engine.pin("document", document)
        await engine.pin("other", tokens(32, 4))
        for _ in range(3):
            with asleep(shelf, "llama"):
                await put_to_sleep(shelf, "llama")
                await shelf.check_integrity()
                assert engine.held_bytes == 0
            assert await outputs(model, [*document, 5], GREEDY) == alone
            await until_async(lambda: {pin.name for pin in engine.report().pins} == {"document", "other"})
            await shelf.check_integrity()
        with asleep(shelf, "llama"):
            await put_to_sleep(shelf, "llama")
            assert {pin.name: pin.num_bytes for pin in engine.report().pins} == {"document": 0, "other": 0}
            with pytest.raises(RequestError, match="another prefix named 'other' is pinned already"):
                await engine.pin("other", tokens(32, 5))
            await asyncio.to_thread(engine.unpin, "other")
        assert await outputs(model, [*document, 5], GREEDY) == alone
        await until_async(lambda: [pin.name for pin in engine.report().pins if pin.num_bytes] == ["document"])


async def test_pins_of_adapters_survive_a_sleep(models: TinyModels) -> None:
    """Regression: they were computed again without the adapter, whose requests then gave other tokens."""
    document = tokens(64, 9)
    alone = await models.alone("lora", [*document, 5], GREEDY, adapter="red")
    async with models.opened([models.config("lora")], models.memory_for("lora", room_bytes=KV_BYTES)) as shelf:
        model = shelf.model("lora")
        engine = await model.ready()
        folder = models.adapter("lora", "red")
        await engine.set_loaded([AdapterSource("loaded", str(folder), files_version(folder))])
        await engine.pin("document", document, adapter="red")
        await engine.pin("of one that is unloaded", tokens(32, 4), adapter="loaded")
        for names in ({"document", "of one that is unloaded"}, {"document"}):
            with asleep(shelf, "lora"):
                await put_to_sleep(shelf, "lora")
            assert await outputs(model, [*document, 5], GREEDY, adapter="red") == alone
            await until_async(lambda names=names: {pin.name for pin in engine.report().pins if pin.num_bytes} == names)
            assert await outputs(model, [*document, 5], GREEDY, adapter="red") == alone
            await engine.set_loaded([])


async def test_a_model_without_memory_beside_its_weights_is_refused(models: TinyModels) -> None:
    """Regression: it was loaded again and again, and its requests waited for ever."""
    memory_bytes = models.memory_for("llama", room_bytes=4096)
    async with models.opened([models.config("llama")], memory_bytes, deadline_s=20) as shelf:
        with pytest.raises(UnavailableError, match=r"the device has \d+ for weights .* raise device_memory_bytes"):
            await outputs(shelf.model("llama"), [1, 2], GREEDY)


async def test_an_added_model_has_its_swap_space(models: TinyModels) -> None:
    """Regression: the bound of all models together was that of the models of the settings."""
    async with models.opened([], models.memory_for("llama", room_bytes=KV_BYTES)) as shelf:
        for swap_bytes, most_bytes in ((1 << 20, 1 << 20), (1 << 21, 1 << 21), (1 << 19, 1 << 21)):
            shelf.add(ModelConfig(name=f"{swap_bytes}", engine=models.engine("llama", swap_bytes=swap_bytes)))
            assert control_of(shelf)._device.shared.pages.swap_space.most_bytes == most_bytes


async def test_a_new_replica_gets_the_pins_of_a_model_that_sleeps(models: TinyModels) -> None:
    """Regression: a model that slept reported none, and one that was loaded left out those of adapters, without waiting
    for the adapter to be read."""
    memory_bytes, document = models.memory_for("lora", room_bytes=KV_BYTES), tokens(64, 9)
    async with models.opened([models.config("lora")], memory_bytes) as shelf:
        engine = await shelf.model("lora").ready()
        await engine.pin("document", document, adapter="red")
        with asleep(shelf, "lora"):
            await put_to_sleep(shelf, "lora")
            prefixes = engine.hot_prefixes()
    assert [prefix.pin_name for prefix in prefixes] == ["document"]
    async with models.opened([models.config("lora")], memory_bytes, prefixes_of_others=lambda _: [prefixes]) as shelf:
        engine = await shelf.model("lora").ready()
        assert [pin.name for pin in engine.report().pins if pin.num_bytes] == ["document"]


async def test_a_prefix_is_unpinned_at_any_moment_of_a_sleep_and_wake(models: TinyModels) -> None:
    """Regression: while it was computed again after a wake, it was unknown, and pinned afterwards."""
    async with models.opened([models.config("llama")], models.memory_for("llama", room_bytes=KV_BYTES)) as shelf:
        model = shelf.model("llama")
        engine = await model.ready()

        def wake_and_unpin(steps: int) -> None:
            own = engine.driver.engine
            own.footprint.map_weights()
            own.wake()
            own.set_kv_budget(KV_BYTES // 2)
            for _ in range(steps):
                own.step()
            assert [pin.name for pin in own.report().pins] == ["document"]
            own.unpin("document")
            assert own.report().pins == ()
            with pytest.raises(UnknownPinError):
                own.unpin("document")
            while own.has_work:
                assert own.step() == []
            assert own.report().pins == ()
            model.note_awake(0.0)

        for steps in range(5):  # the prefix takes two or three
            await engine.pin("document", tokens(96, 9))
            with asleep(shelf, "llama"):
                await put_to_sleep(shelf, "llama")
                await in_step_thread(shelf, partial(wake_and_unpin, steps))
            await shelf.check_integrity()


@pytest.mark.parametrize("then", ["sleep", "pin", "unpin"])
async def test_a_prefix_that_cannot_be_computed_again_stays_pinned(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """Regression: after a wake without memory for it, it was no longer pinned, and only the log said so."""
    document = tokens(64, 9)
    async with models.opened([models.config("llama")], models.memory_for("llama", room_bytes=KV_BYTES)) as shelf:
        model = shelf.model("llama")
        engine = await model.ready()
        await engine.pin("document", document)

        def pins() -> list[tuple[str, bool]]:
            return [(pin.name, pin.num_bytes > 0) for pin in engine.report().pins]

        async def sleep_and_wake() -> None:
            with asleep(shelf, "llama"):
                await put_to_sleep(shelf, "llama")
            await outputs(model, [1, 2], GREEDY)
            await until_async(lambda: not engine.driver.engine.requests)

        def refuse(*_: Any) -> None:
            raise PinError("no room within its pin quota")

        with monkeypatch.context() as patch:
            patch.setattr(engine.driver.engine.memory, "pin", refuse)
            await sleep_and_wake()
        assert pins() == [("document", False)]
        if then == "sleep":
            await sleep_and_wake()
        elif then == "pin":
            await engine.pin("document", document)
        else:
            await asyncio.to_thread(engine.unpin, "document")
            await sleep_and_wake()
        assert pins() == ([("document", True)] if then != "unpin" else [])


async def test_requests_arrive_at_the_moment_of_sleep(models: TinyModels) -> None:
    alone = [await models.alone("llama", [i + 1, 2], GREEDY) for i in range(8)]
    async with models.opened([models.config("llama")], models.memory_for("llama", room_bytes=KV_BYTES)) as shelf:
        model = shelf.model("llama")
        await model.ready()
        for _ in range(15):
            sleeping = control_of(shelf)._thread.call(lambda: control_of(shelf)._put_to_sleep(model, "another"))
            found = asyncio.gather(*(outputs(model, [i + 1, 2], GREEDY) for i in range(8)))
            await asyncio.wrap_future(sleeping)
            assert await found == alone
            await until_state(shelf, "llama", "awake")


@pytest.mark.parametrize("state", ["new", "awake", "asleep"])
async def test_impossible_requests_are_refused_in_every_state(models: TinyModels, state: str) -> None:
    async with models.opened([models.config("llama")], models.memory_for("llama", room_bytes=KV_BYTES)) as shelf:
        model = shelf.model("llama")
        if state != "new":
            await model.ready()
        if state == "asleep":
            await put_to_sleep(shelf, "llama")
        with pytest.raises(RequestError, match="empty"):
            await outputs(model, [], GREEDY)
        with pytest.raises(ContextLengthError):
            await outputs(model, tokens(200), GREEDY)
        with pytest.raises(ContextLengthError):
            await outputs(model, tokens(40), replace(GREEDY, max_tokens=1000))
        with pytest.raises(RequestError):
            await outputs(model, [10**6], GREEDY)
        with pytest.raises(UnknownModelError):
            await outputs(model, [1], GREEDY, adapter="none")
        with pytest.raises(RequestError):
            await outputs(model, [1], GREEDY, **EMBED)
        assert len((await outputs(model, [1], GREEDY))[0]) == 24


async def test_a_thousand_requests_are_cancelled_at_once(models: TinyModels) -> None:
    names = ["llama", "qwen3", "gpt2"]
    alone = {name: await models.alone(name, [1, 2], GREEDY) for name in names}
    memory_bytes = models.memory_for("llama", "qwen3", room_bytes=KV_BYTES // 2, beside=names)
    async with models.opened([models.config(name) for name in names], memory_bytes) as shelf:
        for _ in range(2):  # new, then asleep or awake
            tasks = [asyncio.create_task(outputs(shelf.model(names[i % 3]), [i % 500 + 1], LONG)) for i in range(1000)]
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            found = await asyncio.gather(*(outputs(shelf.model(name), [1, 2], GREEDY) for name in names))
            assert found == [alone[name] for name in names]
            await shelf.check_integrity()
        await until_async(lambda: all(s.num_running + s.num_waiting == 0 for s in shelf.statuses()))


async def test_requests_of_two_event_loops(models: TinyModels) -> None:
    names = ["llama", "qwen3"]
    alone = {name: await models.alone(name, [3, 2], GREEDY) for name in names}
    memory_bytes = models.memory_for("qwen3", room_bytes=KV_BYTES // 4, beside=names)

    async def several(shelf: Shelf) -> None:
        for name in (*names, *names):
            found = await asyncio.gather(*(outputs(shelf.model(name), [3, 2], GREEDY) for _ in range(3)))
            assert found == [alone[name]] * 3

    async with models.opened([models.config(name) for name in names], memory_bytes) as shelf:
        await asyncio.gather(*(asyncio.to_thread(lambda: asyncio.run(several(shelf))) for _ in range(2)))
        # a loop that ends while its requests wait
        for name in names:
            waiting = asyncio.to_thread(lambda name=name: asyncio.run(give_up(shelf, name)))
            await waiting
        await several(shelf)


async def give_up(shelf: Shelf, name: str) -> None:
    tasks = [asyncio.create_task(outputs(shelf.model(name), [3, 2], LONG)) for _ in range(3)]
    await asyncio.sleep(0)
    assert len(tasks) == 3


# ---- models that come, go and fail ----


async def test_models_are_added_and_removed_in_every_state(models: TinyModels) -> None:
    alone = {name: await models.alone(name, [1, 2], LONG) for name in ("llama", "qwen3")}
    memory_bytes = models.memory_for("llama", "qwen3", room_bytes=KV_BYTES)
    async with models.opened([models.config("llama")], memory_bytes) as shelf:
        with pytest.raises(RequestError, match="already"):
            shelf.add(models.config("llama", of="qwen3"))
        for state in ("new", "loading", "awake", "waking", "asleep"):
            shelf.add(models.config("other", of="qwen3"))
            other = shelf.model("other")
            running = asyncio.create_task(outputs(shelf.model("llama"), [1, 2], LONG))
            if state in ("awake", "waking", "asleep"):
                await other.ready()
            if state in ("waking", "asleep"):
                with asleep(shelf, "other") if state == "asleep" else nullcontext():
                    await put_to_sleep(shelf, "other")
            tasks = [asyncio.create_task(outputs(other, [1, 2], LONG)) for _ in range(5)]
            if state == "loading":
                await until_state(shelf, "other", "loading")
            elif state != "new":
                await asyncio.sleep(0)
            await shelf.remove("other")
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(end, UnavailableError) or end == alone["qwen3"] for end in ended), ended
            assert any(isinstance(end, UnavailableError) for end in ended)
            with pytest.raises(UnknownModelError):
                shelf.model("other")
            with pytest.raises(UnknownModelError):
                await shelf.remove("other")
            with pytest.raises(UnavailableError, match="removed"):
                await outputs(other, [1, 2], LONG)
            assert await running == alone["llama"]
            await shelf.check_integrity()
        assert shelf.names == ("llama",)


async def test_a_removed_model_is_not_waited_for(models: TinyModels) -> None:
    """Regression: a request to a model that had been removed loaded it again after the back-off, and never ended."""
    async with models.opened([models.config("llama")], models.memory_for("llama", room_bytes=KV_BYTES)) as shelf:
        model = shelf.model("llama")
        await shelf.remove("llama")
        await asyncio.sleep(2 * shelved_model._FIRST_RETRY_S)
        async with asyncio.timeout(10):
            with pytest.raises(UnavailableError, match="removed"):
                await outputs(model, [1, 2], GREEDY)
            with pytest.raises(UnavailableError, match="removed"):
                await model.ready()


async def test_a_name_is_used_again_while_its_last_model_closes(models: TinyModels) -> None:
    alone = {name: await models.alone(name, [1, 2], GREEDY) for name in ("llama", "qwen3")}
    memory_bytes = models.memory_for("qwen3", room_bytes=KV_BYTES, beside=["llama"])
    async with models.opened([], memory_bytes) as shelf:
        removals = []
        for i in range(6):
            name = ("llama", "qwen3")[i % 2]
            shelf.add(models.config("mine", of=name))
            if i % 3:
                assert await outputs(shelf.model("mine"), [1, 2], GREEDY) == alone[name]
            else:
                waiting = asyncio.create_task(outputs(shelf.model("mine"), [1, 2], GREEDY))
                await until_state(shelf, "mine", "loading")
                waiting.cancel()
            removals.append(asyncio.create_task(shelf.remove("mine")))
            await until_async(lambda: not shelf.names)
        await asyncio.gather(*removals)


@pytest.mark.parametrize("damage", ["no folder", "damaged config", "damaged weights"])
async def test_a_model_that_cannot_be_loaded_is_tried_again(models: TinyModels, tmp_path: Path, damage: str) -> None:
    alone = await models.alone("llama", [1, 2], GREEDY)
    whole, folder = models.checkpoint("llama"), tmp_path / "model"
    if damage != "no folder":
        shutil.copytree(whole, folder)
    if damage == "damaged config":
        (folder / "config.json").write_text("{")
    if damage == "damaged weights":
        with (folder / "model.safetensors").open("r+b") as file:
            file.truncate(1000)
    broken = replace(models.config("broken", of="llama"), engine=replace(models.engine("llama"), model=str(folder)))
    memory_bytes = models.memory_for("llama", "llama", room_bytes=KV_BYTES)
    async with models.opened([models.config("llama"), broken], memory_bytes) as shelf:
        for _ in range(2):
            results = await asyncio.gather(
                *(outputs(shelf.model("broken"), [1, 2], GREEDY) for _ in range(3)),
                outputs(shelf.model("llama"), [1, 2], GREEDY),
                return_exceptions=True,
            )
            assert results.pop() == alone
            assert all(isinstance(result, UnavailableError) for result in results), results
            status = {status.name: status for status in shelf.statuses()}["broken"]
            assert status.state == "failed"
            assert status.error is not None
            assert status.error in str(results[0])
            await shelf.check_integrity()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        await until_async(lambda: served(shelf, "broken", alone))
        assert {status.error for status in shelf.statuses()} == {None}


async def served(shelf: Shelf, name: str, alone: Outputs) -> bool:
    """Whether the model answers; an answer is right."""
    try:
        assert await outputs(shelf.model(name), [1, 2], GREEDY) == alone
    except UnavailableError:
        return False
    return True


async def test_a_load_fails_after_its_request_was_cancelled(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: asyncio logged "Future exception was never retrieved" for each of these requests."""
    begun, released = threading.Event(), threading.Event()

    def load(*_: Any, **__: Any) -> AsyncEngine:
        begun.set()
        released.wait(30)
        raise OSError("injected")

    monkeypatch.setattr(control, "AsyncEngine", load)
    async with models.opened([models.config("llama")], models.memory_for("llama", room_bytes=KV_BYTES)) as shelf:
        task = asyncio.create_task(outputs(shelf.model("llama"), [1, 2], GREEDY))
        await until_async(begun.is_set)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        released.set()
        await until_state(shelf, "llama", "failed")
        await asyncio.sleep(0)
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]


class Panic(BaseException):
    """As a library in Rust raises it."""


@pytest.mark.parametrize("error", [OSError("no space left"), Panic("index out of bounds"), SystemExit(1)])
async def test_a_loader_that_dies_fails_its_model_only(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    alone = await models.alone("llama", [1, 2], GREEDY)
    real = control.AsyncEngine

    def load(config: EngineConfig, *args: Any, **kwargs: Any) -> AsyncEngine:
        if config.max_num_seqs == 5:
            raise error
        return real(config, *args, **kwargs)

    dies = ModelConfig(name="dies", engine=models.engine("llama", max_num_seqs=5))
    memory_bytes = models.memory_for("llama", "llama", room_bytes=KV_BYTES)
    async with models.opened([models.config("llama"), dies], memory_bytes) as shelf:
        with monkeypatch.context() as patch:
            patch.setattr(control, "AsyncEngine", load)
            with pytest.raises(UnavailableError, match="dies"):
                await outputs(shelf.model("dies"), [1, 2], GREEDY)
            assert await outputs(shelf.model("llama"), [1, 2], GREEDY) == alone
        await until_async(lambda: served(shelf, "dies", alone))


@pytest.mark.parametrize(
    ("phase", "owner", "name"),
    [("load", control, "AsyncEngine"), ("wake", StoredWeights, "open"), ("wake", host_calls, "populate")],
)
async def test_a_load_or_wake_that_hangs_ends_the_process_and_is_not_repeated_at_once(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, phase: str, owner: Any, name: str
) -> None:
    """Regression: its requests waited for ever, and so did every other model's once its engine was stopped. Files that
    do not answer must not end each new process either."""
    alone = {name: await models.alone(name, [1, 2], GREEDY) for name in ("llama", "qwen3")}
    memory_bytes = models.memory_for("llama", "qwen3", room_bytes=32 << 20)
    configs = [models.config("llama"), models.config("qwen3")]
    async with models.opened(configs, memory_bytes) as shelf:
        model, other = shelf.model("llama"), shelf.model("qwen3")
        for waked in (model, other) if phase == "wake" else (other,):
            await outputs(waked, [1, 2], GREEDY)
        mount = Mount(monkeypatch, owner, name, "llama")
        await put_to_sleep(shelf, "llama")
        waiting = asyncio.create_task(outputs(model, [1, 2], GREEDY))
        await until_async(mount.asked.is_set, 30.0)
        assert shelf.healthy
        assert await outputs(other, [1, 2], GREEDY) == alone["qwen3"]
        with monkeypatch.context() as patch:
            patch.setattr(moves, "_LOAD_S", 0.0)
            await until_async(lambda: not shelf.healthy, 30.0)
        message = rf"the {phase} of the model 'llama' hangs: .* files of '.*' answer\? A new process .* after 300 s"
        with pytest.raises(UnavailableError, match=message):
            shelf.check()
        with pytest.raises(UnavailableError, match=message):
            await waiting
        monkeypatch.undo()
        async with models.opened(configs, memory_bytes) as next_process:
            for _ in range(2):
                with pytest.raises(UnavailableError, match=r"its load hung .* tried again in 300 s") as refused:
                    await outputs(next_process.model("llama"), [1, 2], GREEDY)
                assert refused.value.retry_after_s == pytest.approx(control._HUNG_LOOK_S, abs=4)
            assert await outputs(next_process.model("qwen3"), [1, 2], GREEDY) == alone["qwen3"]
            assert next_process.healthy
            control.HungLoads(control.default_folder().parent).forget(configs[0])
            await until_async(lambda: served(next_process, "llama", alone["llama"]), 30.0)
        mount.answers.set()


async def test_a_model_that_is_refused_while_it_is_loaded_is_loaded_once(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: its next request began a second load, whose end was lost: the request waited for ever, and the
    second engine's memory was never given back."""
    real, begun, answers = control.AsyncEngine, [], threading.Event()

    def load(*args: Any, **kwargs: Any) -> AsyncEngine:
        begun.append(args)
        assert answers.wait(60)
        return real(*args, **kwargs)

    monkeypatch.setattr(control, "AsyncEngine", load)
    alone = await models.alone("llama", [1, 2], GREEDY)
    async with models.opened([models.config("llama")], models.memory_for("llama", room_bytes=KV_BYTES)) as shelf:
        model = shelf.model("llama")
        first = asyncio.create_task(outputs(model, [1, 2], GREEDY))
        await until_async(lambda: begun, 30.0)
        await in_step_thread(shelf, partial(model.refuse, UnavailableError("there is no memory for it now")))
        with pytest.raises(UnavailableError, match="no memory for it now"):
            await first
        await until_async(lambda: time.monotonic() > model._retry_at, 30.0)
        second = asyncio.create_task(outputs(model, [1, 2], GREEDY))
        await until_async(lambda: model.is_wanted, 30.0)
        for _ in range(3):  # plans
            planned_at = control_of(shelf)._planned_at
            control_of(shelf).note_change()
            await until_async(lambda at=planned_at: control_of(shelf)._planned_at > at, 30.0)
        answers.set()
        assert await second == alone
        assert len(begun) == 1
        await shelf.check_integrity()


async def test_a_full_disk(models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models take turns with their weights in memory."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(models, "weights_dir", tmp_path / "weights")
    names = ("llama", "gpt2")
    alone = {name: await models.alone(name, [1, 2], GREEDY) for name in names}
    memory_bytes = models.memory_for("llama", room_bytes=KV_BYTES, beside=names)
    async with models.opened([models.config(name) for name in names], memory_bytes) as shelf:
        for _ in range(2):
            for name in names:
                assert await outputs(shelf.model(name), [1, 2], GREEDY) == alone[name]
                await put_to_sleep(shelf, name)
                await shelf.check_integrity()
        assert min(status.num_wakes for status in shelf.statuses()) >= 2
    assert list((tmp_path / "weights").glob("*.weights")) == []


async def test_a_machine_without_a_thread_left(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it ended the thread of all steps."""
    alone = await models.alone("llama", [1, 2], GREEDY)
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("folio-move"):
            raise RuntimeError("can't start new thread")
        real(thread)

    async with models.opened([models.config("llama")], models.memory_for("llama", room_bytes=KV_BYTES)) as shelf:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(UnavailableError, match="new thread"):
                await outputs(shelf.model("llama"), [1, 2], GREEDY)
            assert shelf.healthy
        await until_async(lambda: served(shelf, "llama", alone))


@pytest.mark.parametrize("error", [IntegrityError("injected"), OSError("no space left on device"), Panic("bounds")])
async def test_an_engine_whose_steps_fail_is_loaded_again(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    alone = {name: await models.alone(name, [1, 2], LONG) for name in ("llama", "qwen3")}

    def fail() -> None:
        raise error

    memory_bytes = models.memory_for("llama", "qwen3", room_bytes=KV_BYTES)
    async with models.opened([models.config("llama"), models.config("qwen3")], memory_bytes) as shelf:
        engine = await shelf.model("llama").ready()
        others = [asyncio.create_task(outputs(shelf.model("qwen3"), [1, 2], LONG)) for _ in range(3)]
        monkeypatch.setattr(engine.driver.engine, "step", fail)
        for _ in range(3):
            with pytest.raises(EngineError):
                await outputs(shelf.model("llama"), [1, 2], LONG)
        await until_state(shelf, "llama", "failed")
        assert shelf.healthy
        shelf.check()
        await until_async(lambda: served(shelf, "llama", [alone["llama"][0][:24]]))
        assert await asyncio.gather(*others) == [alone["qwen3"]] * 3
        assert await outputs(shelf.model("llama"), [1, 2], LONG) == alone["llama"]
        await shelf.check_integrity()


@pytest.mark.parametrize("call", ["step", "map_weights"])
async def test_a_lost_device_takes_all_models_with_it(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Regression: its models would have been loaded again for ever, by a replica that says that it is healthy."""

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    memory_bytes = models.memory_for("llama", "qwen3", room_bytes=KV_BYTES)
    async with models.opened([models.config("llama"), models.config("qwen3")], memory_bytes) as shelf:
        engine = await shelf.model("llama").ready()
        for module in ("folio.app.engine.driver", "folio.app.shelf.control"):
            monkeypatch.setattr(f"{module}.device_fault", lambda _: RuntimeError("lost"))
        assert shelf.healthy
        owner = engine.driver.engine.footprint if call == "map_weights" else engine.driver.engine
        monkeypatch.setattr(owner, call, fail)
        task = asyncio.create_task(outputs(shelf.model("llama"), [1, 2], LONG))
        if call == "map_weights":
            await put_to_sleep(shelf, "llama")
        with pytest.raises(EngineError):
            await task
        await until_async(lambda: not shelf.healthy)
        with pytest.raises(UnavailableError, match="send the request again"):
            shelf.check()


@pytest.mark.parametrize("call", ["sleep", "wake", "map_weights", "set_kv_budget"])
async def test_an_engine_that_cannot_sleep_or_wake_is_loaded_again(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    alone = {name: await models.alone(name, [1, 2], LONG) for name in ("llama", "qwen3")}

    def fail(*_: object) -> None:
        raise MapError("injected")

    memory_bytes = models.memory_for("llama", "qwen3", room_bytes=KV_BYTES)
    async with models.opened([models.config("llama"), models.config("qwen3")], memory_bytes) as shelf:
        engine = await shelf.model("llama").ready()
        owner = engine.driver.engine.footprint if call == "map_weights" else engine.driver.engine
        monkeypatch.setattr(owner, call, fail)
        task = asyncio.create_task(outputs(shelf.model("llama"), [1, 2], LONG))
        other = asyncio.create_task(outputs(shelf.model("qwen3"), [1, 2], LONG))
        await put_to_sleep(shelf, "llama")
        [result] = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(result, UnavailableError) or result == alone["llama"], result
        await until_async(lambda: served(shelf, "llama", [alone["llama"][0][:24]]))
        assert await other == alone["qwen3"]
        await shelf.check_integrity()


@pytest.mark.parametrize("page", [0, 1, 2])
@pytest.mark.parametrize("error", [OutOfPages(1, 0), MapError("injected")])
async def test_a_page_that_a_load_cannot_have(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, page: int, error: VmemError
) -> None:
    """Regression: a load that found no page failed, although one that finds no memory for weights waits for it. A
    self-test that found no page left its memfd open."""
    alone = await models.alone("draft", [1, 2], GREEDY)
    pages, real = itertools.count(), HostBackend.create

    def create(backend: HostBackend, page_bytes: int) -> int:
        if threading.current_thread().name.startswith("folio-move") and next(pages) == page:
            raise error
        return real(backend, page_bytes)

    async with models.opened(
        [models.config("draft")], models.memory_for("draft", "llama", room_bytes=KV_BYTES)
    ) as shelf:
        num_files = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patch:
            patch.setattr(HostBackend, "create", create)
            if isinstance(error, OutOfPages):
                assert await outputs(shelf.model("draft"), [1, 2], GREEDY) == alone
            else:
                with pytest.raises(UnavailableError, match="injected"):
                    await outputs(shelf.model("draft"), [1, 2], GREEDY)
        await until_async(lambda: served(shelf, "draft", alone))
    assert len(os.listdir("/proc/self/fd")) == num_files
    assert next(pages) > page


async def test_a_stopped_engine_is_noticed_at_once(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: until the next plan, which may be a second later, the model was "awake" and refused requests."""
    monkeypatch.setattr(control, "_IDLE_S", 60.0)
    monkeypatch.setattr(control, "_WORKING_S", 60.0)
    async with models.opened([models.config("llama")], models.memory_for("llama", room_bytes=KV_BYTES)) as shelf:
        engine = await shelf.model("llama").ready()
        await outputs(shelf.model("llama"), [1, 2], GREEDY)
        engine.stop()
        await until_async(lambda: shelf.model("llama").state == "failed", 5.0)


async def test_a_plan_that_fails_ends_requests_and_not_the_shelf(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the thread of all steps ended, and every request waited for ever."""
    alone = await models.alone("llama", [1, 2], GREEDY)

    def fail(*_: object) -> None:
        raise KeyError("injected")

    async with models.opened([models.config("llama")], models.memory_for("llama", room_bytes=KV_BYTES)) as shelf:
        for is_loaded in (False, True):
            if is_loaded:
                await shelf.model("llama").ready()
            with monkeypatch.context() as patch:
                patch.setattr(Arbiter, "plan", fail)
                [result] = await asyncio.gather(outputs(shelf.model("llama"), [1, 2], LONG), return_exceptions=True)
                assert isinstance(result, EngineError) or is_loaded  # it may end before the next plan
                assert shelf.healthy
            await until_async(lambda: served(shelf, "llama", alone))


async def test_a_thread_that_hangs_is_found(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: `check` looked at no engine."""
    released = threading.Event()
    memory_bytes = models.memory_for("llama", "qwen3", room_bytes=KV_BYTES)
    async with models.opened([models.config("llama"), models.config("qwen3")], memory_bytes) as shelf:
        engine = await shelf.model("llama").ready()
        await shelf.model("qwen3").ready()
        real = engine.driver.engine.step

        def hang() -> Any:
            released.wait(60)
            return real()

        monkeypatch.setattr(engine.driver.engine, "step", hang)
        monkeypatch.setattr(engine.driver, "_stalled_s", 0.1)
        monkeypatch.setattr(engine.driver, "_longest_s", 0.0)
        task = asyncio.create_task(outputs(shelf.model("llama"), [1, 2], GREEDY))
        await until_async(lambda: not shelf.healthy, 10)
        with pytest.raises(UnavailableError):
            shelf.check()
        with pytest.raises(UnavailableError):
            await task
        released.set()


# ---- memory ----


async def test_models_share_the_swap_space(models: TinyModels) -> None:
    """Regression: each had `swap_bytes` of host memory for its preempted requests, however many models there were."""
    names, prompt = ("llama", "qwen3", "gemma2"), tokens(20, 1)
    alone = {name: await models.alone(name, prompt, LONG) for name in names}
    engines = [models.engine(name, preemption="swap") for name in names]
    configs = [ModelConfig(name=name, engine=engine) for name, engine in zip(names, engines, strict=True)]
    async with models.opened(configs, models.memory_for(*names, room_bytes=3 * KV_BYTES)) as shelf:
        space = control_of(shelf)._device.shared.pages.swap_space
        assert space.most_bytes == SWAP_BYTES
        memories = [(await shelf.model(name).ready()).driver.engine.memory for name in names]

        def put_all_to_sleep() -> None:
            owned = [memory.swapping.num_bytes(list(memory.tables.sequences)) for memory in memories]
            space.most_bytes = sum(owned) * 2 // 3
            for name in names:
                control_of(shelf)._put_to_sleep(shelf.model(name), "another")

        streams = {name: stream_of(shelf.model(name), prompt, LONG) for name in names}
        firsts = await asyncio.gather(*map(anext, streams.values()))
        got = {name: outputs_of(first)[0] for name, first in zip(names, firsts, strict=True)}
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(asleep(shelf, name))
            await in_step_thread(shelf, put_all_to_sleep)
            swapped = [memory.swapping.used_bytes for memory in memories]
            assert 0 < sum(swapped) == space.used_bytes <= space.most_bytes
            assert 0 in swapped, "one is recomputed"
        for name, stream in streams.items():
            async for deltas in stream:
                got[name] += outputs_of(deltas)[0]
            assert [got[name]] == alone[name], name
        assert space.used_bytes == 0


async def test_models_that_can_never_fit_are_refused_with_the_reason(models: TinyModels) -> None:
    alone = await models.alone("gemma2", [1, 2], GREEDY)
    memory_bytes = models.memory_for("gemma2", room_bytes=KV_BYTES // 4, beside=["bamba"])
    async with models.opened([models.config("gemma2"), models.config("bamba")], memory_bytes) as shelf:
        for _ in range(2):
            results = await asyncio.gather(
                outputs(shelf.model("bamba"), [1], GREEDY),
                outputs(shelf.model("gemma2"), [1, 2], GREEDY),
                return_exceptions=True,
            )
            assert isinstance(results[0], UnavailableError)
            assert "device_memory_bytes" in str(results[0])
            assert results[1] == alone


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "draft", "bamba"])
async def test_requests_are_bounded_by_what_other_models_leave(models: TinyModels, name: str) -> None:
    """Regression: only the model's own weights were left out of the memory that requests were judged by. Those which
    could never run beside a step's workspace and a model that is kept always waited, and ended with 503."""
    configs = [models.config(name), ModelConfig(name="kept", engine=models.engine("llama"), keep="always")]

    async def load(shelf: Shelf) -> Engine:
        for config in configs:
            await outputs(shelf.model(config.name), [1, 2], GREEDY)
        return (await shelf.model(name).ready()).driver.engine

    plenty = models.memory_for(name, "llama", room_bytes=KV_BYTES)
    async with models.opened(configs, plenty) as shelf:
        engine = await load(shelf)
        assert shelf.model(name).engine.context_tokens == 128
        kept = (await shelf.model("kept").ready()).driver.engine.footprint
        share = 1.0 if engine.speculation is None else engine.speculation.memory_share
        footprints, device = (engine.footprint, kept), shelf.device_status()
        room_bytes = math.ceil(engine.memory.pages_for(70) * engine.memory.pages.page_bytes / share)
        room_bytes += device.workspace_bytes + sum(of.weight_bytes + of.anchor_bytes for of in footprints)
    async with models.opened(configs, room_bytes) as shelf:
        await load(shelf)
        engine = await shelf.model(name).ready()
        for state in ("awake", "asleep"):
            if state == "asleep":
                await put_to_sleep(shelf, name)
            most = engine.context_tokens
            assert 70 <= most < 128
            message = rf"length is {most} tokens\..* It is 128 .* raise device_memory_bytes"
            for prompt, max_tokens in ((tokens(30), most - 29), (tokens(most), None), (tokens(120), 1)):
                with pytest.raises(ContextLengthError, match=message):
                    await outputs(shelf.model(name), prompt, replace(GREEDY, max_tokens=max_tokens))
            for prompt, max_tokens in ((tokens(30), most - 30), (tokens(most - 1), 1), (tokens(40), None)):
                found = await outputs(shelf.model(name), prompt, replace(GREEDY, max_tokens=max_tokens))
                assert len(found[0]) == (max_tokens or most - 40)
            with pytest.raises(RequestError, match="do not fit into the KV cache together"):
                await outputs(shelf.model(name), tokens(30), replace(GREEDY, max_tokens=most - 30, n=6))


async def test_a_request_that_can_never_fit_any_more_is_refused_alone(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: all requests of its model were. It was accepted while there was more memory."""
    monkeypatch.setattr(control.Control, "_limit_requests", lambda *_: None)
    params = replace(GREEDY, max_tokens=90)
    alone = await models.alone("qwen3", [1, 2], GREEDY)
    page_bytes = models.reference("qwen3").driver.engine.memory.pages.page_bytes
    pages_a_block = models.reference("qwen3").driver.engine.memory.groups[0].layout.num_slices
    memory_bytes = models.memory_for("qwen3", room_bytes=5 * pages_a_block * page_bytes)
    config = ModelConfig(name="qwen3", engine=models.engine("qwen3", max_model_len=None))
    async with models.opened([config], memory_bytes) as shelf:
        await shelf.model("qwen3").ready()
        results = await asyncio.gather(
            outputs(shelf.model("qwen3"), tokens(30), params),
            *(outputs(shelf.model("qwen3"), [1, 2], GREEDY) for _ in range(4)),
            return_exceptions=True,
        )
        assert results[1:] == [alone] * 4
        assert isinstance(results[0], UnavailableError), results[0]


async def test_models_are_kept_always_or_for_some_time(models: TinyModels) -> None:
    names = ("llama", "qwen3", "gpt2")
    alone = {name: await models.alone(name, [1, 2], GREEDY) for name in names}
    configs = [
        models.config("llama", keep="always"),
        models.config("qwen3", keep=0.2),
        models.config("gpt2"),
    ]
    memory_bytes = models.memory_for("llama", "qwen3", room_bytes=KV_BYTES, beside=names)
    async with models.opened(configs, memory_bytes) as shelf:
        for _ in range(2):
            for name in names:
                assert await outputs(shelf.model(name), [1, 2], GREEDY) == alone[name]
            assert shelf.model("llama").state == "awake"
            await until_state(shelf, "qwen3", "asleep")
        statuses = {status.name: status for status in shelf.statuses()}
        assert statuses["llama"].num_evictions == 0
        assert statuses["llama"].num_wakes == 1
        assert statuses["qwen3"].num_wakes == 2


async def test_the_log_says_who_sleeps_for_whom_and_who_wakes(
    models: TinyModels, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, control.logger.name)
    names = ("llama", "qwen3")
    configs = [models.config("llama"), models.config("qwen3", keep=0.2)]
    async with models.opened(configs, models.memory_for("llama", room_bytes=KV_BYTES // 2, beside=names)) as shelf:
        for name in ("llama", "qwen3"):
            await outputs(shelf.model(name), [1, 2], GREEDY)
        await until_state(shelf, "qwen3", "asleep")
        running = asyncio.create_task(outputs(shelf.model("llama"), [1, 2], LONG))
        while not (shelf.model("llama").status.num_running and await put_to_sleep(shelf, "llama")):
            await asyncio.sleep(0.001)
        await running
    lines = [re.sub(r"\d+(\.\d+)?", "1", record.getMessage()) for record in caplog.records if " MiB in " in record.msg]
    assert lines == [
        "loaded 'llama': 1 MiB in 1 s",
        "put 'llama' to sleep for 'qwen1': 1 MiB in 1 ms",
        "loaded 'qwen1': 1 MiB in 1 s",
        "put 'qwen1' to sleep after 1 s without a request: 1 MiB in 1 ms",
        "woke 'llama': 1 MiB in 1 ms",
        "put 'llama' to sleep for 'another', preempting its 1 running sequences: 1 MiB in 1 ms",
        "woke 'llama': 1 MiB in 1 ms",
    ]


async def test_an_idle_model_that_is_put_to_sleep_loses_no_turn(models: TinyModels) -> None:
    """Regression: a request that came before the next plan was taken for one of a model that had just had its turn, and
    waited behind all others; where the model stayed awake for its least time, until all of its requests had ended."""
    alone = await models.alone("llama", [1, 2], LONG)
    allocation = Allocation(budgets={}, preempt=(), sleep={"llama": "x"}, wake=(), prefetch=(), waits={}, refused={})
    async with models.opened([models.config("llama")], models.memory_for("llama", room_bytes=KV_BYTES)) as shelf:
        model = shelf.model("llama")
        await model.ready()

        def lost() -> bool:
            control_of(shelf)._carry_out(allocation, {"llama": model})
            return model.lost_at is not None

        assert not await in_step_thread(shelf, lost)
        assert model.state == "asleep"
        running = asyncio.create_task(outputs(model, [1, 2], LONG))
        await until_async(lambda: model.status.num_running > 0)
        assert await in_step_thread(shelf, lost)
        assert await running == alone
        assert model.lost_at is None


async def test_the_queue_is_bounded_while_a_model_is_loaded(models: TinyModels) -> None:
    alone = await models.alone("llama", [1, 2], GREEDY)
    config = ModelConfig(name="llama", engine=models.engine("llama", max_queued_requests=3))
    async with models.opened([config], models.memory_for("llama", room_bytes=KV_BYTES)) as shelf:
        results = await asyncio.gather(
            *(outputs(shelf.model("llama"), [1, 2], GREEDY) for _ in range(10)), return_exceptions=True
        )
        refused = [result for result in results if isinstance(result, OverloadedError)]
        assert len(refused) == 7
        assert all(error.retry_after_s > 0 for error in refused)
        assert [result for result in results if not isinstance(result, OverloadedError)] == [alone] * 3


async def test_a_busy_model_starves_no_other(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is memory for one at a time, and one has always more requests than run at once."""
    monkeypatch.setattr(turns, "LEAST_TURN_S", 0.3)
    names = ("llama", "qwen3", "gpt2")
    alone = {name: await models.alone(name, [1, 2], GREEDY) for name in names}
    memory_bytes = models.memory_for("gpt2", room_bytes=KV_BYTES // 2, beside=names)
    configs = [models.config(name, slo=SLO(ttft_s=0.2)) for name in names]
    async with models.opened(configs, memory_bytes) as shelf:
        for name in names:
            await shelf.model(name).ready()
        ended = asyncio.Event()

        async def keep_busy(i: int) -> None:
            while not ended.is_set():
                assert len((await outputs(shelf.model("llama"), [i + 1, 2], LONG))[0]) == 100

        def needed_bytes() -> int:
            status = shelf.device_status()
            assert status is not None
            return status.needed_bytes

        busy = [asyncio.create_task(keep_busy(i)) for i in range(12)]
        not_enough = asyncio.create_task(until_async(lambda: needed_bytes() > memory_bytes))
        for _ in range(3):
            for name in names[1:]:
                async with asyncio.timeout(8):
                    assert await outputs(shelf.model(name), [1, 2], GREEDY) == alone[name]
        ended.set()
        await asyncio.gather(*busy, not_enough)
        await until_async(lambda: not needed_bytes())


# ---- close ----


@pytest.mark.parametrize("state", ["new", "loading", "waking", "awake", "asleep"])
async def test_close_in_every_state(models: TinyModels, state: str) -> None:
    async with models.opened([models.config("llama")], models.memory_for("llama", room_bytes=KV_BYTES)) as shelf:
        model = shelf.model("llama")
        if state in ("waking", "awake", "asleep"):
            await model.ready()
        holds = asleep(shelf, "llama") if state == "asleep" else nullcontext()
        with holds:
            if state in ("waking", "asleep"):
                await put_to_sleep(shelf, "llama")
            tasks = [asyncio.create_task(outputs(model, [1, 2], LONG)) for _ in range(10)]
            if state == "loading":
                await until_state(shelf, "llama", "loading")
            elif state == "awake":
                await until_async(lambda: model.status.num_running > 0)
            elif state != "new":
                await until_async(lambda: model.status.num_waiting > 0)
            await asyncio.to_thread(shelf.close)
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, UnavailableError), result
        with pytest.raises(UnavailableError):
            await outputs(model, [1, 2], GREEDY)
        with pytest.raises(UnavailableError):
            await shelf.check_integrity()
        with pytest.raises(UnavailableError):
            shelf.add(models.config("qwen3"))
        with pytest.raises(UnavailableError):
            shelf.check()
        assert not shelf.healthy
        shelf.close()
