"""Memory of LoRA adapters on a shelf: charged before it is taken, and given back while their model sleeps."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from folio.app.engine.engine import Engine
from folio.app.engine.lora.layers import num_bytes
from folio.app.engine.lora.rank import RankAdapters
from folio.app.engine.lora.source import AdapterSource
from folio.app.errors import ModelError, UnavailableError
from folio.app.shelf.shelf import Shelf
from tests.app.shelf.shelves import (
    GREEDY,
    KV_BYTES,
    LONG,
    TinyModels,
    control_of,
    device_of,
    in_step_thread,
    outputs,
    outputs_of,
    sleeping,
    stream_of,
)
from tests.processes import until_async

LONGER = replace(LONG, max_tokens=120)


def adapter_bytes(shelf: Shelf) -> int:
    """What is charged to the device beside weights and workspace."""
    status = shelf.device_status()
    assert status is not None
    return status.charged_bytes - sum(model.device_weight_bytes for model in shelf.statuses())


async def engine_of(shelf: Shelf, name: str) -> Engine:
    return (await shelf.model(name).ready()).driver.engine


async def test_adapters_are_given_back_while_their_model_sleeps(models: TinyModels) -> None:
    """Regression: those of preempted requests stayed in memory, which no other model could have. Tokens are as
    before."""
    alone = {name: await models.alone("lora", [1, 2], LONGER, adapter=name) for name in ("red", "blue")}
    base = await models.alone("lora", [1, 2], LONGER)
    async with models.shelf("lora", memory_of=["lora"]) as shelf:
        model = shelf.model("lora")
        await outputs(model, [1, 2], GREEDY)
        engine = await engine_of(shelf, "lora")
        assert adapter_bytes(shelf) == engine.adapters.num_bytes == 0
        streams = {name: stream_of(model, [1, 2], LONGER, adapter=name) for name in alone}
        got = {name: outputs_of(await anext(stream))[0] for name, stream in streams.items()}
        taken = engine.adapters.num_bytes
        targets = engine.model.adapters._targets
        assert (
            taken
            == adapter_bytes(shelf)
            == sum(num_bytes({linear: update}) for linear in targets for update in linear.updates.values())
        )
        async with sleeping(shelf, "lora"):
            assert adapter_bytes(shelf) == engine.adapters.num_bytes == 0
            assert not any(linear.updates for linear in targets)
            assert await in_step_thread(shelf, lambda: engine.adapters.wanted_bytes) == taken
            await shelf.check_integrity()
        assert await outputs(model, [1, 2], LONGER) == base
        for name, stream in streams.items():
            async for deltas in stream:
                got[name] += outputs_of(deltas)[0]
            assert [got[name]] == alone[name]


def sizes(monkeypatch: pytest.MonkeyPatch, num_bytes: int, check: Callable[[], None] = lambda: None) -> None:
    """Make adapters as large as this; the check is called where one is read."""
    real = RankAdapters.read

    def read(self: RankAdapters, source: AdapterSource) -> Any:
        check()
        return real(self, source)

    monkeypatch.setattr(RankAdapters, "_size", lambda *_: num_bytes)
    monkeypatch.setattr(RankAdapters, "read", read)


async def test_an_adapter_that_does_not_fit_makes_room_first(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: an adapter was read first, and charged with the next plan."""
    alone = await models.alone("lora", [1, 2], GREEDY, adapter="red")
    other = await models.alone("llama", [1, 2], GREEDY)
    configs = [models.config("lora"), models.config("llama")]
    memory_bytes = models.memory_for("lora", "llama", room_bytes=KV_BYTES)
    async with models.opened(configs, memory_bytes) as shelf:
        for config in configs:
            await outputs(shelf.model(config.name), [1, 2], GREEDY)
        large, charged = KV_BYTES // 2 + models.weight_bytes("llama"), []
        pages = device_of(shelf).shared.pages

        def check() -> None:
            charged.append(adapter_bytes(shelf))

        sizes(monkeypatch, large, check)
        assert pages.available_bytes < large
        assert await outputs(shelf.model("lora"), [1, 2], GREEDY, adapter="red") == alone
        assert len(charged) == 1
        assert charged[0] >= large
        assert shelf.model("llama").state == "asleep"
        await shelf.check_integrity()
        assert await outputs(shelf.model("llama"), [1, 2], GREEDY) == other


async def test_an_adapter_that_can_never_fit_fails_its_requests_only(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it took the memory all the same. Many of its requests are no reason to replace the engine."""
    sizes(monkeypatch, 1 << 30)
    alone = await models.alone("lora", [1, 2], LONG)
    async with models.shelf("lora", memory_of=["lora"]) as shelf:
        model = shelf.model("lora")
        await model.ready()
        running = asyncio.create_task(outputs(model, [1, 2], LONG))
        for _ in range(12):
            with pytest.raises(
                UnavailableError, match=r"adapter 'red' takes 1073741824 bytes; .* there are at most \d+:"
            ):
                await outputs(model, [1, 2], GREEDY, adapter="red")
        assert await running == alone
        assert model.state == "awake"
        assert adapter_bytes(shelf) == 0


@pytest.mark.parametrize("share", [0.6, 0.5])
async def test_unused_adapters_give_way_to_another_one_and_its_request(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Regression: two adapters fitted, but not the request beside them; it was refused."""
    alone = {name: await models.alone("lora", [1, 2], GREEDY, adapter=name) for name in ("red", "blue")}
    async with models.shelf("lora", memory_of=["lora"]) as shelf:
        engine = await engine_of(shelf, "lora")
        memory = engine.adapters.memory
        assert memory is not None
        sizes(monkeypatch, int(share * memory.room_bytes))
        for name in ("red", "blue", "red"):
            assert await outputs(shelf.model("lora"), [1, 2], GREEDY, adapter=name) == alone[name]
            assert list(engine.adapters.slots) == [name]
            await shelf.check_integrity()


async def test_unused_adapters_give_way_to_a_long_request(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: what was in memory of adapters bounded the length of requests, used or not."""
    prompt = [1 + i % 50 for i in range(90)]
    alone = await models.alone("lora", prompt, GREEDY)
    async with models.shelf("lora", memory_of=["lora"]) as shelf:
        model = shelf.model("lora")
        engine = await engine_of(shelf, "lora")
        memory = engine.adapters.memory
        assert memory is not None
        kv_bytes = engine.memory.pages_for(len(prompt)) * engine.memory.pages.page_bytes
        sizes(monkeypatch, int(memory.room_bytes) - kv_bytes + 1)
        await outputs(model, [1, 2], GREEDY, adapter="red")
        assert adapter_bytes(shelf) > 0
        await until_async(lambda: engine.memory.context_tokens == engine.memory.max_tokens)
        assert await outputs(model, prompt, GREEDY) == alone
        assert adapter_bytes(shelf) == 0


@pytest.mark.parametrize("fails", ["size", "read"])
async def test_an_adapter_that_is_lost_while_its_model_sleeps(models: TinyModels, fails: str) -> None:
    """Its requests end with the reason, and the others go on."""
    alone = await models.alone("lora", [1, 2], LONGER, adapter="blue")
    async with models.shelf("lora", memory_of=["lora"]) as shelf:
        model = shelf.model("lora")
        streams = {name: stream_of(model, [1, 2], LONGER, adapter=name) for name in ("red", "blue")}
        got = {name: outputs_of(await anext(stream))[0] for name, stream in streams.items()}
        file = models.adapter("lora", "red") / "adapter_model.safetensors"
        async with sleeping(shelf, "lora"):
            file.rename(file.with_name("lost"))
            if fails == "size":
                (await engine_of(shelf, "lora")).adapters._sizing.clear()
        try:
            with pytest.raises(ModelError, match="is missing"):
                async for _ in streams["red"]:
                    pass
        finally:
            file.with_name("lost").rename(file)
        async for deltas in streams["blue"]:
            got["blue"] += outputs_of(deltas)[0]
        assert [got["blue"]] == alone
        await shelf.check_integrity()


async def test_requests_wait_while_an_adapter_is_read(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: their waits did not count, so that a model that sleeps and has no other requests was never due. What
    is being read keeps its memory until the read ends; it is read again after the wake."""
    alone = await models.alone("lora", [1, 2], GREEDY, adapter="red")
    begun, goes_on = threading.Event(), threading.Event()

    def check() -> None:
        begun.set()
        assert goes_on.wait(60)

    async with models.shelf("lora", memory_of=["lora"]) as shelf:
        model = shelf.model("lora")
        engine = await engine_of(shelf, "lora")
        sizes(monkeypatch, 1000, check)
        red = asyncio.create_task(outputs(model, [1, 2], GREEDY, adapter="red"))
        await until_async(begun.is_set)
        need = await in_step_thread(shelf, partial(control_of(shelf)._need, model, time.monotonic()))
        assert (need.num_running, need.num_waiting) == (0, 1)
        assert need.first_bytes == need.waiting_bytes > 0 < need.waited_s
        assert need.weight_bytes == model.weight_bytes + 1000
        async with sleeping(shelf, "lora"):
            assert engine.adapter_bytes == 1000
            await shelf.check_integrity()
            goes_on.set()
            await until_async(lambda: engine.adapter_bytes == 0)
        assert await red == alone
        await shelf.remove("lora")
        assert adapter_bytes(shelf) == 0
