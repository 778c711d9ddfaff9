"""Linear layers with other kernels than torch's: on CPUs weights are packed once, at load; on CUDA products of few rows
have a kernel of their own, for decode steps."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from folio.app.compat.torch import onednn_linear, onednn_pack, onednn_supports
from folio.app.engine.layers.fusion import FusedAttention
from folio.app.errors import ConfigError
from folio.kernels import CpuLinear, FewRowProduct, KernelError, has_matrix_tiles

logger = logging.getLogger(__name__)

# Layers whose weights the surrounding module reads itself: Mamba-1 mixers, Hunyuan's router.
_LEFT_UNPACKED = {"dt_proj", "wg"}
# oneDNN compiles a primitive for each number of rows, 1 to 3 MiB, quickly. torch and oneDNN would each keep the last
# 1,024. A step needs few, the same in every layer.
_PRIMITIVE_CACHES, _CACHED_PRIMITIVES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"), 16

# Of `FewRowLinear`: with more rows torch's product does not split its sums, and reads `x` less often.
_FEW_ROWS = 16


@dataclass(frozen=True, slots=True)
class Product:
    """Matrix kernel: `pack` converts a weight `[outputs, inputs]` at load; `multiply(x, packed, bias)` computes
    `x @ weight.T + bias`."""

    pack: Callable[[torch.Tensor], Any]
    multiply: Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor]


def onednn_product() -> Product:
    """torch's oneDNN product; packed weights make it several times faster on few rows, and faster on many."""
    for name in _PRIMITIVE_CACHES:  # read when this process makes its first product
        os.environ.setdefault(name, str(_CACHED_PRIMITIVES))
    return Product(onednn_pack, onednn_linear)


class PackedLinear(nn.Module):
    """`nn.Linear` with a packed weight.

    Attributes:
        merged: (name, rows) of each original layer, where several were merged into this one.
        packed: the weight as `product` packed it.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        product: Product,
        merged: tuple[tuple[str, int], ...] = (),
    ) -> None:
        super().__init__()
        self.merged = merged
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._multiply = product.multiply
        self.packed = product.pack(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, self.packed, self.bias)


def choose_product(dtype: torch.dtype, *, int8: bool = False, movable: bool = False) -> Product | None:
    """The fastest kernel for a dtype on this processor; `None`, and a warning, if there is none.

    Args:
        movable: packed weights must be plain tensors, which oneDNN's are not.

    Raises:
        ConfigError: `int8`, and no kernel here computes with 8-bit weights.
    """
    try:
        linear = CpuLinear()
        reason = linear.unsupported(dtype)
    except KernelError as error:
        reason = str(error)
    if int8:
        if reason is not None:
            raise ConfigError(f"quantization is 'int8', which is not possible with {dtype} here: {reason}; use 'none'")
        return Product(partial(linear.pack, int8=True), linear)  # a scale for each output; sums exact as the dtype's
    if reason is None and (movable or not (dtype == torch.bfloat16 and has_matrix_tiles())):
        return Product(linear.pack, linear)
    if reason is not None:
        logger.info("Folio's own matrix kernel does not run with %s: %s", dtype, reason)
    if onednn_supports(dtype) and not movable:
        return onednn_product()
    logger.warning(
        "no fast %s matrix kernel for this processor: linear layers stay unpacked, several times slower", dtype
    )
    return None


def pack_linears(model: nn.Module, product: Product) -> int:
    """Replace every linear layer of a CPU model; return the number. Unpacked weights are freed unless an embedding
    shares them."""
    num_packed = 0
    # One at a time, without references to replaced layers: while one is packed its weight exists twice.
    for name in [name for name, _ in model.named_children()]:
        child: Any = model.get_submodule(name)
        if type(child) not in (nn.Linear, Conv1D):
            num_packed += pack_linears(child, product)
        elif name not in _LEFT_UNPACKED:
            weight = child.weight.detach() if type(child) is nn.Linear else child.weight.detach().t()
            bias = None if child.bias is None else child.bias.detach()
            setattr(model, name, PackedLinear(weight, bias, product, getattr(child, "merged", ())))
            num_packed += 1
    return num_packed


class FewRowLinear(nn.Linear):
    """`nn.Linear` whose products of at most `_FEW_ROWS` rows use another kernel. It has the original's parameters."""

    def __init__(self, original: nn.Linear, product: FewRowProduct) -> None:
        super().__init__(original.in_features, 1, bias=False, device="meta")
        self.out_features, self.weight, self.bias = original.out_features, original.weight, original.bias
        self.merged: tuple[tuple[str, int], ...] = getattr(original, "merged", ())
        self._product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() > _FEW_ROWS * x.shape[-1]:
            return super().forward(x)
        return self._product(x, self.weight, self.bias)


def use_few_row_products(model: nn.Module, product: FewRowProduct) -> int:
    """Replace the linear layers of fused attention, whose weights are so small that torch's products of few rows split
    their sums; return the number of replaced ones."""
    num_replaced = 0
    for attention in [module for module in model.modules() if isinstance(module, FusedAttention)]:
        for name in ("qkv_proj", "o_proj"):
            linear: Any = attention.get_submodule(name)
            if isinstance(linear, nn.Linear) and product.unsupported(linear.weight) is None:
                setattr(attention, name, FewRowLinear(linear, product))
                num_replaced += 1
    return num_replaced
