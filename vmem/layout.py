"""Where the keys and values of a token lie: a pure planner from model geometry to strides.

The layout is *interleaved*: one block holds all layers of its tokens, and inside it one token follows the other:

    block   | token 0                                   | token 1 …
            | layer 0: K [heads, dim] V [heads, dim] | layer 1: … | padding |

so a token's bytes are contiguous, blocks mapped side by side make one array of tokens with a constant stride, and
a block needs one page instead of one per layer and side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vmem.errors import LayoutError

# Rows start at multiples of a cache line, so that no vector load of one token splits two lines.
_ROW_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Geometry of one layer's cache: K is `[num_heads, key_dim]` a token, V is `[num_heads, value_dim]`."""

    num_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Strides and sizes in bytes. `key_offsets[i]` and `value_offsets[i]` are layer i's places within a token."""

    layers: tuple[LayerSpec, ...]
    dtype: torch.dtype
    block_tokens: int
    token_bytes: int
    payload_bytes: int
    key_offsets: tuple[int, ...]
    value_offsets: tuple[int, ...]

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.token_bytes

    @property
    def waste(self) -> float:
        """Share of a token's bytes that hold no key or value."""
        return 1 - self.payload_bytes / self.token_bytes

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)

    def view(self, memory: torch.Tensor, layer: int, group_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Layer `layer` of `memory`, a uint8 tensor of whole groups of `group_tokens` tokens.

        Returns:
            K `[num_groups, group_tokens, num_heads, key_dim]` and V `[…, value_dim]`, strided views of `memory`.
        """
        spec = self.layers[layer]
        values = memory.view(self.dtype)
        token_stride = self.token_bytes // self.dtype.itemsize
        num_groups = memory.numel() // (group_tokens * self.token_bytes)

        def strided(offset_bytes: int, dim: int) -> torch.Tensor:
            return values.as_strided(
                (num_groups, group_tokens, spec.num_heads, dim),
                (group_tokens * token_stride, token_stride, dim, 1),
                offset_bytes // self.dtype.itemsize,
            )

        return strided(self.key_offsets[layer], spec.key_dim), strided(self.value_offsets[layer], spec.value_dim)


def plan_layout(
    layers: Sequence[LayerSpec], dtype: torch.dtype, *, granularity_bytes: int, block_tokens: int = 16
) -> KVLayout:
    """Lay out the layers of one token, padded so that a block of `block_tokens` is a whole number of granules.

    Raises:
        LayoutError: no layers, a dimension that is not positive, or a block size that does not divide the granule.
    """
    if not layers:
        raise LayoutError("a layout needs at least one layer")
    if any(min(spec.num_heads, spec.key_dim, spec.value_dim) < 1 for spec in layers):
        raise LayoutError(f"heads and dimensions must be positive: {layers}")
    if block_tokens < 1 or granularity_bytes % block_tokens:
        raise LayoutError(f"block_tokens {block_tokens} must divide the granularity of {granularity_bytes} bytes")
    offset = payload = 0
    key_offsets: list[int] = []
    value_offsets: list[int] = []
    for spec in layers:
        for dim, offsets in ((spec.key_dim, key_offsets), (spec.value_dim, value_offsets)):
            offsets.append(offset)
            num_bytes = spec.num_heads * dim * dtype.itemsize
            payload += num_bytes
            offset = _round_up(offset + num_bytes, _ROW_ALIGNMENT_BYTES)
    token_bytes = _round_up(offset, max(granularity_bytes // block_tokens, _ROW_ALIGNMENT_BYTES))
    return KVLayout(
        layers=tuple(layers),
        dtype=dtype,
        block_tokens=block_tokens,
        token_bytes=token_bytes,
        payload_bytes=payload,
        key_offsets=tuple(key_offsets),
        value_offsets=tuple(value_offsets),
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
