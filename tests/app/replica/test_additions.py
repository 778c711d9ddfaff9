"""Adapters added at run time, on a real shelf of two models."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from folio.app.config.shelf import ShelfConfig
from folio.app.engine import AsyncEngine, EngineRequest, SamplingParams
from folio.app.engine.lora.source import AdapterSource, files_version
from folio.app.errors import ModelUnavailableError, UnavailableError, UnknownPinError
from folio.app.fleet.loaded import LoadedTable
from folio.app.fleet.messages import GenerateRequest, whole_outputs
from folio.app.models.builtin import resolve_model
from folio.app.replica import additions as additions_module
from folio.app.replica.additions import ShelfAdditions
from folio.app.shelf import control
from folio.app.shelf.shelf import Shelf
from tests.app.engine.lora.adapters import make_adapter
from tests.app.serving.registry import patched_cluster
from tests.local_server import a_model, replica_of_shelf

Adapting = tuple[Shelf, ShelfAdditions, AdapterSource]


@pytest.fixture
def adapting(tmp_path: Path) -> Iterator[Adapting]:
    """Two models, and an adapter for the second."""
    folder = tmp_path / "adapters" / "poet"
    make_adapter(folder, Path(resolve_model("builtin")), r"layers.*_proj$", seed=1)
    options: dict[str, Any] = {"dtype": "float32", "kv_memory_bytes": 16 << 20, "max_num_batched_tokens": 512}
    options |= {"warm_up": False, "adapter_dir": str(tmp_path / "adapters")}
    models = (a_model("first", **options), a_model("second", max_model_len=512, **options))
    settings = ShelfConfig(models=models, device_memory_bytes=256 << 20)
    shelf = Shelf([model.on_device("cpu") for model in models], device_memory_bytes=settings.device_memory_bytes)
    additions = ShelfAdditions(settings, shelf, LoadedTable(), None, "cpu")
    yield shelf, additions, AdapterSource("poet", str(folder), files_version(folder), "second")
    shelf.close()


async def say(shelf: Shelf, model: str, adapter: str | None = None) -> str:
    params = SamplingParams(max_tokens=8, temperature=0)
    lists = shelf.model(model).stream(EngineRequest("r", [300, 301], params, adapter=adapter))
    return "".join([delta.text async for deltas in lists for delta in deltas])


async def test_adapters_reach_the_models_after_a_stopped_engine(
    adapting: Adapting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the first engine that had stopped kept the table from all later models."""
    shelf, additions, poet = adapting
    plain = [await say(shelf, name) for name in ("first", "second")]
    stopped = shelf.engines()["first"]

    async def is_gone(loaded: object) -> None:
        raise UnavailableError("the engine has stopped")

    monkeypatch.setattr(stopped, "set_loaded", is_gone)
    await additions.adopt(LoadedTable(1, (poet, replace(poet, name="other", model="first"))))
    assert await say(shelf, "second", "poet") != plain[1]
    assert [source.name for source in shelf.model("first").loaded_adapters] == ["other"]
    assert await say(shelf, "first") == plain[0]


async def test_adapters_that_come_while_a_model_is_loaded_are_there_at_once(
    adapting: Adapting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: they came with the next change of the table."""
    shelf, additions, poet = adapting
    begun, goes_on = threading.Event(), threading.Event()

    class Slow(AsyncEngine):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            begun.set()
            assert goes_on.wait(20)

    monkeypatch.setattr(control, "AsyncEngine", Slow)
    answer = asyncio.create_task(say(shelf, "second", "poet"))
    assert await asyncio.to_thread(begun.wait, 20)
    await additions.adopt(LoadedTable(1, (poet,)))
    goes_on.set()
    assert await answer != await say(shelf, "second")


async def test_a_replica_that_has_missed_a_model_or_an_adapter_learns_of_it_from_its_first_request(
    adapting: Adapting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a replica that had just replaced a killed one refused requests for what was added at run time with
    `UnknownModelError`, which ends them with 404, where the ingress knew better. A registry that has died, too, gets
    the table a little later. What remains unknown is for another replica."""
    *_, poet = adapting
    cluster = patched_cluster(monkeypatch)
    options: dict[str, Any] = {"kv_memory_bytes": 16 << 20, "max_num_batched_tokens": 512, "warm_up": False}
    known, missed = (a_model(n, adapter_dir=str(tmp_path / "adapters"), **options) for n in ("known", "missed"))
    replica = replica_of_shelf(ShelfConfig(models=(known,), device_memory_bytes=256 << 20, models_dir=str(tmp_path)))
    table = LoadedTable(1, (replace(poet, model="missed"),), (missed,))

    async def answer(model: str, adapter: str | None) -> None:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        call = GenerateRequest(f"{model}-{adapter}", [300, 301], params, model=model, adapter=adapter, whole=True)
        items = [item async for item in replica.generate_stream(call)]
        pieces = whole_outputs([piece for item in items if isinstance(item, list) for piece in item])
        assert len(pieces[0].token_ids) == 3

    async def restore() -> None:
        await asyncio.sleep(0.3)
        cluster.registry.restore(table)

    later = asyncio.create_task(restore())
    assert await replica.max_model_len("missed") > 0
    await asyncio.gather(answer("missed", None), answer("missed", "poet"), answer("", None), later)
    engine = replica._shelf.engines()["missed"]
    set_loaded = engine.set_loaded

    async def slowly(loaded: Any) -> None:
        await asyncio.sleep(0.3)
        await set_loaded(loaded)

    monkeypatch.setattr(engine, "set_loaded", slowly)
    new = replace(table, revision=2, sources=(*table.sources, replace(poet, name="new", model="missed")))
    cluster.registry.restore(new)
    change = asyncio.create_task(replica.set_loaded(new))
    await asyncio.sleep(0)  # it has begun
    await answer("missed", "new")
    await change
    monkeypatch.setattr(additions_module, "_LEARN_S", 0.1)
    for model, adapter, what in (("gone", None, "model 'gone'"), ("known", "poet", "adapter 'poet'")):
        with pytest.raises(ModelUnavailableError, match=what) as unknown:
            await answer(model, adapter)
        assert unknown.value.replica == "local"
    with pytest.raises(UnknownPinError):
        await replica.unpin("pin", "missed")
    replica.__del__()
