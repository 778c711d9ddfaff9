"""Public attention functions: flash-attention's `flash_attn_with_kvcache`, and packed batches.

A cache has one of two forms, with any strides but 1 for the last dimension:

- paged: `[num_blocks, block_size, num_kv_heads, head_dim]`, with a `block_table`;
- contiguous: `[batch_size_cache, seqlen_cache, num_kv_heads, head_dim]`, one row per sequence. Nothing past
  `cache_seqlens` is read, so a row may be a region that ends in a hole.

On CUDA only shapes and dtypes are checked, because reading index tensors would wait for the device. On a CPU their
numbers are checked, too.
"""

from __future__ import annotations

from functools import cache, partial

import torch

from folio.kernels.arguments import (
    bound_of,
    cached_lengths,
    check_new_tokens,
    check_numbers,
    check_tensor,
    leftpad_of,
    masking_of,
    rotated,
    scales_of,
    sequence_table,
    slots_of,
    window_of,
)
from folio.kernels.int8_cache import head_dim
from folio.kernels.provider import AttentionCall, AttentionProvider, CacheWrite, VarlenBatch
from folio.kernels.select import select_provider


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    sinks: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    provider: AttentionProvider | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Append `k`, `v` to the cache in place, and attend over it (flash-attention 2's function of this name).

    With query i of seqlen_q and key j of the seqlen_k that are then cached, i sees j if
    `i + seqlen_k - seqlen_q - window_size[0] <= j <= i + seqlen_k - seqlen_q + window_size[1]`, -1 being no bound;
    `causal` makes the right window 0. With seqlen_q = 2, seqlen_k = 5 the causal mask is

        1 1 1 1 0
        1 1 1 1 1

    A query that sees nothing gives zeros, and minus infinity in `softmax_lse` (flash-attention 2: plus infinity).

    Args:
        q: `[batch_size, seqlen_q, num_heads, head_dim]`; float32, bfloat16 or float16.
        k_cache, v_cache: `[num_blocks, block_size, num_kv_heads, head_dim]` with a `block_table`, else
            `[batch_size_cache, seqlen_cache, num_kv_heads, head_dim]`. Their head sizes may differ. dtype of `q`, or
            8-bit floats, or int8: then rows of `kernels.int8_cache`, 4 bytes longer.
        k, v: `[batch_size, seqlen_new, num_kv_heads, head_dim]`, stored from `cache_seqlens` on. There must be room.
        rotary_cos, rotary_sin: `[seqlen_ro, rotary_dim / 2]`; rotate `k` by its positions `cache_seqlens`,
            `cache_seqlens + 1`, …, and `q` by the same with a causal mask or a window, else by `cache_seqlens`.
            Only with `k`, `v`.
        cache_seqlens: int or `[batch_size]` int32, tokens cached before the call; by default all of the cache.
        cache_batch_idx: `[batch_size]` int32, each sequence's row of a contiguous cache; 0, 1, … if not given.
        cache_leftpad: `[batch_size]` int32, the first visible token of the cache.
        block_table: `[batch_size, max_blocks_per_sequence]` int32; any block size.
        softmax_scale: `1 / sqrt(head_dim)` if not given.
        softcap: above 0, a score s becomes `softcap · tanh(s / softcap)`.
        rotary_interleaved: pairs are dimensions 0 and 1, …; else 0 and rotary_dim / 2, ….
        alibi_slopes: `[num_heads]` or `[batch_size, num_heads]` float32, adds `-slope · |i + seqlen_k - seqlen_q - j|`.
        num_splits: the most parts into which a single query's cache is split between processors; 0: a heuristic.
        sinks: `[num_heads]` float32, one more score per head, without a value.
        k_descale, v_descale: `[num_kv_heads]` float32, factors of a cache of 8-bit floats.
        provider: the kernels; by default `select_provider("auto", …)`.

    Returns:
        `[batch_size, seqlen_q, num_heads, head_dim of v_cache]`, and with `return_softmax_lse` the logarithm of each
        softmax's denominator `[batch_size, num_heads, seqlen_q]` float32.

    Raises:
        ValueError: shapes, dtypes or arguments do not fit together; nothing has been stored.
        KernelError: the provider cannot do this; nothing has been stored.
    """
    check_tensor(q, "q", (None, None, None, None))
    check_new_tokens(k, v, rotary_cos, rotary_sin)
    batch_size, seqlen_q, num_heads, _ = q.shape
    table = sequence_table(k_cache, v_cache, block_table, cache_batch_idx, batch_size, q.device)
    capacity = table.shape[1] * k_cache.shape[1]
    lengths = cached_lengths(cache_seqlens, batch_size, capacity, q.device)
    num_new = 0
    if k is not None and v is not None:
        if cache_seqlens is None:
            raise ValueError("cache_seqlens is not given; k and v are stored from there on")
        check_tensor(k, "k", (batch_size, None, k_cache.shape[2], head_dim(k_cache)), q.dtype, q.device)
        check_tensor(v, "v", (batch_size, k.shape[1], v_cache.shape[2], head_dim(v_cache)), q.dtype, q.device)
        num_new = k.shape[1]
    all_lengths = lengths + num_new
    window = window_of(window_size, causal, capacity + seqlen_q)
    leftpad = leftpad_of(cache_leftpad, batch_size, q.device)
    names = ("cache_batch_idx", "row") if block_table is None else ("block_table", "block")
    counts = torch.full_like(lengths, seqlen_q)
    check_numbers(names, counts, all_lengths, num_new, leftpad, window[0], table, k_cache)

    new, scales = None, scales_of(k_cache, k_descale, v_descale)
    if k is not None and v is not None:
        positions = lengths[:, None].long() + torch.arange(max(num_new, seqlen_q), device=q.device)
        turned = partial(rotated, cos=rotary_cos, sin=rotary_sin, interleaved=rotary_interleaved)
        k = turned(k, positions=positions[:, :num_new])
        q = turned(
            q, positions=positions[:, :1].expand(-1, seqlen_q) if window == (-1, -1) else positions[:, :seqlen_q]
        )
        slots = slots_of(table, torch.arange(batch_size, device=q.device)[:, None], positions[:, :num_new], k_cache)
        new = CacheWrite(k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache, slots, scales)
    masking = masking_of(q, batch_size, softmax_scale, window, softcap, alibi_slopes, sinks)
    cu_seqlens_q = torch.arange(batch_size + 1, dtype=torch.int32, device=q.device) * seqlen_q
    most = capacity if q.is_cuda else min(capacity, int(all_lengths.max()) if batch_size else 0)
    batch = VarlenBatch(cu_seqlens_q, all_lengths, table, seqlen_q, most, leftpad)
    lse = q.new_empty(batch_size * seqlen_q, num_heads, dtype=torch.float32) if return_softmax_lse else None
    call = AttentionCall(q.flatten(0, 1), k_cache, v_cache, batch, masking, scales, lse, num_splits)
    out = _store_and_attend(provider, call, new).unflatten(0, (batch_size, seqlen_q))
    return out if lse is None else (out, lse.view(batch_size, seqlen_q, num_heads).transpose(1, 2))


def varlen_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    rotary_interleaved: bool = True,
    cache_leftpad: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    provider: AttentionProvider | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of a packed batch of sequences of different lengths: chunks of prompts beside decodes.

    Args:
        q: `[num_tokens, num_heads, head_dim]`, the last tokens of each sequence.
        cu_seqlens_q: `[num_seqs + 1]` int32, where each sequence's queries begin; the last entry is `num_tokens`.
        cache_seqlens: `[num_seqs]` int32, cached tokens of each sequence, the queries' own and those of `k`, `v`
            included.
        block_table: `[num_seqs, max_blocks_per_sequence]` int32. For a contiguous cache of width 1: each sequence's
            row.
        k, v: `[num_tokens, num_kv_heads, head_dim]`, the queries' own keys and values, to be stored first.
        max_seqlen_q, max_seqlen_k: upper bounds of a sequence's queries and cached tokens. Without them the call waits
            for the device to find the maxima.
        rotary_cos, rotary_sin: `[seqlen_ro, rotary_dim / 2]`; rotate `q` and `k` by their positions. Only with `k`.

    Other arguments and errors as in `flash_attn_with_kvcache`.

    Returns:
        `[num_tokens, num_heads, head_dim of v_cache]`, and with `return_softmax_lse` `[num_tokens, num_heads]` float32.
    """
    check_tensor(q, "q", (None, None, None))
    check_new_tokens(k, v, rotary_cos, rotary_sin)
    check_tensor(cache_seqlens, "cache_seqlens", (None,), torch.int32, q.device)
    num_seqs, num_tokens = cache_seqlens.numel(), len(q)
    check_tensor(cu_seqlens_q, "cu_seqlens_q", (num_seqs + 1,), torch.int32, q.device)
    table = sequence_table(k_cache, v_cache, block_table, None, num_seqs, q.device)
    counts = cu_seqlens_q.diff()
    if not q.is_cuda and (cu_seqlens_q[0] != 0 or cu_seqlens_q[-1] != num_tokens or (counts < 0).any()):
        raise ValueError(f"cu_seqlens_q must increase from 0 to {num_tokens}, got {cu_seqlens_q.tolist()}")
    window = window_of(window_size, causal, table.shape[1] * k_cache.shape[1] + num_tokens)
    leftpad = leftpad_of(cache_leftpad, num_seqs, q.device)
    num_new = 0 if k is None else counts
    check_numbers(("block_table", "block"), counts, cache_seqlens, num_new, leftpad, window[0], table, k_cache)
    max_seqlen_q = bound_of(max_seqlen_q, "max_seqlen_q", counts)
    max_seqlen_k = bound_of(max_seqlen_k, "max_seqlen_k", cache_seqlens)
    new, scales = None, scales_of(k_cache, k_descale, v_descale)
    if k is not None and v is not None:
        check_tensor(k, "k", (num_tokens, k_cache.shape[2], head_dim(k_cache)), q.dtype, q.device)
        check_tensor(v, "v", (num_tokens, v_cache.shape[2], head_dim(v_cache)), q.dtype, q.device)
        sequence = torch.repeat_interleave(torch.arange(num_seqs, device=q.device), counts, output_size=num_tokens)
        before = (cache_seqlens - cu_seqlens_q[1:]).long()
        positions = torch.arange(num_tokens, device=q.device) + before[sequence]
        turned = partial(rotated, cos=rotary_cos, sin=rotary_sin, positions=positions, interleaved=rotary_interleaved)
        new = CacheWrite(turned(k), v, k_cache, v_cache, slots_of(table, sequence, positions, k_cache), scales)
        q = turned(q)
    masking = masking_of(q, num_seqs, softmax_scale, window, softcap, alibi_slopes, sinks)
    starts, lengths = cu_seqlens_q.contiguous(), cache_seqlens.contiguous()
    batch = VarlenBatch(starts, lengths, table, max_seqlen_q, max_seqlen_k, leftpad)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_softmax_lse else None
    out = _store_and_attend(provider, AttentionCall(q, k_cache, v_cache, batch, masking, scales, lse, num_splits), new)
    return out if lse is None else (out, lse)


def _store_and_attend(provider: AttentionProvider | None, call: AttentionCall, new: CacheWrite | None) -> torch.Tensor:
    """Store the new tokens and attend. Nothing is stored if the provider cannot attend."""
    if call.num_splits < 0:
        raise ValueError(f"num_splits {call.num_splits} is below 0")
    provider = provider or _default(call.query.device)
    provider.refuse_unsupported(call)
    if new is not None:
        provider.run_write(new)
    return provider.run_attend(call)


def _default(device: torch.device) -> AttentionProvider:
    """The "auto" provider of the current stream: kernels keep partial results between launches."""
    return _default_of(device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)


@cache
def _default_of(device: torch.device, stream: int) -> AttentionProvider:
    return select_provider("auto", device)
