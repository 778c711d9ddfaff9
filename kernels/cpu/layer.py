"""Whole decoder layers, one or more, in one call of C++ (`csrc/layer.cpp`)."""

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
# Keys and values of each part of a step.
Caches = Sequence[tuple[torch.Tensor, torch.Tensor]]
_NORMS = ("before_attention", "before_mlp", "after_attention", "after_mlp")  # of `LayerWeights.norms`


class _NormWeight(ctypes.Structure):
    """`NormWeight` of layer.cpp, field by field."""

    _fields_ = [("weight", _POINTER), ("eps", _FLOAT), ("offset", _FLOAT)]


class _LayerWeights(ctypes.Structure):
    """`LayerWeights` of layer.cpp, field by field."""

    _fields_ = [
        *((name, _POINTER) for name in ("query_weight", "key_weight")),
        *((name, _NormWeight) for name in _NORMS),
        *((name, WeightFields) for name in ("qkv", "attention_out", "gate_up", "down")),
        ("activation", _INT32),
    ]


class _LayerPart(ctypes.Structure):
    """`LayerPart` of layer.cpp, field by field."""

    _fields_ = [
        ("rotary", ctypes.POINTER(RotaryFields)),
        ("attention", ctypes.POINTER(AttentionFields)),
        ("first_token", _INT64),
    ]


class _LayerCache(ctypes.Structure):
    """`LayerCache` of layer.cpp, field by field."""

    _fields_ = [("keys", _POINTER), ("values", _POINTER)]


class _LayerCall(ctypes.Structure):
    """`LayerCall` of layer.cpp, field by field."""

    _fields_ = [
        ("weights", ctypes.POINTER(_LayerWeights)),
        ("heads", _POINTER),
        ("parts", ctypes.POINTER(_LayerPart)),
        ("caches", ctypes.POINTER(_LayerCache)),
        ("num_parts", _INT32),
    ]


class _LayersCall(ctypes.Structure):
    """`LayersCall` of layer.cpp, field by field."""

    _fields_ = [
        *((name, _POINTER) for name in ("multiply", "panel_bytes", "hidden", "out", "workspace")),
        ("layers", ctypes.POINTER(_LayerCall)),
        ("rows", _INT64),
        *((name, _INT32) for name in ("num_layers", "dtype")),
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
                _LayerPart(ctypes.pointer(part.rotary.fields), ctypes.pointer(part.attend.fields), part.first_token)
                for part in parts
            )
        )

    def outside(self, caches: Caches) -> str:
        return "; ".join(
            f"{part.rotary.outside(keys)}; {part.attend.outside()}"
            for part, (keys, _) in zip(self._parts, caches, strict=True)
        )


class CpuLayer:
    """A layer's weights in C++.

    Args:
        march: the compiler's name of the processor, as for `CpuLinear`.

    Raises:
        KernelError: the library cannot be compiled.
    """

    def __init__(self, weights: LayerWeights, march: str = "native") -> None:
        load, call = partial(load_function, "layer", march=march), ctypes.POINTER(_LayersCall)
        self.run = load("folio_layers", call, result=ctypes.c_int)
        self.workspace_bytes = load("folio_layers_workspace", call, result=_INT64)
        products = load_library("linear", march)
        self.products = tuple(
            ctypes.cast(products[name], _POINTER) for name in ("folio_multiply", "folio_linear_panel_bytes")
        )
        self.dtype = weights.qkv.weight.dtype
        self._weights = weights  # kept: the fields have the addresses of its tensors
        query_weight, key_weight = [norm.weight for norm in weights.head_norms] or (None, None)
        self.fields = _LayerWeights(
            query_weight=address(query_weight),
            key_weight=address(key_weight),
            **dict(zip(_NORMS, map(_norm_fields, weights.norms), strict=True)),
            qkv=_product_fields(weights.qkv),
            attention_out=_product_fields(weights.attention_out),
            gate_up=_product_fields(weights.gate_up),
            down=_product_fields(weights.down),
            activation=ACTIVATIONS.index(weights.activation),
        )


class PreparedLayer:
    """A layer of a step.

    Args:
        heads: memory for queries, keys and values of all rows, `[rows, num_heads, head_dim]`, as the parts were
            prepared with; overwritten.
        parts: which together have all rows.
        caches: this layer's keys and values, for each part.
    """

    def __init__(self, layer: CpuLayer, heads: torch.Tensor, parts: StepParts, caches: Caches) -> None:
        self.layer, self.parts, self.caches = layer, parts, caches
        self._heads = heads  # kept: the fields have its address
        pointers = (_LayerCache * len(caches))(*(_LayerCache(k.data_ptr(), v.data_ptr()) for k, v in caches))
        self.fields = _LayerCall(ctypes.pointer(layer.fields), heads.data_ptr(), parts.fields, pointers, len(caches))


def run_layers(hidden: torch.Tensor, layers: Sequence[PreparedLayer], workspace: Workspace) -> torch.Tensor:
    """The output of layers that follow each other, for `hidden [..., size]`: of its shape and dtype, which is that of
    the layers. Each value is that of the single operations, bit for bit, on a residual in float32.

    Raises:
        KernelError: a slot or a cached token is outside of the cache; nothing is written.
    """
    first, hidden = layers[0].layer, hidden.contiguous()
    out = torch.empty_like(hidden)
    if not hidden.numel():
        return out
    call = _LayersCall(
        *first.products,
        hidden.data_ptr(),
        out.data_ptr(),
        None,
        (_LayerCall * len(layers))(*(layer.fields for layer in layers)),
        hidden.numel() // hidden.shape[-1],
        len(layers),
        CPP_DTYPES[first.dtype],
    )
    call.workspace = workspace.at_least(first.workspace_bytes(call)).data_ptr()
    if result := first.run(call):
        wrong = "; ".join(dict.fromkeys(layer.parts.outside(layer.caches) for layer in layers))
        raise cache_error(result, layers[0].caches[0][0], wrong)
    return out


def _norm_fields(norm: HeadNorm | None) -> _NormWeight:
    return _NormWeight() if norm is None else _NormWeight(norm.weight.data_ptr(), norm.eps, norm.offset)


def _product_fields(product: Product) -> WeightFields:
    return WeightFields.of(product.weight, product.bias)
