"""Block copies in one launch, for copy-on-write and for staging swaps."""

# ruff: noqa: N803 (compile-time constants are capitals in Triton's kernels)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.blocks import check_copy

_CHUNK_WORDS = 1024  # per program: four 16-byte accesses in flight per thread


@triton.jit(do_not_specialize_on_alignment=["source_rows_ptr", "target_rows_ptr"])
def _copy_kernel(
    source_ptr: tl.tensor,  # [num_blocks, words]
    target_ptr: tl.tensor,  # [num_blocks, words]
    source_rows_ptr: tl.tensor,  # [n]
    target_rows_ptr: tl.tensor,  # [n]
    words: tl.tensor,
    source_stride: tl.tensor,
    target_stride: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """One program per row and chunk, in one grid dimension: the others are limited to 65,535."""
    program = tl.program_id(0)
    num_chunks = tl.cdiv(words, CHUNK)
    row = program // num_chunks
    columns = (program % num_chunks).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    source_row = tl.load(source_rows_ptr + row)
    target_row = tl.load(target_rows_ptr + row)
    there = columns < words
    copied = tl.load(source_ptr + source_row * source_stride + columns, mask=there)
    tl.store(target_ptr + target_row * target_stride + columns, copied, mask=there)


def copy_blocks(
    source: torch.Tensor, target: torch.Tensor, source_rows: torch.Tensor, target_rows: torch.Tensor
) -> None:
    """`target[target_rows[i]] = source[source_rows[i]]` for every i.

    Args:
        source, target: `[num_blocks, words]` int64, any row stride; either may be pinned host memory, and both the same
            tensor if no row is both read and written.
        source_rows, target_rows: `[n]` int64, contiguous, on the device; `target_rows` without duplicates.

    Raises:
        ValueError: a shape, dtype or stride differs.
    """
    check_copy(source, target, source_rows, target_rows)
    words = source.shape[1]
    num_programs = len(source_rows) * triton.cdiv(words, _CHUNK_WORDS)
    if not num_programs:
        return
    with torch.cuda.device_of(target_rows):
        _copy_kernel[(num_programs,)](
            source,
            target,
            source_rows,
            target_rows,
            words,
            source.stride(0),
            target.stride(0),
            CHUNK=_CHUNK_WORDS,
            num_warps=4,
        )
