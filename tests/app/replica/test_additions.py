"""Adapters added at run time, on a real shelf of two models."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.builtin import resolve_model
from app.config.shelf import ShelfConfig
from app.engine import AsyncEngine, SamplingParams
from app.engine.lora.source import AdapterSource, files_version
from app.engine.shelf import control
from app.engine.shelf.shelf import Shelf
from app.errors import UnavailableError
from app.fleet.loaded import LoadedTable
from app.replica.additions import ShelfAdditions
from tests.app.engine.lora.adapters import make_adapter
from tests.local_server import a_model

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
    lists = shelf.model(model).generate([300, 301], params, adapter=adapter)
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
