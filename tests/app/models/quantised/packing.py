"""Checkpoints of the methods' layouts, written from codes as their libraries' sources pack them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

# Nibble i of a word of AWQ is that of this output.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def write(folder: Path, quantization: object, tensors: Mapping[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": quantization}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def words(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """`[rows, columns]` → int32 `[rows, columns · bits / 32]`, rounded up."""
    fields = 32 // bits
    rows = []
    for row in codes.tolist():
        row += [0] * (-len(row) % fields)
        parts = [row[start : start + fields] for start in range(0, len(row), fields)]
        rows.append([sum(part[(order or range(fields))[i]] << bits * i for i in range(fields)) for part in parts])
    return torch.from_numpy(np.array(rows, dtype=np.uint32).view(np.int32))


def codes(shape: tuple[int, int], bits: int, least: int = 0) -> torch.Tensor:
    return torch.randint(least, 2**bits, shape, generator=torch.Generator().manual_seed(sum(shape) + bits))


def scales(shape: tuple[int, ...], dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.01 + 0.001).to(dtype)


def gptq(config: dict[str, Any], outputs: int, inputs: int, groups: torch.Tensor) -> dict[str, Any]:
    """Tensors of a module `a`, and `expected`. Args: `groups`: the group of each input."""
    bits, count = config["bits"], int(groups.max()) + 1
    values, by_group = codes((outputs, inputs), bits), scales((count, outputs))
    zeros = torch.full((count, outputs), 2 ** (bits - 1)) if config.get("sym") else codes((count, outputs), bits, 1)
    stored = zeros if config.get("checkpoint_format") == "gptq_v2" else zeros - 1
    return {
        "a.qweight": words(values, bits).t(),
        "a.qzeros": words(stored, bits),
        "a.scales": by_group,
        "a.g_idx": groups.int(),
        "expected": by_group.float()[groups].t() * (values - zeros[groups].t()),
    }
