"""Fused decoder layers: the residual is added in the same pass as a norm, the last one by the norm after the layer.

A layer is recognised by the names of its submodules and then by its behaviour, like the modules of `fusion`.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from folio.app.engine.layers.fusion import PROBE_TOKENS, FusedAttention, FusedRMSNorm, close
from folio.app.engine.layers.fusion_record import FusionRecord, Learned, replace_modules
from folio.app.engine.layers.lazy_tensor import LazySum, evaluated
from folio.kernels import Elementwise

# Names of a layer's norms: before attention, after it, before the MLP, after it. A norm that comes after is applied to
# the output before the residual is added.
_Places = tuple[str | None, str | None, str | None, str | None]
_LAYERS: tuple[_Places, ...] = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
)
_LAYER_ARGUMENTS = {
    "hidden_states",
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "position_embeddings",
}


OneCall = Callable[[torch.Tensor, tuple[torch.Tensor, torch.Tensor]], torch.Tensor | None]


class FusedLayer(nn.Module):
    """Decoder layer that adds residuals together with norms. It has the original's submodules, and the plain attributes
    that models read. Without a norm after the MLP its output is a `LazySum`.

    Attributes:
        norms: before attention, after it, before the MLP, after it.
        one_call: the output of `(hidden_states, position_embeddings)`, computed or lazy, or `None` where it cannot.
    """

    self_attn: nn.Module
    mlp: nn.Module

    def __init__(self, ops: Elementwise, original: nn.Module, places: _Places) -> None:
        super().__init__()
        for name, value in vars(original).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)
        for name, child in original.named_children():
            self.add_module(name, child)
        self.training = original.training
        self._ops = ops
        self._names = list(inspect.signature(original.forward).parameters)[1:]
        norms = [None if name is None else getattr(original, name) for name in places]
        self.norms: tuple[FusedRMSNorm | None, ...] = tuple(norms)
        self.one_call: OneCall | None = None

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs |= zip(self._names, args, strict=False)
        if self.one_call is not None:
            out = self.one_call(hidden_states, kwargs["position_embeddings"])
            if out is not None:
                return out
        before_attention, after_attention, before_mlp, after_mlp = self.norms
        x = hidden_states if before_attention is None else before_attention(hidden_states)
        hidden_states = evaluated(hidden_states)
        x, _ = self.self_attn(hidden_states=x, **kwargs)
        if after_attention is not None:
            hidden_states = self._normed_sum(x, hidden_states, after_attention)
            x = hidden_states if before_mlp is None else before_mlp(hidden_states)
        else:
            assert before_mlp is not None
            norm = before_mlp
            hidden_states, x = self._ops.add_rms_norm(x, hidden_states, norm.weight, norm.eps, norm.offset)
        x = self.mlp(x)
        x = x[0] if isinstance(x, tuple) else x  # routers return their scores, too
        return LazySum(x, hidden_states) if after_mlp is None else self._normed_sum(x, hidden_states, after_mlp)

    def _normed_sum(self, x: torch.Tensor, residual: torch.Tensor, norm: FusedRMSNorm) -> torch.Tensor:
        return self._ops.rms_norm_add(x, residual, norm.weight, norm.eps, norm.offset)


@torch.inference_mode()
def fuse_layers(model: nn.Module, ops: Elementwise, record: FusionRecord | None = None) -> int:
    """Fuse decoder layers with fused norms and attention; return the number of replaced ones."""

    def fuse(module: nn.Module, known: Learned | None) -> tuple[nn.Module, Learned] | None:
        fused = _fused_layer(module, ops, compare=known is None)
        return None if fused is None else (fused, {})

    return replace_modules(model, fuse, record or FusionRecord())


def _fused_layer(original: Any, ops: Elementwise, *, compare: bool) -> FusedLayer | None:
    """The replacement, if it behaves like the original."""
    children = dict(original.named_children())
    places = next((names for names in _LAYERS if set(children) == {"self_attn", "mlp", *filter(None, names)}), None)
    if places is None or not all(type(children[name]) is FusedRMSNorm for name in places if name is not None):
        return None
    parameters = inspect.signature(original.forward).parameters
    named = {name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}
    if type(original.self_attn) is not FusedAttention or not named <= _LAYER_ARGUMENTS:
        return None
    norm: Any = children[next(filter(None, places))]
    same = not compare or _same_sums(original, ops, places, norm.weight)
    return FusedLayer(ops, original, places) if same else None


class _StandIn(nn.Module):
    """A submodule with given outputs, which records its inputs. Real ones can be so small beside the residual that a
    deviation, such as a factor, would pass for rounding."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = output
        self.inputs: list[torch.Tensor] = []
        self.options: list[dict[str, Any]] = []

    def forward(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        self.inputs.append(hidden_states)
        self.options.append(options)
        return self._output


def _same_sums(original: Any, ops: Elementwise, places: _Places, like: torch.Tensor) -> bool:
    """Whether the replacement gives the same inputs to attention and MLP, and the same output."""
    generator = torch.Generator().manual_seed(0)
    x, of_attention, of_mlp = (torch.randn(1, PROBE_TOKENS, len(like), generator=generator).to(like) for _ in range(3))
    options = {name: object() for name in _LAYER_ARGUMENTS - {"hidden_states"}}
    real = original.self_attn, original.mlp
    scored = isinstance(original.mlp(x), tuple)
    attention, mlp = _StandIn((of_attention, None)), _StandIn((of_mlp, None) if scored else of_mlp)
    original.self_attn, original.mlp = attention, mlp
    try:
        expected, actual = original(x, **options), FusedLayer(ops, original, places)(x, **options)
    finally:
        original.self_attn, original.mlp = real
    if not isinstance(expected, torch.Tensor) or len(attention.inputs) != 2 or len(mlp.inputs) != 2:
        return False
    theirs, ours = attention.options
    given = all(ours.get(name) is value for name, value in theirs.items())
    return given and all(itertools.starmap(close, (attention.inputs, mlp.inputs, (expected, actual))))
