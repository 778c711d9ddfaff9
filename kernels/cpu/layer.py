"""A whole decoder layer in one call of C++ (`csrc/layer.cpp`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from folio.kernels.cpu.build import load_function, load_library
from folio.kernels.cpu.ops import (
    CPP_DTYPES,
    CpuRotaryWrite,
    PackedWeight,
    RotaryFields,
    WeightFields,
    address,
    cache_error,
    on_huge_pages,
)
from folio.kernels.cpu.provider import AttentionFields, CpuAttend
from folio.kernels.elementwise import ACTIVATIONS, Activation, HeadNorm

_POINTER, _INT64, _INT32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_NORMS = ("before_attention", "before_mlp", "after_attention", "after_mlp")  # of `LayerWeights.norms`


class _NormWeight(ctypes.Structure):
    """`NormWeight` of layer.cpp, field by field."""

    _fields_ = [("weight", _POINTER), ("eps", _FLOAT), ("offset", _FLOAT)]


class _LayerPart(ctypes.Structure):
    """`LayerPart` of layer.cpp, field by field."""

    _fields_ = [
        ("rotary", ctypes.POINTER(RotaryFields)),
        ("attention", ctypes.POINTER(AttentionFields)),
        *((name, _POINTER) for name in ("key_cache", "value_cache")),
        ("first_token", _INT64),
    ]


class _LayerCall(ctypes.Structure):
    """`LayerCall` of layer.cpp, field by field."""

    _fields_ = [
        *((name, _POINTER) for name in ("multiply", "panel_bytes", "hidden", "out", "heads", "workspace")),
        ("parts", ctypes.POINTER(_LayerPart)),
        *((name, _POINTER) for name in ("query_weight", "key_weight")),
        *((name, _NormWeight) for name in _NORMS),
        *((name, WeightFields) for name in ("qkv", "attention_out", "gate_up", "down")),
        ("rows", _INT64),
        *((name, _INT32) for name in ("num_parts", "dtype", "activation")),
    ]


@dataclass(frozen=True, slots=True)
class Product:
    """A packed weight and its bias `[outputs]` or `None`."""

    weight: PackedWeight
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of a layer `x += o(attention(qkv(norm(x)))); x += down(activation(gate(norm(x))) · up(norm(x)))`.

    Attributes:
        norms: before attention, and before the MLP; then those of the outputs of attention and of the MLP, or none;
            weights `[size]`.
        head_norms: of queries and of keys, before the rotation; or none.
        qkv: queries, keys and values side by side.
        gate_up: gates, then ups.
    """

    norms: Sequence[HeadNorm | None]
    head_norms: tuple[HeadNorm, ...]
    qkv: Product
    attention_out: Product
    gate_up: Product
    down: Product
    activation: Activation

    def __post_init__(self) -> None:
        size, dtype = self.qkv.weight.inputs, self.qkv.weight.dtype
        products = (self.qkv, self.attention_out, self.gate_up, self.down)
        for product in products:
            bias = product.bias
            if product.weight.dtype != dtype or (bias is not None and (bias.dtype != dtype or bias.stride(0) != 1)):
                raise ValueError(f"a product of {product.weight.dtype} in a layer of {dtype}")
        given = (self.attention_out.weight.outputs, self.gate_up.weight.inputs, self.down.weight.outputs)
        if set(given) != {size} or self.gate_up.weight.outputs != 2 * self.down.weight.inputs:
            shapes = [(product.weight.inputs, product.weight.outputs) for product in products]
            raise ValueError(f"products (inputs, outputs) {shapes} do not follow each other")
        weights = [norm.weight for norm in self.norms if norm is not None]
        if any(weight.shape != (size,) or weight.dtype != dtype for weight in weights):
            raise ValueError(f"norms of {[list(weight.shape) for weight in weights]} for {size} of {dtype}")


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Tokens of a step that are read in one view, from `first_token` on."""

    rotary: CpuRotaryWrite
    attend: CpuAttend
    first_token: int


class Workspace:
    """Memory for the values between a layer's operations, shared by layers that run one after the other. It grows to
    the largest call; fresh memory in each would cost a page fault every 4 KiB."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def at_least(self, num_bytes: int) -> torch.Tensor:
        if len(self._memory) < num_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # freed first
            self._memory = on_huge_pages(num_bytes)
        return self._memory


class StepParts:
    """The parts of a step in C++, for all layers of one kind."""

    def __init__(self, parts: Sequence[LayerPart]) -> None:
        self._parts = parts  # kept: the fields have their addresses
        self.fields = (_LayerPart * len(parts))(
            *(
                _LayerPart(
                    ctypes.pointer(part.rotary.fields), ctypes.pointer(part.attend.fields), 0, 0, part.first_token
                )
                for part in parts
            )
        )

    def error(self, result: int, caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Exception:
        keys = caches[0][0]
        wrong = "; ".join(
            f"{part.rotary.outside(cache)}; {part.attend.outside()}"
            for part, (cache, _) in zip(self._parts, caches, strict=True)
        )
        return cache_error(result, keys, wrong)


class CpuLayer:
    """One layer's call. Each value is that of the single operations, bit for bit.

    Args:
        march: the compiler's name of the processor, as for `CpuLinear`.

    Raises:
        KernelError: the library cannot be compiled.
    """

    def __init__(self, weights: LayerWeights, workspace: Workspace, march: str = "native") -> None:
        load, call = partial(load_function, "layer", march=march), ctypes.POINTER(_LayerCall)
        self._run = load("folio_layer", call, result=ctypes.c_int)
        self._workspace_bytes = load("folio_layer_workspace", call, result=_INT64)
        products = load_library("linear", march)
        self._weights, self._workspace = weights, workspace  # kept: the fields have the addresses of the weights
        query_weight, key_weight = [norm.weight for norm in weights.head_norms] or (None, None)
        self._fields = _LayerCall(
            multiply=ctypes.cast(products["folio_multiply"], _POINTER),
            panel_bytes=ctypes.cast(products["folio_linear_panel_bytes"], _POINTER),
            query_weight=address(query_weight),
            key_weight=address(key_weight),
            **dict(zip(_NORMS, map(_norm_fields, weights.norms), strict=True)),
            qkv=_product_fields(weights.qkv),
            attention_out=_product_fields(weights.attention_out),
            gate_up=_product_fields(weights.gate_up),
            down=_product_fields(weights.down),
            dtype=CPP_DTYPES[weights.qkv.weight.dtype],
            activation=ACTIVATIONS.index(weights.activation),
        )

    def __call__(
        self,
        hidden: torch.Tensor,
        heads: torch.Tensor,
        parts: StepParts,
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """The layer's output of `hidden [..., size]`, of its shape and dtype.

        Args:
            heads: memory for queries, keys and values of all rows, `[rows, num_heads, head_dim]`, as the parts were
                prepared with; overwritten.
            parts: which together have all rows.
            caches: this layer's keys and values, for each part.

        Raises:
            KernelError: a slot or a cached token is outside of the cache; nothing is written.
        """
        hidden = hidden.contiguous()
        out = torch.empty_like(hidden)
        if not len(heads):
            return out
        call, fields = self._fields, parts.fields
        call.hidden, call.out, call.heads = hidden.data_ptr(), out.data_ptr(), heads.data_ptr()
        call.rows, call.parts, call.num_parts = len(heads), fields, len(fields)
        for part, (keys, values) in zip(fields, caches, strict=True):
            part.key_cache, part.value_cache = keys.data_ptr(), values.data_ptr()
        call.workspace = self._workspace.at_least(self._workspace_bytes(call)).data_ptr()
        if result := self._run(call):
            raise parts.error(result, caches)
        return out


def _norm_fields(norm: HeadNorm | None) -> _NormWeight:
    return _NormWeight() if norm is None else _NormWeight(norm.weight.data_ptr(), norm.eps, norm.offset)


def _product_fields(product: Product) -> WeightFields:
    return WeightFields.of(product.weight, product.bias)
