"""`load_format: dummy`: a complete model with random weights, from `config.json` alone."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, modeling_utils

from folio.app.config.engine import EngineConfig
from folio.app.engine import LLM, SamplingParams
from folio.app.engine.model.checkpoint_module import random_model
from folio.app.engine.model.loader import LoadedModel, load_model
from folio.app.errors import ConfigError, ModelError
from tests.architectures import ALL
from tests.conftest import MakeCheckpoint

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = [[(7 * i + 3 * j) % 500 for j in range(90)] for i in range(2)]


def config_folder(folder: Path, name: str, **settings: Any) -> Path:
    """A folder with a `config.json` and nothing else, of a model whose logits differ by more than they are rounded."""
    model_type, defaults = ALL[name]
    AutoConfig.for_model(model_type, **(defaults | {"initializer_range": 0.2} | settings)).save_pretrained(folder)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    return folder


def load(folder: Path, **settings: Any) -> LoadedModel:
    return load_model(EngineConfig(model=str(folder), skip_tokenizer_init=True, **settings).on_device("cpu"))


def greedy_tokens(folder: Path, load_format: str, dtype: str) -> list[list[int]]:
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "kv_memory_bytes": 16 << 20, "num_threads": 1}
    with LLM(folder, load_format=load_format, dtype=dtype, **settings) as llm:
        return [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.thirds
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gpt_oss", "bamba"])
def test_tokens_are_those_of_the_same_weights_from_a_checkpoint(name: str, dtype: str, tmp_path: Path) -> None:
    """Buffers are no part of a checkpoint: uncomputed rotary frequencies would give other tokens."""
    folder = config_folder(tmp_path / "config", name, tie_word_embeddings=name == "qwen2")
    torch.manual_seed(3)
    tokens = greedy_tokens(folder, "dummy", dtype)
    torch.manual_seed(4)
    assert tokens == greedy_tokens(folder, "dummy", dtype), "two loads should give the same weights"
    assert len(set(map(tuple, tokens))) == len(PROMPTS), "outputs should depend on the prompt"
    assert len(set(tokens[0])) > 1
    config, saved = AutoConfig.from_pretrained(folder), tmp_path / "saved"
    model = random_model(config, torch.device("cpu"), dtype=getattr(torch, dtype), attn_implementation="eager")
    model.save_pretrained(saved)
    assert tokens == greedy_tokens(saved, "auto", dtype)


def test_weights_are_in_the_dtype_of_the_config_and_tied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process's random state does not change."""
    # Which packs weights, and unties them.
    monkeypatch.setattr("folio.app.engine.model.checkpoint_module.optimise", lambda *_, **__: None)
    folder = config_folder(tmp_path, "qwen2", dtype="bfloat16", tie_word_embeddings=True)
    state = torch.random.get_rng_state()
    with caplog.at_level(logging.WARNING):
        model = load(folder, load_format="dummy").module
    assert "random weights" in caplog.text
    assert torch.equal(state, torch.random.get_rng_state())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_the_choice_is_checked() -> None:
    with pytest.raises(ConfigError, match="load_format is 'random'; choose one of auto, dummy"):
        EngineConfig(model="builtin", load_format="random")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'dummy'.*tensor_parallel_size 2; dummy weights are for one rank"):
        EngineConfig(model="builtin", load_format="dummy", tensor_parallel_size=2)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_all_tensors_are_created_on_the_device(name: str, tmp_path: Path) -> None:
    """The host may lack memory for a copy, and the device cannot read rotary frequencies elsewhere."""
    config = AutoConfig.from_pretrained(config_folder(tmp_path, name))
    model = random_model(config, torch.device("meta"), dtype="auto", attn_implementation="eager")
    devices = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    assert devices == {"meta"}
    assert len(list(model.buffers())) > 0


def saved_as_bin(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("form", [None, saved_as_bin], ids=["safetensors", "bin"])
def test_a_loaded_model_does_not_read_its_checkpoint_any_more(
    form: Callable[[Path], None] | None, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Its files were mapped: a truncated one ended the process (SIGBUS), one overwritten in place changed the model."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), folder)
    expected = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    if form is not None:
        form(folder)
    model = load(folder)
    assert str(folder) not in Path("/proc/self/maps").read_text()
    for path in folder.iterdir():
        os.truncate(path, 100)
    assert torch.equal(model.module.get_input_embeddings().weight, expected)


def test_files_stay_mapped_where_memory_is_short(
    checkpoint: MakeCheckpoint, use_machine: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """A copy might end the process, too: weights of 14 GB that are quantised to 7 GB load on a machine with 12 GB."""
    folder = checkpoint("llama")
    use_machine(available_bytes=1000)
    with caplog.at_level(logging.INFO):
        model = load(folder)
    assert "model.safetensors stays mapped, as memory is short" in caplog.text
    assert torch.isfinite(model.module.get_input_embeddings().weight).all()


def test_a_checkpoint_that_is_truncated_while_it_is_read(
    checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the process, with the other models (SIGBUS)."""
    folder, opened = tmp_path / "model", modeling_utils.safe_open
    shutil.copytree(checkpoint("llama"), folder)

    def open_and_truncate(path: str, **options: Any) -> Any:
        file = opened(path, **options)
        os.truncate(path, os.stat(path).st_size // 2)
        return file

    monkeypatch.setattr(modeling_utils, "safe_open", open_and_truncate)
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated or damaged"):
        load(folder)
    monkeypatch.undo()
    assert modeling_utils.safe_open is opened
