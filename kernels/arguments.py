"""Arguments of the public functions: checks of shapes, dtypes and numbers, and their translation for providers."""

from __future__ import annotations

import torch

from folio.kernels.provider import FP8_DTYPES, CacheScales, Masking


def check_tensor(
    tensor: torch.Tensor,
    name: str,
    shape: tuple[int | None, ...],
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> None:
    """Raise `ValueError` unless the tensor has this shape, dtype and device; `None` in a shape is any size."""
    fits = tensor.ndim == len(shape) and all(w in (None, s) for w, s in zip(shape, tensor.shape, strict=True))
    if not fits:
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(tensor.shape)}, expected [{expected}]")
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"{name} {list(tensor.shape)} has dtype {tensor.dtype}, expected {dtype}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} {list(tensor.shape)} is on {tensor.device}, q on {device}")


def check_new_tokens(*tensors: torch.Tensor | None) -> None:
    """Raise `ValueError` if only one of `k` and `v` is given, or `rotary_cos` or `rotary_sin` without them."""
    k, v, *rotary = tensors
    if (k is None) != (v is None):
        raise ValueError("only one of k and v is given; give both or neither")
    if k is None and any(table is not None for table in rotary):
        raise ValueError("rotary_cos and rotary_sin rotate new keys; give k and v, too")


def sequence_table(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    num_seqs: int,
    device: torch.device,
) -> torch.Tensor:
    """`[num_seqs, width]`: the block table, or each sequence's row of a contiguous cache."""
    check_tensor(k_cache, "k_cache", (None, None, None, None), device=device)
    check_tensor(v_cache, "v_cache", (*k_cache.shape[:3], None), k_cache.dtype, device)
    if 0 in k_cache.shape[1:] or not v_cache.shape[3]:
        raise ValueError(f"k_cache {list(k_cache.shape)} and v_cache {list(v_cache.shape)} are empty")
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError("block_table and cache_batch_idx are both given; a paged cache takes the first only")
    if block_table is not None:
        check_tensor(block_table, "block_table", (num_seqs, None), torch.int32, device)
        return block_table.contiguous()
    if cache_batch_idx is not None:
        check_tensor(cache_batch_idx, "cache_batch_idx", (num_seqs,), torch.int32, device)
        return cache_batch_idx[:, None].contiguous()
    if num_seqs > len(k_cache):
        raise ValueError(f"k_cache {list(k_cache.shape)} has fewer rows than q has sequences, {num_seqs}")
    return torch.arange(num_seqs, dtype=torch.int32, device=device)[:, None].contiguous()


def cached_lengths(
    cache_seqlens: int | torch.Tensor | None, num_seqs: int, capacity: int, device: torch.device
) -> torch.Tensor:
    """`[num_seqs]` int32: a number for every sequence is repeated; `None` is all of the cache."""
    if isinstance(cache_seqlens, torch.Tensor):
        check_tensor(cache_seqlens, "cache_seqlens", (num_seqs,), torch.int32, device)
        return cache_seqlens
    length = capacity if cache_seqlens is None else cache_seqlens
    if not 0 <= length <= capacity:
        raise ValueError(f"cache_seqlens {length} is not within 0 … {capacity}, the capacity of the cache")
    return torch.full((num_seqs,), length, dtype=torch.int32, device=device)


def leftpad_of(cache_leftpad: torch.Tensor | None, num_seqs: int, device: torch.device) -> torch.Tensor | None:
    if cache_leftpad is None:
        return None
    check_tensor(cache_leftpad, "cache_leftpad", (num_seqs,), torch.int32, device)
    if not cache_leftpad.is_cuda and num_seqs and int(cache_leftpad.min()) < 0:
        raise ValueError(f"cache_leftpad {int(cache_leftpad.min())} is below 0")
    return cache_leftpad.contiguous()


def bound_of(given: int | None, name: str, lengths: torch.Tensor) -> int:
    """The given upper bound of the lengths; without one their maximum, which waits for a CUDA device."""
    if given is not None and lengths.is_cuda:
        if given < 1 and lengths.numel():
            raise ValueError(f"{name} {given} is below 1")
        return given
    longest = int(lengths.max()) if lengths.numel() else 0
    if given is not None and given < longest:
        raise ValueError(f"{name} {given} is below {longest}, the longest sequence")
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
    """Raise `ValueError` if a length, or a table entry that will be used, is outside of the cache.

    Skipped on CUDA, where reading the numbers would wait for the device. `cache_seqlens` includes new tokens.
    """
    if cache_seqlens.is_cuda or not cache_seqlens.numel():
        return
    block_size, capacity = k_cache.shape[1], table.shape[1] * k_cache.shape[1]
    before = cache_seqlens - num_new
    if int(before.min()) < 0 or int(cache_seqlens.max()) > capacity:
        raise ValueError(
            f"cache_seqlens from {int(before.min())}, and with new tokens to {int(cache_seqlens.max())}, are not "
            f"within 0 … {capacity}, the capacity of a sequence: {table.shape[1]} times {block_size} tokens"
        )
    first = torch.zeros_like(cache_seqlens) if leftpad is None else leftpad
    if window_left >= 0:
        first = torch.maximum(first, cache_seqlens - num_queries - window_left)
    # Queries read from `first` on; new tokens are written from the old length on.
    first = torch.minimum(torch.where(num_queries > 0, first, cache_seqlens), before)
    columns = torch.arange(table.shape[1])
    used = (columns >= (first // block_size)[:, None]) & (columns < (-(-cache_seqlens // block_size))[:, None])
    used &= (first < cache_seqlens)[:, None]
    wrong = table[used & ((table < 0) | (table >= len(k_cache)))]
    if len(wrong):
        raise ValueError(f"{names[0]} has {names[1]} {int(wrong[0])}, which is not within 0 … {len(k_cache) - 1}")


def window_of(window_size: tuple[int, int], causal: bool, most: int) -> tuple[int, int]:
    """Both sides of the window; -1 where it is at least `most` tokens wide and hides nothing."""
    if min(window_size) < -1:
        raise ValueError(f"window_size {window_size}: a side is a number of tokens, or -1 for no bound")
    left, right = (-1 if side >= most else side for side in window_size)
    return left, 0 if causal else right


def slots_of(
    table: torch.Tensor, sequence: torch.Tensor, positions: torch.Tensor, k_cache: torch.Tensor
) -> torch.Tensor:
    """Slots of sequences' positions, flat int64: `block · block_size + position within the block`."""
    block_size = k_cache.shape[1]
    return (table[sequence, positions // block_size].long() * block_size + positions % block_size).flatten()


def rotated(
    x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, positions: torch.Tensor, *, interleaved: bool
) -> torch.Tensor:
    """Rotate `x [..., num_heads, dim]` by `positions [...]` in float32 or float64, rounded once (RoFormer §3.2.2)."""
    if cos is None and sin is None:
        return x
    if cos is None or sin is None:
        raise ValueError("only one of rotary_cos and rotary_sin is given; give both or neither")
    check_tensor(cos, "rotary_cos", (None, None), device=x.device)
    check_tensor(sin, "rotary_sin", tuple(cos.shape), cos.dtype, x.device)
    half = cos.shape[1]
    if 2 * half > x.shape[-1]:
        raise ValueError(f"rotary_cos {list(cos.shape)} rotates more dimensions than a head has, {x.shape[-1]}")
    if not positions.is_cuda and positions.numel() and int(positions.max()) >= len(cos):
        raise ValueError(f"rotary_cos {list(cos.shape)} has no row for position {int(positions.max())}")
    compute = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (table[positions][..., None, :].to(compute) for table in (cos, sin))
    pairs = x[..., : 2 * half].to(compute)
    first, second = (pairs[..., 0::2], pairs[..., 1::2]) if interleaved else (pairs[..., :half], pairs[..., half:])
    parts = (first * cos - second * sin, first * sin + second * cos)
    turned = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], dim=-1)


def masking_of(
    q: torch.Tensor,
    num_seqs: int,
    softmax_scale: float | None,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> Masking:
    num_heads = q.shape[-2]
    if softcap < 0:
        raise ValueError(f"softcap {softcap} is below 0")
    if alibi_slopes is not None:
        shape = (num_heads,) if alibi_slopes.ndim == 1 else (num_seqs, num_heads)
        check_tensor(alibi_slopes, "alibi_slopes", shape, torch.float32, q.device)
        alibi_slopes = alibi_slopes.contiguous()
    if sinks is not None:
        check_tensor(sinks, "sinks", (num_heads,), torch.float32, q.device)
        sinks = sinks.contiguous()
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return Masking(scale, *window, softcap, alibi_slopes, sinks)


def scales_of(
    k_cache: torch.Tensor, k_descale: torch.Tensor | None, v_descale: torch.Tensor | None
) -> CacheScales | None:
    if k_descale is None and v_descale is None:
        return None
    if k_cache.dtype not in FP8_DTYPES:
        raise ValueError(f"k_descale and v_descale are for caches of 8-bit floats, not of {k_cache.dtype}")
    num_kv_heads = k_cache.shape[2]
    one = torch.ones(num_kv_heads, device=k_cache.device)
    scales = CacheScales(one if k_descale is None else k_descale, one if v_descale is None else v_descale)
    check_tensor(scales.key, "k_descale", (num_kv_heads,), torch.float32, k_cache.device)
    check_tensor(scales.value, "v_descale", (num_kv_heads,), torch.float32, k_cache.device)
    return scales
