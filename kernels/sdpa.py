"""The provider for machines without a compiler: torch's own attention."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.provider import Masking
from kernels.reference import GatherProvider, ReferenceProvider, visible


class SdpaProvider(GatherProvider):
    """torch's scaled_dot_product_attention, one call a sequence, grouped heads folded into the query rows.

    Folding is exact and several times faster than `enable_gqa` on CPUs. Softcap and sinks are beyond SDPA and take the
    reference's way.
    """

    name = "sdpa"

    def __init__(self) -> None:
        self._reference = ReferenceProvider()

    def attend_one(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masking: Masking) -> torch.Tensor:
        if masking.softcap > 0 or masking.sinks is not None:
            return self._reference.attend_one(query, key, value, masking)
        num_queries, num_heads, dim = query.shape
        num_kv_heads = key.shape[1]
        group_size = num_heads // num_kv_heads
        folded = query.view(num_queries, num_kv_heads, group_size, dim).permute(1, 2, 0, 3)
        folded = folded.reshape(1, num_kv_heads, group_size * num_queries, dim)
        mask = None
        if num_queries > 1 or masking.window_left >= 0:
            mask = visible(num_queries, key.shape[0], masking.window_left, query.device).repeat(group_size, 1)
        out = functional.scaled_dot_product_attention(
            folded, key.transpose(0, 1)[None], value.transpose(0, 1)[None], attn_mask=mask, scale=masking.scale
        )
        out = out.view(num_kv_heads, group_size, num_queries, value.shape[2]).permute(2, 0, 1, 3)
        return out.reshape(num_queries, num_heads, value.shape[2])
