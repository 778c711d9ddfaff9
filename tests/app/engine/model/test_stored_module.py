"""Models from the files of their weights: the same in every bit as from the checkpoint, which is not read."""

from __future__ import annotations

import gc
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from folio.app.config.engine import EngineConfig
from folio.app.engine.model import checkpoint_files, checkpoint_module, stored_module
from folio.app.engine.model.loader import LoadedModel, load_model, read_weights
from folio.app.errors import ModelError
from folio.app.models.weights.arena import WeightArena
from folio.app.models.weights.model_parts import find_tensors, fingerprint
from folio.app.models.weights.store import WeightStore
from tests.conftest import MakeCheckpoint

Load = Callable[..., LoadedModel]
BeforeReads = Callable[[Callable[[Path], object]], None]


@pytest.fixture
def load(checkpoint: MakeCheckpoint, tmp_path: Path) -> Iterator[Load]:
    """`load(name, **settings)` in a store of its own, as a new process would."""
    arenas: list[WeightArena] = []

    def load(name: str, **settings: Any) -> LoadedModel:
        settings = {"model": str(checkpoint(name)), "skip_tokenizer_init": True} | settings
        model = load_model(EngineConfig(**settings).on_device("cpu"), weights=WeightStore(tmp_path / "weights"))
        assert model.weights is not None
        arenas.append(model.weights)
        return model

    yield load
    for arena in arenas:
        arena.close()


@pytest.fixture
def before_reads(monkeypatch: pytest.MonkeyPatch) -> BeforeReads:
    """`before_reads(call)`: it is called before each file of a checkpoint is read into the page cache."""
    real = checkpoint_files._read
    return lambda call: monkeypatch.setattr(checkpoint_files, "_read", lambda path: call(path) or real(path))


@pytest.fixture
def no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """After its call no checkpoint can be read."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the checkpoint should not be read")

    def forbid() -> None:
        monkeypatch.setattr(checkpoint_module, "_load_module", fail)

    return forbid


@pytest.mark.thirds
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {}) for name in ("llama", "qwen3", "gemma2", "gpt2", "opt", "mixtral", "bamba", "qwen3_next")),
        ("gpt_oss", {}),  # sinks are a parameter
        ("gpt_oss", {"dtype": "bfloat16"}),  # and here copies
        ("deepseek_v3", {"dtype": "bfloat16"}),  # with a few tensors of float32
        ("yarn", {"dtype": "bfloat16", "quantization": "int8"}),
        ("qwen2", {"dtype": "float16"}),
        ("gemma3n", {}),
        ("llama", {"load_format": "dummy"}),
        ("yarn", {"dtype": "bfloat16", "quantization": "int4", "batch_invariant": True}),
    ],
    ids=str,
)
def test_the_same_in_every_bit(
    name: str, settings: dict[str, Any], load: Load, no_checkpoint: Callable[[], None]
) -> None:
    first = load(name, **settings)
    no_checkpoint()
    second = load(name, **settings)
    tensors = [dict(find_tensors(model.module)) for model in (first, second)]
    assert list(tensors[0]) == list(tensors[1])
    for path, tensor in tensors[0].items():
        other = tensors[1][path]
        assert torch.equal(tensor, other), path
        for of in (lambda t: t.dtype, lambda t: t.device, lambda t: t.stride(), type, lambda t: t.is_inference()):
            assert of(tensor) == of(other), path  # type: ignore[no-untyped-call]
        assert not other.requires_grad
    assert fingerprint(first.module) == fingerprint(second.module)
    unequal = {"module": None, "weights": None}
    assert replace(first, **unequal) == replace(second, **unequal)  # type: ignore[arg-type]
    if settings.get("dtype") != "float16":  # its products are slow, and here not for all sizes
        logits = []
        for model in (first, second):
            model.module.set_attn_implementation("eager")
            with torch.inference_mode():
                logits.append(model.module(input_ids=torch.arange(3, 60)[None], use_cache=False).logits)
        assert torch.equal(*logits)


def test_weights_are_read_before_the_load(
    checkpoint: MakeCheckpoint, load: Load, tmp_path: Path, before_reads: BeforeReads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoints of a model and its draft model, or their files once there are some, which the load then need not
    check."""
    models = [str(checkpoint(name)) for name in ("llama", "qwen2")]
    settings = {"model": models[0], "draft_model": models[1], "speculation": "draft", "skip_tokenizer_init": True}
    config, read = EngineConfig(**settings).on_device("cpu"), []  # type: ignore[arg-type,var-annotated]
    before_reads(read.append)
    read_weights(config, WeightStore(tmp_path / "weights"))
    assert [str(path.parent) for path in read] == models
    for name in ("llama", "qwen2"):
        load(name)
    read.clear()
    store = WeightStore(tmp_path / "weights")
    read_weights(config, store)
    assert read == []
    monkeypatch.setattr("folio.app.models.weights.store.check_contents", None)
    model = load_model(config, weights=store)
    assert model.weights is not None
    model.weights.close()


def test_a_load_whose_files_do_not_answer_holds_up_no_other(load: Load, before_reads: BeforeReads) -> None:
    """Regression: it held the lock of transformers' modules, and no other model could be loaded. Now its files have
    been read before."""
    asked, answers, reader = threading.Event(), threading.Event(), "slow reader"

    def read(_: Path) -> None:
        if threading.current_thread().name == reader:
            asked.set()
            assert answers.wait(60)

    before_reads(read)
    thread = threading.Thread(target=load, args=("llama",), name=reader)
    thread.start()
    assert asked.wait(60)
    load("qwen2")
    answers.set()
    thread.join(60)


def test_tensors_of_one_object_are_one_again(load: Load, no_checkpoint: Callable[[], None]) -> None:
    """Tied embeddings that are not packed, and the weights of norms that attention has taken over."""
    for _ in range(2):
        module: Any = load("qwen3", dtype="float16").module
        attention = module.model.layers[0].self_attn
        assert attention.rotary.query_norm.weight is attention._original[0].q_norm.weight
        no_checkpoint()


@pytest.mark.parametrize("wrong", ["fused", "fingerprint", "dtype"])
def test_a_model_that_is_not_the_file_s_is_loaded_from_its_checkpoint(
    wrong: str, load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever differs, such as a fusion that another version of the code would not do."""
    facts = checkpoint_module.MadeModule.facts.fget  # type: ignore[attr-defined]

    def changed(self: Any) -> dict[str, Any]:
        right = facts(self)
        if wrong == "fused":
            right["fused"].pop("model.layers.1.self_attn")
        return right | {"fingerprint": {"fingerprint": "0"}, "dtype": {"dtype": "float64"}}.get(wrong, {})

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module.MadeModule, "facts", property(changed))
        first = load("llama")
    with caplog.at_level("INFO"):
        second = load("llama")
    assert "ignoring the weight file of" in caplog.text
    assert fingerprint(first.module) == fingerprint(second.module)
    for (path, tensor), (_, other) in zip(find_tensors(first.module), find_tensors(second.module), strict=True):
        assert torch.equal(tensor, other), path


@pytest.mark.parametrize("error", [ModelError("changed"), ValueError("odd")])
def test_a_file_that_cannot_be_mapped_is_closed_once(
    error: Exception, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: twice, which may have closed another file; and a model that cannot be filled stayed mapped."""

    def num_open() -> int:
        gc.collect()  # what other tests have left
        return len(list(Path("/proc/self/fd").iterdir()))

    load("llama")
    before = num_open()

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(
            *((WeightArena, "map") if isinstance(error, ModelError) else (stored_module.Skeleton, "fill")), fail
        )
        patch.setattr(checkpoint_module, "_load_module", fail)
        with pytest.raises(type(error), match=str(error)):
            load("llama")
    assert num_open() == before


def test_the_file_of_a_model_without_output_layer_is_not_for_generation(
    checkpoint: MakeCheckpoint, load: Load, tmp_path: Path
) -> None:
    """It has a file of its own, as a model that pools."""
    folder, copy = checkpoint("llama"), tmp_path / "copy"
    shutil.copytree(folder, copy)
    weights = load_file(folder / "model.safetensors")
    save_file({name: w for name, w in weights.items() if "lm_head" not in name}, copy / "model.safetensors")
    model = load("llama", model=str(copy), pooling="last")
    assert not model.generates
    assert not load("llama", model=str(copy), pooling="last").generates
    with pytest.raises(ModelError, match=r"lacks 1 weights, lm_head\.weight among them"):
        load("llama", model=str(copy))


def test_a_fingerprint_shows_whatever_is_computed(load: Load) -> None:
    """But for values of tensors."""
    module: Any = load("gemma2").module
    original = fingerprint(module)
    layer = module.model.layers[1]
    for owner, name in ((layer.input_layernorm, "eps"), (layer.mlp, "activation"), (layer.self_attn, "_head_dim")):
        for value in ("other", getattr(owner, name)):
            setattr(owner, name, value)
            assert (fingerprint(module) == original) == (value != "other")
    rotary = layer.self_attn.rotary
    layer.self_attn.rotary = replace(rotary, masking=replace(rotary.masking, softcap=2.5))
    assert fingerprint(module) != original
    layer.self_attn.rotary = rotary
    assert fingerprint(module) == original
    module.model.layers[0], module.model.layers[1] = module.model.layers[1], module.model.layers[0]
    assert fingerprint(module) != original
