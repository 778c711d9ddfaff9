"""LoRA adapters in PEFT's format for tests, and the models with merged weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D


def make_adapter(
    folder: Path, model: Path, pattern: str, *, seed: int = 0, rank: int = 4, **settings: Any
) -> dict[str, torch.Tensor]:
    """Random weights for every linear layer whose path `pattern` is found in; returns them.

    Args:
        settings: of `adapter_config.json`.
    """
    with torch.device("meta"):
        blank = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    generator = torch.Generator().manual_seed(seed)
    tensors, targets = {}, set()
    for path, module in blank.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and re.search(pattern, path):
            rows, columns = (module.nf, module.nx) if isinstance(module, Conv1D) else module.weight.shape
            r = next((r for key, r in settings.get("rank_pattern", {}).items() if path.endswith(key)), rank)
            name = f"base_model.model.{path}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(r, columns, generator=generator) / 8
            tensors[f"{name}.lora_B.weight"] = torch.randn(rows, r, generator=generator) / 4
            targets.add(path.rpartition(".")[2])
    write_adapter(
        folder, tensors, **({"r": rank, "lora_alpha": 2 * rank, "target_modules": sorted(targets)} | settings)
    )
    return tensors


def write_adapter(folder: Path, tensors: dict[str, torch.Tensor], **settings: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "bias": "none", "task_type": "CAUSAL_LM", "modules_to_save": None, "use_dora": False}
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))


class Merged:
    """transformers' own model, the adapter's `W + scale · B A` in its weights.

    Args:
        scales: ending of a path → scale; the first that fits.
    """

    def __init__(self, model: Path, adapter: Path | None = None, scales: dict[str, float] | None = None) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        tensors = {} if adapter is None else load_file(adapter / "adapter_model.safetensors")
        for key, down in tensors.items():
            if ".lora_A." not in key:
                continue
            path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            scale = next(scale for ending, scale in (scales or {"": 2.0}).items() if path.endswith(ending))
            added = scale * tensors[key.replace("lora_A", "lora_B")] @ down
            layer = self._model.get_submodule(path)
            layer.weight.data += added.T if isinstance(layer, Conv1D) else added

    def save(self, folder: Path) -> Path:
        self._model.save_pretrained(folder)
        return folder

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """`[num_tokens, vocab_size]`."""
        out: torch.Tensor = self._model(torch.tensor([token_ids]), use_cache=False).logits[0]
        return out

    def generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The likeliest tokens, one after the other."""
        token_ids = list(prompt)
        for _ in range(num_tokens):
            token_ids.append(int(self.logits(token_ids)[-1].argmax()))
        return token_ids[len(prompt) :]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small products are no faster with several threads, and far slower beside other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
