"""Linear layers with other kernels than torch's: on CPUs weights are packed once, at load, and on CUDA quantised ones;
there products of few rows have a kernel of their own, for decode steps."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

from folio.app.compat.torch import onednn_linear, onednn_pack, onednn_supports
from folio.app.engine.layers.fusion import FusedAttention
from folio.kernels import CpuLinear, FewRowProduct, KernelError, PackedProduct, quantise
from folio.kernels.cpu.ops import PackedWeight

logger = logging.getLogger(__name__)

# Layers whose weights the surrounding module reads itself: Mamba-1 mixers, Hunyuan's router.
_LEFT_UNPACKED = {"dt_proj", "wg"}
# oneDNN compiles a primitive for each number of rows, 1 to 3 MiB, quickly. torch and oneDNN would each keep the last
# 1,024. A step needs few, the same in every layer.
_PRIMITIVE_CACHES, _CACHED_PRIMITIVES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"), 16

# Of `FewRowLinear`: with more rows torch's product does not split its sums, and reads `x` less often.
_FEW_ROWS = 16


Multiply = Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Product:
    """Matrix kernel: `pack` converts a weight `[outputs, inputs]` at load; `multiply(x, packed, bias)` computes
    `x @ weight.T + bias`."""

    pack: Callable[[torch.Tensor], Any]
    multiply: Multiply


def onednn_product() -> Product:
    """torch's oneDNN product; packed weights make it several times faster on few rows, and faster on many."""
    for name in _PRIMITIVE_CACHES:  # read when this process makes its first product
        os.environ.setdefault(name, str(_CACHED_PRIMITIVES))
    return Product(onednn_pack, onednn_linear)


class PackedLinear(nn.Module):
    """`nn.Linear` with a packed weight.

    Args:
        shape: (outputs, inputs).

    Attributes:
        merged: (name, rows) of each original layer, where several were merged into this one.
        packed: the weight as a `Product` packed it.
    """

    def __init__(
        self,
        packed: Any,
        shape: tuple[int, int],
        bias: torch.Tensor | None,
        multiply: Multiply,
        merged: tuple[tuple[str, int], ...] = (),
    ) -> None:
        super().__init__()
        self.merged = merged
        self.out_features, self.in_features = shape
        self.bias = bias
        self._multiply = multiply
        self.packed = packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, self.packed, self.bias)


def keep_logits_unrounded(output: nn.Module | None) -> None:
    """Let an output layer of Folio's own product return float32. Rounded to bfloat16, near logits would be equal ones,
    and their differences a third of the error of a step."""
    if type(output) is PackedLinear and isinstance(output._multiply, CpuLinear):
        output._multiply = partial(output._multiply, unrounded=True)


def rounding_product(linear: PackedProduct, bits: Literal[4, 8]) -> Product:
    """Weights are quantised as they are packed. Args: `linear`: has products in their dtype."""
    group = linear.int8_group if bits == 8 else None
    return Product(
        lambda weight: linear.merged(linear.pack_quantised(quantise(weight, bits, group), weight.dtype)),
        linear,
    )


def choose_product(dtype: torch.dtype, *, movable: bool = False) -> Product | None:
    """The fastest kernel for a dtype on this processor; `None`, and a warning, if there is none.

    Args:
        movable: packed weights must be plain tensors, which oneDNN's are not.
    """
    try:
        linear = CpuLinear()
        reason = linear.unsupported(dtype)
    except KernelError as error:
        reason = str(error)
    if reason is None:
        return Product(linear.pack, linear)
    logger.info("Folio's own matrix kernel does not run with %s: %s", dtype, reason)
    if onednn_supports(dtype) and not movable:
        return onednn_product()
    logger.warning(
        "no fast %s matrix kernel for this processor: linear layers stay unpacked, several times slower", dtype
    )
    return None


def pack_linears(model: nn.Module, pack: Callable[[str, nn.Module], PackedLinear | None], prefix: str = "") -> int:
    """Replace linear layers by what `pack(path, layer)` makes of them, unless it is `None`; return the
    number. Unpacked weights are freed unless an embedding shares them."""
    num_packed = 0
    # One at a time, without references to replaced layers: while one is packed its weight exists twice.
    for name in [name for name, _ in model.named_children()]:
        child: Any = model.get_submodule(name)
        if type(child) not in (nn.Linear, Conv1D):
            num_packed += pack_linears(child, pack, f"{prefix}{name}.")
        elif name not in _LEFT_UNPACKED and (packed := pack(f"{prefix}{name}", child)) is not None:
            setattr(model, name, packed)
            num_packed += 1
    return num_packed


def packed_by(product: Product) -> Callable[[str, nn.Module], PackedLinear]:
    """Packs a layer's own weight; for `pack_linears`."""

    def pack(path: str, layer: Any) -> PackedLinear:
        weight = layer.weight.detach() if type(layer) is nn.Linear else layer.weight.detach().t()
        bias = None if layer.bias is None else layer.bias.detach()
        shape = (weight.shape[0], weight.shape[1])
        return PackedLinear(product.pack(weight), shape, bias, product.multiply, getattr(layer, "merged", ()))

    return pack


class PackedEmbedding(nn.Module):
    """An embedding whose matrix is a quantised packed weight.

    Args:
        original: any embedding; it is applied to the looked-up rows, so that its scale is kept.
        packed: `[num_embeddings, embedding_dim]`, shared with an output layer if they are tied.
    """

    def __init__(self, original: nn.Embedding, packed: PackedWeight, linear: PackedProduct) -> None:
        super().__init__()
        nothing = torch.empty(0, packed.inputs, dtype=packed.dtype, device=packed.parts[0].codes.device)
        original.weight = nn.Parameter(nothing, requires_grad=False)
        original.padding_idx = None  # of training
        self.original, self.packed, self._linear = original, packed, linear

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = self._linear.rows(self.packed, token_ids)
        places = torch.arange(token_ids.numel(), device=token_ids.device).view_as(token_ids)
        out: torch.Tensor = functional_call(self.original, {"weight": rows.flatten(0, -2)}, (places,))
        return out


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
