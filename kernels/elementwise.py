"""Operations between the matrix products of a layer: their interface."""

from __future__ import annotations

from typing import Protocol

import torch


class Elementwise(Protocol):
    """RMS norm, gated activation and rotary embedding, rounded once from float32. Tensors of a call have one dtype:
    float32, bfloat16 or float16."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
        """`x / rms(x) * (weight + offset)` over the last dimension; `x [..., size]`, `weight [size]`.

        Raises:
            ValueError: the tensors do not fit.
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` of `gate_up [..., 2 * size]`, gates first; returns `[..., size]`.

        Raises:
            ValueError: the last dimension is odd.
        """
        ...

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate the first `dim` elements of each head in place, pairs `dim / 2` apart.

        Args:
            x: `[rows, heads, head_dim]`, stride 1 along the head.
            cos, sin: `[..., rows, dim]`.

        Raises:
            ValueError: the tensors do not fit.
        """
        ...
