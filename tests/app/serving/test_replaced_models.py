"""Models added at run time whose files are replaced: never the old weights under the new model's name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from folio.app.api.operators.bodies import AddModelRequest
from folio.app.config.added_model import AddedModel, files_sample
from folio.app.config.engine import EngineConfig
from folio.app.config.shelf import ShelfConfig
from folio.app.engine import EngineRequest, SamplingParams
from folio.app.errors import RequestError
from folio.app.fleet.loaded import LoadedTable
from folio.app.models.builtin import resolve_model
from folio.app.replica.additions import ShelfAdditions
from folio.app.shelf.shelf import Shelf
from tests.app.serving.registry import Cluster, patched_cluster
from tests.fakes.replicas import completion
from tests.local_server import LocalHandle, a_model, ingress_of, replica_of_shelf


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return patched_cluster(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "small"
    shutil.copytree(resolve_model("builtin"), folder)
    return folder


def replace_weights(folder: Path) -> None:
    """By others of the same size and time."""
    path, other = folder / "model.safetensors", folder / "other"
    before, tensors = path.stat(), load_file(path)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, other, {"format": "pt"})
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


async def test_a_folder_with_other_weights_is_another_model(folder: Path, cluster: Cluster) -> None:
    """Adding it again had no effect: the old weights were served."""
    first = a_model("first")
    settings = {"device_memory_bytes": 256 << 20, "models_dir": folder.parent}
    replica: Any = replica_of_shelf(ShelfConfig(models=(first,), **settings))  # type: ignore[arg-type]
    ingress: Any = ingress_of(LocalHandle(replica), first, shelf=settings)
    try:
        add = AddModelRequest(name="second", path="small", dtype="float32")
        await ingress.add_model(add)
        before = (await ingress.generate(completion(model="second", temperature=0))).choices[0].text
        await ingress.add_model(add)
        replace_weights(folder)
        with pytest.raises(RequestError, match="and its files differ; remove it first"):
            await ingress.add_model(add)
        await ingress.remove_model("second")
        await ingress.add_model(add)
        assert (await ingress.generate(completion(model="second", temperature=0))).choices[0].text != before
    finally:
        replica.__del__()


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    shelf = Shelf([a_model("first").on_device("cpu")], device_memory_bytes=256 << 20)
    yield shelf
    shelf.close()


async def test_a_replica_that_misses_the_removal_loads_the_new_files(shelf: Shelf, folder: Path) -> None:
    """The table had a model of the same name, path and settings, and so the old engine was kept."""

    async def says() -> str:
        lists = shelf.model("second").stream(
            EngineRequest("r", [300, 301], SamplingParams(max_tokens=8, temperature=0))
        )
        return "".join([delta.text async for deltas in lists for delta in deltas])

    settings = ShelfConfig(models=(a_model("first"),), device_memory_bytes=256 << 20)
    additions = ShelfAdditions(settings, shelf, LoadedTable(), None, "cpu")
    engine = EngineConfig(model=str(folder), dtype="float32", max_model_len=512, warm_up=False)
    added = AddedModel(name="second", engine=engine)
    with_it = LoadedTable().with_model(added)
    await additions.adopt(with_it)
    before = await says()
    replace_weights(folder)
    await additions.adopt(with_it.without_model("second").with_model(added))
    assert await says() != before


@pytest.mark.parametrize("size", [100, 20 << 20])
def test_samples_of_files(size: int, tmp_path: Path) -> None:
    """Name, size, and content: all of it, or a part of the beginning, the middle and the end."""
    path = tmp_path / "a"
    path.write_bytes(bytes(size))
    samples = {files_sample([path]), files_sample([]), files_sample([path.rename(tmp_path / "b")])}
    for at in (0, size // 2, size - 1):
        content = bytearray(size)
        content[at : at + 40_000] = bytes([1]) * min(40_000, size - at)
        (tmp_path / "b").write_bytes(content)
        samples.add(files_sample([tmp_path / "b"]))
    (tmp_path / "b").write_bytes(bytes(size + 1))
    samples.add(files_sample([tmp_path / "b"]))
    assert len(samples) == 7
