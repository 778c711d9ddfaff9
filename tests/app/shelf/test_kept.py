"""Prefixes of models that sleep."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from folio.app.config.engine import KVStore
from folio.app.config.shelf import ModelConfig
from folio.app.engine.engine import Engine
from folio.app.engine.schedule import read_ahead
from folio.app.engine.schedule.preemption import PreemptionCostModel
from folio.app.shelf.shelf import Shelf
from folio.vmem.prefix.store import kept_prefixes
from tests.app.shelf.shelves import (
    GREEDY,
    KV_BYTES,
    MODELS,
    Outputs,
    TinyModels,
    control_of,
    deltas_of,
    device_of,
    in_step_thread,
    outputs_of,
    put_to_sleep,
    sleeping,
    until_state,
)
from tests.conftest import tokens
from tests.processes import until_async

PROMPT = tokens(81, 7)


@pytest.fixture(autouse=True)
def _copies_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are those of a busy machine, and of models whose steps take less time than a call."""
    monkeypatch.setattr(PreemptionCostModel, "read_s", lambda *_: 0.0)
    monkeypatch.setattr(PreemptionCostModel, "is_worth_swap", lambda *_: True)


async def ask(shelf: Shelf, name: str, prompt: list[int] = PROMPT, **options: Any) -> tuple[int | None, Outputs]:
    """The request's cached tokens, and its tokens."""
    deltas = await deltas_of(shelf.model(name), prompt, GREEDY, **options)
    return deltas[-1].num_cached_tokens, outputs_of(deltas)


def kept_bytes(shelf: Shelf, name: str) -> int:
    return shelf.model(name).status.kept_bytes


async def engine_of(shelf: Shelf, name: str) -> Engine:
    return (await shelf.model(name).ready()).driver.engine


@pytest.mark.parametrize("name", [name for name in MODELS if name != "embeds"])
async def test_what_was_cached_is_cached_after_a_sleep(models: TinyModels, name: str) -> None:
    options = {"adapter": "red"} if name == "lora" else {}
    alone = await models.alone(name, PROMPT, GREEDY, **options)
    async with models.shelf(models.config(name), memory_of=[name], room_bytes=4 * KV_BYTES) as shelf:
        assert await ask(shelf, name, **options) == (0, alone)
        cached, _ = await ask(shelf, name, **options)
        assert cached
        for _ in range(2):
            await put_to_sleep(shelf, name)
            assert 0 < kept_bytes(shelf, name) <= device_of(shelf).shared.pages.swap_space.used_bytes
            await shelf.check_integrity()
            assert await ask(shelf, name, **options) == (cached, alone)
            await shelf.check_integrity()


@pytest.mark.parametrize("name", ["gemma2", "lora", "bamba", "draft"])
async def test_pins_come_back_without_being_computed(
    models: TinyModels, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    document, other, options = tokens(64, 1), tokens(32, 2), {"adapter": "red"} if name == "lora" else {}
    alone = await models.alone(name, [*document, 5], GREEDY, **options)
    async with models.shelf(models.config(name), memory_of=[name], room_bytes=4 * KV_BYTES) as shelf:
        running = await shelf.model(name).ready()
        engine = running.driver.engine
        await running.pin("document", document, **options)
        await running.pin("other", other)

        def pins() -> dict[str, bool]:
            return {pin.name: pin.num_bytes > 0 for pin in engine.report().pins}

        assert pins() == {"document": True, "other": True}
        cached, _ = await ask(shelf, name, [*document, 5], **options)
        assert cached
        with monkeypatch.context() as patch:
            patch.setattr(engine.executor, "run", lambda *_: pytest.fail("a step was computed"))
            async with sleeping(shelf, name):
                assert pins() == {"document": False, "other": False}
            await in_step_thread(shelf, partial(control_of(shelf)._wake, shelf.model(name)))
            await until_async(lambda: all(pins().values()) and not engine.requests, 30.0)
        assert await ask(shelf, name, [*document, 5], **options) == (cached, alone)
        await shelf.check_integrity()


async def test_another_model_takes_the_room_of_what_is_kept(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is left goes with the model."""
    monkeypatch.setattr(kept_prefixes, "_COPY_BYTES", 1)
    configs = [ModelConfig(name=name, engine=models.engine(name, preemption="swap")) for name in ("llama", "qwen3")]
    async with models.shelf(*configs, memory_of=["llama", "qwen3"], room_bytes=4 * KV_BYTES) as shelf:
        space = device_of(shelf).shared.pages.swap_space
        for name in ("llama", "qwen3"):
            await ask(shelf, name)
        await put_to_sleep(shelf, "llama")
        kept = kept_bytes(shelf, "llama")
        assert kept == space.used_bytes
        space.most_bytes = kept * 3 // 2
        await put_to_sleep(shelf, "qwen3")
        assert kept_bytes(shelf, "llama") + kept_bytes(shelf, "qwen3") == space.used_bytes <= space.most_bytes
        assert kept_bytes(shelf, "qwen3")
        assert kept_bytes(shelf, "llama") < kept
        await shelf.check_integrity()
        assert (await ask(shelf, "qwen3"))[0]
        engine = await shelf.model("qwen3").ready()
        engine.stop()
        await until_async(lambda: space.used_bytes == kept_bytes(shelf, "llama"), 10.0)
        await shelf.check_integrity()


@pytest.mark.parametrize("settings", [{"swap_bytes": 0}, {"prefix_cache": False}])
async def test_nothing_is_kept_without_room_or_cache(models: TinyModels, settings: dict[str, Any]) -> None:
    config = ModelConfig(name="llama", engine=models.engine("llama", **settings), keep=0)
    async with models.shelf(config, memory_of=["llama"]) as shelf:
        await ask(shelf, "llama")
        await until_state(shelf, "llama", "asleep")
        assert kept_bytes(shelf, "llama") == 0
        assert (await ask(shelf, "llama"))[0] == 0


async def test_a_model_with_keep_0_keeps_its_prefixes(models: TinyModels) -> None:
    async with models.shelf(models.config("llama", keep=0), memory_of=["llama"]) as shelf:
        _, alone = await ask(shelf, "llama")
        await until_state(shelf, "llama", "asleep")
        assert await ask(shelf, "llama") == (80, alone)


async def test_what_was_not_written_before_a_sleep_is_on_disk_after_the_close(
    models: TinyModels, tmp_path: Path
) -> None:
    store = KVStore(dir=str(tmp_path), bytes=64 << 20)
    config = ModelConfig(name="llama", engine=models.engine("llama", kv_store=store))
    async with models.shelf(config, memory_of=["llama"]) as shelf:
        engine = await engine_of(shelf, "llama")
        assert engine.store is not None
        engine.store._writer._next_at = time.monotonic() + 1e6
        _, alone = await ask(shelf, "llama")
        async with sleeping(shelf, "llama"):
            assert engine.store.counts.written == 0
            await asyncio.to_thread(shelf.close)
        assert engine.store.counts.dropped == 0
    async with models.shelf(config, memory_of=["llama"]) as shelf:
        assert await ask(shelf, "llama") == (80, alone)


async def test_a_long_prefix_comes_back_in_parts_however_long_it_has_waited_for_memory(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "_PART_BYTES", 1)
    monkeypatch.setattr(read_ahead, "_MOST_WAIT_S", 0.0)
    async with models.shelf("llama", memory_of=["llama"]) as shelf:
        _, alone = await ask(shelf, "llama")
        await put_to_sleep(shelf, "llama")
        assert await ask(shelf, "llama") == (80, alone)
