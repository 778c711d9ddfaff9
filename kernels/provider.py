"""What an attention provider is, and the checks that all of them share.

Rotary position embedding, for callers of the kernels whose keys are not rotated yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

MAX_WINDOW = 2**30
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class KernelError(Exception):
    """A kernel cannot be built, is not available, does not support a shape, or is given a cache that is not there."""


@dataclass(frozen=True, slots=True)
class VarlenBatch:
    """The queries of one step, packed one sequence after the other, and where their keys and values are cached.

    Attributes:
        cu_seqlens_q: `[num_seqs + 1]` int32, where each sequence's queries begin; its last entry is their number.
        cache_seqlens: `[num_seqs]` int32, cached tokens of each sequence, the queries' own included.
        block_table: `[num_seqs, width]` int32, the sequence's blocks in the cache; entries past its last block are not
            read. In the region view a sequence is one block, its region: the table has width 1.
        max_seqlen_q, max_seqlen_k: at least the most queries and the most cached tokens of a sequence. Kernels size
            their grids by them, so that nothing waits for the device.
        cache_leftpad: `[num_seqs]` int32, the first cached token that counts; `None` for 0 everywhere.
    """

    cu_seqlens_q: torch.Tensor
    cache_seqlens: torch.Tensor
    block_table: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    cache_leftpad: torch.Tensor | None = None

    def __post_init__(self) -> None:
        num_seqs = self.cache_seqlens.numel()
        shapes = {
            "cu_seqlens_q": (num_seqs + 1,),
            "cache_seqlens": (num_seqs,),
            "block_table": (num_seqs, self.block_table.shape[-1]),
            "cache_leftpad": (num_seqs,),
        }
        for name, shape in shapes.items():
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
            if tensor.dtype != torch.int32 or not tensor.is_contiguous():
                raise ValueError(f"{name} must be a contiguous int32 tensor, got {tensor.dtype}")

    def to(self, device: torch.device) -> VarlenBatch:
        """The same batch with its tensors on the device."""
        return VarlenBatch(
            self.cu_seqlens_q.to(device, non_blocking=True),
            self.cache_seqlens.to(device, non_blocking=True),
            self.block_table.to(device, non_blocking=True),
            self.max_seqlen_q,
            self.max_seqlen_k,
            None if self.cache_leftpad is None else self.cache_leftpad.to(device, non_blocking=True),
        )


@dataclass(frozen=True, slots=True)
class Masking:
    """How scores become weights: `softmax(softcap(q·k·scale) + alibi)` over the visible tokens.

    The last query of a sequence stands at its last cached token. A query at position p sees the cached positions
    `p - window_left … p + window_right`; a negative window has no end. The default is causal attention. `softcap > 0`
    replaces a score s by `softcap · tanh(s / softcap)`. `alibi_slopes [num_q_heads]` or `[num_seqs, num_q_heads]`
    float32 adds `-slope · |p - position|`. `sinks [num_q_heads]` float32 adds one score a head to the denominator,
    without a value. A query that sees nothing gives zeros.
    """

    scale: float
    window_left: int = -1
    window_right: int = 0
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("window_left", "window_right"):
            if getattr(self, name) > MAX_WINDOW:  # kernels add positions in 32 bits
                raise ValueError(f"{name} {getattr(self, name)} is above {MAX_WINDOW}; -1 is a window without an end")


@dataclass(frozen=True, slots=True)
class CacheScales:
    """What a cache of 8-bit floats holds is `value / scale`: `key`, `value` `[num_kv_heads]` float32."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """What the choice of a provider depends on.

    Attributes:
        dtype, cache_dtype: of the queries; of the cache.
        num_blocks, block_tokens: of the cache: blocks, or regions.
        key_strides, value_strides: of the caches, in elements, the last one left out.
        paged: a sequence may have more than one block.
        decode: no sequence has more than one query.
        extras: which of "window", "right" (a window that is not causal), "softcap", "alibi", "sinks", "leftpad" and
            "lse" occur.
    """

    device_type: str
    dtype: torch.dtype
    cache_dtype: torch.dtype
    num_q_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    num_blocks: int
    block_tokens: int
    key_strides: tuple[int, ...]
    value_strides: tuple[int, ...]
    paged: bool
    decode: bool
    extras: frozenset[str]


class AttentionProvider(Protocol):
    """Attention over a cache, and the write into it.

    Caches are `[num_blocks, block_tokens, num_kv_heads, dim]` with any strides but 1 for the last. In the block-table
    view a block is a block; in the region view it is a sequence's region. Their dtype is that of the queries, or one of
    `FP8_DTYPES`.
    """

    name: str

    def unsupported(self, problem: AttentionProblem) -> str | None:
        """Why `attend` cannot do this, as a sentence; `None` if it can."""
        ...

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
        *,
        rotary: Rotary | None = None,
        scales: CacheScales | None = None,
    ) -> None:
        """Store `key`, `value` `[num_tokens, num_kv_heads, dim]` at `slots [num_tokens]` int64, each
        `block · block_tokens + position within the block`; keys are rotated first where `rotary` says so."""
        ...

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: VarlenBatch,
        masking: Masking,
        *,
        scales: CacheScales | None = None,
        lse: torch.Tensor | None = None,
        num_splits: int = 0,
    ) -> torch.Tensor:
        """Attention of `query [num_tokens, num_q_heads, key_dim]`; returns `[num_tokens, num_q_heads, value_dim]` of
        its dtype. No cached token past `cache_seqlens` is read, nor one that no query of its sequence sees: there may
        be a hole.

        Args:
            lse: `[num_tokens, num_q_heads]` float32, contiguous; filled with the logarithm of each softmax's
                denominator, sinks included, and minus infinity where nothing is visible.
            num_splits: into how many parts at most a sequence's cache is split between processors, where a kernel
                splits at all; 0 for a choice of its own.

        Raises:
            KernelError: `unsupported` gives a reason.
        """
        ...


def describe_problem(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: VarlenBatch,
    masking: Masking,
    lse: torch.Tensor | None = None,
) -> AttentionProblem:
    """The problem that a call poses."""
    extras = {
        "window": masking.window_left >= 0,
        "right": masking.window_right != 0,
        "softcap": masking.softcap > 0,
        "alibi": masking.alibi_slopes is not None,
        "sinks": masking.sinks is not None,
        "leftpad": batch.cache_leftpad is not None,
        "lse": lse is not None,
    }
    return AttentionProblem(
        device_type=query.device.type,
        dtype=query.dtype,
        cache_dtype=key_cache.dtype,
        num_q_heads=query.shape[1],
        num_kv_heads=key_cache.shape[2],
        key_dim=query.shape[2],
        value_dim=value_cache.shape[3],
        num_blocks=key_cache.shape[0],
        block_tokens=key_cache.shape[1],
        key_strides=key_cache.stride()[:3],
        value_strides=value_cache.stride()[:3],
        paged=batch.block_table.shape[1] > 1,
        decode=batch.max_seqlen_q <= 1,
        extras=frozenset(name for name, there in extras.items() if there),
    )


def check_attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: VarlenBatch,
    masking: Masking,
    lse: torch.Tensor | None,
) -> None:
    """Raise `ValueError` with the shapes unless they fit together."""
    if query.ndim != 3 or key_cache.ndim != 4 or value_cache.ndim != 4:
        shapes = [list(t.shape) for t in (query, key_cache, value_cache)]
        raise ValueError(
            "expected a query [tokens, heads, dim] and caches [blocks, tokens, kv_heads, dim], "
            f"got {shapes[0]}, {shapes[1]} and {shapes[2]}"
        )
    if query.shape[2] != key_cache.shape[3] or key_cache.shape[:3] != value_cache.shape[:3]:
        raise ValueError(
            f"query {list(query.shape)}, keys {list(key_cache.shape)}, values {list(value_cache.shape)} do not match"
        )
    if 0 in key_cache.shape[1:] or 0 in value_cache.shape[1:]:
        raise ValueError(f"caches {list(key_cache.shape)} and {list(value_cache.shape)} are empty")
    if query.shape[1] % key_cache.shape[2]:
        raise ValueError(f"{query.shape[1]} query heads cannot share {key_cache.shape[2]} KV heads evenly")
    if key_cache.dtype != value_cache.dtype or key_cache.dtype not in (query.dtype, *FP8_DTYPES):
        raise ValueError(f"dtypes differ: {query.dtype}, {key_cache.dtype}, {value_cache.dtype}")
    if key_cache.stride(3) != 1 or value_cache.stride(3) != 1:
        raise ValueError("the caches must have stride 1 along the head")
    num_heads, num_seqs = query.shape[1], batch.cache_seqlens.numel()
    if masking.sinks is not None:
        _check(masking.sinks, "sinks", (num_heads,))
    if masking.alibi_slopes is not None:
        shape = (num_heads,) if masking.alibi_slopes.ndim == 1 else (num_seqs, num_heads)
        _check(masking.alibi_slopes, "alibi_slopes", shape)
    if lse is not None:
        _check(lse, "lse", tuple(query.shape[:2]))


def check_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    rotary: Rotary | None,
) -> None:
    """Raise `ValueError` with the shapes unless the new tokens fit the cache."""
    for name, new, cache in (("key", key, key_cache), ("value", value, value_cache)):
        if (
            new.ndim != 3
            or cache.ndim != 4
            or new.shape[1:] != cache.shape[2:]
            or cache.dtype not in (new.dtype, *FP8_DTYPES)
        ):
            raise ValueError(
                f"{name} {list(new.shape)} {new.dtype} does not fit a cache {list(cache.shape)} {cache.dtype}"
            )
        if cache.stride(3) != 1:
            raise ValueError("the caches must have stride 1 along the head")
    if key_cache.shape[:3] != value_cache.shape[:3] or (key.dtype, key_cache.dtype) != (value.dtype, value_cache.dtype):
        raise ValueError(
            f"keys {key.dtype} into {list(key_cache.shape)} {key_cache.dtype} and values {value.dtype} into "
            f"{list(value_cache.shape)} {value_cache.dtype} do not go together"
        )
    if len(key) != len(value) or slots.shape != key.shape[:1] or slots.dtype != torch.int64 or slots.stride(0) > 1:
        raise ValueError(
            f"{len(key)} keys and {len(value)} values need as many contiguous int64 slots, got {list(slots.shape)} "
            f"{slots.dtype} with strides {slots.stride()}"
        )
    if rotary is not None:
        if rotary.positions.shape != slots.shape or rotary.cos.shape != rotary.sin.shape or rotary.cos.ndim != 2:
            raise ValueError(
                f"{len(key)} keys cannot be turned by positions {list(rotary.positions.shape)}, cos "
                f"{list(rotary.cos.shape)} and sin {list(rotary.sin.shape)}"
            )
        if 2 * rotary.cos.shape[1] > key.shape[2]:
            raise ValueError(f"{2 * rotary.cos.shape[1]} dimensions are to be turned, keys have {key.shape[2]}")


def refuse_unsupported(provider: AttentionProvider, problem: AttentionProblem) -> None:
    """Raise `KernelError` if the provider says why it cannot do this."""
    reason = provider.unsupported(problem)
    if reason is not None:
        raise KernelError(f"attention {provider.name} cannot do this: {reason}")


def as_cached(
    key: torch.Tensor, value: torch.Tensor, dtype: torch.dtype, scales: CacheScales | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[num_tokens, num_kv_heads, dim]` as a cache of that dtype holds them: divided by the scales and
    clipped if that is one of `FP8_DTYPES`."""
    if dtype not in FP8_DTYPES:
        return key, value
    if scales is not None:
        key, value = key.float() / scales.key[:, None], value.float() / scales.value[:, None]
    limit = torch.finfo(dtype).max
    return key.float().clamp(-limit, limit).to(dtype), value.float().clamp(-limit, limit).to(dtype)


def _check(tensor: torch.Tensor, name: str, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != torch.float32 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous float32 tensor {list(shape)}, got {list(tensor.shape)} {tensor.dtype}"
        )


@dataclass(frozen=True, slots=True)
class Rotary:
    """Which angle each of some tokens is turned by (RoFormer §3.2.2).

    Attributes:
        cos, sin: `[num_positions, rotary_dim / 2]`; dimensions from `rotary_dim` on are left as they are.
        positions: `[num_tokens]` int64, a row of `cos` for each token.
        interleaved: pairs are the dimensions 0 and 1, 2 and 3, …; else 0 and rotary_dim / 2, … (GPT-NeoX).
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    interleaved: bool


def rotate(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """`x [num_tokens, num_heads, dim]` rotated, in float32 (or float64) and rounded once."""
    compute = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (table[rotary.positions][:, None].to(compute) for table in (rotary.cos, rotary.sin))
    half = cos.shape[-1]
    turned = x[..., : 2 * half].to(compute)
    if rotary.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    parts = (first * cos - second * sin, first * sin + second * cos)
    turned = torch.stack(parts, dim=-1).flatten(-2) if rotary.interleaved else torch.cat(parts, dim=-1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], dim=-1)
