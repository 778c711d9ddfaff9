"""Checkpoints in the forms of other libraries, made from a plain one by rounding to nearest, with the weights that
they stand for.

No calibration: perplexities over those of the plain checkpoint are upper bounds of what each form costs.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
GROUP, BLOCK = 64, 128
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word is that of this output
_NF4_BELOW = (-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0)
_NF4_ABOVE = (0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0)


def write(form: str, plain: Path, folder: Path) -> Tensors:
    """Write the plain checkpoint's linear layers in a form of `FORMS`, and the rest as it is. Returns the weights that
    the codes stand for, in float32."""
    config, pack = FORMS[form]
    written: Tensors = {}
    exact: Tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            parts, exact[name] = pack(tensor.float())
            module = name.removesuffix(".weight")
            written |= {f"{module}.{part}": values.contiguous() for part, values in parts.items()}
        else:
            written[name] = exact[name] = tensor
    _write(plain, folder, {"quantization_config": config}, written)
    return exact


def write_first_layers(count: int, plain: Path, folder: Path) -> None:
    """Write the plain checkpoint with its first layers only."""
    tensors = load_file(plain / "model.safetensors")
    kept = {name: t for name, t in tensors.items() if (found := _LAYER.match(name)) is None or int(found[1]) < count}
    _write(plain, folder, {"num_hidden_layers": count}, kept)


def _write(plain: Path, folder: Path, changes: dict[str, Any], tensors: Tensors) -> None:
    shutil.copytree(plain, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "config.json").write_text(json.dumps(json.loads((plain / "config.json").read_text()) | changes))
    save_file(tensors, folder / "model.safetensors")


def _gptq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """4 bits, one scale for each 64 inputs."""
    groups = weight.unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 7).half()
    codes = (groups / scales.float()[..., None]).round_().clamp_(-8, 7)
    exact = (codes * scales.float()[..., None]).flatten(1)
    parts = {
        "qweight": _words((codes + 8).flatten(1)).t(),
        "qzeros": _words(torch.full_like(scales.t(), 7)),  # one less, as GPTQ stores them
        "scales": scales.t(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }
    return parts, exact


def _awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """4 bits, a scale and a zero point for each 64 inputs."""
    groups = weight.unflatten(1, (-1, GROUP))
    least, most = groups.amin(-1).clamp_(max=0), groups.amax(-1).clamp_(min=0)
    scales = ((most - least) / 15).half()
    zeros = (-least / scales.float()).round_().clamp_(0, 15)
    codes = ((groups / scales.float()[..., None]).round_() + zeros[..., None]).clamp_(0, 15)
    exact = ((codes - zeros[..., None]) * scales.float()[..., None]).flatten(1)
    parts = {
        "qweight": _words(codes.flatten(1).t(), _AWQ_ORDER),
        "qzeros": _words(zeros.t(), _AWQ_ORDER),
        "scales": scales.t(),
    }
    return parts, exact


def _fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """8-bit floats, a scale for each block of 128 × 128."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    scales = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).abs().amax((1, 3)) / 448
    whole = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    values = (weight / whole).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale_inv": scales}, values.float() * whole


def _nf4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """16 levels, a largest value for each 64 inputs."""
    levels = torch.tensor((*_NF4_BELOW, *_NF4_ABOVE))
    groups = weight.reshape(-1, GROUP)
    largest = groups.abs().amax(-1)
    codes = torch.bucketize(groups / largest[:, None], (levels[1:] + levels[:-1]) / 2)
    state = {"quant_type": "nf4", "blocksize": GROUP, "dtype": "bfloat16", "shape": list(weight.shape)}
    flat = codes.to(torch.uint8).view(-1)
    parts = {
        "weight": (flat[::2] * 16 + flat[1::2])[:, None],
        "weight.absmax": largest,
        "weight.quant_map": levels,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return parts, (levels[codes] * largest[:, None]).view_as(weight)


def _words(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight codes of a row in each int32."""
    nibbles = codes.long().unflatten(1, (-1, 8))[..., list(order)]
    words = (nibbles << 4 * torch.arange(8)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


_INT4 = {"bits": 4, "group_size": GROUP}
FORMS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]]] = {
    "gptq": ({"quant_method": "gptq", "sym": True, "desc_act": False, **_INT4}, _gptq),
    "awq": ({"quant_method": "awq", "version": "gemm", "zero_point": True, **_INT4}, _awq),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}, _fp8),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, _nf4),
}
