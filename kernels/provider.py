"""What an attention provider is, and the checks that all of them share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class KernelError(Exception):
    """A kernel cannot be built, is not available, or does not support a shape."""


@dataclass(frozen=True, slots=True)
class VarlenBatch:
    """The queries of one step, packed one sequence after the other, and where their keys and values are cached.

    Attributes:
        cu_seqlens_q: `[num_seqs + 1]` int32, where each sequence's queries begin; its last entry is their number.
        cache_seqlens: `[num_seqs]` int32, cached tokens of each sequence, the queries' own included.
        groups: `[num_seqs, width]` int32. Width 1: the sequence's region slot. Wider: its block table, whose entries
            past the sequence's last block are not read.
    """

    cu_seqlens_q: torch.Tensor
    cache_seqlens: torch.Tensor
    groups: torch.Tensor

    def __post_init__(self) -> None:
        num_seqs = self.cache_seqlens.numel()
        for name, shape in (("cu_seqlens_q", (num_seqs + 1,)), ("groups", (num_seqs, self.groups.shape[-1]))):
            tensor = getattr(self, name)
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
        for name in ("cu_seqlens_q", "cache_seqlens", "groups"):
            tensor = getattr(self, name)
            if tensor.dtype != torch.int32 or not tensor.is_contiguous():
                raise ValueError(f"{name} must be a contiguous int32 tensor, got {tensor.dtype}")


@dataclass(frozen=True, slots=True)
class Masking:
    """How scores become weights: `softmax(softcap(q·k·scale))` over the visible tokens.

    A query at position p sees the cached positions `max(0, p - window_left) … p`; `window_left < 0` sees all up to p.
    `softcap > 0` replaces a score s by `softcap · tanh(s / softcap)`. `sinks [num_q_heads]` float32 adds one score a
    head to the denominator, without a value.
    """

    scale: float
    window_left: int = -1
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


class AttentionProvider(Protocol):
    """Attention over a cache, and the write into it.

    Caches are `[num_groups, group_tokens, num_kv_heads, dim]` with any strides but 1 for the last: the region view has
    one group a sequence, the block-table view one group a block.
    """

    name: str

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Store `key`, `value` `[num_tokens, num_kv_heads, dim]` at `slots [num_tokens]` int64, each
        `group · group_tokens + position within the group`."""
        ...

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: VarlenBatch,
        masking: Masking,
    ) -> torch.Tensor:
        """Causal attention of `query [num_tokens, num_q_heads, key_dim]`; returns `[num_tokens, num_q_heads,
        value_dim]` of its dtype. No cached token past `cache_seqlens`, or before the window of a sequence's first
        query, is read: there may be a hole."""
        ...


def check_shapes(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    """Raise `ValueError` with the shapes unless they fit together."""
    if query.ndim != 3 or key_cache.ndim != 4 or value_cache.ndim != 4:
        shapes = [list(t.shape) for t in (query, key_cache, value_cache)]
        raise ValueError(
            "expected a query [tokens, heads, dim] and caches [groups, tokens, kv_heads, dim], "
            f"got {shapes[0]}, {shapes[1]} and {shapes[2]}"
        )
    if query.shape[2] != key_cache.shape[3] or key_cache.shape[:3] != value_cache.shape[:3]:
        raise ValueError(
            f"query {list(query.shape)}, keys {list(key_cache.shape)}, values {list(value_cache.shape)} do not match"
        )
    if query.shape[1] % key_cache.shape[2]:
        raise ValueError(f"{query.shape[1]} query heads cannot share {key_cache.shape[2]} KV heads evenly")
    if not query.dtype == key_cache.dtype == value_cache.dtype:
        raise ValueError(f"dtypes differ: {query.dtype}, {key_cache.dtype}, {value_cache.dtype}")


def check_write(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Raise `ValueError` with the shapes unless the new tokens fit the cache."""
    for name, new, cache in (("key", key, key_cache), ("value", value, value_cache)):
        if new.ndim != 3 or new.shape[1:] != cache.shape[2:] or new.dtype != cache.dtype:
            raise ValueError(
                f"{name} {list(new.shape)} {new.dtype} does not fit a cache {list(cache.shape)} {cache.dtype}"
            )
    if len(key) != len(value) or slots.shape != key.shape[:1] or slots.dtype != torch.int64:
        raise ValueError(f"{len(key)} keys, {len(value)} values and slots {list(slots.shape)} {slots.dtype}")
