"""Faults of checkpoints: folders that cannot be loaded, or would give wrong outputs."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from folio.app.config.checkpoint import checkpoint_faults, rank_faults
from folio.app.config.engine import EngineConfig
from folio.app.engine.memory.size import ModelSize
from folio.app.engine.model.context import read_config
from folio.app.engine.model.loader import load_config
from folio.app.errors import ConfigError, ModelError
from folio.app.models.builtin import BUILTIN_FOLDER

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(BUILTIN_FOLDER, copy)
    return copy


def edit(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_valid_folder(folder: Path) -> None:
    assert list(checkpoint_faults(folder)) == []


@pytest.mark.parametrize("num_bytes", [0, 5, 100, -1])
def test_truncated_weights(folder: Path, num_bytes: int) -> None:
    """Regression: after 68 s there were 240 lines, none with the file's name."""
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:num_bytes])
    [fault] = checkpoint_faults(folder)
    assert fault.startswith(f"{folder / WEIGHTS} has {len(content[:num_bytes])} bytes and ")
    assert list(checkpoint_faults(folder, weights=False)) == []


def test_the_first_tensor_beyond_the_end_of_truncated_weights_is_named(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, 5_000_000)
    [fault] = checkpoint_faults(folder)
    found = re.search(r"(\d+) of its 54 tensors end beyond it, (model\.layers\.\S+) is the first one", fault)
    assert found is not None
    assert 0 < int(found[1]) < 54


HUGE = 2 * 10**9
SIZES: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 200_000}, "num_hidden_layers is 200000; it must be an integer from 1 to 2048"),
    ({"num_hidden_layers": HUGE}, "num_hidden_layers is 2000000000; it must be"),
    ({"vocab_size": HUGE}, "vocab_size is 2000000000; it must be an integer from 1 to 16777216"),
    *(
        ({name: -1}, f"{name} is -1; it must be an integer")
        for name in ("num_attention_heads", "max_position_embeddings")
    ),
    *(({name: 0}, f"{name} is 0; it must be an integer") for name in ("num_hidden_layers", "num_key_value_heads")),
    ({"hidden_size": 1.5}, "hidden_size is 1.5; it must be an integer"),
    ({"hidden_size": [256, "x"]}, 'hidden_size is "x"; it must be an integer'),
    ({"head_dim": "12"}, 'head_dim is "12"; it must be an integer'),
    ({"intermediate_size": {"a": {"b": 1}}}, 'intermediate_size is {"a": {"b": 1}}; it must be an integer'),
    ({"num_hidden_layers": True}, "num_hidden_layers is true; it must be an integer"),
    ({"text_config": 5}, "text_config is 5; it must be an object"),
    ({"text_config": {"model_type": "llama", "vocab_size": 3072, "num_hidden_layers": HUGE}}, "num_hidden_layers is"),
    ({"num_key_value_heads": 3}, "num_attention_heads is 4; it must be a multiple of num_key_value_heads, 3"),
    # Within the bounds, but not of these weights.
    ({"num_hidden_layers": 5}, "the number of layers is 5, but no tensor begins with model.layers.4"),
    ({"vocab_size": 3073}, "vocab_size is 3073, but the tensor model.embed_tokens.weight has the shape [3072, 256]"),
    (
        {"hidden_size": 512},
        "the hidden size is 512, but the tensor model.embed_tokens.weight has the shape [3072, 256]",
    ),
]


@pytest.mark.parametrize(("change", "message"), SIZES, ids=str)
def test_sizes_that_are_not_those_of_the_weights(folder: Path, change: dict[str, Any], message: str) -> None:
    """200,000 layers were being built after a minute; others ended with a traceback of transformers or torch."""
    edit(folder / "config.json", lambda content: content.update(change))
    begin = time.monotonic()
    assert any(message in fault for fault in checkpoint_faults(folder))
    assert list(rank_faults(folder, 2)) == []
    for call in (load_config, read_config) if "integer" in message else (load_config,):
        with pytest.raises(ModelError, match=re.escape(message)):
            call(str(folder), weights=True) if call is load_config else call(str(folder))
    assert time.monotonic() - begin < 10


def test_truncated_embeddings(folder: Path) -> None:
    """The file is whole, its tensor is not the config's."""
    tensors = load_file(folder / WEIGHTS)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:100].clone()
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    [fault] = checkpoint_faults(folder)
    assert "vocab_size is 3072, but the tensor model.embed_tokens.weight has the shape [100, 256]" in fault
    assert list(checkpoint_faults(folder, weights=False)) == []


@pytest.mark.parametrize("name", ["dtype", "layer_types", "hidden_act", "rope_parameters", "eos_token_id"])
@pytest.mark.parametrize("value", [-1, 1.5, "x", {}, [], {"a": {"b": 1}}, True, 10**30], ids=str)
def test_any_value_in_a_config_is_a_plan_or_an_error_of_ours(folder: Path, name: str, value: Any) -> None:
    edit(folder / "config.json", lambda content: content.update({name: value}))
    with suppress(ModelError, ConfigError):
        ModelSize(EngineConfig(model=str(folder)))


def test_weights_that_git_did_not_fetch(folder: Path) -> None:
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    [fault] = checkpoint_faults(folder)
    assert "git lfs pull" in fault


def test_an_index_with_files_that_are_not_there(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "a.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    [fault] = checkpoint_faults(folder)
    assert fault.endswith("names 1 of 2 files that are not there: b.safetensors")
    (folder / INDEX).write_text("{}")
    [fault] = checkpoint_faults(folder)
    assert fault.endswith("has no weight_map")


def test_an_empty_folder(tmp_path: Path) -> None:
    config, weights = checkpoint_faults(tmp_path)
    assert config == f"{str(tmp_path)!r} has no config.json: it has no files at all"
    assert "has no weights" in weights


def test_an_invalid_config(folder: Path) -> None:
    for content, message in (("{oops", "is not JSON"), ("[]", "is a JSON list"), ('{"a": 1}', "has no model_type")):
        (folder / "config.json").write_text(content)
        [fault] = checkpoint_faults(folder)
        assert message in fault


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bert"}, "bert is an encoder; Folio serves"),
        ({"model_type": "roberta", "is_decoder": True}, None),
        ({"model_type": "t5"}, "t5 is an encoder-decoder model"),
        ({"model_type": "llama", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "frobnicator"}, "frobnicator is no text-generating decoder that transformers"),
        ({"model_type": "vit"}, "vit is no text-generating decoder"),
        ({"model_type": "some_pictures", "text_config": {"model_type": "llama", "vocab_size": 3072}}, None),
    ],
)
def test_architectures(folder: Path, config: dict[str, Any], message: str | None) -> None:
    edit(folder / "config.json", lambda content: content.update(config))
    found = list(checkpoint_faults(folder))
    assert len(found) == (message is not None)
    assert all(str(message) in fault for fault in found)


def test_a_tokenizer_of_another_model(folder: Path) -> None:
    """Regression: the model was served, and text became token ids that it does not have."""
    edit(folder / "config.json", lambda content: content.update(vocab_size=1000))
    [fault, of_weights] = checkpoint_faults(folder)
    assert "vocab_size is 1000, but the tensor model.embed_tokens.weight" in of_weights
    assert "tokenizer.json has token ids up to 3071, 2072 of them beyond the vocab_size in config.json, 1000" in fault


def test_special_tokens_beyond_the_vocabulary(folder: Path) -> None:
    """Gemma 3 1B, a text model, shares a tokenizer with a placeholder for images."""

    def add(content: Any, **token: Any) -> None:
        content["added_tokens"].append({"id": 3072, "content": "<image>", **token})

    edit(folder / "tokenizer.json", lambda content: add(content, special=True))
    assert list(checkpoint_faults(folder)) == []
    edit(folder / "tokenizer.json", lambda content: content["added_tokens"][-1].update(special=False))
    [fault] = checkpoint_faults(folder)
    assert "token ids up to 3072, 1 of them" in fault


def test_invalid_tokenizer_files(folder: Path) -> None:
    for content in ("{oops", "[]", "{}", '{"model": {"vocab": [1]}}'):
        (folder / "tokenizer.json").write_text(content)
        [fault] = checkpoint_faults(folder)
        assert "tokenizer.json" in fault
    (folder / "tokenizer.json").unlink()
    [fault] = checkpoint_faults(folder)
    assert "has no tokenizer" in fault


@pytest.mark.parametrize(("ranks", "num_faults"), [(1, 0), (2, 0), (3, 1), (4, 0), (8, 1)])
def test_ranks_share_heads_evenly(folder: Path, ranks: int, num_faults: int) -> None:
    """4 attention heads and 2 KV heads: four ranks have one of each, two of them the same KV head."""
    assert len(list(rank_faults(folder, ranks))) == num_faults
    edit(folder / "config.json", lambda content: content.update(num_attention_heads=12, num_key_value_heads=4))
    [fault] = rank_faults(folder, 6)
    assert fault.startswith("it must divide the 4 KV heads of ")
