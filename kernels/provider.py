"""Attention providers: their interface, its values, and the argument checks that all share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from folio.kernels import int8_cache
from folio.kernels.errors import KernelError

MAX_WINDOW = 2**30
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_SMALL_DTYPES = (*FP8_DTYPES, torch.int8)  # of caches that hold rounded keys and values


@dataclass(frozen=True, slots=True)
class VarlenBatch:
    """The packed queries of one step, and the cached tokens of their sequences.

    Attributes:
        cu_seqlens_q: `[num_seqs + 1]` int32, the index of each sequence's first query; the last entry is their number.
        cache_seqlens: `[num_seqs]` int32, cached tokens of each sequence, the queries' own included.
        block_table: `[num_seqs, width]` int32, the sequence's blocks in the cache; entries past its last block are not
            read. In the region view a sequence is one block, its region: the table has width 1.
        max_seqlen_q, max_seqlen_k: upper bounds of a sequence's queries and cached tokens. Kernels size their grids by
            them, without waiting for the device.
        cache_leftpad: `[num_seqs]` int32, the first visible cached token; `None` for 0 everywhere.
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
        """A copy of the batch with its tensors on the device."""
        tensors = {
            name: tensor.to(device, non_blocking=True)
            for name in ("cu_seqlens_q", "cache_seqlens", "block_table", "cache_leftpad")
            if (tensor := getattr(self, name)) is not None
        }
        return replace(self, **tensors)


@dataclass(frozen=True, slots=True)
class Masking:
    """Scores and visibility: weights are `softmax(softcap(q·k·scale) + alibi)` over the visible tokens.

    The last query of a sequence has the position of its last cached token. A query that sees nothing gives zeros.

    Attributes:
        window_left, window_right: a query at position p sees `p - window_left … p + window_right`; negative: no bound.
            The default is causal attention.
        softcap: above 0, a score s becomes `softcap · tanh(s / softcap)`.
        alibi_slopes: `[num_q_heads]` or `[num_seqs, num_q_heads]` float32, adds `-slope · |p - position|`.
        sinks: `[num_q_heads]` float32, one more score per head in the denominator, without a value.
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
                raise ValueError(f"{name} {getattr(self, name)} is above {MAX_WINDOW}; -1 is no bound")


@dataclass(frozen=True, slots=True)
class CacheScales:
    """Scales `[num_kv_heads]` float32 of a cache of 8-bit floats, which holds `x / scale`."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Arguments of `AttentionProvider.attend`. Raises `ValueError` unless shapes, dtypes and strides fit together."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    batch: VarlenBatch
    masking: Masking
    scales: CacheScales | None = None
    lse: torch.Tensor | None = None
    num_splits: int = 0

    def __post_init__(self) -> None:
        query, key_cache, value_cache, masking = self.query, self.key_cache, self.value_cache, self.masking
        _check_caches(key_cache, value_cache)
        if query.ndim != 3 or query.shape[2] != int8_cache.head_dim(key_cache):
            raise ValueError(
                f"query {list(query.shape)} does not match [tokens, heads, dim] of keys {_describe(key_cache)}"
            )
        if 0 in key_cache.shape[1:] or 0 in value_cache.shape[1:]:
            raise ValueError(f"caches {list(key_cache.shape)} and {list(value_cache.shape)} are empty")
        num_heads, num_seqs = query.shape[1], self.batch.cache_seqlens.numel()
        if num_heads % key_cache.shape[2]:
            raise ValueError(f"{num_heads} query heads cannot share {key_cache.shape[2]} KV heads evenly")
        if key_cache.dtype not in (query.dtype, *_SMALL_DTYPES):
            raise ValueError(f"queries of {query.dtype} cannot read a cache of {key_cache.dtype}")
        if masking.sinks is not None:
            _check_floats(masking.sinks, "sinks", (num_heads,))
        if masking.alibi_slopes is not None:
            shape = (num_heads,) if masking.alibi_slopes.ndim == 1 else (num_seqs, num_heads)
            _check_floats(masking.alibi_slopes, "alibi_slopes", shape)
        if self.lse is not None:
            _check_floats(self.lse, "lse", tuple(query.shape[:2]))

    @property
    def kind(self) -> tuple[object, ...]:
        """All that `AttentionProvider.unsupported` may decide by."""
        query, key_cache, value_cache = self.query, self.key_cache, self.value_cache
        masking, batch = self.masking, self.batch
        tensors = query.device.type, query.dtype, query.shape[1:], key_cache.dtype
        caches = key_cache.shape, key_cache.stride(), value_cache.shape, value_cache.stride()
        sizes = batch.block_table.shape[1] > 1, batch.max_seqlen_q <= 1
        window = masking.window_left >= 0, masking.window_right != 0
        scores = masking.softcap > 0, masking.alibi_slopes is None, masking.sinks is None
        return *tensors, *caches, *sizes, *window, *scores, batch.cache_leftpad is None, self.lse is None


@dataclass(frozen=True, slots=True)
class CacheWrite:
    """Arguments of `AttentionProvider.write`. Raises `ValueError` unless the new tokens fit the cache."""

    key: torch.Tensor
    value: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slots: torch.Tensor
    scales: CacheScales | None = None

    def __post_init__(self) -> None:
        key, value, slots = self.key, self.value, self.slots
        _check_caches(self.key_cache, self.value_cache)
        for name, new, cache in (("key", key, self.key_cache), ("value", value, self.value_cache)):
            dim = cache.shape[3] if new.dtype == cache.dtype else int8_cache.head_dim(cache)
            if new.shape[1:] != (cache.shape[2], dim) or cache.dtype not in (new.dtype, *_SMALL_DTYPES):
                raise ValueError(f"{name} {_describe(new)} does not fit a cache {_describe(cache)}")
        if key.dtype != value.dtype:
            raise ValueError(f"keys of {key.dtype} and values of {value.dtype} differ in dtype")
        if len(key) != len(value) or slots.shape != key.shape[:1] or slots.dtype != torch.int64 or slots.stride(0) > 1:
            raise ValueError(
                f"{len(key)} keys and {len(value)} values need as many contiguous int64 slots, got {_describe(slots)} "
                f"with strides {slots.stride()}"
            )

    def as_cached(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in the cache's dtype: 8-bit floats are divided by the scales and clipped, int8 is rows of
        `int8_cache`."""
        key, value, dtype = self.key, self.value, self.key_cache.dtype
        if dtype == key.dtype:
            return key, value
        if dtype == torch.int8:
            return int8_cache.quantise(key), int8_cache.quantise(value)
        if self.scales is not None:
            key, value = key.float() / self.scales.key[:, None], value.float() / self.scales.value[:, None]
        limit = torch.finfo(dtype).max
        return key.float().clamp(-limit, limit).to(dtype), value.float().clamp(-limit, limit).to(dtype)


# (query, key cache, value cache) → results: `AttentionCall` for another layer.
AttendLayer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# (key, value, key cache, value cache): `CacheWrite` for another layer.
StoreLayer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


class AttentionProvider(ABC):
    """Attention over a cache, and writes into it.

    Caches are `[num_blocks, block_tokens, num_kv_heads, dim]` with any strides but 1 for the last; in the region view a
    block is a sequence's region. Their dtype is that of the queries, or one of `FP8_DTYPES`, or int8: then `dim` is
    that of a row of `int8_cache`.
    """

    name: str

    @abstractmethod
    def unsupported(self, call: AttentionCall) -> str | None:
        """The reason why `run_attend` cannot take this, as a sentence; `None` if it can. Equal for calls of one
        `kind`."""

    @abstractmethod
    def run_write(self, new: CacheWrite) -> None:
        """`write` with checked arguments."""

    @abstractmethod
    def run_attend(self, call: AttentionCall) -> torch.Tensor:
        """`attend` with checked arguments."""

    def prepare_write(self, new: CacheWrite) -> StoreLayer:
        """A function that stores the keys and values of one step's layers, all with the shapes, strides and dtypes of
        `new`, which it does not check again. It keeps the slots."""
        return lambda key, value, key_cache, value_cache: self.run_write(
            CacheWrite(key, value, key_cache, value_cache, new.slots, new.scales)
        )

    def prepare_attend(self, call: AttentionCall) -> AttendLayer:
        """A function that attends for one step's layers, all with the shapes, strides and dtypes of `call`, which it
        does not check again. It keeps the batch, and fills the call's `lse` each time.

        Raises:
            KernelError: `unsupported` gives a reason. The function may raise it, too.
        """
        return lambda query, key_cache, value_cache: self.run_attend(
            replace(call, query=query, key_cache=key_cache, value_cache=value_cache)
        )

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
        *,
        scales: CacheScales | None = None,
    ) -> None:
        """Store `key`, `value` `[num_tokens, num_kv_heads, dim]` at `slots [num_tokens]` int64, each
        `block · block_tokens + position within the block`.

        Raises:
            ValueError: the tensors do not fit; nothing is stored.
        """
        self.run_write(CacheWrite(key, value, key_cache, value_cache, slots, scales))

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
        """Attend with `query [num_tokens, num_q_heads, key_dim]`; returns `[num_tokens, num_q_heads, value_dim]` of its
        dtype. No cached token is read that no query of its sequence sees: it may be a hole.

        Args:
            lse: `[num_tokens, num_q_heads]` float32, contiguous; filled with the logarithm of each softmax's
                denominator, sinks included, and minus infinity where nothing is visible.
            num_splits: the most parts into which a sequence's cache is split between processors; 0: the kernel's
                choice.

        Raises:
            ValueError: the tensors do not fit.
            KernelError: `unsupported` gives a reason.
        """
        return self.run_attend(AttentionCall(query, key_cache, value_cache, batch, masking, scales, lse, num_splits))

    def refuse_unsupported(self, call: AttentionCall) -> None:
        """Raise `KernelError` with the reason if the call is not supported."""
        reason = self.unsupported(call)
        if reason is not None:
            raise KernelError(f"attention provider {self.name} does not support this call: {reason}")


def _check_caches(key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    if key_cache.ndim != 4 or value_cache.ndim != 4:
        shapes = f"{list(key_cache.shape)} and {list(value_cache.shape)}"
        raise ValueError(f"caches must be [blocks, tokens, kv_heads, dim], got {shapes}")
    if key_cache.shape[:3] != value_cache.shape[:3] or key_cache.dtype != value_cache.dtype:
        raise ValueError(f"caches of keys {_describe(key_cache)} and of values {_describe(value_cache)} do not match")
    if key_cache.stride(3) != 1 or value_cache.stride(3) != 1:
        raise ValueError("the caches must have stride 1 along the head")


def _check_floats(tensor: torch.Tensor, name: str, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != torch.float32 or not tensor.is_contiguous():
        raise ValueError(f"{name} must be a contiguous float32 tensor {list(shape)}, got {_describe(tensor)}")


def _describe(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}"
