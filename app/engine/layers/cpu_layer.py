"""Decoder layers that run in one call of C++ on a CPU: fused layers with packed weights of Folio's own product.

Layers that follow each other run in one call together: each returns a tensor that is computed when something else than
the next layer reads it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from folio.app.compat.torch import tensor_without_memory
from folio.app.engine.layers.attention import CachedAttention, PreparedPart, bound
from folio.app.engine.layers.batch import StepBatch
from folio.app.engine.layers.fused_layer import FusedLayer
from folio.app.engine.layers.fusion import FusedAttention, FusedGatedMLP
from folio.app.engine.layers.lazy_tensor import LazyTensor, evaluated
from folio.app.engine.layers.linear import PackedLinear
from folio.kernels import HeadNorm
from folio.kernels.cpu.layer import (
    CpuLayer,
    LayerPart,
    LayerWeights,
    PreparedLayer,
    Product,
    StepParts,
    Workspace,
    run_layers,
)
from folio.kernels.cpu.ops import CpuRotaryWrite, PackedWeight
from folio.kernels.cpu.provider import CpuAttend
from folio.kernels.threads import one_thread


class LayerStep:
    """State that a model's layers share during a step: their workspace, and the step's prepared calls in C++."""

    def __init__(self) -> None:
        self.workspace = Workspace()
        self._heads = torch.empty(0)
        self._batch: StepBatch | None = None
        self._parts: dict[int, tuple[list[PreparedPart], StepParts | None]] = {}  # by the list's id

    def heads(self, like: torch.Tensor, *shape: int) -> torch.Tensor:
        """Memory for the queries, keys and values of a step's rows; the same for all layers of that shape."""
        if self._heads.shape != shape or self._heads.dtype != like.dtype:
            self._heads = like.new_empty(shape)
        return self._heads

    def parts(self, prepared: list[PreparedPart], batch: StepBatch) -> StepParts | None:
        """The prepared calls; `None` if another kernel makes one of them."""
        if batch is not self._batch:
            self._batch = batch
            self._parts.clear()
        if (known := self._parts.get(id(prepared))) is not None:
            return known[1]
        parts = [
            LayerPart(part.write, part.attend, 0 if part.tokens is None else part.tokens.start)
            for part in prepared
            if isinstance(part.write, CpuRotaryWrite) and part.write.stores and isinstance(part.attend, CpuAttend)
        ]
        found = StepParts(parts) if len(parts) == len(prepared) else None
        self._parts[id(prepared)] = prepared, found
        return found


class LazyLayers(LazyTensor):
    """The output of layers that follow each other, computed in one call when it is read.

    If a later layer has computed them, too, they are computed again: they write the same keys and values.

    Args:
        hidden: the input of the first one.
        handler: of their attention, with the batch of this step.
    """

    handler: CachedAttention
    layers: tuple[PreparedLayer, ...]
    hidden: torch.Tensor
    _batch: StepBatch
    _step: LayerStep

    @staticmethod
    def __new__(
        cls, hidden: torch.Tensor, layers: tuple[PreparedLayer, ...], handler: CachedAttention, step: LayerStep
    ) -> LazyLayers:
        lazy = tensor_without_memory(cls, hidden)
        lazy.hidden, lazy.layers, lazy.handler, lazy._step = hidden, layers, handler, step
        lazy._batch, lazy._value = handler.batch, None
        return lazy

    def continues(self, handler: CachedAttention) -> bool:
        """Whether a layer of this handler can be computed with these."""
        return self._value is None and handler is self.handler

    def _computed(self) -> torch.Tensor:
        if self.handler.batch is not self._batch:
            raise RuntimeError("the output of a layer is read after its step, whose blocks may have other owners now")
        return run_layers(self.hidden, self.layers, self._step.workspace)


class LayerInOneCall:
    """`FusedLayer.one_call`: the whole layer in C++ where C++ also computes its attention over the KV cache."""

    def __init__(self, attention: FusedAttention, weights: LayerWeights, step: LayerStep) -> None:
        self._attention, self._step = attention, step
        self._shape = attention.heads_shape
        self._layer = CpuLayer(weights)

    def __call__(
        self, hidden: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor | None:
        handler, rotary = bound(self._attention), self._attention.rotary
        if not isinstance(handler, CachedAttention):
            return None
        before: tuple[PreparedLayer, ...] = ()
        if isinstance(hidden, LazyLayers) and hidden.continues(handler):
            before, hidden = hidden.layers, hidden.hidden
        else:
            hidden = evaluated(hidden)
        heads = self._step.heads(hidden, hidden.shape[1], *self._shape)
        prepared = handler.rotary_parts(rotary, heads, *position_embeddings)
        parts = self._step.parts(prepared, handler.batch)
        if parts is None:
            return None
        caches = [handler.cache(part.view, rotary.layer) for part in prepared]
        layer = PreparedLayer(self._layer, heads, parts, caches)
        return LazyLayers(hidden, (*before, layer), handler, self._step)


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
    if num_layers:
        for name, module in model.named_modules():
            if name.rpartition(".")[2] == "rotary_emb":
                # Torch's other threads, woken even for one token's cosines, would spin on the cores of the layers' own.
                module.forward = one_thread()(module.forward)
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
