"""What the public front takes: shapes, dtypes and numbers are checked, and turned into what providers take."""

from __future__ import annotations

import torch

from kernels.provider import FP8_DTYPES, CacheScales, Masking, Rotary


def check_tensor(
    tensor: torch.Tensor,
    name: str,
    shape: tuple[int | None, ...],
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> None:
    """Raise `ValueError` unless the tensor is like that; `None` in a shape is any size."""
    fits = tensor.ndim == len(shape) and all(w in (None, s) for w, s in zip(shape, tensor.shape, strict=True))
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(tensor.shape)}, expected [{wanted}]")
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"{name} {list(tensor.shape)} has dtype {tensor.dtype}, expected {dtype}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} {list(tensor.shape)} is on {tensor.device}, q on {device}")


def sequence_table(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    num_seqs: int,
    device: torch.device,
) -> torch.Tensor:
    """`[num_seqs, width]`, the block table, or each sequence's row of a contiguous cache."""
    check_tensor(k_cache, "k_cache", (None, None, None, None), device=device)
    check_tensor(v_cache, "v_cache", (*k_cache.shape[:3], None), k_cache.dtype, device)
    if 0 in k_cache.shape[1:] or not v_cache.shape[3]:
        raise ValueError(f"k_cache {list(k_cache.shape)} and v_cache {list(v_cache.shape)} are empty")
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError("a cache has a block_table or a cache_batch_idx, not both")
    if block_table is not None:
        check_tensor(block_table, "block_table", (num_seqs, None), torch.int32, device)
        return block_table.contiguous()
    if cache_batch_idx is not None:
        check_tensor(cache_batch_idx, "cache_batch_idx", (num_seqs,), torch.int32, device)
        return cache_batch_idx[:, None].contiguous()
    if num_seqs > len(k_cache):
        raise ValueError(f"k_cache {list(k_cache.shape)} has fewer rows than q has sequences, {num_seqs}")
    return torch.arange(num_seqs, dtype=torch.int32, device=device)[:, None].contiguous()


def leftpad_of(cache_leftpad: torch.Tensor | None, num_seqs: int, device: torch.device) -> torch.Tensor | None:
    if cache_leftpad is None:
        return None
    check_tensor(cache_leftpad, "cache_leftpad", (num_seqs,), torch.int32, device)
    if not cache_leftpad.is_cuda and num_seqs and int(cache_leftpad.min()) < 0:
        raise ValueError(f"cache_leftpad {int(cache_leftpad.min())} is below 0")
    return cache_leftpad.contiguous()


def bound_of(given: int | None, name: str, lengths: torch.Tensor) -> int:
    """The bound that was given, if it is one; else the longest, for which CUDA is waited for."""
    if given is not None and lengths.is_cuda:
        if given < 1 and lengths.numel():
            raise ValueError(f"{name} {given} is below 1")
        return given
    longest = int(lengths.max()) if lengths.numel() else 0
    if given is not None and given < longest:
        raise ValueError(f"{name} {given} is below {longest}, what a sequence has")
    return longest if given is None else given


def check_numbers(
    names: tuple[str, str],
    num_queries: torch.Tensor,
    cache_seqlens: torch.Tensor,
    num_new: int | torch.Tensor,
    leftpad: torch.Tensor | None,
    window_left: int,
    table: torch.Tensor,
    k_cache: torch.Tensor,
) -> None:
    """Raise `ValueError` if lengths, or entries of the table that are used, are outside of the cache; not on CUDA,
    where looking would wait. `cache_seqlens` includes what is new."""
    if cache_seqlens.is_cuda or not cache_seqlens.numel():
        return
    block_size, capacity = k_cache.shape[1], table.shape[1] * k_cache.shape[1]
    before = cache_seqlens - num_new
    if int(before.min()) < 0 or int(cache_seqlens.max()) > capacity:
        raise ValueError(
            f"cache_seqlens from {int(before.min())}, and with new tokens to {int(cache_seqlens.max())}, are not "
            f"within 0 … {capacity}: {table.shape[1]} times {block_size} tokens are what a sequence of this cache holds"
        )
    first = torch.zeros_like(cache_seqlens) if leftpad is None else leftpad
    if window_left >= 0:
        first = torch.maximum(first, cache_seqlens - num_queries - window_left)
    # Read from there on if there are queries, and written from the old length on.
    first = torch.minimum(torch.where(num_queries > 0, first, cache_seqlens), before)
    places = torch.arange(table.shape[1])
    used = (places >= (first // block_size)[:, None]) & (places < (-(-cache_seqlens // block_size))[:, None])
    used &= (first < cache_seqlens)[:, None]
    wrong = table[used & ((table < 0) | (table >= len(k_cache)))]
    if len(wrong):
        raise ValueError(f"{names[0]} has {names[1]} {int(wrong[0])}, which is not within 0 … {len(k_cache) - 1}")


def window_of(window_size: tuple[int, int], causal: bool, most: int) -> tuple[int, int]:
    """Both sides, -1 for one that no query and token are `most` tokens apart to notice."""
    if min(window_size) < -1:
        raise ValueError(f"window_size {window_size}: a side is a number of tokens, or -1 for no bound")
    left, right = (-1 if side >= most else side for side in window_size)
    return left, 0 if causal else right


def slots_of(
    table: torch.Tensor, sequence: torch.Tensor, positions: torch.Tensor, k_cache: torch.Tensor
) -> torch.Tensor:
    """Where positions of sequences are in a cache: `block · block_size + position within`, int64, flat."""
    block_size = k_cache.shape[1]
    return (table[sequence, positions // block_size].long() * block_size + positions % block_size).flatten()


def rotary_of(
    cos: torch.Tensor | None, sin: torch.Tensor | None, positions: torch.Tensor, interleaved: bool, x: torch.Tensor
) -> Rotary:
    if cos is None or sin is None:
        raise ValueError("rotary_cos and rotary_sin go together: only one of them is given")
    check_tensor(cos, "rotary_cos", (None, None), device=x.device)
    check_tensor(sin, "rotary_sin", tuple(cos.shape), cos.dtype, x.device)
    if 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(f"rotary_cos {list(cos.shape)} turns more dimensions than a head has, {x.shape[-1]}")
    if not positions.is_cuda and positions.numel() and int(positions.max()) >= len(cos):
        raise ValueError(f"rotary_cos {list(cos.shape)} has no row for position {int(positions.max())}")
    return Rotary(cos, sin, positions.flatten(), interleaved)


def masking_and_scales(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    num_seqs: int,
    softmax_scale: float | None,
    window: tuple[int, int],
    softcap: float,
    num_splits: int,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
) -> tuple[Masking, CacheScales | None]:
    num_heads, num_kv_heads = q.shape[-2], k_cache.shape[2]
    for name, number in (("softcap", softcap), ("num_splits", num_splits)):
        if number < 0:
            raise ValueError(f"{name} {number} is below 0")
    if alibi_slopes is not None:
        shape = (num_heads,) if alibi_slopes.ndim == 1 else (num_seqs, num_heads)
        check_tensor(alibi_slopes, "alibi_slopes", shape, torch.float32, q.device)
        alibi_slopes = alibi_slopes.contiguous()
    if sinks is not None:
        check_tensor(sinks, "sinks", (num_heads,), torch.float32, q.device)
        sinks = sinks.contiguous()
    scales = None
    if k_descale is not None or v_descale is not None:
        if k_cache.dtype not in FP8_DTYPES:
            raise ValueError(f"k_descale and v_descale are for caches of 8-bit floats, not of {k_cache.dtype}")
        one = torch.ones(num_kv_heads, device=q.device)
        scales = CacheScales(one if k_descale is None else k_descale, one if v_descale is None else v_descale)
        check_tensor(scales.key, "k_descale", (num_kv_heads,), torch.float32, q.device)
        check_tensor(scales.value, "v_descale", (num_kv_heads,), torch.float32, q.device)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return Masking(scale, *window, softcap, alibi_slopes, sinks), scales
