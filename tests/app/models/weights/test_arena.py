"""Weight arenas: a model whose tensors have moved computes the same, whenever they are mapped."""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from folio.app.config.engine import EngineConfig, ResolvedConfig
from folio.app.engine import SamplingParams
from folio.app.engine.engine import Engine
from folio.app.engine.layers.linear import PackedLinear
from folio.app.engine.model import checkpoint_module, loader, stored_module
from folio.app.engine.model.loader import LoadedModel, load_model
from folio.app.engine.ranks import executor
from folio.app.errors import ConfigError, ModelError
from folio.app.models.weights.arena import WeightArena, collect
from folio.app.models.weights.file_digests import FileDigests
from folio.app.models.weights.key import weight_key
from folio.app.models.weights.model_parts import find_tensors
from folio.app.models.weights.store import WeightStore
from folio.kernels import HeadNorm
from folio.vmem import MapError
from folio.vmem.weights import FileRange
from tests.app.engine.runs import generate_staggered, layers_in_one_call
from tests.architectures import ALL
from tests.conftest import MakeCheckpoint, tokens

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = [tokens(length, seed) for seed, length in enumerate((1, 17, 129, 300))]


@dataclass(frozen=True)
class Parts:
    named: dict[str, Any]
    norm: HeadNorm


class Tangled(nn.Module):
    """Tensors that share memory, in all places where models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.arange(24.0).reshape(4, 6), requires_grad=False)
        self.tied = self.rows
        self.transposed = self.rows.detach().t()
        self.last = (self.rows.detach()[2:, 1:],)
        self.register_buffer("frequencies", torch.arange(7, dtype=torch.float64), persistent=False)
        self.register_buffer("absent", None)
        self.empty = torch.empty(0)
        with torch.inference_mode():  # as fusion does
            self.child = nn.ModuleList([nn.Linear(3, 2, dtype=torch.bfloat16)]).requires_grad_(False)
        self.hidden = ([nn.Linear(2, 2, bias=False).requires_grad_(False)],)
        self.parts = Parts({"a": torch.tensor(5, dtype=torch.int8)}, HeadNorm(torch.ones(3000), 1e-5, 0.0))
        self.parts.named["self"] = self.parts

    def all_tensors(self) -> dict[str, torch.Tensor]:
        return {
            "rows": self.rows,
            "transposed": self.transposed,
            "last": self.last[0],
            "frequencies": self.frequencies,
            "weight": self.child[0].weight,
            "bias": self.child[0].bias,
            "hidden": self.hidden[0][0].weight,
            "a": self.parts.named["a"],
            "norm": self.parts.norm.weight,
        }


def test_every_tensor_is_found_once() -> None:
    model = Tangled()
    found = dict(find_tensors(model))
    assert list(found) == [
        "rows",
        "frequencies",
        "child.0.weight",
        "child.0.bias",
        "transposed",
        "last.0",
        "empty",
        "hidden.0.0.weight",
        "parts.named.a",
        "parts.norm.weight",
    ]
    assert len({id(tensor) for tensor in found.values()}) == len(found)


def test_tensors_that_share_memory_share_it_in_the_new_place() -> None:
    model = Tangled()
    before = {name: tensor.clone() for name, tensor in model.all_tensors().items()}
    collection = collect(model)
    contents = torch.zeros(collection.table.num_bytes, dtype=torch.uint8)
    for at, piece in collection.pieces:
        contents[at : at + len(piece)] = piece
    assert len(collection.pieces) == 7, "each byte should be kept once"
    old = {tensor.untyped_storage().data_ptr() for tensor in collection.tensors}
    kinds = [tensor.is_inference() for tensor in collection.tensors]
    collection.attach(contents)
    assert [tensor.is_inference() for tensor in collection.tensors] == kinds
    for name, tensor in model.all_tensors().items():
        assert torch.equal(tensor, before[name]), name
        assert tensor.untyped_storage().data_ptr() == contents.data_ptr() not in old
        assert tensor.dtype == before[name].dtype
    assert isinstance(model.rows, nn.Parameter)
    assert model.tied is model.rows
    model.rows[2, 1] = 99
    assert model.transposed[1, 2] == model.last[0][0, 0] == 99
    assert collection.pieces == [], "the old memory should be free"
    assert model.parts.norm.weight.data_ptr() % 64 == model.rows.data_ptr() % 64 == contents.data_ptr() % 64


def test_memory_of_views_is_freed() -> None:
    """Regression: packed weights on huge pages, which are views, kept their first memory beside the mapped file."""
    memory = np.arange(4096, dtype=np.uint8)
    freed = weakref.ref(memory)
    model = nn.Module()
    model.packed = torch.from_numpy(memory)[64:].view(2, -1)
    del memory
    before, collection = model.packed.clone(), collect(model)
    contents = torch.zeros(collection.table.num_bytes, dtype=torch.uint8)
    [(at, piece)] = collection.pieces
    contents[at : at + len(piece)] = piece
    del piece
    collection.attach(contents)
    assert torch.equal(model.packed, before)
    assert freed() is None


def test_tensors_that_are_on_another_device_move_too() -> None:
    """`nn.Module.to` leaves tensors in plain attributes where they were."""
    model = Tangled()
    collection = collect(model)
    collection.attach(torch.empty(collection.table.num_bytes, dtype=torch.uint8, device="meta"))
    assert {tensor.device.type for tensor in model.all_tensors().values()} == {"meta"}
    assert isinstance(model.rows, nn.Parameter)
    assert model.tied is model.rows
    assert model.transposed.shape == (6, 4)


def test_opaque_tensors_are_refused() -> None:
    model = nn.Module()
    model.packed = torch.ones(2, 2).to_sparse()
    with pytest.raises(ModelError, match=r"the tensor packed has the layout torch\.sparse_coo, which cannot be moved"):
        collect(model)


def config_of(make_checkpoint: MakeCheckpoint, name: str = "llama", **of_model: Any) -> ResolvedConfig:
    model_type, default = ALL[name]
    folder = str(make_checkpoint(model_type, **default | of_model))
    return EngineConfig(model=folder, skip_tokenizer_init=True).on_device("cpu")


def copy_of(make_checkpoint: MakeCheckpoint, folder: Path) -> tuple[Path, ResolvedConfig]:
    """A checkpoint that may be changed."""
    config = config_of(make_checkpoint, num_hidden_layers=1)
    shutil.copytree(config.model, folder)
    return Path(config.model), replace(config, model=str(folder))


def engine_with(store: WeightStore | None, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Engine:
    monkeypatch.setattr(executor, "load_model", lambda config, weights=None: load_model(config, weights=store))
    return Engine(EngineConfig(skip_tokenizer_init=True, kv_memory_bytes=16 << 20, num_threads=1, **settings))


@pytest.mark.thirds
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen2", {}),
        ("qwen2", {"dtype": "bfloat16"}),
        ("qwen2", {"dtype": "float16"}),
        ("qwen3", {"quantization": "int8"}),
        ("gemma2", {"quantization": "int8", "dtype": "bfloat16"}),
        ("gpt_oss", {"dtype": "bfloat16"}),
        ("qwen3_next", {}),
        ("bamba", {"dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_same_tokens(
    name: str,
    settings: dict[str, Any],
    make_checkpoint: MakeCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As without an arena; after each time that the weights were unmapped; and from the file of another process."""
    model_type, of_model = ALL[name]
    if name == "qwen2":
        of_model = of_model | {"tie_word_embeddings": True}
    settings |= {"model": str(make_checkpoint(model_type, **of_model))}
    alone = engine_with(None, monkeypatch, **settings)
    expected = generate_staggered(alone, PROMPTS, GREEDY)
    calls = layers_in_one_call(alone.model.module)
    alone.close()
    assert len(set(map(tuple, expected))) > 1
    for _ in range(2):
        engine = engine_with(WeightStore(tmp_path), monkeypatch, **settings)
        arena = engine.model.weights
        assert arena is not None
        assert layers_in_one_call(engine.model.module) == calls
        for _ in range(2):
            assert generate_staggered(engine, PROMPTS, GREEDY) == expected
            arena.unmap()
            arena.map()
        engine.close()
        assert not arena.is_mapped


def test_a_draft_model_and_adapters_layers(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each model has its arena. Layers of adapters wrap what has moved, and the file is the one without them."""
    model = config_of(make_checkpoint).model
    settings: dict[str, Any] = {"model": model, "draft_model": model, "speculation": "draft"}
    engine = engine_with(None, monkeypatch, **settings)
    expected = generate_staggered(engine, PROMPTS, GREEDY)
    engine.close()
    (tmp_path / "adapters").mkdir()
    for more in ({}, {"adapter_dir": str(tmp_path / "adapters")}):
        engine = engine_with(WeightStore(tmp_path / "weights"), monkeypatch, **settings | more)
        assert generate_staggered(engine, PROMPTS, GREEDY) == expected
        engine.close()
        assert len(list((tmp_path / "weights").glob("*.weights"))) == 1, "one checkpoint should have one file"


def _tensors() -> list[torch.Tensor]:
    gc.collect()
    return [found for found in gc.get_objects() if type(found) in (torch.Tensor, nn.Parameter)]


Load = Callable[[ResolvedConfig, WeightStore], tuple[LoadedModel, WeightArena]]


@pytest.fixture
def load() -> Iterator[Load]:
    """Load a model whose weights stay mapped until the end of the test."""
    arenas: list[WeightArena] = []

    def load(config: ResolvedConfig, store: WeightStore) -> tuple[LoadedModel, WeightArena]:
        model = load_model(config, weights=store)
        assert model.weights is not None
        arenas.append(model.weights)
        return model, model.weights

    yield load
    for arena in arenas:
        arena.close()


@pytest.mark.thirds
@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "gpt2", "mixtral", "gpt_oss", "bamba", "qwen3_next", "deepseek_v2"]
)
def test_no_tensor_of_a_model_stays_behind(
    name: str, make_checkpoint: MakeCheckpoint, tmp_path: Path, load: Load
) -> None:
    """Wherever it is kept: all tensors that came with loading the model are looked at."""
    config = config_of(make_checkpoint, name)
    load_model(config)
    before = _tensors()
    model, _ = load(config, WeightStore(tmp_path))
    known, inside = {id(tensor) for tensor in before}, 0
    addresses = _addresses(model)
    for tensor in _tensors():
        if id(tensor) not in known and tensor.numel():
            assert tensor.data_ptr() in addresses, f"{list(tensor.shape)} {tensor.dtype} is outside of the arena"
            inside += 1
    assert inside > 20


def _addresses(model: LoadedModel) -> range:
    assert model.weights is not None
    first = min(tensor.data_ptr() for _, tensor in find_tensors(model.module) if tensor.numel())
    start = first // (2 << 20) * (2 << 20)
    return range(start, start + model.weights.num_bytes)


def test_all_packed_weights_are_in_the_arena(make_checkpoint: MakeCheckpoint, tmp_path: Path, load: Load) -> None:
    """And its bytes are those of the tensors, but for what aligns them."""
    config = replace(config_of(make_checkpoint), quantization="int8")
    model, arena = load(config, WeightStore(tmp_path))
    addresses, packed_bytes = _addresses(model), 0
    for part in model.module.modules():
        if isinstance(part, PackedLinear):
            assert all(piece.codes.data_ptr() in addresses for piece in part.packed.parts)
            assert all(piece.scales.data_ptr() in addresses for piece in part.packed.parts)
            packed_bytes += part.packed.nbytes
    embedding_bytes = model.module.get_input_embeddings().weight.nbytes  # type: ignore[union-attr]
    assert packed_bytes + embedding_bytes <= arena.num_bytes <= 2 * (packed_bytes + embedding_bytes)


def test_a_failed_load_unmaps_the_weights(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(make_checkpoint)
    closed: list[FileRange] = []
    close = FileRange.close
    monkeypatch.setattr(FileRange, "close", lambda self: closed.append(self) or close(self))

    def fail(_: object) -> int:
        raise ModelError("injected")

    monkeypatch.setattr("folio.app.engine.model.loader.run_in_one_call", fail)
    with pytest.raises(ModelError, match="injected"):
        load_model(config, weights=WeightStore(tmp_path))
    assert [weights.is_mapped for weights in closed] == [False, False], "of the checkpoint, and of the arena"


class SlowSource:
    """A file that answers when it is told to."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.asked, self.answers = threading.Event(), threading.Event()
        self.calls: list[str] = []

    def open(self) -> tuple[int, int]:
        self.asked.set()
        assert self.answers.wait(60)
        return self._fd, 0

    def duplicate(self) -> tuple[int, int] | None:
        return os.dup(self._fd), 0

    def mapped(self) -> None:
        self.calls.append("mapped")

    def release(self) -> None:
        self.calls.append("release")

    def close(self) -> None:
        self.calls.append("close")


@pytest.mark.parametrize("num_bytes", [2 * 4096, 10], ids=["mapped", "cannot be mapped"])
def test_an_arena_that_is_closed_while_a_thread_maps_it(tmp_path: Path, num_bytes: int) -> None:
    """Nothing is unmapped under the thread, and nothing is left."""
    (tmp_path / "file").write_bytes(bytes(num_bytes))
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    source = SlowSource(fd)
    arena = WeightArena(FileRange(2 * 4096), source)

    def map_weights() -> None:
        with nullcontext() if num_bytes > 10 else pytest.raises(MapError):
            arena.map()

    threads = [threading.Thread(target=call) for call in (map_weights, arena.close)]
    for thread in threads:
        thread.start()
        assert source.asked.wait(60)
    threads[1].join(0.05)
    assert source.calls == []
    source.answers.set()
    for thread in threads:
        thread.join(60)
    assert source.calls == ["mapped" if num_bytes > 10 else "release", "close"]
    assert not arena.is_mapped
    arena.unmap()
    with pytest.raises(ModelError, match="given back"):
        arena.map()
    assert source.calls[-1] == "close"
    os.close(fd)


@pytest.mark.parametrize(("owner", "fails"), [(checkpoint_module, "optimise"), (stored_module, "collect")])
def test_a_failed_make_frees_its_tensors_before_their_charge_ends(
    owner: ModuleType, fails: str, make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the error's traceback kept them, while other models were given the memory of the device that they
    had."""
    config = config_of(make_checkpoint)
    tensors: list[weakref.ref[torch.Tensor]] = []
    num_left: list[int] = []

    def end() -> None:
        num_left.append(sum(tensor() is not None for tensor in tensors))

    def fail(module: nn.Module, *_: object, **__: object) -> None:
        temporary = torch.ones(1000)
        tensors.extend(map(weakref.ref, (temporary, *module.parameters())))
        try:
            raise KeyError("injected")
        except KeyError as error:
            raise ModelError("injected") from error

    store = WeightStore(tmp_path)
    monkeypatch.setattr(store, "room_to_make", lambda num_bytes: end)
    monkeypatch.setattr(owner, fails, fail)
    with pytest.raises(ModelError, match="injected"):
        load_model(config, weights=store)
    assert len(tensors) > 5
    assert num_left == [0]


def test_a_changed_checkpoint_has_another_file_and_no_second_chance(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, load: Load
) -> None:
    """Weights of the same size and time as the old ones were taken for them. A sleeping model whose file is lost must
    not wake up as another one."""
    folder = tmp_path / "checkpoint"
    original, config = copy_of(make_checkpoint, folder)
    store = WeightStore(tmp_path / "weights")
    model, arena = load(config, store)
    (first,) = (tmp_path / "weights").glob("*.weights")
    arena.unmap()
    (weights,) = folder.glob("*.safetensors")
    before, scale = weights.stat(), model.module.get_input_embeddings().weight.new_tensor(2)
    save_file({name: tensor * scale for name, tensor in load_file(weights).items()}, tmp_path / "w", {"format": "pt"})
    os.utime(tmp_path / "w", ns=(before.st_atime_ns, before.st_mtime_ns))
    (tmp_path / "w").replace(weights)
    after = weights.stat()
    assert (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    os.truncate(first, 100)
    with pytest.raises(ModelError, match="has changed since it was loaded; load it again"):
        arena.map()
    again, _ = load(config, store)
    (second,) = (tmp_path / "weights").glob("*.weights")
    assert second.name != first.name
    of_first = load_file(original / "model.safetensors")
    assert torch.equal(again.module.get_input_embeddings().weight, 2 * of_first["model.embed_tokens.weight"])


def test_a_model_of_the_hub_that_is_downloaded_while_it_is_loaded_has_one_file(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had a second one from its second load on, and could not be made again."""
    checkpoint = Path(config_of(make_checkpoint, num_hidden_layers=1).model)
    cache = HubCache(tmp_path / "hub", checkpoint)
    cache.download("config.json")
    monkeypatch.setattr("folio.app.models.weights.key.try_to_load_from_cache", cache.find)
    monkeypatch.setattr(loader, "load_config", partial(_of_folder, loader.load_config, str(checkpoint)))
    monkeypatch.setattr(loader, "find_pooling", lambda *_: None)  # asks the Hub
    load_module, loads = checkpoint_module._load_module, []

    def download(config: ResolvedConfig, *args: Any) -> Any:
        loads.append(config)
        for name in ("model.safetensors", "generation_config.json"):
            cache.download(name)
        return load_module(replace(config, model=str(checkpoint)), *args)

    monkeypatch.setattr(checkpoint_module, "_load_module", download)
    config = EngineConfig(model="org/name", skip_tokenizer_init=True).on_device("cpu")
    store = WeightStore(tmp_path / "weights")

    _, arena = load(config, store)
    (first,) = (tmp_path / "weights").glob("*.weights")
    cache.download("tokenizer.json", b"{}")
    arena.unmap()
    os.truncate(first, 100)
    arena.map()
    made = first.stat().st_ino
    cache.download_again()
    num_loads = len(loads)
    load(config, store)
    assert len(loads) == num_loads, "the file is read, not the checkpoint"
    assert [*(tmp_path / "weights").glob("*.weights")] == [first]
    assert first.stat().st_ino == made
    key = weight_key(config, FileDigests().of)
    cache.download("model.safetensors", b"another")
    assert weight_key(config, FileDigests().of) != key


class HubCache:
    """Files of a snapshot are links to blobs that are named by their digest."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._blobs, self.snapshot = folder / "blobs", folder / "snapshots" / "0"
        for created in (self._blobs, self.snapshot):
            created.mkdir(parents=True)

    def find(self, model: str, name: str) -> str:
        assert (model, name) == ("org/name", "config.json")
        return str(self.snapshot / name)

    def download(self, name: str, content: bytes | None = None) -> None:
        content = (self._checkpoint / name).read_bytes() if content is None else content
        blob = self._blobs / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (self.snapshot / name).unlink(missing_ok=True)
        (self.snapshot / name).symlink_to(blob)

    def download_again(self) -> None:
        for blob in self._blobs.iterdir():
            os.utime(blob, ns=(1, 1))


def _of_folder(load: Callable[..., Any], folder: str, _: str, **options: Any) -> Any:
    return load(folder, **options)


def test_a_checkpoint_that_changes_while_it_is_read_is_not_kept(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its old tensors would be served as the new ones."""
    folder = tmp_path / "checkpoint"
    _, config = copy_of(make_checkpoint, folder)
    load_module = checkpoint_module._load_module

    def change(*args: Any) -> Any:
        result = load_module(*args)
        with (folder / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"!")
        return result

    monkeypatch.setattr(checkpoint_module, "_load_module", change)
    with pytest.raises(ModelError, match="has changed while it was loaded; load it again"):
        load_model(config, weights=WeightStore(tmp_path / "weights"))
    assert list((tmp_path / "weights").glob("*.weights")) == []


def test_ranks_have_no_store(tmp_path: Path) -> None:
    config = EngineConfig(model="builtin", tensor_parallel_size=2).on_device("cpu")
    comm: Any = object()
    with pytest.raises(ConfigError, match="has one rank"):
        load_model(config, comm, WeightStore(tmp_path))
