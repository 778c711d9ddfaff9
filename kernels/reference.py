"""Attention in plain torch, each sequence's keys and values gathered first: slow, and simple enough to be believed.

The provider for machines without a compiler: torch's own attention.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.provider import (
    AttentionProblem,
    CacheScales,
    Masking,
    Rotary,
    VarlenBatch,
    as_cached,
    check_attend,
    check_write,
    rotate,
)


class GatherProvider:
    """Write by index, and walk the sequences of a batch one by one; a subclass attends for one."""

    name: str

    def unsupported(self, problem: AttentionProblem) -> str | None:
        if not problem.dtype.is_floating_point or problem.dtype.itemsize < 2:
            return f"queries cannot be {problem.dtype}"
        return None

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
        *,
        rotary: Rotary | None = None,
        scales: CacheScales | None = None,
    ) -> None:
        check_write(key, value, key_cache, value_cache, slots, rotary)
        write_by_index(key, value, key_cache, value_cache, slots, rotary, scales)

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: VarlenBatch,
        masking: Masking,
        *,
        scales: CacheScales | None = None,
        lse: torch.Tensor | None = None,
        num_splits: int = 0,
    ) -> torch.Tensor:
        check_attend(query, key_cache, value_cache, batch, masking, lse)
        out = query.new_zeros(*query.shape[:2], value_cache.shape[3])
        if lse is not None:
            lse.fill_(-torch.inf)
        starts, lengths = batch.cu_seqlens_q.tolist(), batch.cache_seqlens.tolist()
        leftpad = [0] * len(lengths) if batch.cache_leftpad is None else batch.cache_leftpad.tolist()
        for i, end in enumerate(lengths):
            rows = slice(starts[i], starts[i + 1])
            num_queries = rows.stop - rows.start
            begin = first_visible(num_queries, end, leftpad[i], masking)
            if not num_queries or begin >= end:
                continue
            key, value = (_gather(cache, batch.block_table[i], begin, end) for cache in (key_cache, value_cache))
            if key.dtype != query.dtype:
                key, value = (_dequantize(x, s, query.dtype) for x, s in zip((key, value), _pair(scales), strict=True))
            mask = visible(num_queries, lengths[i], begin, end, masking, query.device)
            slopes = masking.alibi_slopes
            bias = None
            if slopes is not None:
                distance = _positions(num_queries, lengths[i], query.device)[:, None] - torch.arange(
                    begin, end, device=query.device
                )
                bias = -(slopes if slopes.ndim == 1 else slopes[i])[:, None, None] * distance.abs()
            out[rows] = self.attend_one(
                query[rows], key, value, mask, bias, masking, None if lse is None else lse[rows]
            )
        return out

    def attend_one(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        bias: torch.Tensor | None,
        masking: Masking,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        """`[q, heads, dim]` against `[cached, kv_heads, dim]`, where `mask [q, cached]` says, with a bias `[heads, q,
        cached]` on the scores."""
        raise AssertionError("a provider defines this")


class ReferenceProvider(GatherProvider):
    """The definition of correct: every step written out, computed in float32, or in float64 when given float64."""

    name = "reference"

    def attend_one(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        bias: torch.Tensor | None,
        masking: Masking,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        compute = torch.promote_types(query.dtype, torch.float32)
        group_size = query.shape[1] // key.shape[1]
        keys = key.to(compute).repeat_interleave(group_size, dim=1)
        values = value.to(compute).repeat_interleave(group_size, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query.to(compute), keys) * masking.scale
        if masking.softcap > 0:
            scores = masking.softcap * torch.tanh(scores / masking.softcap)
        if bias is not None:
            scores = scores + bias
        scores = scores.masked_fill(~mask, -torch.inf)
        if masking.sinks is not None:
            sinks = masking.sinks.to(compute)[:, None, None].expand(-1, query.shape[0], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        total = scores.logsumexp(dim=-1, keepdim=True)
        blind = ~mask.any(dim=1)
        weights = (scores - total).exp()[..., : key.shape[0]].masked_fill(blind[:, None], 0.0)
        if lse is not None:
            lse.copy_(total[..., 0].T.masked_fill(blind[:, None], -torch.inf))
        return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)


def write_by_index(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    rotary: Rotary | None,
    scales: CacheScales | None,
) -> None:
    """`AttentionProvider.write` in plain torch."""
    if rotary is not None:
        key = rotate(key, rotary)
    blocks, positions = slots // key_cache.shape[1], slots % key_cache.shape[1]
    key_cache[blocks, positions], value_cache[blocks, positions] = as_cached(key, value, key_cache.dtype, scales)


def first_visible(num_queries: int, num_cached: int, leftpad: int, masking: Masking) -> int:
    """The cached token before which no query sees any."""
    return leftpad if masking.window_left < 0 else max(leftpad, num_cached - num_queries - masking.window_left)


def visible(
    num_queries: int, num_cached: int, begin: int, end: int, masking: Masking, device: torch.device
) -> torch.Tensor:
    """Which of the cached tokens `begin … end - 1` each of the last `num_queries` positions sees: bool
    `[num_queries, end - begin]`."""
    query_positions = _positions(num_queries, num_cached, device)[:, None]
    cached_positions = torch.arange(begin, end, device=device)
    mask = torch.ones(num_queries, end - begin, dtype=torch.bool, device=device)
    if masking.window_right >= 0:
        mask &= cached_positions <= query_positions + masking.window_right
    if masking.window_left >= 0:
        mask &= cached_positions >= query_positions - masking.window_left
    return mask


def _positions(num_queries: int, num_cached: int, device: torch.device) -> torch.Tensor:
    return torch.arange(num_cached - num_queries, num_cached, device=device)


def _gather(cache: torch.Tensor, table: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Cached tokens `begin … end - 1` of a sequence, `[num_tokens, num_kv_heads, dim]`; no others are read."""
    block_tokens = cache.shape[1]
    if table.numel() == 1:
        return cache[int(table[0]), begin:end]
    first, last = begin // block_tokens, -(-end // block_tokens)
    parts = [cache[b] for b in table[first:last].tolist()]
    parts[-1] = parts[-1][: end - (last - 1) * block_tokens]
    parts[0] = parts[0][begin - first * block_tokens :]
    return torch.cat(parts)


def _dequantize(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    wide = x.to(torch.float32)
    return (wide if scale is None else wide * scale[:, None]).to(dtype)


def _pair(scales: CacheScales | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if scales is None else (scales.key, scales.value)


class SdpaProvider(GatherProvider):
    """torch's scaled_dot_product_attention, one call a sequence, grouped heads folded into the query rows.

    Folding is exact and several times faster than `enable_gqa` on CPUs. Softcap, ALiBi, sinks and the logarithm of the
    denominator are beyond SDPA and take the reference's way.
    """

    name = "sdpa"

    def __init__(self) -> None:
        self._reference = ReferenceProvider()

    def attend_one(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        bias: torch.Tensor | None,
        masking: Masking,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        num_queries, num_heads, dim = query.shape
        if masking.softcap > 0 or masking.sinks is not None or bias is not None or lse is not None:
            return self._reference.attend_one(query, key, value, mask, bias, masking, lse)
        num_kv_heads = key.shape[1]
        group_size = num_heads // num_kv_heads
        folded = query.view(num_queries, num_kv_heads, group_size, dim).permute(1, 2, 0, 3)
        folded = folded.reshape(1, num_kv_heads, group_size * num_queries, dim)
        # One query sees all that was gathered.
        attn_mask = None if num_queries == 1 else mask.repeat(group_size, 1)
        out = functional.scaled_dot_product_attention(
            folded, key.transpose(0, 1)[None], value.transpose(0, 1)[None], attn_mask=attn_mask, scale=masking.scale
        )
        out = out.view(num_kv_heads, group_size, num_queries, value.shape[2]).permute(2, 0, 1, 3)
        out = out.reshape(num_queries, num_heads, value.shape[2])
        if num_queries > 1:
            out = out.masked_fill(~mask.any(dim=1)[:, None, None], 0.0)
        return out
