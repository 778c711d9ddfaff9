"""Penalties for tokens that a sequence has, on logits in place; the counts stay on the device.

A row's counts are entries `token id << 32 | count` in int64, at an address of their own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# ruff: noqa: N803 (compile-time constants are capitals in Triton's kernels)

_TILE_ENTRIES, _NUM_WARPS = 1024, 4


@triton.jit(do_not_specialize=["num"])
def _replace_kernel(
    addresses_ptr: tl.tensor,  # [num] int64
    entries_ptr: tl.tensor,  # [num] int64
    num: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = at < num
    targets = tl.load(addresses_ptr + at, mask=there, other=0).to(tl.pointer_type(tl.int64))
    tl.store(targets, tl.load(entries_ptr + at, mask=there, other=0), mask=there)


@triton.jit
def _penalise_kernel(
    logits_ptr: tl.tensor,  # [*, width], rows row_stride apart
    rows_ptr: tl.tensor,  # [num_rows] int64
    addresses_ptr: tl.tensor,  # [num_rows] int64
    nums_ptr: tl.tensor,  # [num_rows] int32
    penalties_ptr: tl.tensor,  # [num_rows, 3] float32
    row_stride: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    start = tl.program_id(1) * TILE
    num = tl.load(nums_ptr + row)
    if start < num:
        at = start + tl.arange(0, TILE)
        there = at < num
        entries_ptr = tl.load(addresses_ptr + row).to(tl.pointer_type(tl.int64))
        entries = tl.load(entries_ptr + at, mask=there, other=0)
        times = (entries & 0xFFFFFFFF).to(tl.float32)
        logit_ptrs = logits_ptr + tl.load(rows_ptr + row) * row_stride + (entries >> 32)
        logits = tl.load(logit_ptrs, mask=there, other=0.0)
        repetition = tl.load(penalties_ptr + row * 3)
        frequency = tl.load(penalties_ptr + row * 3 + 1)
        presence = tl.load(penalties_ptr + row * 3 + 2)
        logits = tl.where(logits < 0, logits * repetition, tl.div_rn(logits, repetition))
        logits -= frequency * times
        logits -= tl.where(times > 0, presence, 0.0)
        tl.store(logit_ptrs, logits, mask=there)


def penalise(
    logits: torch.Tensor,
    most_entries: int,
    rows: torch.Tensor,
    addresses: torch.Tensor,
    nums: torch.Tensor,
    penalties: torch.Tensor,
    changed: torch.Tensor,
    entries: torch.Tensor,
) -> None:
    """Replace entries, then change `logits [*, width]` (float32, contiguous) in place for the tokens of all entries.
    Does not wait for the device.

    Args:
        most_entries: of a row.
        rows: of the logits, `[n]` int64.
        addresses, nums: of each row's entries, `[n]` int64 and int32. A row has a token once.
        penalties: repetition, frequency and presence, `[n, 3]` float32.
        changed, entries: addresses of entries, and what replaces them, `[changes]` int64.
    """
    with torch.cuda.device_of(logits):
        if len(changed):
            grid = (triton.cdiv(len(changed), _TILE_ENTRIES),)
            _replace_kernel[grid](changed, entries, len(changed), TILE=_TILE_ENTRIES, num_warps=_NUM_WARPS)
        _penalise_kernel[(len(rows), triton.cdiv(most_entries, _TILE_ENTRIES))](
            logits,
            rows,
            addresses,
            nums,
            penalties,
            logits.stride(0),
            TILE=_TILE_ENTRIES,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,  # products are rounded before they are subtracted, as on CPUs
        )
