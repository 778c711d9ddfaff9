"""Faults of checkpoints: folders that cannot be loaded, or would give wrong outputs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.builtin import BUILTIN_FOLDER
from app.config.checkpoint import checkpoint_faults, rank_faults

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
    [fault] = checkpoint_faults(folder)
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
