"""Checkpoints of the methods' layouts, written from codes as their libraries' sources pack them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

OUTPUTS, INPUTS = 24, 128
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


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


_BELOW = (-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0)
_ABOVE = (0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0)
NF4_LEVELS = torch.tensor((*_BELOW, *_ABOVE))


def nf4_state(state: Mapping[str, Any]) -> torch.Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def nf4(inputs: int, nested: bool, block: int = 64) -> dict[str, torch.Tensor]:
    """Tensors of a module `a`, and `expected`."""
    values, count = codes((OUTPUTS, inputs), 4), OUTPUTS * inputs // block
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [OUTPUTS, inputs]}
    tensors = {"a.weight": (values[:, ::2] * 16 + values[:, 1::2]).to(torch.uint8).view(-1, 1)}
    if nested:
        state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": 0.05}
        stored, table = codes((1, count), 8)[0].to(torch.uint8), torch.linspace(-1, 1, 256)
        seconds = scales((-(-count // 16),), torch.float32)
        tensors |= {"a.weight.nested_absmax": seconds, "a.weight.nested_quant_map": table}
        found = table[stored.long()] * seconds.repeat_interleave(16)[:count] + 0.05
    else:
        stored = found = scales((count,), torch.float32)
    return tensors | {
        "a.weight.absmax": stored,
        "a.weight.quant_map": NF4_LEVELS,
        "a.weight.quant_state.bitsandbytes__nf4": nf4_state(state),
        "expected": (NF4_LEVELS[values].view(-1, block) * found[:, None]).view(OUTPUTS, inputs),
    }


NF4_CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
