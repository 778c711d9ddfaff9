"""Decode kernel: attention of single queries, with the cache split between processors (flash-decoding)."""

# ruff: noqa: N803 (compile-time constants are capitals in Triton's kernels)

from __future__ import annotations

import math
from dataclasses import dataclass

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

MAX_SPLITS = 128
_MOST_STAGES = 5
_COMBINED_ELEMENTS = 2048  # partial results that a program reads at a time: more would take further registers
_WARP_ELEMENTS = 2048  # the most sums per warp: 64 registers per thread
_MOST_WAVE_SPLITS = 8
_INTERPRETED_PROCESSORS = 4  # without a GPU


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """Constants of the decode kernel that a device decides. None changes what is computed, beyond rounding.

    `python -m benchmarks.gpu_decode` compares `TUNINGS`: on a device by time, with `--compile` by registers and shared
    memory. With the defaults the stages take 38 KiB, so that five programs share the 227 KiB of a processor.

    Attributes:
        tile_tokens: the most tokens of a tile.
        tile_bytes: the most bytes of its keys, and of its values, in the query's dtype.
        by_cache: count `tile_bytes` in the cache's dtype, so that tiles of 8-bit floats have twice the tokens.
        ahead_bytes: of keys, and of values, requested ahead of the tile that is multiplied, by as many stages.
        programs_a_processor: programs that run together. More would begin when the first ones end.
        min_split_tiles: the least tiles of a split, unless the caller sets the number of splits.
        filled_waves: where there are more pairs of sequence and head than programs that run together, the share of the
            places in all waves that splits must fill; 0 for no splits.
    """

    tile_tokens: int = 64
    tile_bytes: int = 16384
    by_cache: bool = False
    ahead_bytes: int = 16384
    programs_a_processor: int = 5
    min_split_tiles: int = 4
    filled_waves: float = 0.0


DEFAULT_TUNING = DecodeTuning()
TUNINGS = {
    "five programs": DEFAULT_TUNING,
    "three programs": DecodeTuning(128, by_cache=True, ahead_bytes=32768, programs_a_processor=3),
    "short splits": DecodeTuning(min_split_tiles=1, filled_waves=0.85),
    "narrow tiles": DecodeTuning(32, min_split_tiles=8),
}


@triton.jit
def _combine_splits(
    partial_ptr: tl.tensor,  # [num_pairs * num_splits, GROUP, value_dim]
    partial_sums_ptr: tl.tensor,  # [num_pairs * num_splits, GROUP, 2]
    first_slot: tl.tensor,
    num_splits: tl.tensor,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The softmax over all splits, in a fixed order: results do not depend on which split ends last.

    The peaks are read first, so that the loop only multiplies and adds, each thread for itself, and its reads do not
    wait for one another.
    """
    group = tl.arange(0, BLOCK_GROUP)
    dims = tl.arange(0, BLOCK_VALUE_DIM)
    # Bypass the first-level cache: other processors have written these.
    every = tl.arange(0, MOST_SPLITS)
    places = partial_sums_ptr + ((first_slot + every[:, None]) * GROUP + group[None, :]) * 2
    held = (every < num_splits)[:, None] & (group < GROUP)[None, :]
    peak = tl.max(tl.load(places, mask=held, other=float("-inf"), cache_modifier=".cg"), 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    accumulated = tl.full([BLOCK_SPLITS, BLOCK_GROUP, BLOCK_VALUE_DIM], 0.0, tl.float32)
    total = tl.full([BLOCK_SPLITS, BLOCK_GROUP, 1], 0.0, tl.float32)
    for begin in range(0, num_splits, BLOCK_SPLITS):
        splits = begin + tl.arange(0, BLOCK_SPLITS)
        slots = ((first_slot + splits[:, None]) * GROUP + group[None, :])[:, :, None]
        there = ((splits < num_splits)[:, None] & (group < GROUP)[None, :])[:, :, None]
        peaks = tl.load(partial_sums_ptr + slots * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(partial_sums_ptr + slots * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        parts = tl.load(
            partial_ptr + slots * VALUE_DIM + dims[None, None, :],
            mask=there & (dims < VALUE_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        weights = tl.exp2(peaks - base[None, :, None])
        total += totals * weights
        accumulated += parts * weights
    return tl.sum(accumulated, 0), tl.sum(tl.sum(total, 2), 0), peak


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
    BLOCK_GROUP: tl.constexpr,  # GROUP, to a power of two
    BLOCK_TILE: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
) -> None:
    """One program per sequence, KV head and split: `[num_seqs, num_kv_heads, num_splits]`."""
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    # One branch for both reasons to end: loads before it are in flight together. (The compiler moves others behind it.)
    token = tl.load(cu_seqlens_q_ptr + sequence)
    num_queries = tl.load(cu_seqlens_q_ptr + sequence + 1) - token
    num_cached = tl.load(cache_seqlens_ptr + sequence)
    first = 0
    if leftpad_ptr is not None:
        first = tl.load(leftpad_ptr + sequence)

    # The query has the position of the last cached token, and sees first … last - 1.
    if HAS_LEFT:
        first = tl.maximum(first, num_cached - 1 - window_left)
    last = tl.where(first < num_cached, num_cached, 0)
    origin = first // BLOCK_TILE * BLOCK_TILE
    num_tiles = tl.cdiv(tl.maximum(last - origin, 0), BLOCK_TILE)
    split_tiles = tl.maximum(tl.cdiv(num_tiles, tl.num_programs(2)), min_split_tiles)
    num_splits = tl.maximum(tl.cdiv(num_tiles, split_tiles), 1)
    if (num_queries != 1) | (split >= num_splits):  # not of this kernel, or without tokens
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
            if tl.atomic_add(counters_ptr + pair, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
                tl.store(counters_ptr + pair, 0)
                combined, combined_total, combined_peak = _combine_splits(
                    partial_ptr,
                    partial_sums_ptr,
                    pair.to(tl.int64) * tl.num_programs(2),
                    num_splits,
                    GROUP,
                    VALUE_DIM,
                    BLOCK_VALUE_DIM,
                    BLOCK_GROUP,
                    BLOCK_SPLITS,
                    MOST_SPLITS,
                )
                group = tl.arange(0, BLOCK_GROUP)
                store_rows(
                    combined,
                    combined_total,
                    combined_peak,
                    token,
                    kv_head * GROUP + group,
                    group < GROUP,
                    kv_head,
                    out_ptr,
                    lse_ptr,
                    sinks_ptr,
                    value_scales_ptr,
                    NUM_Q_HEADS,
                    VALUE_DIM,
                    BLOCK_VALUE_DIM,
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

    def __init__(self, tuning: DecodeTuning = DEFAULT_TUNING) -> None:
        self._tuning = tuning
        self._partial: dict[torch.device, list[torch.Tensor]] = {}
        self._partial_sums: dict[torch.device, list[torch.Tensor]] = {}
        self._counters: dict[torch.device, list[torch.Tensor]] = {}
        self._num_processors: dict[torch.device, int] = {}
        self._kernel = Kernel(_decode_kernel)

    def prepare(self, call: AttentionCall) -> AttendInto:
        """A function that fills those sequences' rows of the results and of `call.lse`."""
        tuning, query, key_cache, value_cache = self._tuning, call.query, call.key_cache, call.value_cache
        batch, masking, num_splits = call.batch, call.masking, call.num_splits
        num_seqs, num_kv_heads = batch.cache_seqlens.numel(), key_cache.shape[2]
        group, value_dim, device = query.shape[1] // num_kv_heads, value_cache.shape[3], query.device
        widest = max(padded(query.shape[2]), padded(value_dim))
        block_rows, block_group = padded(group), triton.next_power_of_2(group)
        element_bytes = key_cache.element_size()
        tile_row_bytes = widest * (element_bytes if tuning.by_cache else query.element_size())
        block_tile = max(16, min(tuning.tile_tokens, tuning.tile_bytes // tile_row_bytes))
        num_warps = 4 if block_rows * widest <= _WARP_ELEMENTS * 4 else 8
        if query.dtype == torch.float32:  # no tensor cores: a thread holds whole rows of both factors
            block_tile, num_warps = 16, 8
        num_stages = 1 + max(1, min(_MOST_STAGES - 1, tuning.ahead_bytes // (block_tile * widest * element_bytes)))
        min_split_tiles = 1
        if num_splits <= 0:
            min_split_tiles = tuning.min_split_tiles
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
            "BLOCK_GROUP": block_group,
            "BLOCK_SPLITS": max(1, min(8, _COMBINED_ELEMENTS // (block_group * padded(value_dim)))),
            "MOST_SPLITS": MAX_SPLITS,
        }
        launch = self._kernel.prepare(arguments, CHANGING, num_warps=num_warps, num_stages=num_stages)
        grid = num_seqs, num_kv_heads, num_splits
        return lambda query, key_cache, value_cache, out: launch(grid, along_last(query), key_cache, value_cache, out)

    def _choose_splits(
        self, num_seqs: int, num_kv_heads: int, num_cached: int, block_tile: int, device: torch.device
    ) -> int:
        """As many splits as run together, if the longest sequence has tokens for them."""
        if device not in self._num_processors:
            self._num_processors[device] = (
                torch.cuda.get_device_properties(device).multi_processor_count
                if device.type == "cuda"
                else _INTERPRETED_PROCESSORS
            )
        tuning, num_pairs = self._tuning, triton.next_power_of_2(num_seqs) * num_kv_heads
        at_once = tuning.programs_a_processor * self._num_processors[device]
        waves = {n: n * num_pairs / at_once for n in range(1, _MOST_WAVE_SPLITS + 1)}
        filling = (n for n, count in waves.items() if count / math.ceil(count) >= tuning.filled_waves)
        num_splits = at_once // num_pairs or next(filling, 1)
        return max(1, min(num_splits, triton.cdiv(num_cached, tuning.min_split_tiles * block_tile)))


def _grown(
    tensors: dict[torch.device, list[torch.Tensor]], size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The device's last tensor, or a new one of zeros if that has fewer elements."""
    grown = tensors.setdefault(device, [])
    if not grown or grown[-1].numel() < size:
        grown.append(torch.zeros(triton.next_power_of_2(size), dtype=dtype, device=device))
    return grown[-1]
