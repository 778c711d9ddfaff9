"""Attention in plain torch, each sequence's keys and values gathered first: slow, and simple enough to be believed."""

from __future__ import annotations

import torch

from kernels.provider import Masking, VarlenBatch, check_shapes


class GatherProvider:
    """Write by index, and walk the sequences of a batch one by one; a subclass attends for one."""

    name: str

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        group_tokens = key_cache.shape[1]
        groups, positions = slots // group_tokens, slots % group_tokens
        key_cache[groups, positions] = key
        value_cache[groups, positions] = value

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: VarlenBatch,
        masking: Masking,
    ) -> torch.Tensor:
        check_shapes(query, key_cache, value_cache)
        out = query.new_empty(*query.shape[:2], value_cache.shape[3])
        starts, lengths = batch.cu_seqlens_q.tolist(), batch.cache_seqlens.tolist()
        for i, num_cached in enumerate(lengths):
            start, end = starts[i], starts[i + 1]
            if end > start:
                first = first_visible(end - start, num_cached, masking.window_left)
                key = _gather(key_cache, batch.groups[i], first, num_cached)
                value = _gather(value_cache, batch.groups[i], first, num_cached)
                out[start:end] = self.attend_one(query[start:end], key, value, masking)
        return out

    def attend_one(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masking: Masking) -> torch.Tensor:
        """`[q, heads, dim]` against `[cached, kv_heads, dim]`."""
        raise AssertionError("a provider defines this")


class ReferenceProvider(GatherProvider):
    """The definition of correct: every step written out, computed in float32, or in float64 when given float64."""

    name = "reference"

    def attend_one(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masking: Masking) -> torch.Tensor:
        compute = torch.float64 if query.dtype == torch.float64 else torch.float32
        group_size = query.shape[1] // key.shape[1]
        keys = key.to(compute).repeat_interleave(group_size, dim=1)
        values = value.to(compute).repeat_interleave(group_size, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query.to(compute), keys) * masking.scale
        if masking.softcap > 0:
            scores = masking.softcap * torch.tanh(scores / masking.softcap)
        mask = visible(query.shape[0], key.shape[0], masking.window_left, query.device)
        scores = scores.masked_fill(~mask, -torch.inf)
        if masking.sinks is not None:
            sinks = masking.sinks.to(compute)[:, None, None].expand(-1, query.shape[0], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(dim=-1)[..., : key.shape[0]]
        return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)


def first_visible(num_queries: int, num_cached: int, window_left: int) -> int:
    """The first cached token that any of the last `num_queries` positions sees."""
    return 0 if window_left < 0 else max(0, num_cached - num_queries - window_left)


def visible(num_queries: int, num_cached: int, window_left: int, device: torch.device) -> torch.Tensor:
    """Which cached tokens each of the last `num_queries` positions sees: bool `[num_queries, num_cached]`."""
    query_positions = torch.arange(num_cached - num_queries, num_cached, device=device)[:, None]
    cached_positions = torch.arange(num_cached, device=device)
    mask = cached_positions <= query_positions
    if window_left >= 0:
        mask &= cached_positions >= query_positions - window_left
    return mask


def _gather(cache: torch.Tensor, groups: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Cached tokens `begin … end - 1` of a sequence, `[num_tokens, num_kv_heads, dim]`; no others are read."""
    group_tokens = cache.shape[1]
    if groups.numel() == 1:
        return cache[int(groups[0]), begin:end]
    first, last = begin // group_tokens, -(-end // group_tokens)
    tokens = cache[groups[first:last].long()].flatten(0, 1)
    return tokens[begin - first * group_tokens : end - first * group_tokens]
