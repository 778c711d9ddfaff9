"""Rows of a KV cache in int8: the codes of a token's head, and behind them their scale in float32.

A cache is `[num_blocks, block_tokens, num_kv_heads, dim + 4]` int8. Since a row has all that it takes to read it,
blocks are shared, copied, swapped and stored like those of any other dtype.
"""

from __future__ import annotations

import torch

SCALE_BYTES = 4
_MOST = 127
_LEAST_SIZE = 1e-30  # of a row's largest element; below, 127 / it would be infinite


def row_bytes(dim: int) -> int:
    """Bytes of a row of `dim` elements."""
    return dim + SCALE_BYTES


def head_dim(cache: torch.Tensor) -> int:
    """Elements of a head of a cache of any dtype."""
    return cache.shape[-1] - (SCALE_BYTES if cache.dtype == torch.int8 else 0)


def quantise(x: torch.Tensor) -> torch.Tensor:
    """Rows `[..., dim + 4]` of `x [..., dim]`: rounded to nearest, the largest element becomes 127. The scale of a row
    with a NaN or an infinity is NaN."""
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True)
    finite = largest.isfinite()
    largest = largest.clamp(min=_LEAST_SIZE)
    codes = torch.where(finite, wide * (_MOST / largest), 0.0).round().to(torch.int8)
    scales = torch.where(finite, largest / _MOST, torch.nan)
    return torch.cat([codes, scales.view(torch.int8)], dim=-1)


def dequantise(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The elements `[..., dim]` of `rows [..., dim + 4]`."""
    scales = rows[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (rows[..., :-SCALE_BYTES].float() * scales).to(dtype)
