"""Fusion: fewer and larger operations in a loaded model.

    norms        one pass, which adds a residual that waits for it (`LazySum`)
    MLPs         gate and up projections in one product, the activation and the product with up in one pass
    attention    query, key and value projections in one product; their norms, rotation and cache write in one pass

Modules are recognised by shape and then by behaviour: a replacement must give the original's output on random input, so
that an architecture with a deviation keeps its own code. A fused attention layer must pass the same queries, keys and
values to the attention function and return the same output; its scale, window, soft cap and sinks are those of the
original's call.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from folio.app.engine.layers.attention import AttentionHandler, RotaryLayer, bind_attention, bound
from folio.app.engine.layers.fusion_record import FusionRecord, Learned, replace_modules
from folio.app.engine.layers.lazy_tensor import LazySum, evaluated
from folio.kernels import Activation, Elementwise, HeadNorm, Masking

# Relative to the largest value; bfloat16 rounds once here and several times in the original.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class FusedRMSNorm(nn.Module):
    """`x / rms(x) * (weight + offset)`; the offset is 1 for Gemma."""

    def __init__(self, ops: Elementwise, weight: torch.Tensor, eps: float, offset: float) -> None:
        super().__init__()
        self._ops = ops
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps, self.offset = eps, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, LazySum):
            normed = x.added_by(
                lambda update, residual: self._ops.add_rms_norm(update, residual, self.weight, self.eps, self.offset)
            )
            if normed is not None:
                return normed
        return self._ops.rms_norm(evaluated(x), self.weight, self.eps, self.offset)


class FusedGatedMLP(nn.Module):
    """`down(activation(gate(x)) * up(x))` with gate and up in one matrix product."""

    def __init__(
        self, ops: Elementwise, gate: nn.Linear, up: nn.Linear, down: nn.Linear, activation: Activation
    ) -> None:
        super().__init__()
        self._ops, self.activation = ops, activation
        self.gate_up_proj = merge_linears({"gate_proj": gate, "up_proj": up})
        self.down_proj = down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self._ops.gate(self.gate_up_proj(x), self.activation))
        return out


def merge_linears(layers: Mapping[str, nn.Linear]) -> nn.Linear:
    """One layer with the concatenated outputs of several, of which all or none have a bias; `merged` has the (name,
    rows) of each."""
    parts = list(layers.values())
    merged: Any = nn.Linear(parts[0].in_features, 1, bias=parts[0].bias is not None, device="meta")
    merged.merged = tuple((name, len(layer.weight)) for name, layer in layers.items())  # a rank's part
    merged.weight = nn.Parameter(torch.cat([layer.weight for layer in parts]), requires_grad=False)
    if parts[0].bias is not None:
        merged.bias = nn.Parameter(torch.cat([layer.bias for layer in parts]), requires_grad=False)
    layer: nn.Linear = merged
    return layer


@torch.inference_mode()
def fuse_modules(model: nn.Module, ops: Elementwise, record: FusionRecord | None = None) -> int:
    """Fuse norms and MLPs; return the number of replaced modules. Linear layers must not be packed yet."""

    def fuse(module: nn.Module, known: Learned | None) -> tuple[nn.Module, Learned] | None:
        fused, size = _fused_norm(module, ops) or _fused_mlp(module, ops) or (None, 0)
        return (fused, {}) if fused is not None and (known is not None or _same_output(module, fused, size)) else None

    return replace_modules(model, fuse, record or FusionRecord())


def _fused_norm(module: nn.Module, ops: Elementwise) -> tuple[FusedRMSNorm, int] | None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not (type(module).__name__.endswith("RMSNorm") and isinstance(weight, torch.Tensor) and isinstance(eps, float)):
        return None
    if weight.dtype not in TOLERANCE or weight.ndim != 1:
        return None
    offset = 1.0 if type(module).__name__.startswith("Gemma") else 0.0
    return FusedRMSNorm(ops, weight.detach(), eps, offset), weight.numel()


def _fused_mlp(module: nn.Module, ops: Elementwise) -> tuple[nn.Module, int] | None:
    children: dict[str, Any] = dict(module.named_children())
    gate, up, down = (children.get(name) for name in ("gate_proj", "up_proj", "down_proj"))
    if not (type(gate) is type(up) is type(down) is nn.Linear) or len(children) > 4:
        return None
    if gate.weight.dtype not in TOLERANCE or (gate.bias is None) != (up.bias is None):
        return None
    activation = _activation(getattr(module, "act_fn", nn.functional.silu))
    return None if activation is None else (FusedGatedMLP(ops, gate, up, down, activation), gate.in_features)


def _activation(function: Any) -> Activation | None:
    """The name of an activation function. Both kinds of GELU are too close for a comparison in half precision."""
    if not callable(function) or (isinstance(function, nn.Module) and any(True for _ in function.parameters())):
        return None
    x = torch.linspace(-12, 12, 997)
    functions: dict[Activation, torch.Tensor] = {
        "silu": nn.functional.silu(x),
        "gelu": nn.functional.gelu(x),
        "gelu_tanh": nn.functional.gelu(x, approximate="tanh"),
    }
    actual = function(x.clone())
    return next((name for name, y in functions.items() if torch.allclose(actual, y, rtol=0, atol=1e-5)), None)


def _same_output(module: nn.Module, fused: nn.Module, size: int) -> bool:
    weight = next(fused.parameters())
    generator = torch.Generator().manual_seed(0)
    for scale in (1.0, 100.0):  # clamping shows in large states only
        x = (torch.randn(1, 5, size, generator=generator) * scale).to(weight)
        if not close(module(x), fused(x)):
            return False
    return True


_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = ("q_norm", "k_norm")
_ARGUMENTS = ["hidden_states", "position_embeddings", "attention_mask"]
PROBE_TOKENS = 5


class FusedAttention(nn.Module):
    """Attention layer with rotary positions. Without a bound handler it runs the original, by transformers'
    attention."""

    def __init__(self, ops: Elementwise, original: Any, layer: int, rotary_dim: int, masking: Masking) -> None:
        super().__init__()
        self.qkv_proj = merge_linears({name: getattr(original, name) for name in _PROJECTIONS[:3]})
        self.o_proj: nn.Module = original.o_proj
        norms = [_head_norm(getattr(original, name, None), ops) for name in _NORMS]
        self._head_dim: int = original.head_dim
        self._heads = [len(getattr(original, name).weight) // self._head_dim for name in _PROJECTIONS[:3]]
        self.rotary = RotaryLayer(layer, ops, self._heads[0], self._heads[1], rotary_dim, masking, norms[0], norms[1])
        self._original = (original,)  # not a child module: the weights are in this one

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        handler = bound(self)
        if handler is None:
            result: tuple[torch.Tensor, torch.Tensor | None] = self._original[0](
                hidden_states, position_embeddings, attention_mask, **kwargs
            )
            return result
        heads = self.qkv_proj(hidden_states).view(-1, sum(self._heads), self._head_dim)
        out = handler.attend_rotary(self.rotary, heads, *position_embeddings)
        return self.o_proj(out.view(*hidden_states.shape[:-1], -1)), None

    @property
    def heads_shape(self) -> tuple[int, int]:
        """(heads, size of each) of queries, keys and values side by side."""
        return sum(self._heads), self._head_dim

    def take_over(self) -> None:
        """Replace the original's weights by references to this layer's, so that the original can still run."""
        original = self._original[0]
        columns = self.qkv_proj.weight.split([n * self._head_dim for n in self._heads])
        start = 0
        for name, part in zip(_PROJECTIONS[:3], columns, strict=True):
            setattr(original, name, _Columns(self, "qkv_proj", slice(start, start + len(part))))
            start += len(part)
        original.o_proj = _Columns(self, "o_proj", slice(None))

    @property
    def num_key_value_groups(self) -> int:
        """The original's repetition of keys and values; kernels derive it from the shapes."""
        groups: int = self._original[0].num_key_value_groups
        return groups

    @num_key_value_groups.setter
    def num_key_value_groups(self, groups: int) -> None:
        self._original[0].num_key_value_groups = groups


class _Columns(nn.Module):
    """Some output columns of a submodule, which may have been replaced (packed) since."""

    def __init__(self, fused: FusedAttention, name: str, columns: slice) -> None:
        super().__init__()
        self._fused, self._name, self._columns = (fused,), name, columns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = getattr(self._fused[0], self._name)(x)[..., self._columns]
        return out.contiguous()


class _Recorder(AttentionHandler):
    """Records the arguments of a layer's attention call."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masking: Masking
    ) -> torch.Tensor:
        self.layer, self.masking = layer, masking
        self.states = [tensor.clone() for tensor in (query, key, value)]
        return query * 0.5

    def attend_rotary(
        self, layer: RotaryLayer, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        return self.attend(layer.layer, *layer.rotated(heads, cos, sin), layer.masking)


@torch.inference_mode()
def fuse_attention(model: nn.Module, ops: Elementwise, record: FusionRecord | None = None) -> int:
    """Fuse attention layers; return the number of replaced ones. Linear layers must not be packed yet."""
    record = record or FusionRecord()
    columns = 0 if record.is_known else _angle_columns(model)
    if columns is None:
        return 0

    def fuse(module: nn.Module, known: Learned | None) -> tuple[nn.Module, Learned] | None:
        if not _looks_fusable(module):
            return None
        fused = _known_attention(module, ops, known) if known else _fused(module, ops, columns)
        if fused is None:
            return None
        learned = known or _learned(fused.rotary, module)
        bind_attention(fused, None)
        fused.take_over()
        return fused, learned

    return replace_modules(model, fuse, record)


def _learned(rotary: RotaryLayer, original: nn.Module) -> Learned:
    """What the constructor of a fused attention layer needs, for JSON. Sinks are a parameter, or a copy of one."""
    masking = rotary.masking
    numbers = {field.name: getattr(masking, field.name) for field in dataclasses.fields(masking)}
    sinks = numbers.pop("sinks")
    assert numbers.pop("alibi_slopes") is None
    name = next((name for name, parameter in original.named_parameters() if parameter is sinks), None)
    return {
        "layer": rotary.layer,
        "rotary_dim": rotary.rotary_dim,
        "masking": numbers,
        "sinks": None if sinks is None else {"parameter": name, "shape": list(sinks.shape)},
    }


def _known_attention(original: Any, ops: Elementwise, known: Learned) -> FusedAttention:
    sinks: torch.Tensor | None = None
    if (of_sinks := known["sinks"]) is not None:
        name, device = of_sinks["parameter"], original.o_proj.weight.device
        sinks = original.get_parameter(name) if name else torch.empty(of_sinks["shape"], device=device)
    masking = Masking(**known["masking"], sinks=sinks)
    return FusedAttention(ops, original, known["layer"], known["rotary_dim"], masking)


def _angle_columns(model: Any) -> int | None:
    """Cosines of a token, as the model passes them to its layers; `None` if layers differ or there are none."""
    ropes = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "rotary_emb"]
    if len(ropes) != 1:
        return None
    kinds: list[tuple[str, ...]] = []
    match list(inspect.signature(ropes[0].forward).parameters):
        case ["x", "position_ids"]:
            kinds = [()]
        case ["x", "position_ids", "layer_type"]:  # other frequencies in layers with a window
            kinds = [(kind,) for kind in sorted(set(model.config.get_text_config().layer_types))]
    weight = next(parameter for parameter in model.parameters() if not parameter.is_meta)
    # One grid of positions, or one each for time, height and width, which transformers 5.17 requires.
    grids = (3,) if hasattr(ropes[0], "mrope_section") else ()
    positions = torch.zeros(*grids, 1, 1, dtype=torch.int64, device=weight.device)
    columns = set()
    for kind in kinds:
        angles = ropes[0](weight.new_zeros(1, 1, 1), positions, *kind)
        # Some models use one tensor of complex numbers instead of cosines and sines.
        if not isinstance(angles, tuple) or weight.dtype not in TOLERANCE or angles[0].dtype != weight.dtype:
            return None
        columns.add(angles[0].shape[-1])
    return columns.pop() if len(columns) == 1 else None


def _looks_fusable(module: nn.Module) -> bool:
    children = dict(module.named_children())
    if set(children) - set(_NORMS) != set(_PROJECTIONS) or len(children) not in (4, 6):
        return False
    linears: list[Any] = [children[name] for name in _PROJECTIONS]
    if any(type(linear) is not nn.Linear for linear in linears):
        return False
    query, key, value, out = linears
    if {linear.bias is None for linear in linears[:3]} == {True, False} or len(key.weight) != len(value.weight):
        return False
    # By the weights, which may be a rank's part: `in_features` is of the unsharded layer.
    if out.weight.shape[1] != len(query.weight):
        return False  # the query projection has further outputs
    head_dim = getattr(module, "head_dim", None)
    if not isinstance(head_dim, int) or len(query.weight) % head_dim or len(key.weight) % head_dim:
        return False
    norms = [children[name] for name in _NORMS if name in children]
    if any(getattr(norm.weight, "shape", None) != (head_dim,) for norm in norms):
        return False  # a norm over all heads together
    return _takes_arguments(module.forward)


def _takes_arguments(forward: Any) -> bool:
    parameters = list(inspect.signature(forward).parameters.values())
    required = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return [p.name for p in parameters[:3]] == _ARGUMENTS and set(required) <= set(_ARGUMENTS)


def _head_norm(module: nn.Module | None, ops: Elementwise) -> HeadNorm | None:
    norm = module if module is None or isinstance(module, FusedRMSNorm) else (_fused_norm(module, ops) or (None,))[0]
    return None if norm is None else HeadNorm(norm.weight, norm.eps, norm.offset)


def _fused(original: Any, ops: Elementwise, columns: int) -> FusedAttention | None:
    """The replacement, if it behaves like the original."""
    try:
        # Tables of cosines are as wide as what is rotated, or half as wide.
        for rotary_dim in (columns, 2 * columns):
            if rotary_dim <= original.head_dim:
                fused = _same_attention(original, ops, columns, rotary_dim)
                if fused is not None:
                    return fused
    finally:
        bind_attention(original, None)
    return None


def _same_attention(original: Any, ops: Elementwise, columns: int, rotary_dim: int) -> FusedAttention | None:
    weight = original.q_proj.weight
    generator = torch.Generator().manual_seed(0)
    fused: FusedAttention | None = None
    for scale in (1.0, 100.0):
        x = (torch.randn(1, PROBE_TOKENS, weight.shape[1], generator=generator) * scale).to(weight)
        cos, sin = torch.randn(2, 1, PROBE_TOKENS, columns, generator=generator).to(weight)
        # Far positions, to reveal a further dependency on them.
        positions = torch.randint(1 << 20, (1, PROBE_TOKENS), generator=generator).to(weight.device)
        theirs, ours = _Recorder(), _Recorder()
        bind_attention(original, theirs)
        expected, _ = original(x, (cos, sin), None, position_ids=positions)
        if fused is None:
            fused = FusedAttention(ops, original, theirs.layer, rotary_dim, theirs.masking)
        bind_attention(fused, ours)
        actual, _ = fused(x, (cos, sin), None, position_ids=positions)
        pairs = zip([*theirs.states, expected], [*ours.states, actual], strict=True)
        if not all(itertools.starmap(close, pairs)):
            return None
    return fused


def close(expected: torch.Tensor, actual: torch.Tensor) -> bool:
    """Equal but for rounding, relative to the largest value."""
    if expected.shape != actual.shape:
        return False
    difference = (actual.float() - expected.float()).abs().max()
    return bool((difference <= TOLERANCE[expected.dtype] * expected.float().abs().max()).item())  # NaN is not
