"""Models and adapters are added to a server that runs, and removed; with a real shelf and without Ray."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from folio.app.api.input import served_models
from folio.app.api.operators.bodies import AddModelRequest, LoadAdapterRequest, UnloadAdapterRequest
from folio.app.config.shelf import ShelfConfig
from folio.app.engine import SamplingParams
from folio.app.errors import ForbiddenError, ModelUnavailableError, RequestError, UnavailableError, UnknownModelError
from folio.app.fleet.messages import GenerateRequest
from folio.app.models.builtin import resolve_model
from tests.app.serving.registry import Cluster, patched_cluster
from tests.app.serving.shelf_models import MODELS, SETTINGS, completion, say, states
from tests.fakes.replicas import Engines, ingress_with
from tests.local_server import LocalHandle, a_model, guarded_api, ingress_of, replica_of_shelf


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return patched_cluster(monkeypatch)


@pytest.fixture
def growing(tmp_path: Path, cluster: Cluster) -> Iterator[Any]:
    """One model, to which those in the folder "small" can be added."""
    shutil.copytree(resolve_model("builtin"), tmp_path / "models" / "small")
    (tmp_path / "models" / "broken").mkdir()
    shelf = ShelfConfig(models=MODELS[:1], device_memory_bytes=256 << 20, models_dir=tmp_path / "models")
    replica: Any = replica_of_shelf(shelf)
    ingress = ingress_of(
        LocalHandle(replica), *MODELS[:1], shelf={"device_memory_bytes": 256 << 20, "models_dir": shelf.models_dir}
    )
    ingress.replica, ingress.shelf = replica, shelf
    yield ingress
    replica.__del__()


async def test_a_model_is_added_and_removed(growing: Any, tmp_path: Path) -> None:
    alone = (await growing.generate(completion("first"))).choices[0].text
    card = await growing.add_model(AddModelRequest(name="second", path="small", keep=30.0, dtype="float32"))
    assert (card.id, card.state, card.parent) == ("second", "new", None)
    assert (await growing.generate(completion("second"))).choices[0].text == alone
    assert await states(growing) == {"first": "awake", "second": "awake"}
    for _ in range(2):  # idempotent
        await growing.add_model(AddModelRequest(name="second", path="small", keep=30.0, dtype="float32"))
    with pytest.raises(RequestError, match=r"already, from .*small'.*remove it first"):
        await growing.add_model(AddModelRequest(name="second", path="small"))
    late: Any = replica_of_shelf(growing.shelf, "late")  # a replica that starts later has it, too
    try:
        assert [hosted.status.name for hosted in await late.hosted_models()] == ["first", "second"]
        assert late._shelf.model("second").config.keep == 30.0
    finally:
        late.__del__()
    await growing.remove_model("second")
    assert await states(growing) == {"first": "awake"}
    with pytest.raises(UnknownModelError):
        await growing.generate(completion("second"))
    with pytest.raises(UnknownModelError, match="no model 'second' has been added"):
        await growing.remove_model("second")
    with pytest.raises(RequestError, match="belongs to the settings"):
        await growing.remove_model("first")
    assert (await growing.generate(completion("first"))).choices[0].text == alone


def shards(name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))

    return write


def make_fifo(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def move_weights(*, cut: bool) -> Callable[[Path], None]:
    def move(folder: Path) -> None:
        weights, outside = folder / "model.safetensors", folder.parents[1] / "model.safetensors"
        weights.rename(outside)
        if cut:
            weights.write_bytes(outside.read_bytes()[:-100])
        else:
            weights.symlink_to(outside)

    return move


# Each was served, answered 500, or took a thread of the replica for good.
DAMAGES: dict[str, Callable[[Path], object]] = {
    "outside": move_weights(cut=False),
    "truncated": move_weights(cut=True),
    "index": shards("../../model.safetensors"),
    "deep": lambda folder: (folder / "config.json").write_text("[" * 100_000),
    "fifo": make_fifo,
    "long": shards("x" * 5000),
    "tokenizer": lambda folder: (folder / "tokenizer.json").write_text('{"model": {"vocab": {}}}'),
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": "gone"}, "there is no such folder in models_dir"),
        ({"path": "../models"}, "not below models_dir"),
        ({"path": "/etc"}, "not below models_dir"),
        ({"path": "broken"}, "has no config.json"),
        ({"path": "outside"}, "links out of models_dir"),
        ({"path": "truncated"}, "truncated or damaged"),
        ({"path": "index"}, "the weights must be in the model's folder"),
        ({"path": "deep"}, "is not JSON"),
        ({"path": "fifo"}, "has no config.json"),
        ({"path": "long"}, "cannot be read: .*too long"),
        ({"path": "tokenizer"}, "no tokenizer for .*KeyError"),
        ({"path": "small", "name": "first"}, "of the settings"),
    ],
)
async def test_what_cannot_be_served_is_not_added(
    growing: Any, cluster: Cluster, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "models" / str(fields["path"])
    if fields["path"] in DAMAGES:
        shutil.copytree(tmp_path / "models" / "small", folder)
        DAMAGES[fields["path"]](folder)
    with pytest.raises(RequestError, match=message):
        await growing.add_model(AddModelRequest.model_validate({"name": "second"} | fields))
    assert await states(growing) == {"first": "new"}
    assert cluster.registry.newer(0) == (0, None)


async def test_the_same_models_come_back_after_a_restart(growing: Any, cluster: Cluster, tmp_path: Path) -> None:
    """Regression: a model that the settings of a new version have, too, was that of the old table."""
    for name in ("second", "third", "fourth"):
        await growing.add_model(AddModelRequest(name=name, path="small", keep=30.0))
    with pytest.raises(RequestError, match="'first' is a name of the settings; choose another one"):
        await growing.add_model(AddModelRequest(name="first", path="small"))
    await growing.remove_model("third")
    settings = replace(growing.shelf, models=(*growing.shelf.models, a_model("fourth", **SETTINGS)))
    for shelf, kept in ((growing.shelf, 30.0), (settings, "always")):
        late: Any = replica_of_shelf(shelf, "late")
        try:
            assert sorted(hosted.status.name for hosted in await late.hosted_models()) == ["first", "fourth", "second"]
            await late.set_loaded(replace(cluster.registry.newer(0)[1], revision=99))
            assert late._shelf.model("fourth").config.keep == kept
            assert await say(late, "fourth") == await say(late, "second")
        finally:
            late.__del__()
    extra = {"device_memory_bytes": 256 << 20, "models_dir": settings.models_dir}
    ingress = ingress_of(LocalHandle(growing.replica), *settings.models, shelf=extra, aliases={"gpt": "first"})
    await ingress.model("second")  # which makes it learn the table
    models = ingress._models
    assert models.find("fourth").config.keep == "always"
    assert list(models.by_name) == ["first", "fourth", "second"]
    with pytest.raises(RequestError, match="'gpt' is a name of the settings"):
        await ingress.add_model(AddModelRequest(name="gpt", path="small"))


async def test_a_model_that_one_replica_cannot_take_is_on_none(growing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    replica, calls = growing.replica, 0
    set_loaded = type(replica).set_loaded

    async def fails_once(self: Any, table: Any) -> None:
        nonlocal calls
        calls += 1
        await set_loaded(self, table)
        if calls == 1:
            raise UnavailableError("silent")

    monkeypatch.setattr(type(replica), "set_loaded", fails_once)
    with pytest.raises(UnavailableError):
        await growing.add_model(AddModelRequest(name="second", path="small"))
    assert calls == 2
    assert [hosted.status.name for hosted in await replica.hosted_models()] == ["first"]
    assert await states(growing) == {"first": "new"}


async def test_without_the_settings_nothing_can_be_loaded() -> None:
    ingress = ingress_with(Engines())
    for change, setting in (
        (ingress.load_adapter(LoadAdapterRequest(lora_name="a", lora_path="a")), "adapter_dir"),
        (ingress.unload_adapter(UnloadAdapterRequest(lora_name="pirate")), "adapter_dir"),
        (ingress.add_model(AddModelRequest(name="x", path="x")), "models_dir is not set"),
        (ingress.remove_model("first"), "models_dir is not set"),
    ):
        with pytest.raises(ForbiddenError, match=setting):
            await change


@pytest.mark.parametrize("damage", ["missing", "damaged", "config"])
async def test_a_tokenizer_that_cannot_be_loaded_takes_no_other_model_with_it(
    growing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """Regression: HTTP 500 at each request, which read the files again."""
    monkeypatch.setattr(served_models, "_FIRST_RETRY_S", 0.3)
    await growing.add_model(AddModelRequest(name="second", path="small"))
    folder = tmp_path / "models" / "small"
    file = folder / ("config.json" if damage == "config" else "tokenizer.json")
    whole = file.read_bytes()
    if damage == "missing":
        shutil.rmtree(folder)
    else:
        file.write_bytes(whole[: len(whole) // 2])
    api = guarded_api(growing)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://test") as client:
        body = {"model": "second", "prompt": "The moon", "max_tokens": 2}
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(3)))
        answers.append(await client.post("/v1/completions", json=body))
        for answer in answers:
            error = answer.json()["error"]
            assert (answer.status_code, error["type"], error["code"]) == (503, "server_error", "unavailable")
            assert "'second' cannot be served now" in error["message"]
            assert int(answer.headers["retry-after"]) >= 1
        assert (await growing.generate(completion("first"))).choices
        if damage == "missing":
            shutil.copytree(resolve_model("builtin"), folder)
        file.write_bytes(whole)
        assert caplog.text.count("the tokenizer of 'second' cannot be loaded") == 1, "tried again without a pause"

        async with asyncio.timeout(20):
            while (await client.post("/v1/completions", json=body)).status_code != 200:
                await asyncio.sleep(0.05)


async def test_a_tokenizer_that_is_damaged_later_makes_the_model_unavailable(growing: Any, tmp_path: Path) -> None:
    """Regression: each request was answered 500, with a traceback in the log."""
    await growing.add_model(AddModelRequest(name="second", path="small"))
    (tmp_path / "models" / "small" / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    with pytest.raises(UnavailableError, match=r"'second' cannot be served now: no tokenizer for .*KeyError"):
        await growing.generate(completion("second"))


async def test_a_model_that_cannot_be_loaded_takes_no_other_with_it(
    growing: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await growing.add_model(AddModelRequest(name="second", path="small"))
    (tmp_path / "models" / "small" / "model.safetensors").unlink()
    for _ in range(2):
        with pytest.raises(UnavailableError, match="the model 'second' cannot be served now") as failure:
            await growing.generate(completion("second"))
    assert failure.value.message.count("model") > 1, "it says why"
    assert 0 < (failure.value.retry_after_s or 0) <= 5
    assert [r for r in caplog.records if "'second' cannot be loaded" in r.getMessage() and r.exc_info is None]
    assert await states(growing) == {"first": "new", "second": "failed"}
    await growing.generate(completion("first"))
    growing.replica.check_health()
    stats = await growing.replica.record_routing_stats()
    assert stats["models"]["second"]["wake_s"] > 60
    call = GenerateRequest("r", [1], SamplingParams(), model="second")
    with pytest.raises(ModelUnavailableError) as refused:
        await anext(growing.replica.generate_stream(call))
    assert refused.value.replica == "local"
