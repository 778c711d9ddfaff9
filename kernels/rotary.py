"""Rotary position embedding, for callers of the kernels whose keys are not rotated yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rotary:
    """Which angle each of some tokens is turned by (RoFormer §3.2.2).

    Attributes:
        cos, sin: `[num_positions, rotary_dim / 2]`; dimensions from `rotary_dim` on are left as they are.
        positions: `[num_tokens]` int64, a row of `cos` for each token.
        interleaved: pairs are the dimensions 0 and 1, 2 and 3, …; else 0 and rotary_dim / 2, … (GPT-NeoX).
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    interleaved: bool


def rotate(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """`x [num_tokens, num_heads, dim]` rotated, in float32 (or float64) and rounded once."""
    compute = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (table[rotary.positions][:, None].to(compute) for table in (rotary.cos, rotary.sin))
    half = cos.shape[-1]
    turned = x[..., : 2 * half].to(compute)
    if rotary.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    parts = (first * cos - second * sin, first * sin + second * cos)
    turned = torch.stack(parts, dim=-1).flatten(-2) if rotary.interleaved else torch.cat(parts, dim=-1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], dim=-1)
