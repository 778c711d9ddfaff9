"""Tiles of cached tokens, and the arguments common to the decode and prefill kernels."""

# ruff: noqa: N803 (compile-time constants are capitals in Triton's kernels)

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from folio.kernels.provider import AttentionCall
from folio.kernels.triton.cache import along_last

# A table of width 1 with longer blocks is a region view. Shorter blocks are looked up even in a table of width 1, so
# that a short batch over blocks does not compile a further kernel.
_MAX_BLOCK_TOKENS = 512


@triton.jit
def attend_tiles(
    query: tl.tensor,  # [BLOCK_ROWS, BLOCK_KEY_DIM]
    accumulated: tl.tensor,  # [BLOCK_ROWS, BLOCK_VALUE_DIM] float32: sum of weights times values
    total: tl.tensor,  # [BLOCK_ROWS] float32: sum of weights
    peak: tl.tensor,  # [BLOCK_ROWS] float32: largest score, in units of log 2
    position: tl.tensor,  # [BLOCK_ROWS]
    slope: tl.tensor,  # [BLOCK_ROWS], in units of log 2; read with HAS_ALIBI
    key_ptr: tl.tensor,  # the KV head's first token of block 0
    value_ptr: tl.tensor,
    table_ptr: tl.tensor,  # the sequence's row
    start: tl.tensor,  # a multiple of BLOCK_TILE
    stop: tl.tensor,
    first: tl.tensor,  # tokens first … last - 1 may be read
    last: tl.tensor,
    factor: tl.tensor,
    cap: tl.tensor,
    window_left: tl.tensor,
    window_right: tl.tensor,
    key_block_stride: tl.tensor,
    key_token_stride: tl.tensor,
    value_block_stride: tl.tensor,
    value_token_stride: tl.tensor,
    MASKED: tl.constexpr,  # some token of some tile is invisible to some row
    HAS_LEFT: tl.constexpr,  # visibility differs between rows by window_left
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    ADDRESSING: tl.constexpr,  # the table is read once per "region", "tile" or "token"
    BLOCK_TOKENS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    BLOCK_TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add the tiles that begin at `start`, `start + BLOCK_TILE`, … before `stop` to the running softmax."""
    key_dims = tl.arange(0, BLOCK_KEY_DIM)
    value_dims = tl.arange(0, BLOCK_VALUE_DIM)
    block = _load_blocks(table_ptr, start, stop, first, last, ADDRESSING, BLOCK_TOKENS, BLOCK_TILE)
    for begin in range(start, stop, BLOCK_TILE):
        tokens = begin + tl.arange(0, BLOCK_TILE)
        readable = (tokens >= first) & (tokens < last)
        within = tokens.to(tl.int64)
        if ADDRESSING != "region":
            within = within % BLOCK_TOKENS
        key_rows = block * key_block_stride + within * key_token_stride
        key = _load_tile(key_ptr, key_rows, key_dims, readable, MASKED, KEY_DIM, BLOCK_KEY_DIM)
        # ieee: not TF32. Shorter floats are not affected.
        scores = tl.dot(query, tl.trans(_widened(key, query.dtype)), input_precision="ieee") * factor
        if HAS_SOFTCAP:
            scores = cap * (1.0 - 2.0 / (tl.exp2(scores * 2.8853900817779268) + 1.0))  # tanh; 2 / ln 2
        if HAS_ALIBI:
            scores -= slope[:, None] * tl.abs(position[:, None] - tokens[None, :]).to(tl.float32)
        if MASKED:
            seen = readable[None, :]
            if HAS_LEFT:
                seen = seen & (tokens[None, :] >= position[:, None] - window_left)
            if HAS_RIGHT:
                seen = seen & (tokens[None, :] <= position[:, None] + window_right)
            scores = tl.where(seen, scores, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(scores, 1))
        base = new_peak
        if MASKED:  # a row may have seen nothing yet, and -inf - -inf is NaN
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(peak - base)
        total = total * decay + tl.sum(weights, 1)
        peak = new_peak

        value_rows = block * value_block_stride + within * value_token_stride
        value = _load_tile(value_ptr, value_rows, value_dims, readable, MASKED, VALUE_DIM, BLOCK_VALUE_DIM)
        accumulated = accumulated * decay[:, None]
        accumulated = tl.dot(
            weights.to(query.dtype),
            _widened(value, query.dtype),
            accumulated,
            input_precision="ieee",
            out_dtype=tl.float32,
        )
        if ADDRESSING != "region":
            # One tile ahead: otherwise keys and values could not be prefetched.
            block = _load_blocks(table_ptr, begin + BLOCK_TILE, stop, first, last, ADDRESSING, BLOCK_TOKENS, BLOCK_TILE)
    return accumulated, total, peak


@triton.jit
def _load_blocks(
    table_ptr: tl.tensor,
    begin: tl.tensor,
    stop: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    ADDRESSING: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_TILE: tl.constexpr,
) -> tl.tensor:
    """The block of the tile at `begin`, or its tokens' blocks `[BLOCK_TILE]`; 0 from `stop` on."""
    if ADDRESSING == "region":
        block = tl.load(table_ptr, mask=begin < stop, other=0)
    elif ADDRESSING == "tile":
        block = tl.load(table_ptr + begin // BLOCK_TOKENS, mask=begin < stop, other=0)
    else:
        tokens = begin + tl.arange(0, BLOCK_TILE)
        readable = (tokens >= first) & (tokens < last) & (begin < stop)
        block = tl.load(table_ptr + tokens // BLOCK_TOKENS, mask=readable, other=0)
    return block.to(tl.int64)


@triton.jit
def _load_tile(
    base: tl.tensor,
    rows: tl.tensor,  # [BLOCK_TILE] int64
    dims: tl.tensor,  # [BLOCK_DIM]
    readable: tl.tensor,  # [BLOCK_TILE]
    MASKED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> tl.tensor:
    """`[BLOCK_TILE, BLOCK_DIM]`, zero where nothing is readable: recycled memory may hold NaN."""
    pointers = base + rows[:, None] + dims[None, :]
    if MASKED and DIM == BLOCK_DIM:
        tile = tl.load(pointers, mask=readable[:, None], other=0.0)
    elif MASKED:
        tile = tl.load(pointers, mask=readable[:, None] & (dims < DIM)[None, :], other=0.0)
    elif DIM == BLOCK_DIM:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(dims < DIM)[None, :], other=0.0)
    return tile


@triton.jit
def _widened(tile: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """The tile in the query's dtype. From 8 bits to bfloat16 Triton converts one number an instruction, and by way of
    float32 two; both are exact."""
    if dtype == tl.bfloat16 and tile.dtype.primitive_bitwidth == 8:
        tile = tile.to(tl.float32)
    return tile.to(dtype)


@triton.jit
def store_rows(
    accumulated: tl.tensor,  # [BLOCK_ROWS, BLOCK_VALUE_DIM]
    total: tl.tensor,  # [BLOCK_ROWS]
    peak: tl.tensor,  # [BLOCK_ROWS]
    tokens: tl.tensor,  # [BLOCK_ROWS] or scalar: rows of out
    heads: tl.tensor,  # [BLOCK_ROWS]
    valid: tl.tensor,  # [BLOCK_ROWS]
    kv_head: tl.tensor,
    out_ptr: tl.tensor,  # [num_tokens, num_q_heads, value_dim]
    lse_ptr: tl.tensor,  # [num_tokens, num_q_heads] or None
    sinks_ptr: tl.tensor,  # [num_q_heads] or None
    value_scales_ptr: tl.tensor,  # [num_kv_heads] or None
    NUM_Q_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
) -> None:
    """Divide by the sum of the weights and store; zeros in rows that see nothing."""
    blind = peak == float("-inf")
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + heads, mask=valid, other=0.0) * 1.4426950408889634  # 1 / ln 2
        base = tl.where(blind, 0.0, tl.maximum(peak, sink))
        decay = tl.exp2(peak - base)
        total = total * decay + tl.exp2(sink - base)
        accumulated = accumulated * decay[:, None]
        peak = base
    total = tl.where(blind, 1.0, total)
    result = accumulated / total[:, None]
    if value_scales_ptr is not None:
        result = result * tl.load(value_scales_ptr + kv_head)
    rows = tokens.to(tl.int64) * NUM_Q_HEADS + heads
    dims = tl.arange(0, BLOCK_VALUE_DIM)
    pointers = out_ptr + rows[:, None] * VALUE_DIM + dims[None, :]
    tl.store(pointers, result.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (dims < VALUE_DIM)[None, :])
    if lse_ptr is not None:
        lse = tl.where(blind, float("-inf"), (peak + tl.log2(total)) * 0.6931471805599453)  # ln 2
        tl.store(lse_ptr + rows, lse, mask=valid)


@triton.jit
def load_slopes(
    slopes_ptr: tl.tensor, sequence: tl.tensor, slopes_stride: tl.tensor, heads: tl.tensor, valid: tl.tensor
) -> tl.tensor:
    """The ALiBi slope of each row, in units of log 2; zeros without ALiBi."""
    slope = tl.full(heads.shape, 0.0, tl.float32)
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + sequence * slopes_stride + heads, mask=valid, other=0.0) * 1.4426950408889634
    return slope


INTERPRETED = not isinstance(attend_tiles, JITFunction)
# (query, key cache, value cache, results to be filled): a prepared launch of an attention kernel, for any layer.
AttendInto = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
CHANGING = ("query_ptr", "key_ptr", "value_ptr", "out_ptr")


def attend_arguments(call: AttentionCall, block_tile: int) -> dict[str, Any]:
    """Arguments that the decode and the prefill kernel share. `CHANGING` are the first layer's."""
    key_cache, value_cache, batch, masking = call.key_cache, call.value_cache, call.batch, call.masking
    query, scales = along_last(call.query), call.scales
    num_heads, num_kv_heads = query.shape[1], key_cache.shape[2]
    block_tokens, width = key_cache.shape[1], batch.block_table.shape[1]
    slopes = masking.alibi_slopes
    if width == 1 and block_tokens > _MAX_BLOCK_TOKENS:
        addressing = "region"
    else:
        addressing = "token" if block_tokens % block_tile else "tile"
    if key_cache.dtype == query.dtype:
        scales = None
    capped = masking.softcap > 0
    log2_e = math.log2(math.e)
    return {
        "query_ptr": query,
        "key_ptr": key_cache,
        "value_ptr": value_cache,
        "out_ptr": query.new_empty(*query.shape[:2], value_cache.shape[3]),
        "lse_ptr": call.lse,
        "cu_seqlens_q_ptr": batch.cu_seqlens_q,
        "cache_seqlens_ptr": batch.cache_seqlens,
        "block_table_ptr": batch.block_table,
        "leftpad_ptr": batch.cache_leftpad,
        "slopes_ptr": slopes,
        "sinks_ptr": masking.sinks,
        "key_scales_ptr": None if scales is None else scales.key.contiguous(),
        "value_scales_ptr": None if scales is None else scales.value.contiguous(),
        "factor": float(masking.scale / masking.softcap if capped else masking.scale * log2_e),
        "cap": float(masking.softcap * log2_e),
        "window_left": masking.window_left,
        "window_right": masking.window_right,
        "table_stride": width,
        "slopes_stride": num_heads if slopes is not None and slopes.ndim == 2 else 0,
        "query_token_stride": query.stride(0),
        "query_head_stride": query.stride(1),
        "key_block_stride": key_cache.stride(0),
        "key_token_stride": key_cache.stride(1),
        "key_head_stride": key_cache.stride(2),
        "value_block_stride": value_cache.stride(0),
        "value_token_stride": value_cache.stride(1),
        "value_head_stride": value_cache.stride(2),
        "HAS_LEFT": masking.window_left >= 0,
        "HAS_RIGHT": masking.window_right >= 0,
        "HAS_SOFTCAP": capped,
        "HAS_ALIBI": slopes is not None,
        "ADDRESSING": addressing,
        "BLOCK_TOKENS": 0 if addressing == "region" else block_tokens,
        "NUM_Q_HEADS": num_heads,
        "GROUP": num_heads // num_kv_heads,
        "KEY_DIM": query.shape[2],
        "VALUE_DIM": value_cache.shape[3],
        "BLOCK_KEY_DIM": padded(query.shape[2]),
        "BLOCK_VALUE_DIM": padded(value_cache.shape[3]),
        "BLOCK_TILE": block_tile,
        "UPCAST_DOT": INTERPRETED,  # the interpreter multiplies the bit patterns of short floats
    }


def padded(size: int) -> int:
    """The smallest tile side that holds `size`: `tl.dot` takes powers of two from 16."""
    return max(16, triton.next_power_of_2(size))
