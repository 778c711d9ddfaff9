"""Fewer and larger operations in a loaded CPU model: one-pass norms, merged gate and up projections.

Modules are recognised by shape and then by behaviour: a replacement that does not give the module's own output on
random input is not made. So an architecture with a twist of its own keeps its own code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from kernels import CpuElementwise

# Relative to the largest value; bfloat16 rounds once here and several times in the original.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class FusedRMSNorm(nn.Module):
    """`x / rms(x) * (weight + offset)`; offset 1 for Gemma's kind."""

    def __init__(self, ops: CpuElementwise, weight: torch.Tensor, eps: float, offset: float) -> None:
        super().__init__()
        self._ops = ops
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._eps = eps
        self._offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.rms_norm(x, self.weight, self._eps, self._offset)


class FusedSwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))` with gate and up in one matrix product."""

    def __init__(self, ops: CpuElementwise, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self._ops = ops
        self.gate_up_proj = merge_linears({"gate_proj": gate, "up_proj": up})
        self.down_proj = down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self._ops.silu_mul(self.gate_up_proj(x)))
        return out


def merge_linears(layers: Mapping[str, nn.Linear]) -> nn.Linear:
    """One layer with the outputs of several, one after the other; `merged` says how many are whose. All of them have a
    bias, or none."""
    parts = list(layers.values())
    merged: Any = nn.Linear(parts[0].in_features, 1, bias=parts[0].bias is not None, device="meta")
    merged.merged = tuple((name, len(layer.weight)) for name, layer in layers.items())  # of which a rank has a part
    merged.weight = nn.Parameter(torch.cat([layer.weight for layer in parts]), requires_grad=False)
    if parts[0].bias is not None:
        merged.bias = nn.Parameter(torch.cat([layer.bias for layer in parts]), requires_grad=False)
    layer: nn.Linear = merged
    return layer


@torch.inference_mode()
def fuse_modules(model: nn.Module, ops: CpuElementwise) -> int:
    """Replace what can be replaced; returns how many modules. Call it before the linear layers are packed."""
    num_fused = 0
    for name in [name for name, _ in model.named_children()]:  # no list that would keep what is replaced
        child = model.get_submodule(name)
        fused, size = _fused_norm(child, ops) or _fused_swiglu(child, ops) or (None, 0)
        if fused is not None and _same_output(child, fused, size):
            setattr(model, name, fused)
            num_fused += 1
        else:
            num_fused += fuse_modules(child, ops)
    return num_fused


def _fused_norm(module: nn.Module, ops: CpuElementwise) -> tuple[nn.Module, int] | None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not (type(module).__name__.endswith("RMSNorm") and isinstance(weight, torch.Tensor) and isinstance(eps, float)):
        return None
    if weight.dtype not in TOLERANCE or weight.ndim != 1:
        return None
    offset = 1.0 if type(module).__name__.startswith("Gemma") else 0.0
    return FusedRMSNorm(ops, weight.detach(), eps, offset), weight.numel()


def _fused_swiglu(module: nn.Module, ops: CpuElementwise) -> tuple[nn.Module, int] | None:
    children = dict(module.named_children())
    gate, up, down = (children.get(name) for name in ("gate_proj", "up_proj", "down_proj"))
    if not (type(gate) is type(up) is type(down) is nn.Linear) or len(children) > 4:
        return None
    assert isinstance(gate, nn.Linear)
    assert isinstance(up, nn.Linear)
    assert isinstance(down, nn.Linear)
    if gate.weight.dtype not in TOLERANCE or (gate.bias is None) != (up.bias is None):
        return None
    return FusedSwiGLU(ops, gate, up, down), gate.in_features


def _same_output(module: nn.Module, fused: nn.Module, size: int) -> bool:
    dtype = next(fused.parameters()).dtype
    generator = torch.Generator().manual_seed(0)
    for scale in (1.0, 100.0):  # clamped states are only seen when they are large
        x = (torch.randn(1, 5, size, generator=generator) * scale).to(dtype)
        expected, actual = module(x).float(), fused(x).float()
        if not (actual - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max():  # NaN is not
            return False
    return True
