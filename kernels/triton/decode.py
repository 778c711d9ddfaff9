"""Decode kernel: attention of single queries, with the cache split between processors (flash-decoding)."""

# ruff: noqa: N803 (compile-time constants are capitals in Triton's kernels)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.provider import AttentionCall
from kernels.triton.cache import along_last
from kernels.triton.launch import Kernel
from kernels.triton.tiles import (
    CHANGING,
    AttendInto,
    attend_arguments,
    attend_tiles,
    load_slopes,
    padded,
    store_rows,
)

MAX_SPLITS = 128
# The least tiles of a split, unless the caller sets the number of splits: combining costs more than shorter ones save.
_MIN_SPLIT_TILES = 4
# Of keys, and of values, per tile: with two tiles in flight, three programs fit the 227 KiB of a processor.
_TILE_BYTES = 16384
_WARP_ELEMENTS = 2048  # the most sums per warp: 64 registers per thread
_COMBINED_ELEMENTS = 8192  # partial results that a program adds at a time: 64 per thread
_PROGRAMS_A_PROCESSOR = 3  # that run at once: more would begin when the first ones end
_INTERPRETED_PROCESSORS = 4  # without a GPU


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
    """The running softmax over all splits, in a fixed order: results do not depend on which split ends last."""
    rows = tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_VALUE_DIM)
    accumulated = tl.full([BLOCK_ROWS, BLOCK_VALUE_DIM], 0.0, tl.float32)
    total = tl.full([BLOCK_ROWS], 0.0, tl.float32)
    peak = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    for begin in range(0, num_splits, BLOCK_SPLITS):
        splits = begin + tl.arange(0, BLOCK_SPLITS)
        slots = (first_slot + splits[:, None]) * GROUP + rows[None, :]
        there = (splits < num_splits)[:, None] & (rows < GROUP)[None, :]
        # Bypass the first-level cache: other processors have written these.
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
    """One program per sequence, KV head and split: `[num_seqs, num_kv_heads, num_splits]`."""
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    token = tl.load(cu_seqlens_q_ptr + sequence)
    if tl.load(cu_seqlens_q_ptr + sequence + 1) - token != 1:
        return

    # The query has the position of the last cached token, and sees first … last - 1.
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
    num_splits = tl.maximum(tl.cdiv(num_tiles, split_tiles), 1)  # the other programs have no tokens
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
    # All rows see the same tokens, so only the bounds are masked. Masking every tile keeps this one loop, with loads in
    # flight from the first tile to the last.
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
    if SPLIT:  # noqa: SIM102 (SPLIT is a compile-time constant)
        if num_splits > 1:
            value_dims = tl.arange(0, BLOCK_VALUE_DIM)
            pair = sequence * tl.num_programs(1) + kv_head
            slots = (pair.to(tl.int64) * tl.num_programs(2) + split) * GROUP + rows
            there = valid[:, None] & (value_dims < VALUE_DIM)[None, :]
            tl.store(partial_ptr + slots[:, None] * VALUE_DIM + value_dims[None, :], accumulated, mask=there)
            tl.store(partial_sums_ptr + slots * 2, peak, mask=valid)
            tl.store(partial_sums_ptr + slots * 2 + 1, total, mask=valid)
            # One thread counts for the program, after all threads have stored; its release publishes their stores.
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


class SplitDecode:
    """Attention for the sequences of a batch with exactly one query; other sequences are skipped.

    The grid follows from shapes and from the batch's upper bounds; lengths are read on the device. How a sequence is
    split follows from its length and from the number of sequences, rounded up to a power of two, so that the padding
    rows of a graph change no result.

    Owns, for each device, the splits' partial results and counters. They grow with the largest batch seen. Those that a
    larger one replaces are kept, because a CUDA graph may have captured their addresses; all of them together are
    smaller than the largest. Calls share them: use one stream at a time.
    """

    def __init__(self) -> None:
        self._partial: dict[torch.device, list[torch.Tensor]] = {}
        self._partial_sums: dict[torch.device, list[torch.Tensor]] = {}
        self._counters: dict[torch.device, list[torch.Tensor]] = {}
        self._num_processors: dict[torch.device, int] = {}
        self._kernel = Kernel(_decode_kernel)

    def prepare(self, call: AttentionCall) -> AttendInto:
        """A function that fills those sequences' rows of the results and of `call.lse`."""
        query, key_cache, value_cache = call.query, call.key_cache, call.value_cache
        batch, masking, num_splits = call.batch, call.masking, call.num_splits
        num_seqs, num_kv_heads = batch.cache_seqlens.numel(), key_cache.shape[2]
        group, value_dim, device = query.shape[1] // num_kv_heads, value_cache.shape[3], query.device
        widest = max(padded(query.shape[2]), padded(value_dim))
        block_rows = padded(group)
        block_tile = min(128, max(16, _TILE_BYTES // (widest * key_cache.element_size())))
        num_warps = 4 if block_rows * widest <= _WARP_ELEMENTS * 4 else 8
        if query.dtype == torch.float32:  # no tensor cores: a thread holds whole rows of both factors
            block_tile, num_warps = 16, 8
        min_split_tiles = 1
        if num_splits <= 0:
            min_split_tiles = _MIN_SPLIT_TILES
            num_cached = batch.max_seqlen_k
            if masking.window_left >= 0:
                num_cached = min(num_cached, masking.window_left + 1)
            num_splits = self._choose_splits(num_seqs, num_kv_heads, num_cached, block_tile, device)
        num_splits = min(num_splits, MAX_SPLITS)
        partial = partial_sums = counters = None
        if num_splits > 1:
            num_rows = num_seqs * num_kv_heads * num_splits * group
            partial = _grown(self._partial, num_rows * value_dim, torch.float32, device)
            partial_sums = _grown(self._partial_sums, num_rows * 2, torch.float32, device)
            counters = _grown(self._counters, num_seqs * num_kv_heads, torch.int32, device)
        arguments = attend_arguments(call, block_tile) | {
            "partial_ptr": partial,
            "partial_sums_ptr": partial_sums,
            "counters_ptr": counters,
            "min_split_tiles": min_split_tiles,
            "SPLIT": num_splits > 1,
            "BLOCK_ROWS": block_rows,
            "BLOCK_SPLITS": max(1, min(8, _COMBINED_ELEMENTS // (block_rows * padded(value_dim)))),
        }
        launch = self._kernel.prepare(arguments, CHANGING, num_warps=num_warps, num_stages=3)
        grid = num_seqs, num_kv_heads, num_splits
        return lambda query, key_cache, value_cache, out: launch(grid, along_last(query), key_cache, value_cache, out)

    def _choose_splits(
        self, num_seqs: int, num_kv_heads: int, num_cached: int, block_tile: int, device: torch.device
    ) -> int:
        """As many as run at once, if the longest sequence has tokens for them."""
        if device not in self._num_processors:
            self._num_processors[device] = (
                torch.cuda.get_device_properties(device).multi_processor_count
                if device.type == "cuda"
                else _INTERPRETED_PROCESSORS
            )
        num_programs = _PROGRAMS_A_PROCESSOR * self._num_processors[device]
        even = num_programs // (triton.next_power_of_2(num_seqs) * num_kv_heads)
        return max(1, min(even, triton.cdiv(num_cached, _MIN_SPLIT_TILES * block_tile)))


def _grown(
    tensors: dict[torch.device, list[torch.Tensor]], size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The device's last tensor, or a new one of zeros if that has fewer elements."""
    grown = tensors.setdefault(device, [])
    if not grown or grown[-1].numel() < size:
        grown.append(torch.zeros(triton.next_power_of_2(size), dtype=dtype, device=device))
    return grown[-1]
