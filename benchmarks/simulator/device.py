"""Step times of the simulated device."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One replica's device and model.

    Attributes:
        name: of the device that it stands for.
        fixed_s, token_s: of a step, and of each of its tokens.
        attended_s, decode_attended_s: of each cached token that a query attends to, in prefills and in decodes, which
            read it for one query alone.
        step_tokens: most tokens of a step.
        max_num_seqs: most sequences that run at once.
        cache_tokens: tokens that the KV cache holds.
        unit_tokens: tokens of a block.
        max_mixed_step_s: see `MixedSteps`.
        overlaps: weights are read while products are computed: the longer of both times counts, not their sum.
    """

    name: str
    fixed_s: float
    token_s: float
    attended_s: float
    decode_attended_s: float
    step_tokens: int
    max_num_seqs: int
    cache_tokens: int
    unit_tokens: int
    max_mixed_step_s: float = math.inf
    overlaps: bool = False

    def step_s(self, num_tokens: int, attended: int, decode_attended: int) -> float:
        """Time of a step with this many tokens, whose prefills and decodes attend to these numbers of cached tokens."""
        tokens_s = num_tokens * self.token_s
        weights_s = max(self.fixed_s, tokens_s) if self.overlaps else self.fixed_s + tokens_s
        return weights_s + attended * self.attended_s + decode_attended * self.decode_attended_s


def roofline(
    name: str,
    *,
    parameters: float,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    flops: float,
    bandwidth: float,
    memory_bytes: float,
    unit_tokens: int,
    compute_share: float = 0.5,
    bandwidth_share: float = 0.8,
) -> Device:
    """A device by its data sheet: bf16 weights and cache, and the shares of the peaks that good engines reach.

    Args:
        parameters: of the model.
        layers, heads, kv_heads, head_dim: of its attention.
        flops, bandwidth: peaks, floating-point operations and bytes a second.
        memory_bytes: nine tenths of it hold weights and cache.
    """
    kv_bytes = 2 * 2 * layers * kv_heads * head_dim
    weights_bytes = 2 * parameters
    return Device(
        name=name,
        fixed_s=weights_bytes / (bandwidth_share * bandwidth),
        token_s=2 * parameters / (compute_share * flops),
        attended_s=4 * layers * heads * head_dim / (compute_share * flops),
        decode_attended_s=kv_bytes / (bandwidth_share * bandwidth),
        step_tokens=8192,
        max_num_seqs=256,
        cache_tokens=int((0.9 * memory_bytes - weights_bytes) / kv_bytes) // unit_tokens * unit_tokens,
        unit_tokens=unit_tokens,
    )
