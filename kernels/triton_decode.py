"""Attention of single queries with the cache split between processors (flash-decoding), and what prefill shares."""

# ruff: noqa: N803 (compile-time constants are capitals in Triton's kernels)

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from kernels.provider import CacheScales, Masking, VarlenBatch
from kernels.triton_cache import along_last

MAX_SPLITS = 128
# A split has this many tiles at least, unless the caller says how many splits there are: combining costs more than
# a shorter one saves.
_MIN_SPLIT_TILES = 4
# One table width and blocks longer than this: a region. Shorter blocks are looked up even if the table is one wide, so
# that a short batch over blocks does not need a kernel of its own.
_MAX_BLOCK_TOKENS = 512
# Of keys, and of values, in a tile: with two such tiles on the way, three programs fit a processor of 227 KiB.
_TILE_BYTES = 16384
_WARP_ELEMENTS = 2048  # of the sums that a warp holds at most: 64 registers a thread
_COMBINED_ELEMENTS = 8192  # of partial results that a program adds up at a time: 64 a thread
_INTERPRETED_PROCESSORS = 4  # where there is no GPU to ask


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
    MASKED: tl.constexpr,  # some row does not see all tokens of some tile
    HAS_LEFT: tl.constexpr,  # rows see different tokens because of window_left; and so on
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    ADDRESSING: tl.constexpr,  # the table is read once for the "region", for each "tile", or for each "token"
    BLOCK_TOKENS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    BLOCK_TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take the tiles that begin at `start`, `start + BLOCK_TILE`, … before `stop` into the running softmax."""
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
        # ieee: TF32 is not float32. It means nothing to shorter floats.
        scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee") * factor
        if HAS_SOFTCAP:
            scores = cap * (1.0 - 2.0 / (tl.exp2(scores * 2.8853900817779268) + 1.0))  # tanh; the number is 2 / ln 2
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
        if MASKED:  # a row may have seen nothing yet, and -inf - -inf is not a number
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(peak - base)
        total = total * decay + tl.sum(weights, 1)
        peak = new_peak

        value_rows = block * value_block_stride + within * value_token_stride
        value = _load_tile(value_ptr, value_rows, value_dims, readable, MASKED, VALUE_DIM, BLOCK_VALUE_DIM)
        accumulated = accumulated * decay[:, None]
        accumulated = tl.dot(
            weights.to(query.dtype), value.to(query.dtype), accumulated, input_precision="ieee", out_dtype=tl.float32
        )
        if ADDRESSING != "region":
            # A tile ahead: were it read where it is needed, the keys and values could not be fetched ahead.
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
    """The block of the tile that begins there, or `[BLOCK_TILE]` its tokens' blocks; 0 from `stop` on."""
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
    """`[BLOCK_TILE, BLOCK_DIM]`, zero where nothing may be read: what recycled memory holds may not be a number."""
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
    """Divide by the sum of the weights, and store; a row that sees nothing is zero."""
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
    """The ALiBi slope of each row, in units of log 2; zeros without any."""
    slope = tl.full(heads.shape, 0.0, tl.float32)
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + sequence * slopes_stride + heads, mask=valid, other=0.0) * 1.4426950408889634
    return slope


@triton.jit
def _combine_splits(
    partial_ptr: tl.tensor,  # [num_pairs * num_splits, GROUP, value_dim]
    partial_sums_ptr: tl.tensor,  # [num_pairs * num_splits, GROUP, 2]
    first_slot: tl.tensor,
    num_splits: tl.tensor,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The running softmax over all splits, in their order whichever came last: the same in every run."""
    rows = tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_VALUE_DIM)
    accumulated = tl.full([BLOCK_ROWS, BLOCK_VALUE_DIM], 0.0, tl.float32)
    total = tl.full([BLOCK_ROWS], 0.0, tl.float32)
    peak = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    for begin in range(0, num_splits, BLOCK_SPLITS):
        splits = begin + tl.arange(0, BLOCK_SPLITS)
        slots = (first_slot + splits[:, None]) * GROUP + rows[None, :]
        there = (splits < num_splits)[:, None] & (rows < GROUP)[None, :]
        # From the second-level cache, where other processors have left them.
        peaks = tl.load(partial_sums_ptr + slots * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(partial_sums_ptr + slots * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        parts = tl.load(
            partial_ptr + slots[:, :, None] * VALUE_DIM + dims[None, None, :],
            mask=there[:, :, None] & (dims < VALUE_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_peak = tl.maximum(peak, tl.max(peaks, 0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay = tl.exp2(peak - base)
        weights = tl.exp2(peaks - base[None, :])
        total = total * decay + tl.sum(totals * weights, 0)
        accumulated = accumulated * decay[:, None] + tl.sum(parts * weights[:, :, None], 0)
        peak = new_peak
    return accumulated, total, peak


@triton.jit(
    do_not_specialize=["table_stride", "min_split_tiles", "window_left", "window_right"],
    do_not_specialize_on_alignment=["cu_seqlens_q_ptr", "cache_seqlens_ptr", "block_table_ptr", "leftpad_ptr"],
)
def _decode_kernel(
    query_ptr: tl.tensor,  # [num_tokens, num_q_heads, key_dim]
    key_ptr: tl.tensor,  # [num_blocks, block_tokens, num_kv_heads, key_dim]
    value_ptr: tl.tensor,  # [num_blocks, block_tokens, num_kv_heads, value_dim]
    out_ptr: tl.tensor,  # [num_tokens, num_q_heads, value_dim]
    lse_ptr: tl.tensor,  # [num_tokens, num_q_heads] or None
    cu_seqlens_q_ptr: tl.tensor,  # [num_seqs + 1]
    cache_seqlens_ptr: tl.tensor,  # [num_seqs]
    block_table_ptr: tl.tensor,  # [num_seqs, table_stride]
    leftpad_ptr: tl.tensor,  # [num_seqs] or None
    slopes_ptr: tl.tensor,  # [num_seqs or 1, num_q_heads] or None
    sinks_ptr: tl.tensor,  # [num_q_heads] or None
    key_scales_ptr: tl.tensor,  # [num_kv_heads] or None
    value_scales_ptr: tl.tensor,  # [num_kv_heads] or None
    partial_ptr: tl.tensor,  # [num_seqs, num_kv_heads, num_splits, GROUP, value_dim] float32
    partial_sums_ptr: tl.tensor,  # [num_seqs, num_kv_heads, num_splits, GROUP, 2] float32: peak, total
    counters_ptr: tl.tensor,  # [num_seqs, num_kv_heads] int32, zero before and after
    factor: tl.tensor,
    cap: tl.tensor,
    window_left: tl.tensor,
    window_right: tl.tensor,
    min_split_tiles: tl.tensor,
    table_stride: tl.tensor,
    slopes_stride: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_block_stride: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_block_stride: tl.tensor,
    value_token_stride: tl.tensor,
    value_head_stride: tl.tensor,
    SPLIT: tl.constexpr,  # there is more than one split
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    ADDRESSING: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head: the rows of a tile
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TILE: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
) -> None:
    """One program a sequence, KV head and split: `[num_seqs, num_kv_heads, num_splits]`."""
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    token = tl.load(cu_seqlens_q_ptr + sequence)
    if tl.load(cu_seqlens_q_ptr + sequence + 1) - token != 1:
        return

    # The query stands at the last cached token, and sees first … last - 1.
    num_cached = tl.load(cache_seqlens_ptr + sequence)
    first = 0
    if leftpad_ptr is not None:
        first = tl.load(leftpad_ptr + sequence)
    if HAS_LEFT:
        first = tl.maximum(first, num_cached - 1 - window_left)
    last = tl.where(first < num_cached, num_cached, 0)
    origin = first // BLOCK_TILE * BLOCK_TILE
    num_tiles = tl.cdiv(tl.maximum(last - origin, 0), BLOCK_TILE)
    split_tiles = tl.maximum(tl.cdiv(num_tiles, tl.num_programs(2)), min_split_tiles)
    num_splits = tl.maximum(tl.cdiv(num_tiles, split_tiles), 1)  # others have no tokens, and nobody waits for them
    if split >= num_splits:
        return
    start = origin + split * split_tiles * BLOCK_TILE
    stop = tl.minimum(start + split_tiles * BLOCK_TILE, last)

    rows = tl.arange(0, BLOCK_ROWS)
    valid = rows < GROUP
    heads = kv_head * GROUP + rows
    dims = tl.arange(0, BLOCK_KEY_DIM)
    query_row = query_ptr + token.to(tl.int64) * query_token_stride
    query = tl.load(
        query_row + heads.to(tl.int64)[:, None] * query_head_stride + dims[None, :],
        mask=valid[:, None] & (dims < KEY_DIM)[None, :],
        other=0.0,
    )
    if UPCAST_DOT:
        query = query.to(tl.float32)
    if key_scales_ptr is not None:
        factor = factor * tl.load(key_scales_ptr + kv_head)
    position = tl.full([BLOCK_ROWS], 0, tl.int32) + (num_cached - 1)
    slope = load_slopes(slopes_ptr, sequence, slopes_stride, heads, valid)
    accumulated = tl.full([BLOCK_ROWS, BLOCK_VALUE_DIM], 0.0, tl.float32)
    total = tl.full([BLOCK_ROWS], 0.0, tl.float32)
    peak = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    # All rows see the same tokens, so the bounds are mask enough. Masking every tile keeps it one loop, and its loads
    # in flight from the first tile to the last.
    accumulated, total, peak = attend_tiles(
        query,
        accumulated,
        total,
        peak,
        position,
        slope,
        key_ptr + kv_head.to(tl.int64) * key_head_stride,
        value_ptr + kv_head.to(tl.int64) * value_head_stride,
        block_table_ptr + sequence.to(tl.int64) * table_stride,
        start,
        stop,
        first,
        last,
        factor,
        cap,
        window_left,
        window_right,
        key_block_stride,
        key_token_stride,
        value_block_stride,
        value_token_stride,
        MASKED=True,
        HAS_LEFT=False,
        HAS_RIGHT=False,
        HAS_SOFTCAP=HAS_SOFTCAP,
        HAS_ALIBI=HAS_ALIBI,
        ADDRESSING=ADDRESSING,
        BLOCK_TOKENS=BLOCK_TOKENS,
        KEY_DIM=KEY_DIM,
        VALUE_DIM=VALUE_DIM,
        BLOCK_KEY_DIM=BLOCK_KEY_DIM,
        BLOCK_VALUE_DIM=BLOCK_VALUE_DIM,
        BLOCK_TILE=BLOCK_TILE,
    )

    complete = num_splits == 1
    if SPLIT:  # noqa: SIM102 (one is known when compiling, the other is not)
        if num_splits > 1:
            value_dims = tl.arange(0, BLOCK_VALUE_DIM)
            pair = sequence * tl.num_programs(1) + kv_head
            slots = (pair.to(tl.int64) * tl.num_programs(2) + split) * GROUP + rows
            there = valid[:, None] & (value_dims < VALUE_DIM)[None, :]
            tl.store(partial_ptr + slots[:, None] * VALUE_DIM + value_dims[None, :], accumulated, mask=there)
            tl.store(partial_sums_ptr + slots * 2, peak, mask=valid)
            tl.store(partial_sums_ptr + slots * 2 + 1, total, mask=valid)
            # One thread counts for the program, so all must have stored; releasing, it publishes what all have stored.
            tl.debug_barrier()
            complete = tl.atomic_add(counters_ptr + pair, 1, sem="acq_rel", scope="gpu") == num_splits - 1
            if complete:
                tl.store(counters_ptr + pair, 0)
                accumulated, total, peak = _combine_splits(
                    partial_ptr,
                    partial_sums_ptr,
                    pair.to(tl.int64) * tl.num_programs(2),
                    num_splits,
                    GROUP,
                    VALUE_DIM,
                    BLOCK_VALUE_DIM,
                    BLOCK_ROWS,
                    BLOCK_SPLITS,
                )
    if complete:
        store_rows(
            accumulated,
            total,
            peak,
            token,
            heads,
            valid,
            kv_head,
            out_ptr,
            lse_ptr,
            sinks_ptr,
            value_scales_ptr,
            NUM_Q_HEADS,
            VALUE_DIM,
            BLOCK_VALUE_DIM,
        )


INTERPRETED = not isinstance(_decode_kernel, JITFunction)


def attend_arguments(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    batch: VarlenBatch,
    masking: Masking,
    scales: CacheScales | None,
    lse: torch.Tensor | None,
    block_tile: int,
) -> dict[str, Any]:
    """What the decode and the prefill kernel take alike."""
    num_heads, num_kv_heads = query.shape[1], key_cache.shape[2]
    block_tokens, width = key_cache.shape[1], batch.block_table.shape[1]
    slopes = masking.alibi_slopes
    if width == 1 and block_tokens > _MAX_BLOCK_TOKENS:
        addressing = "region"
    else:
        addressing = "token" if block_tokens % block_tile else "tile"
    if key_cache.dtype == query.dtype:
        scales = None
    query = along_last(query)
    capped = masking.softcap > 0
    log2_e = math.log2(math.e)
    return {
        "query_ptr": query,
        "key_ptr": key_cache,
        "value_ptr": value_cache,
        "out_ptr": out,
        "lse_ptr": lse,
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
        "UPCAST_DOT": INTERPRETED,  # the interpreter multiplies the bits of bfloat16 and 8-bit floats
    }


def padded(size: int) -> int:
    """The least side of a tile that holds so many: `tl.dot` wants powers of two from 16."""
    return max(16, triton.next_power_of_2(size))


class SplitDecode:
    """Attention for the sequences of a batch that have exactly one query; the others are left alone.

    Owns, for each device, the splits' partial results and their counters. They grow with the largest batch seen, and
    calls share them: one stream at a time, and no growth after a CUDA graph has captured a call.
    """

    def __init__(self) -> None:
        self._partial: dict[torch.device, torch.Tensor] = {}
        self._partial_sums: dict[torch.device, torch.Tensor] = {}
        self._counters: dict[torch.device, torch.Tensor] = {}
        self._num_processors: dict[torch.device, int] = {}

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        out: torch.Tensor,
        batch: VarlenBatch,
        masking: Masking,
        scales: CacheScales | None,
        lse: torch.Tensor | None,
        num_splits: int,
    ) -> None:
        """Fill those sequences' rows of `out`, and of `lse`; arguments as of `AttentionProvider.attend`, checked."""
        num_seqs, num_kv_heads = batch.cache_seqlens.numel(), key_cache.shape[2]
        group, value_dim, device = query.shape[1] // num_kv_heads, value_cache.shape[3], query.device
        widest = max(padded(query.shape[2]), padded(value_dim))
        block_rows = padded(group)
        block_tile = min(128, max(16, _TILE_BYTES // (widest * key_cache.element_size())))
        num_warps = 4 if block_rows * widest <= _WARP_ELEMENTS * 4 else 8
        if query.dtype == torch.float32:  # without tensor cores a thread holds whole rows of both factors, and spills
            block_tile, num_warps = 16, 8
        min_split_tiles = 1
        if num_splits <= 0:
            min_split_tiles = _MIN_SPLIT_TILES
            num_cached = batch.max_seqlen_k
            if masking.window_left >= 0:
                num_cached = min(num_cached, masking.window_left + 1)
            num_splits = self._choose_splits(num_seqs * num_kv_heads, num_cached, block_tile, device)
        num_splits = min(num_splits, MAX_SPLITS)
        partial = partial_sums = counters = None
        if num_splits > 1:
            num_rows = num_seqs * num_kv_heads * num_splits * group
            partial = _grown(self._partial, num_rows * value_dim, torch.float32, device)
            partial_sums = _grown(self._partial_sums, num_rows * 2, torch.float32, device)
            counters = _grown(self._counters, num_seqs * num_kv_heads, torch.int32, device)
        arguments = attend_arguments(query, key_cache, value_cache, out, batch, masking, scales, lse, block_tile)
        with torch.cuda.device_of(query):
            _decode_kernel[(num_seqs, num_kv_heads, num_splits)](
                partial_ptr=partial,
                partial_sums_ptr=partial_sums,
                counters_ptr=counters,
                min_split_tiles=min_split_tiles,
                SPLIT=num_splits > 1,
                BLOCK_ROWS=block_rows,
                BLOCK_SPLITS=max(1, min(8, _COMBINED_ELEMENTS // (block_rows * padded(value_dim)))),
                num_warps=num_warps,
                num_stages=3,
                **arguments,
            )

    def _choose_splits(self, num_pairs: int, num_cached: int, block_tile: int, device: torch.device) -> int:
        """So many that two programs run on each processor, if the longest sequence has tokens for them."""
        if device not in self._num_processors:
            self._num_processors[device] = (
                torch.cuda.get_device_properties(device).multi_processor_count
                if device.type == "cuda"
                else _INTERPRETED_PROCESSORS
            )
        wanted = triton.cdiv(2 * self._num_processors[device], num_pairs)
        return max(1, min(wanted, triton.cdiv(num_cached, _MIN_SPLIT_TILES * block_tile)))


def _grown(
    tensors: dict[torch.device, torch.Tensor], size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The device's tensor, in its place a larger one of zeros if it has fewer elements than that."""
    tensor = tensors.get(device)
    if tensor is None or tensor.numel() < size:
        tensor = tensors[device] = torch.zeros(triton.next_power_of_2(size), dtype=dtype, device=device)
    return tensor
