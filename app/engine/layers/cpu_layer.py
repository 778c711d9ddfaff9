"""Decoder layers that run in one call of C++ on a CPU: fused layers with packed weights of Folio's own product."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from folio.app.engine.layers.attention import CachedAttention, PreparedPart, bound
from folio.app.engine.layers.fused_layer import FusedLayer
from folio.app.engine.layers.fusion import FusedAttention, FusedGatedMLP
from folio.app.engine.layers.linear import PackedLinear
from folio.kernels import HeadNorm
from folio.kernels.cpu.layer import CpuLayer, LayerPart, LayerWeights, Product, StepParts, Workspace
from folio.kernels.cpu.ops import CpuRotaryWrite, PackedWeight
from folio.kernels.cpu.provider import CpuAttend


class LayerStep:
    """State that a model's layers share during a step: their workspace, and the step's prepared calls in C++."""

    def __init__(self) -> None:
        self.workspace = Workspace()
        self._heads = torch.empty(0)
        self._prepared: list[PreparedPart] | None = None
        self._parts: StepParts | None = None

    def heads(self, like: torch.Tensor, *shape: int) -> torch.Tensor:
        """Memory for the queries, keys and values of a step's rows; the same for all layers of that shape."""
        if self._heads.shape != shape or self._heads.dtype != like.dtype:
            self._heads = like.new_empty(shape)
        return self._heads

    def parts(self, prepared: list[PreparedPart]) -> StepParts | None:
        """The prepared calls; `None` if another kernel makes one of them."""
        if prepared is not self._prepared:
            parts = [
                LayerPart(part.write, part.attend, 0 if part.tokens is None else part.tokens.start)
                for part in prepared
                if isinstance(part.write, CpuRotaryWrite) and part.write.stores and isinstance(part.attend, CpuAttend)
            ]
            self._prepared = prepared
            self._parts = StepParts(parts) if len(parts) == len(prepared) else None
        return self._parts


class LayerInOneCall:
    """`FusedLayer.one_call`: the whole layer in C++ where C++ also computes its attention over the KV cache."""

    def __init__(self, attention: FusedAttention, weights: LayerWeights, step: LayerStep) -> None:
        self._attention, self._step = attention, step
        self._shape = attention.heads_shape
        self._layer = CpuLayer(weights, step.workspace)

    def __call__(
        self, hidden: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor | None:
        handler, rotary = bound(self._attention), self._attention.rotary
        if not isinstance(handler, CachedAttention):
            return None
        heads = self._step.heads(hidden, hidden.shape[1], *self._shape)
        prepared = handler.rotary_parts(rotary, heads, *position_embeddings)
        parts = self._step.parts(prepared)
        if parts is None:
            return None
        return self._layer(hidden, heads, parts, [handler.cache(part.view, rotary.layer) for part in prepared])


def run_in_one_call(model: nn.Module) -> int:
    """Let the layers that can be run in one call do so; return their number. Linear layers must be packed, and the
    layers be complete: without collectives or adapters."""
    step, num_layers = LayerStep(), 0
    for layer in model.modules():
        if isinstance(layer, FusedLayer) and (weights := _weights(layer)) is not None:
            attention: Any = layer.self_attn
            one_call: Any = LayerInOneCall(attention, weights, step)
            layer.one_call = one_call
            num_layers += 1
    return num_layers


def _weights(layer: Any) -> LayerWeights | None:
    """The layer's weights; `None` if it computes anything but what `LayerWeights` says, or by another product."""
    before_attention, after_attention, before_mlp, after_mlp = layer.norms
    attention, mlp = layer.self_attn, layer.mlp
    if before_attention is None or before_mlp is None:
        return None
    if type(attention) is not FusedAttention or type(mlp) is not FusedGatedMLP:
        return None
    linears: list[Any] = [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]
    if not all(type(linear) is PackedLinear and isinstance(linear.packed, PackedWeight) for linear in linears):
        return None
    norms = [
        None if norm is None else HeadNorm(norm.weight, norm.eps, norm.offset)
        for norm in (before_attention, before_mlp, after_attention, after_mlp)
    ]
    head_norms = tuple(norm for norm in (attention.rotary.query_norm, attention.rotary.key_norm) if norm is not None)
    qkv, attention_out, gate_up, down = (Product(linear.packed, linear.bias) for linear in linears)
    return LayerWeights(norms, head_norms, qkv, attention_out, gate_up, down, mlp.activation)
