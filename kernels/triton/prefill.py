"""Prefill kernel: packed queries, several per sequence, over a cache that holds their own keys too."""

# ruff: noqa: N803, N806 (compile-time constants are capitals in Triton's kernels)

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl

from folio.kernels.provider import AttentionCall
from folio.kernels.triton.cache import along_last
from folio.kernels.triton.launch import Kernel
from folio.kernels.triton.tiles import (
    CHANGING,
    AttendInto,
    attend_arguments,
    attend_tiles,
    load_slopes,
    padded,
    store_rows,
)

# Widest head, rows (queries times heads of a group), tokens per tile, warps, stages. Chosen to spill little of 255
# registers per thread and to need at most 227 KiB for the queries and the stages of keys and values. Few rows, as with
# draft tokens, are bound by memory, as decode is.
_Config = tuple[int, int, int, int, int]
_CONFIGS: tuple[_Config, ...] = (
    (64, 16, 128, 4, 3),
    (128, 16, 64, 4, 3),
    (256, 16, 32, 4, 3),
    (128, 64, 64, 4, 3),
    (256, 64, 32, 4, 2),
    (128, 128, 64, 8, 3),
    (256, 128, 32, 8, 2),
)
_FLOAT32_CONFIGS: tuple[_Config, ...] = (  # no tensor cores: a thread holds whole rows of both factors
    (256, 16, 16, 8, 2),
    (64, 64, 32, 8, 2),
    (128, 64, 16, 16, 2),
    (256, 32, 16, 8, 2),
)
_FLOAT32_LARGE_GROUP: _Config = (256, 64, 16, 16, 2)  # spills a little; groups of up to 64 heads


@triton.jit(
    do_not_specialize=["num_seqs", "table_stride", "window_left", "window_right"],
    do_not_specialize_on_alignment=["cu_seqlens_q_ptr", "cache_seqlens_ptr", "block_table_ptr", "leftpad_ptr"],
)
def _prefill_kernel(
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
    factor: tl.tensor,
    cap: tl.tensor,
    window_left: tl.tensor,
    window_right: tl.tensor,
    num_seqs: tl.tensor,
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
    SKIP_SINGLE: tl.constexpr,  # sequences with one query: the decode kernel's
    ONE_STRETCH: tl.constexpr,  # all tiles are masked: the compiler may round sums of others differently
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    ADDRESSING: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TILE: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
) -> None:
    """One program per tile of queries and KV head: `[num_tiles, num_kv_heads]`.

    Each sequence has one tile more than its queries could need. So the first tile of sequence i is
    `cu_seqlens_q[i] // BLOCK_QUERIES + i`, without a sum over sequences.
    """
    BLOCK_QUERIES: tl.constexpr = BLOCK_ROWS // GROUP
    # The last queries of a sequence see the most tokens: they go first, and short work fills the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = 0
    beyond = num_seqs
    while beyond - sequence > 1:
        middle = (sequence + beyond) // 2
        if tl.load(cu_seqlens_q_ptr + middle) // BLOCK_QUERIES + middle <= tile:
            sequence = middle
        else:
            beyond = middle
    token = tl.load(cu_seqlens_q_ptr + sequence)
    num_queries = tl.load(cu_seqlens_q_ptr + sequence + 1) - token
    first_query = (tile - token // BLOCK_QUERIES - sequence) * BLOCK_QUERIES
    idle = first_query >= num_queries
    if SKIP_SINGLE:
        idle = idle | (num_queries == 1)
    if idle:
        return

    # Each of the tokens first … last - 1 is visible to some row, inner_first … inner_last - 1 to all rows.
    num_cached = tl.load(cache_seqlens_ptr + sequence)
    first_position = num_cached - num_queries + first_query
    last_position = num_cached - num_queries + tl.minimum(first_query + BLOCK_QUERIES, num_queries) - 1
    first = 0
    if leftpad_ptr is not None:
        first = tl.load(leftpad_ptr + sequence)
    inner_first = first
    last = num_cached
    inner_last = num_cached
    if HAS_LEFT:
        inner_first = tl.maximum(first, last_position - window_left)
        first = tl.maximum(first, first_position - window_left)
    if HAS_RIGHT:
        last = tl.minimum(num_cached, last_position + window_right + 1)
        inner_last = tl.minimum(num_cached, first_position + window_right + 1)
    last = tl.where(first < last, last, 0)
    inner_last = tl.maximum(tl.minimum(inner_last, last), 0)

    rows = tl.arange(0, BLOCK_ROWS)
    queries = first_query + rows // GROUP
    valid = (rows < BLOCK_QUERIES * GROUP) & (queries < num_queries)
    heads = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, BLOCK_KEY_DIM)
    query_rows = (token + queries).to(tl.int64) * query_token_stride + heads.to(tl.int64) * query_head_stride
    query = tl.load(
        query_ptr + query_rows[:, None] + dims[None, :], mask=valid[:, None] & (dims < KEY_DIM)[None, :], other=0.0
    )
    if UPCAST_DOT:
        query = query.to(tl.float32)
    if key_scales_ptr is not None:
        factor = factor * tl.load(key_scales_ptr + kv_head)
    position = num_cached - num_queries + queries
    slope = load_slopes(slopes_ptr, sequence, slopes_stride, heads, valid)
    accumulated = tl.full([BLOCK_ROWS, BLOCK_VALUE_DIM], 0.0, tl.float32)
    total = tl.full([BLOCK_ROWS], 0.0, tl.float32)
    peak = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)

    # Three stretches of tiles: masked, visible to every row and unmasked, masked again.
    inner_start = tl.cdiv(inner_first, BLOCK_TILE) * BLOCK_TILE
    inner_stop = tl.maximum(inner_last // BLOCK_TILE * BLOCK_TILE, inner_start)
    if ONE_STRETCH:
        inner_stop = first // BLOCK_TILE * BLOCK_TILE
    for stretch in tl.static_range(3):
        if stretch == 0:
            start = first // BLOCK_TILE * BLOCK_TILE
            stop = tl.minimum(inner_start, last)
        elif stretch == 1:
            start = inner_start
            stop = inner_stop
        else:
            start = inner_stop
            stop = last
        if stretch == 2 or (not ONE_STRETCH and (stretch > 0 or HAS_LEFT or leftpad_ptr is not None)):
            accumulated, total, peak = attend_tiles(
                query,
                accumulated,
                total,
                peak,
                position,
                slope,
                key_ptr + kv_head.to(tl.int64) * key_head_stride,
                value_ptr + kv_head.to(tl.int64) * value_head_stride,
                block_table_ptr + tl.cast(sequence, tl.int64) * table_stride,
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
                MASKED=stretch != 1,
                HAS_LEFT=HAS_LEFT,
                HAS_RIGHT=HAS_RIGHT,
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
    store_rows(
        accumulated,
        total,
        peak,
        token + queries,
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


def prepare_prefill(call: AttentionCall, *, skip_single: bool, batch_invariant: bool = False) -> AttendInto:
    """A function that fills the results and `call.lse`.

    Args:
        skip_single: leave out sequences with exactly one query.
        batch_invariant: a query's sums have one order, whatever the number of queries.
    """
    query, batch = call.query, call.batch
    num_seqs, num_kv_heads = batch.cache_seqlens.numel(), call.key_cache.shape[2]
    group = query.shape[1] // num_kv_heads
    widest = max(padded(query.shape[2]), padded(call.value_cache.shape[3]))
    configs = _FLOAT32_CONFIGS if query.dtype == torch.float32 else _CONFIGS
    num_queries = sys.maxsize if batch_invariant else batch.max_seqlen_q
    _, block_rows, block_tile, num_warps, num_stages = _choose_config(configs, widest, group, num_queries)
    arguments = attend_arguments(call, block_tile) | {
        "num_seqs": num_seqs,
        "SKIP_SINGLE": skip_single,
        "ONE_STRETCH": batch_invariant,
        "BLOCK_ROWS": block_rows,
    }
    launch = Kernel(_prefill_kernel).prepare(arguments, CHANGING, num_warps=num_warps, num_stages=num_stages)
    grid = query.shape[0] // (block_rows // group) + num_seqs, num_kv_heads, 1
    return lambda query, key_cache, value_cache, out: launch(grid, along_last(query), key_cache, value_cache, out)


def _choose_config(configs: tuple[_Config, ...], widest: int, group: int, num_queries: int) -> _Config:
    """The first with enough rows in a tile, else the one with most rows. A tile holds at least one query's rows."""
    fitting = [config for config in configs if widest <= config[0] and group <= config[1]] or [_FLOAT32_LARGE_GROUP]
    enough = [config for config in fitting if group * num_queries <= config[1]]
    return enough[0] if enough else max(fitting, key=lambda config: config[1])
