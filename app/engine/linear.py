"""Linear layers with weights laid out for the CPU's matrix kernels (oneDNN), once, at load."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

logger = logging.getLogger(__name__)

# Whose weights the module around them reads: Mamba-1 mixers, Hunyuan's router.
_READ_ELSEWHERE = {"dt_proj", "wg"}


class PackedLinear(nn.Module):
    """`nn.Linear` with a prepacked weight; several times faster on few rows, and faster on many."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out


def pack_linears(model: nn.Module) -> int:
    """Replace every linear layer of a CPU model; returns how many. The unpacked weights are dropped, except those that
    an embedding shares. Nothing is replaced where the processor lacks the instructions for the model's dtype."""
    dtype = next(model.parameters()).dtype
    if not _supported(dtype):
        logger.warning(
            "this processor has no fast %s products: linear layers stay unpacked, several times slower", dtype
        )
        return 0
    return _pack_children(model)


def _pack_children(parent: nn.Module) -> int:
    """One after the other, and holding on to none of the replaced ones: their weights are there twice as it is."""
    num_packed = 0
    for name in [name for name, _ in parent.named_children()]:
        child: Any = parent.get_submodule(name)
        if type(child) not in (nn.Linear, Conv1D):
            num_packed += _pack_children(child)
        elif name not in _READ_ELSEWHERE:
            weight = child.weight.detach() if type(child) is nn.Linear else child.weight.detach().t()
            setattr(parent, name, PackedLinear(weight, None if child.bias is None else child.bias.detach()))
            num_packed += 1
    return num_packed


def _supported(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32
