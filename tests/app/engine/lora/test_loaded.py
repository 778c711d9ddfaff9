"""Adapters loaded, replaced and unloaded while the engine runs."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from folio.app.config.engine import EngineConfig
from folio.app.engine.async_engine import AsyncEngine
from folio.app.engine.engine import Engine
from folio.app.engine.lora import rank
from folio.app.engine.lora.layers import LoRALinear, Updates
from folio.app.engine.lora.rank import RankAdapters
from folio.app.engine.lora.source import AdapterSource, files_version
from folio.app.engine.lora.weights import read_weights
from folio.app.engine.request.engine_request import EngineRequest
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.startup import hot_prefixes, warm_prefixes
from folio.app.errors import ConfigError, EngineError, ModelError, RequestError, UnknownModelError
from tests.app.engine.engines import MakeEngine, greedy, run
from tests.app.engine.engines import tokens_of as tokens
from tests.app.engine.lora.adapters import Merged, make_adapter, write_adapter
from tests.app.engine.lora.conftest import Events

pytestmark = pytest.mark.usefixtures("one_thread")

Adapters = dict[str, Path]
EngineOf = Callable[..., Engine]
GREEDY = greedy(6)
PROMPT = list(range(3, 43))


@pytest.fixture
def folders(tmp_path: Path, llama: Path) -> Adapters:
    found = {name: tmp_path / "adapters" / name for name in "ab"}
    for seed, folder in enumerate(found.values()):
        make_adapter(folder, llama, r"layers.*_proj$", seed=seed)
    return found


def source(name: str, folder: Path) -> AdapterSource:
    return AdapterSource(name, str(folder), files_version(folder))


@pytest.fixture
def engine_of(serve: MakeEngine, llama: Path, folders: Adapters) -> EngineOf:
    """`engine_of(loaded, **settings)`: with these adapters loaded."""

    def make(loaded: Adapters, **settings: Any) -> Engine:
        engine = serve(llama, {}, adapter_dir=str(folders["a"].parent), **settings)
        engine.adapters.set_loaded([source(name, folder) for name, folder in loaded.items()])
        return engine

    return make


def answer(engine: Engine, adapter: str | None, prompt: list[int] = PROMPT) -> tuple[list[int], int]:
    """The tokens, and the number of cached tokens of the prompt."""
    engine.submit("r", prompt, GREEDY, adapter=adapter)
    deltas = run(engine)["r"]
    return tokens(deltas), deltas[0].num_cached_tokens


def test_an_adapter_is_loaded_and_unloaded(engine_of: EngineOf, llama: Path, folders: Adapters) -> None:
    engine = engine_of({})
    with pytest.raises(UnknownModelError, match="has none"):
        engine.submit("r", PROMPT, GREEDY, adapter="legal")
    engine.adapters.set_loaded([source("legal", folders["a"])])
    assert answer(engine, "legal")[0] == Merged(llama, folders["a"]).generate(PROMPT, 6)
    assert answer(engine, None)[0] == Merged(llama).generate(PROMPT, 6)
    linears = [module for module in engine.model.module.modules() if isinstance(module, LoRALinear)]
    weights = [weakref.ref(update.down) for linear in linears for update in linear.updates.values()]
    assert weights
    engine.adapters.set_loaded([])
    gc.collect()
    assert not any(weight() is not None for weight in weights)
    assert not engine.adapters.slots
    with pytest.raises(UnknownModelError, match="has none"):
        engine.submit("r", PROMPT, GREEDY, adapter="legal")


def test_a_new_adapter_gets_no_prefixes_of_an_old_one(engine_of: EngineOf, llama: Path, folders: Adapters) -> None:
    """The name is the same, the weights are others. With the weights of before, the prefixes are valid again."""
    expected = {key: Merged(llama, folder).generate(PROMPT, 6) for key, folder in folders.items()}
    assert expected["a"] != expected["b"]
    engine = engine_of({})
    for key, num_cached in (("a", 0), ("a", 32), ("b", 0), ("b", 32), ("a", 32)):
        engine.adapters.set_loaded([])
        engine.adapters.set_loaded([source("legal", folders[key])])
        assert answer(engine, "legal") == (expected[key], num_cached)
    engine.adapters.set_loaded([source("legal", folders["b"])])  # in place
    assert answer(engine, "legal") == (expected["b"], 32)
    make_adapter(folders["b"], llama, r"layers.*_proj$", seed=7)  # the same path, other files
    engine.adapters.set_loaded([source("legal", folders["b"])])
    assert answer(engine, "legal") == (Merged(llama, folders["b"]).generate(PROMPT, 6), 0)


def test_requests_that_have_begun_keep_their_adapter(engine_of: EngineOf, llama: Path, folders: Adapters) -> None:
    """Running ones, forks of running ones, and those that wait for the file or for a slot."""
    expected = {key: Merged(llama, folder).generate(PROMPT, 6) for key, folder in folders.items()}
    engine = engine_of({"legal": folders["a"], "other": folders["b"]}, max_loaded_adapters=1)
    engine.submit("runs", PROMPT, GREEDY, adapter="legal")
    deltas = [delta for _ in range(3) for delta in engine.step()]
    while not deltas:
        deltas += engine.step()
    engine.submit("waits", PROMPT, GREEDY, adapter="other")
    engine.adapters.set_loaded([source("legal", folders["b"])])
    assert engine.adapters.slots.keys() == {source("legal", folders["a"]).id}
    engine.submit("later", PROMPT, GREEDY, adapter="legal")
    engine.fork("runs", "fork", replace(GREEDY, max_tokens=2))
    outputs = run(engine)
    assert tokens([*deltas, *outputs["runs"]]) == expected["a"]
    assert tokens(outputs["fork"]) in [expected["a"][i : i + 2] for i in range(6)]
    assert tokens(outputs["waits"]) == tokens(outputs["later"]) == expected["b"]
    assert engine.adapters.slots.keys() == {source("legal", folders["b"]).id}
    with pytest.raises(UnknownModelError):  # its prefix is computed with weights that are gone
        engine.fork("runs", "fork", GREEDY)
    assert not engine.has_work


def test_the_last_requests_end_frees_the_memory(engine_of: EngineOf, llama: Path, folders: Adapters) -> None:
    """Without a later step: by the end of the output, or by cancellation."""
    for cancels in (True, False):
        engine = engine_of({"legal": folders["a"]})
        engine.submit("r", PROMPT, GREEDY, adapter="legal")
        while not engine.step():
            pass
        engine.adapters.set_loaded([])
        assert engine.adapters.slots
        if cancels:
            engine.cancel("r")
        else:
            run(engine)
        assert not engine.adapters.slots


def test_a_request_that_comes_too_late_leaves_nothing(engine_of: EngineOf, llama: Path, folders: Adapters) -> None:
    """It was validated before the adapter was unloaded."""
    engine = engine_of({"legal": folders["a"]})
    begin = engine.prepare(EngineRequest("r", PROMPT, GREEDY, adapter="legal"))
    engine.adapters.set_loaded([])
    with pytest.raises(UnknownModelError):
        begin("r")
    assert not engine.has_work
    engine.check_integrity()


def test_changed_files_are_refused(engine_of: EngineOf, llama: Path, folders: Adapters) -> None:
    """Also after an eviction, and while they are read. A new time alone is no change."""
    engine = engine_of({"x": folders["a"], "y": folders["b"]}, max_loaded_adapters=1)
    expected = answer(engine, "x")[0]
    answer(engine, "y")
    os.utime(folders["a"] / "adapter_model.safetensors")
    assert answer(engine, "x")[0] == expected
    answer(engine, "y")
    settings = json.loads((folders["a"] / "adapter_config.json").read_text())
    (folders["a"] / "adapter_config.json").write_text(json.dumps(settings | {"lora_alpha": 100}))
    engine.submit("r", PROMPT, GREEDY, adapter="x")
    [delta] = run(engine)["r"]
    assert isinstance(delta.error, ModelError)
    assert "has changed" in str(delta.error)
    (folders["b"] / "adapter_model.safetensors").unlink()
    engine.submit("r", PROMPT, GREEDY, adapter="y")
    assert "is missing" in str(run(engine)["r"][0].error)


def test_files_that_change_while_they_are_read_are_refused(
    engine_of: EngineOf, llama: Path, folders: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_and_change(*args: Any, **kwargs: Any) -> Any:
        weights = read_weights(*args, **kwargs)
        make_adapter(folders["a"], llama, r"layers.*_proj$", seed=8)
        return weights

    engine = engine_of({"legal": folders["a"]})
    monkeypatch.setattr(rank, "read_weights", read_and_change)
    engine.submit("r", PROMPT, GREEDY, adapter="legal")
    assert "has changed while it was read" in str(run(engine)["r"][0].error)


def test_prefixes_of_peers_are_computed_with_loaded_adapters(
    engine_of: EngineOf, llama: Path, folders: Adapters
) -> None:
    """A replica that starts has the adapters before it warms its cache."""
    loaded = [source("legal", folders["a"])]
    old = engine_of({"legal": folders["a"]})
    for _ in range(2):
        answer(old, "legal")
    settings = EngineConfig(
        model=str(llama),
        adapter_dir=str(folders["a"].parent),
        kv_memory_bytes=16 << 20,
        num_threads=1,
        skip_tokenizer_init=True,
    )
    new = Engine(settings, loaded=loaded)
    warmed = warm_prefixes(new, [hot_prefixes(old)], 60)
    assert (warmed.hot, warmed.failed) == (1, 0)
    assert answer(new, "legal") == (Merged(llama, folders["a"]).generate(PROMPT, 6), 32)
    new.close()


def test_the_directory_must_exist(serve: MakeEngine, llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapter_dir is .*no such folder"):
        serve(llama, {}, adapter_dir=str(tmp_path / "typo"))


# ---- the async engine ----


@pytest.fixture
def served(llama: Path, folders: Adapters) -> Iterator[AsyncEngine]:
    settings: dict[str, Any] = {"kv_memory_bytes": 16 << 20, "skip_tokenizer_init": True, "num_threads": 1}
    settings |= {"adapter_dir": str(folders["a"].parent), "warm_up": False, "max_loaded_adapters": 2}
    engine = AsyncEngine(EngineConfig(model=str(llama), **settings))
    yield engine
    asyncio.run(engine.check_integrity())
    engine.close()


async def generated(engine: AsyncEngine, adapter: str | None, params: SamplingParams = GREEDY) -> list[int]:
    return tokens([delta async for some in engine.generate(PROMPT, params, adapter=adapter) for delta in some])


async def test_a_check_finds_what_can_be_served(
    served: AsyncEngine, llama: Path, folders: Adapters, tmp_path: Path
) -> None:
    found = await served.check_adapter("legal", "a")
    assert found == source("legal", folders["a"])
    directory = folders["a"].parent
    weights = load_file(folders["a"] / "adapter_model.safetensors")
    settings = json.loads((folders["a"] / "adapter_config.json").read_text())
    first = next(iter(weights))
    write_adapter(directory / "rank", weights, **settings | {"r": 8})
    write_adapter(directory / "module", weights | {"base_model.model.x.lora_A.weight": torch.zeros(1)}, **settings)
    write_adapter(directory / "dtype", weights | {first: weights[first].to(torch.int8)}, **settings)
    write_adapter(directory / "dora", weights, **settings | {"use_dora": True})
    make_adapter(directory / "damaged", llama, "q_proj")
    (directory / "damaged" / "adapter_model.safetensors").write_bytes(b"\0" * 10)
    for path, message in (
        ("rank", "does not fit"),
        ("module", "for no layer"),
        ("dtype", "torch.int8"),
        ("dora", "use_dora"),
        ("damaged", "cannot read"),
        ("../", "not below adapter_dir"),
        ("nowhere", "has no adapter_config"),
    ):
        with pytest.raises(RequestError, match=message) as refused:
            await served.check_adapter("legal", path)
        assert refused.value.param == "lora_path"
    with pytest.raises(UnknownModelError):  # a check alone makes nothing visible
        await generated(served, "legal")
    adapters = served.driver.engine.adapters
    assert not adapters.slots
    own = adapters._own
    assert not own.reading
    await asyncio.to_thread(own._thread.submit(lambda: None).result)
    assert not own._found


async def test_without_the_setting_nothing_is_checked(engine_of: EngineOf, llama: Path, folders: Adapters) -> None:
    settings: dict[str, Any] = {"kv_memory_bytes": 16 << 20, "skip_tokenizer_init": True, "warm_up": False}
    engine = await asyncio.to_thread(AsyncEngine, EngineConfig(model=str(llama), num_threads=1, **settings))
    with pytest.raises(RequestError, match="adapter_dir is not set"):
        await engine.check_adapter("legal", str(folders["a"]))
    engine.close()


async def test_a_failure_that_is_not_the_files(
    served: AsyncEngine, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: RankAdapters, source: AdapterSource) -> Updates:
        raise RuntimeError(f"out of memory for {source.name}")

    with monkeypatch.context() as patch:
        patch.setattr(RankAdapters, "read", fail)
        with pytest.raises(EngineError, match="max_loaded_adapters"):
            await served.check_adapter("legal", "a")
    await served.set_loaded([await served.check_adapter("legal", "a")])
    assert await generated(served, None) == Merged(llama).generate(PROMPT, 6)


async def test_a_cancelled_check_leaves_nothing(served: AsyncEngine, llama: Path, read_events: Events) -> None:
    """Steps go on while the file is read."""
    begun, may_end = read_events
    begun.clear()
    may_end.clear()
    check = asyncio.create_task(served.check_adapter("legal", "a"))
    await asyncio.to_thread(begun.wait, 60)
    assert await generated(served, None) == Merged(llama).generate(PROMPT, 6)
    check.cancel()
    with pytest.raises(asyncio.CancelledError):
        await check
    assert not served.driver.engine.adapters._own.reading
    may_end.set()


async def test_changes_while_requests_run(served: AsyncEngine, llama: Path, folders: Adapters) -> None:
    """Each request gets the tokens of one of the adapters that had its name, or is refused; memory stays consistent."""
    expected = [Merged(llama, folder).generate(PROMPT, 6) for folder in folders.values()]
    choices = [[source("legal", folder)] for folder in folders.values()]
    choices += [[], [*choices[0], source("other", folders["b"])]]
    generator, ended = np.random.default_rng(5), 0

    async def ask() -> int:
        try:
            assert await generated(served, "legal") in expected
        except UnknownModelError:
            return 0
        return 1

    async def change() -> None:
        for _ in range(40):
            await served.set_loaded(choices[generator.integers(4)])
            await asyncio.sleep(0.002)

    changes = asyncio.create_task(change())
    while not changes.done():
        ended += sum(await asyncio.gather(*(ask() for _ in range(4))))
        await served.check_integrity()
    await changes
    assert ended
    await served.set_loaded([])
    assert not served.driver.engine.adapters.slots
    assert not served.driver.engine.adapters._retired


async def test_calls_of_a_closed_engine_end(served: AsyncEngine, folders: Adapters) -> None:
    engine = await asyncio.to_thread(partial(AsyncEngine, served.driver.engine.config))
    engine.close()
    for call in (engine.set_loaded([]), engine.check_adapter("legal", "a")):
        with pytest.raises(EngineError, match="has stopped"):
            await call
