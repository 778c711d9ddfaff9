"""Reference attention in plain torch, and torch's own attention for machines without a compiler.

Both gather each sequence's keys and values first: slow, and simple enough to be believed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from folio.kernels import int8_cache
from folio.kernels.provider import AttentionCall, AttentionProvider, CacheWrite, Masking


@dataclass(frozen=True, slots=True)
class Gathered:
    """One sequence of a batch, its visible keys and values gathered.

    Attributes:
        query: `[num_queries, num_q_heads, key_dim]`.
        key, value: `[num_cached, num_kv_heads, dim]`.
        mask: `[num_queries, num_cached]` bool, true where a query sees a token.
        bias: `[num_q_heads, num_queries, num_cached]`, added to the scores.
        lse: `[num_queries, num_q_heads]` float32, to be filled.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor
    bias: torch.Tensor | None
    lse: torch.Tensor | None


class ReferenceProvider(AttentionProvider):
    """The definition of correct: sequence by sequence, every step written out, computed in float32, or in float64 when
    given float64."""

    name = "reference"

    def unsupported(self, call: AttentionCall) -> str | None:
        if not call.query.dtype.is_floating_point or call.query.dtype.itemsize < 2:
            return f"queries cannot be {call.query.dtype}"
        return None

    def run_write(self, new: CacheWrite) -> None:
        write_by_index(new)

    def run_attend(self, call: AttentionCall) -> torch.Tensor:
        query, batch, masking, scales, lse = call.query, call.batch, call.masking, call.scales, call.lse
        caches = call.key_cache, call.value_cache
        out = query.new_zeros(*query.shape[:2], int8_cache.head_dim(call.value_cache))
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
            key, value = (_gather(cache, batch.block_table[i], begin, end) for cache in caches)
            if key.dtype != query.dtype:
                key = _dequantize(key, None if scales is None else scales.key, query.dtype)
                value = _dequantize(value, None if scales is None else scales.value, query.dtype)
            positions = torch.arange(end - num_queries, end, device=query.device)
            distance = positions[:, None] - torch.arange(begin, end, device=query.device)
            bias = None
            if (slopes := masking.alibi_slopes) is not None:
                bias = -(slopes if slopes.ndim == 1 else slopes[i])[:, None, None] * distance.abs()
            rows_lse = None if lse is None else lse[rows]
            sequence = Gathered(query[rows], key, value, _visible(distance, masking), bias, rows_lse)
            out[rows] = self.attend_one(sequence, masking)
        return out

    def attend_one(self, sequence: Gathered, masking: Masking) -> torch.Tensor:
        """Attention of one sequence, `[num_queries, num_q_heads, value_dim]`."""
        query, mask = sequence.query, sequence.mask
        compute = torch.promote_types(query.dtype, torch.float32)
        group_size = query.shape[1] // sequence.key.shape[1]
        keys = sequence.key.to(compute).repeat_interleave(group_size, dim=1)
        values = sequence.value.to(compute).repeat_interleave(group_size, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query.to(compute), keys) * masking.scale
        if masking.softcap > 0:
            scores = masking.softcap * torch.tanh(scores / masking.softcap)
        if sequence.bias is not None:
            scores = scores + sequence.bias
        scores = scores.masked_fill(~mask, -torch.inf)
        if masking.sinks is not None:
            sinks = masking.sinks.to(compute)[:, None, None].expand(-1, len(query), 1)
            scores = torch.cat([scores, sinks], dim=-1)
        total = scores.logsumexp(dim=-1, keepdim=True)
        blind = ~mask.any(dim=1)
        weights = (scores - total).exp()[..., : len(keys)].masked_fill(blind[:, None], 0.0)
        if sequence.lse is not None:
            sequence.lse.copy_(total[..., 0].T.masked_fill(blind[:, None], -torch.inf))
        return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)


class SdpaProvider(ReferenceProvider):
    """torch's scaled_dot_product_attention, one call per sequence, grouped heads folded into the query rows.

    Folding is exact and several times faster than `enable_gqa` on CPUs. SDPA has no softcap, ALiBi, sinks or logarithm
    of the denominator; calls with these are computed by the reference.
    """

    name = "sdpa"

    def attend_one(self, sequence: Gathered, masking: Masking) -> torch.Tensor:
        if masking.softcap > 0 or masking.sinks is not None or sequence.bias is not None or sequence.lse is not None:
            return super().attend_one(sequence, masking)
        query, key, value = sequence.query, sequence.key, sequence.value
        (num_queries, num_heads, dim), num_kv_heads = query.shape, key.shape[1]
        group_size = num_heads // num_kv_heads
        folded = query.view(num_queries, num_kv_heads, group_size, dim).permute(1, 2, 0, 3)
        folded = folded.reshape(1, num_kv_heads, group_size * num_queries, dim)
        # A single query sees all gathered tokens.
        mask = None if num_queries == 1 else sequence.mask.repeat(group_size, 1)
        out = functional.scaled_dot_product_attention(
            folded, key.transpose(0, 1)[None], value.transpose(0, 1)[None], attn_mask=mask, scale=masking.scale
        )
        out = out.view(num_kv_heads, group_size, num_queries, value.shape[2]).permute(2, 0, 1, 3)
        out = out.reshape(num_queries, num_heads, value.shape[2])
        return out if mask is None else out.masked_fill(~sequence.mask.any(dim=1)[:, None, None], 0.0)


def write_by_index(new: CacheWrite) -> None:
    """`AttentionProvider.write` in plain torch."""
    at = new.slots // new.key_cache.shape[1], new.slots % new.key_cache.shape[1]
    new.key_cache[at], new.value_cache[at] = new.as_cached()


def first_visible(num_queries: int, num_cached: int, leftpad: int, masking: Masking) -> int:
    """The first cached token that some query sees."""
    return leftpad if masking.window_left < 0 else max(leftpad, num_cached - num_queries - masking.window_left)


def _visible(distance: torch.Tensor, masking: Masking) -> torch.Tensor:
    """Visibility by `distance`, the query's position minus the cached token's."""
    mask = torch.ones_like(distance, dtype=torch.bool)
    if masking.window_right >= 0:
        mask &= distance >= -masking.window_right
    if masking.window_left >= 0:
        mask &= distance <= masking.window_left
    return mask


def _gather(cache: torch.Tensor, table: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Read only the cached tokens `begin … end - 1` of a sequence, `[num_tokens, num_kv_heads, dim]`."""
    block_tokens = cache.shape[1]
    if table.numel() == 1:
        return cache[int(table[0]), begin:end]
    first, last = begin // block_tokens, -(-end // block_tokens)
    parts = [cache[b] for b in table[first:last].tolist()]
    parts[-1] = parts[-1][: end - (last - 1) * block_tokens]
    parts[0] = parts[0][begin - first * block_tokens :]
    return torch.cat(parts)


def _dequantize(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if x.dtype == torch.int8:
        return int8_cache.dequantise(x, dtype)
    wide = x.to(torch.float32)
    return (wide if scale is None else wide * scale[:, None]).to(dtype)
