"""Linear layers of a CPU model with weights laid out for a matrix kernel, once, at load."""

from __future__ import annotations

import logging
import os
from typing import Any, Protocol

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from app.errors import ConfigError
from kernels import CpuLinear, KernelError, has_matrix_tiles

logger = logging.getLogger(__name__)

# Whose weights the module around them reads: Mamba-1 mixers, Hunyuan's router.
_READ_ELSEWHERE = {"dt_proj", "wg"}
# oneDNN makes a product for each number of rows, which are 1 to 3 MiB, in no time to speak of. torch and oneDNN would
# each keep the last 1,024. A step has few, the same in every layer.
_PRODUCT_CACHES, _PRODUCTS_KEPT = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"), 16


class Product(Protocol):
    """A matrix kernel: what it makes of a weight `[outputs, inputs]` at load, and `x @ weight.T + bias`."""

    def pack(self, weight: torch.Tensor, /) -> Any: ...

    def __call__(self, x: torch.Tensor, packed: Any, bias: torch.Tensor | None, /) -> torch.Tensor: ...


class OneDnnProduct:
    """torch's own; several times faster with packed weights than without on few rows, and faster on many."""

    def __init__(self) -> None:
        for name in _PRODUCT_CACHES:  # read when the first product of this process is made
            os.environ.setdefault(name, str(_PRODUCTS_KEPT))

    def pack(self, weight: torch.Tensor) -> Any:
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())

    def __call__(self, x: torch.Tensor, packed: Any, bias: torch.Tensor | None) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return out


class Int8Product:
    """Weights rounded to 8 bits, with a scale for each output; sums are as exact as those of the dtype."""

    def __init__(self, linear: CpuLinear) -> None:
        self._linear = linear

    def pack(self, weight: torch.Tensor) -> Any:
        return self._linear.pack(weight, int8=True)

    def __call__(self, x: torch.Tensor, packed: Any, bias: torch.Tensor | None) -> torch.Tensor:
        return self._linear(x, packed, bias)


class PackedLinear(nn.Module):
    """`nn.Linear` with a packed weight.

    Attributes:
        merged: (name, rows) of the layers that this one took the place of, if they were several.
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
        self._bias = bias
        self._product = product
        self._packed = product.pack(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, self._packed, self._bias)


def choose_product(dtype: torch.dtype, *, int8: bool = False) -> Product | None:
    """The fastest kernel there is for a model of this dtype on this processor; `None`, and a warning, if there is none.

    Raises:
        ConfigError: `int8`, and nothing here can compute with 8-bit weights.
    """
    try:
        linear = CpuLinear()
        reason = linear.unsupported(dtype)
    except KernelError as error:
        reason = str(error)
    if int8:
        if reason is not None:
            raise ConfigError(f"quantization is 'int8', which cannot be had with {dtype} here: {reason}; use 'none'")
        return Int8Product(linear)
    if reason is None and not (dtype == torch.bfloat16 and has_matrix_tiles()):
        return linear
    if reason is not None:
        logger.info("no products of Folio's own with %s: %s", dtype, reason)
    if _onednn_supports(dtype):
        return OneDnnProduct()
    logger.warning("this processor has no fast %s products: linear layers stay unpacked, several times slower", dtype)
    return None


def pack_linears(model: nn.Module, product: Product) -> int:
    """Replace every linear layer of a CPU model; returns how many. The unpacked weights are dropped, except those that
    an embedding shares."""
    num_packed = 0
    # One after the other, and holding on to none of the replaced ones: their weights are there twice as it is.
    for name in [name for name, _ in model.named_children()]:
        child: Any = model.get_submodule(name)
        if type(child) not in (nn.Linear, Conv1D):
            num_packed += pack_linears(child, product)
        elif name not in _READ_ELSEWHERE:
            weight = child.weight.detach() if type(child) is nn.Linear else child.weight.detach().t()
            bias = None if child.bias is None else child.bias.detach()
            setattr(model, name, PackedLinear(weight, bias, product, getattr(child, "merged", ())))
            num_packed += 1
    return num_packed


def _onednn_supports(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32
