"""Cache writes (quantise, scatter) and block copies, each in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from folio.kernels.blocks import check_copy
from folio.kernels.provider import FP8_DTYPES, CacheWrite, StoreLayer
from folio.kernels.triton.launch import Kernel

# ruff: noqa: N803, N806 (compile-time constants are capitals in Triton's kernels)


_TILE_ELEMENTS = 2048  # of one token's keys per program: 16 per thread


@triton.jit
def to_fp8(x: tl.tensor, scale: tl.tensor, dtype: tl.constexpr, EMULATED: tl.constexpr) -> tl.tensor:
    """`x / scale`, clipped, as an 8-bit float; NaN stays NaN."""
    LIMIT: tl.constexpr = 448.0 if dtype == tl.float8e4nv else 57344.0
    scaled = tl.div_rn(x.to(tl.float32), scale)
    scaled = tl.clamp(scaled, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if EMULATED:
        # The interpreter's cast rounds wrongly where the mantissa overflows, so values are rounded before it: adding
        # 1.5 · 2^k drops the bits beyond a float8's mantissa, to nearest even.
        MANTISSA: tl.constexpr = 3 if dtype == tl.float8e4nv else 2
        SMALLEST: tl.constexpr = 2.0**-6 if dtype == tl.float8e4nv else 2.0**-14
        magnitude = (scaled.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        shift = tl.maximum(magnitude, SMALLEST) * (1.5 * 2 ** (23 - MANTISSA))
        scaled = (scaled + shift) - shift
    return scaled.to(dtype)


@triton.jit
def store_cached(
    rows: tl.tensor,  # [BLOCK_HEADS, BLOCK_DIM]
    target: tl.tensor,  # the token's address in the cache
    head_stride: tl.tensor,
    scales_ptr: tl.tensor,  # [num_kv_heads] or None
    heads: tl.tensor,
    dims: tl.tensor,
    there: tl.tensor,
    NUM_HEADS: tl.constexpr,
    EMULATED: tl.constexpr,
) -> None:
    cache_dtype: tl.constexpr = target.dtype.element_ty
    if cache_dtype == tl.float8e4nv or cache_dtype == tl.float8e5:
        scale = tl.full([1, 1], 1.0, tl.float32)
        if scales_ptr is not None:
            scale = tl.load(scales_ptr + heads, mask=heads < NUM_HEADS, other=1.0)[:, None]
        rows = to_fp8(rows, scale, cache_dtype, EMULATED)
    pointers = target + heads.to(tl.int64)[:, None] * head_stride + dims[None, :]
    tl.store(pointers, rows, mask=there)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _write_kernel(
    key_ptr: tl.tensor,  # [num_tokens, num_kv_heads, key_dim]
    value_ptr: tl.tensor,  # [num_tokens, num_kv_heads, value_dim]
    key_cache_ptr: tl.tensor,  # [num_blocks, block_tokens, num_kv_heads, key_dim]
    value_cache_ptr: tl.tensor,  # [num_blocks, block_tokens, num_kv_heads, value_dim]
    slots_ptr: tl.tensor,  # [num_tokens]
    key_scales_ptr: tl.tensor,  # [num_kv_heads] or None
    value_scales_ptr: tl.tensor,
    block_tokens: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_token_stride: tl.tensor,
    value_head_stride: tl.tensor,
    key_cache_block_stride: tl.tensor,
    key_cache_token_stride: tl.tensor,
    key_cache_head_stride: tl.tensor,
    value_cache_block_stride: tl.tensor,
    value_cache_token_stride: tl.tensor,
    value_cache_head_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEY_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    EMULATED: tl.constexpr,
) -> None:
    """One program per token and `BLOCK_HEADS` heads."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    slot = tl.load(slots_ptr + token)
    block = slot // block_tokens
    within = slot % block_tokens

    dims = tl.arange(0, BLOCK_KEY_DIM)
    there = (heads < NUM_HEADS)[:, None] & (dims < KEY_DIM)[None, :]
    source = key_ptr + token * key_token_stride + heads.to(tl.int64)[:, None] * key_head_stride
    key = tl.load(source + dims[None, :], mask=there)
    target = key_cache_ptr + block * key_cache_block_stride + within * key_cache_token_stride
    store_cached(key, target, key_cache_head_stride, key_scales_ptr, heads, dims, there, NUM_HEADS, EMULATED)

    dims = tl.arange(0, BLOCK_VALUE_DIM)
    there = (heads < NUM_HEADS)[:, None] & (dims < VALUE_DIM)[None, :]
    source = value_ptr + token * value_token_stride + heads.to(tl.int64)[:, None] * value_head_stride
    value = tl.load(source + dims[None, :], mask=there)
    target = value_cache_ptr + block * value_cache_block_stride + within * value_cache_token_stride
    store_cached(value, target, value_cache_head_stride, value_scales_ptr, heads, dims, there, NUM_HEADS, EMULATED)


def prepare_write(new: CacheWrite) -> StoreLayer:
    """`AttentionProvider.prepare_write` on tensors that can be written by Triton."""
    key, value, key_cache, value_cache, scales = new.key, new.value, new.key_cache, new.value_cache, new.scales
    num_tokens, num_heads, key_dim = key.shape
    if not num_tokens:
        return lambda *_: None
    key, value = along_last(key), along_last(value)
    if key_cache.dtype not in FP8_DTYPES:
        scales = None
    block_key_dim = triton.next_power_of_2(key_dim)
    block_heads = triton.next_power_of_2(num_heads)
    block_heads = min(block_heads, max(1, _TILE_ELEMENTS // block_key_dim))
    arguments = {
        "key_ptr": key,
        "value_ptr": value,
        "key_cache_ptr": key_cache,
        "value_cache_ptr": value_cache,
        "slots_ptr": new.slots,
        "key_scales_ptr": None if scales is None else scales.key.contiguous(),
        "value_scales_ptr": None if scales is None else scales.value.contiguous(),
        "block_tokens": key_cache.shape[1],
        "key_token_stride": key.stride(0),
        "key_head_stride": key.stride(1),
        "value_token_stride": value.stride(0),
        "value_head_stride": value.stride(1),
        "key_cache_block_stride": key_cache.stride(0),
        "key_cache_token_stride": key_cache.stride(1),
        "key_cache_head_stride": key_cache.stride(2),
        "value_cache_block_stride": value_cache.stride(0),
        "value_cache_token_stride": value_cache.stride(1),
        "value_cache_head_stride": value_cache.stride(2),
        "NUM_HEADS": num_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value.shape[2],
        "BLOCK_HEADS": block_heads,
        "BLOCK_KEY_DIM": block_key_dim,
        "BLOCK_VALUE_DIM": triton.next_power_of_2(value.shape[2]),
        "EMULATED": not isinstance(_write_kernel, JITFunction),
    }
    changing = ("key_ptr", "value_ptr", "key_cache_ptr", "value_cache_ptr")
    launch = Kernel(_write_kernel).prepare(arguments, changing, num_warps=4)
    grid = num_tokens, triton.cdiv(num_heads, block_heads), 1
    return lambda key, value, key_cache, value_cache: launch(
        grid, along_last(key), along_last(value), key_cache, value_cache
    )


def along_last(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if its last stride is not 1."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


# ruff: noqa: N803 (compile-time constants are capitals in Triton's kernels)


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
