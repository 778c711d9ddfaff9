"""The CPU attention provider (`csrc/attention.cpp`)."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from folio.kernels import int8_cache
from folio.kernels.arguments import check_numbers
from folio.kernels.cpu.build import load_function
from folio.kernels.cpu.ops import CPP_DTYPES, address, cache_error, slots_outside
from folio.kernels.provider import AttendLayer, AttentionCall, AttentionProvider, CacheWrite, StoreLayer

_MAX_GROUP_SIZE = 64
_UNSUPPORTED = 1  # `Result` of call.h

_POINTER, _INT64, _INT32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class AttentionFields(ctypes.Structure):
    """`AttentionCall` of call.h, field by field."""

    _fields_ = [
        *((name, _POINTER) for name in ("query", "key", "value", "out", "lse")),
        *((name, _POINTER) for name in ("cu_seqlens_q", "cache_seqlens", "cache_leftpad", "block_table")),
        *((name, _POINTER) for name in ("sinks", "alibi_slopes")),
        *((f"query_{name}_stride", _INT64) for name in ("token", "head")),
        *((f"key_{name}_stride", _INT64) for name in ("block", "token", "head")),
        *((f"value_{name}_stride", _INT64) for name in ("block", "token", "head")),
        *((name, _INT64) for name in ("table_stride", "num_blocks", "block_tokens", "alibi_stride")),
        *((name, _INT32) for name in ("num_tokens", "num_seqs", "num_q_heads", "num_kv_heads", "key_dim", "value_dim")),
        *((name, _INT32) for name in ("window_left", "window_right", "dtype", "num_splits", "int8_cache")),
        ("batch_invariant", _INT32),
        *((name, _FLOAT) for name in ("scale", "softcap")),
    ]


class _WriteCall(ctypes.Structure):
    """`WriteCall` of call.h, field by field."""

    _fields_ = [
        *((name, _POINTER) for name in ("key", "value", "key_cache", "value_cache", "slots")),
        *((f"{side}_{name}_stride", _INT64) for side in ("key", "value") for name in ("token", "head")),
        *((f"key_cache_{name}_stride", _INT64) for name in ("block", "token", "head")),
        *((f"value_cache_{name}_stride", _INT64) for name in ("block", "token", "head")),
        *((name, _INT64) for name in ("num_blocks", "block_tokens")),
        *((name, _INT32) for name in ("num_tokens", "num_kv_heads", "key_dim", "value_dim", "element_bytes")),
        *((name, _INT32) for name in ("dtype", "int8_cache")),
    ]


class CpuProvider(AttentionProvider):
    """Decode and chunked prefill over both views in place; float32, bfloat16, float16, each over caches of its own
    dtype or of int8.

    A call that would read or write outside of its cache, or whose cache is no longer mapped, raises `KernelError` and
    reads and writes nothing.

    Args:
        march: the compiler's name of the processor.
        batch_invariant: single queries are computed like those of prompts.

    Raises:
        KernelError: the library cannot be compiled.
    """

    name = "cpu"

    def __init__(self, march: str = "native", *, batch_invariant: bool = False) -> None:
        self.batch_invariant = batch_invariant
        self._attend, self._write = (
            load_function("attention", name, ctypes.POINTER(call), result=ctypes.c_int, march=march)
            for name, call in (("folio_attention", AttentionFields), ("folio_write", _WriteCall))
        )

    def unsupported(self, call: AttentionCall) -> str | None:
        query, key_cache = call.query, call.key_cache
        if query.device.type != "cpu":
            return f"runs on cpu, not on {query.device.type}"
        if query.dtype not in CPP_DTYPES or key_cache.dtype not in (query.dtype, torch.int8):
            return (
                f"takes float32, bfloat16 and float16, over the same or int8, not {query.dtype} over {key_cache.dtype}"
            )
        if query.shape[1] // key_cache.shape[2] > _MAX_GROUP_SIZE:
            return f"takes at most {_MAX_GROUP_SIZE} query heads per KV head"
        if query.dtype == torch.bfloat16 and query.shape[2] % 2:
            return f"head size {query.shape[2]} is odd"
        return None

    def run_write(self, new: CacheWrite) -> None:
        self.prepare_write(new)(new.key, new.value, new.key_cache, new.value_cache)

    def prepare_write(self, new: CacheWrite) -> StoreLayer:
        key_cache, value_cache, slots = new.key_cache, new.value_cache, new.slots
        quantises = key_cache.dtype == torch.int8 and new.key.dtype in CPP_DTYPES
        same = quantises or key_cache.dtype == new.key.dtype
        if not same or new.key.stride(2) != 1 or new.value.stride(2) != 1:
            return lambda key, value, key_cache, value_cache: self._write_copied(
                CacheWrite(key, value, key_cache, value_cache, slots, new.scales)
            )
        fields = _WriteCall(
            *(None, None, None, None, slots.data_ptr()),
            *new.key.stride()[:2],
            *new.value.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            *key_cache.shape[:2],
            *new.key.shape,
            new.value.shape[2],
            new.key.element_size(),
            CPP_DTYPES.get(new.key.dtype, 0),
            quantises,
        )

        def store(key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
            fields.key, fields.value = key.data_ptr(), value.data_ptr()
            fields.key_cache, fields.value_cache = key_cache.data_ptr(), value_cache.data_ptr()
            if result := self._write(fields):
                raise cache_error(result, key_cache, slots_outside(slots, key_cache))

        return store

    def _write_copied(self, new: CacheWrite) -> None:
        """Write keys and values of another dtype, or with other strides, than the kernel takes."""
        key, value = map(_unit_stride, new.as_cached())
        self.run_write(CacheWrite(key, value, new.key_cache, new.value_cache, new.slots))

    def run_attend(self, call: AttentionCall) -> torch.Tensor:
        return self.prepare_attend(call)(call.query, call.key_cache, call.value_cache)

    def prepare_attend(self, call: AttentionCall) -> AttendLayer:
        return CpuAttend(self, self._attend, call)


class CpuAttend:
    """A prepared `AttentionCall`.

    Attributes:
        fields: the call in C++ without the addresses of queries, results and caches.
    """

    def __init__(self, provider: CpuProvider, run: Any, call: AttentionCall) -> None:
        query, key_cache, value_cache, batch, masking = (
            call.query,
            call.key_cache,
            call.value_cache,
            call.batch,
            call.masking,
        )
        int8 = key_cache.dtype == torch.int8
        if query.dtype not in CPP_DTYPES or not (int8 or key_cache.dtype == query.dtype) or query.device.type != "cpu":
            provider.refuse_unsupported(call)
        query = _unit_stride(query)
        num_tokens, num_heads, key_dim = query.shape
        slopes = masking.alibi_slopes
        self.fields = AttentionFields(
            *map(address, (None, None, None, None, call.lse)),
            *map(address, (batch.cu_seqlens_q, batch.cache_seqlens, batch.cache_leftpad, batch.block_table)),
            *map(address, (masking.sinks, slopes)),
            *query.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            batch.block_table.shape[1],
            *key_cache.shape[:2],
            0 if slopes is None or slopes.ndim == 1 else num_heads,
            num_tokens,
            batch.cache_seqlens.numel(),
            num_heads,
            key_cache.shape[2],
            key_dim,
            int8_cache.head_dim(value_cache),
            masking.window_left,
            masking.window_right,
            CPP_DTYPES[query.dtype],
            call.num_splits,
            int8,
            provider.batch_invariant,
            masking.scale,
            masking.softcap,
        )
        self._shape = num_tokens, num_heads, int8_cache.head_dim(value_cache)
        self._provider, self._run, self._call = provider, run, call

    def __call__(self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> torch.Tensor:
        fields = self.fields
        query = _unit_stride(query)
        out = query.new_empty(self._shape)
        fields.query, fields.out = query.data_ptr(), out.data_ptr()
        fields.key, fields.value = key_cache.data_ptr(), value_cache.data_ptr()
        result = self._run(fields)
        if result == _UNSUPPORTED:
            self._provider.refuse_unsupported(self._call)
            raise AssertionError("the kernel refused a supported call")
        if result:
            raise cache_error(result, key_cache, self.outside())
        return out

    def outside(self) -> str:
        """The numbers of the batch that are outside of the cache."""
        return _outside(self._call)


def _outside(call: AttentionCall) -> str:
    """The numbers of the batch that are outside of the cache."""
    batch, names = call.batch, ("block_table", "block")
    counts, pad, window_left = batch.cu_seqlens_q.diff(), batch.cache_leftpad, call.masking.window_left
    try:
        check_numbers(names, counts, batch.cache_seqlens, 0, pad, window_left, batch.block_table, call.key_cache)
    except ValueError as error:
        return str(error)
    return f"cu_seqlens_q {batch.cu_seqlens_q.tolist()} for {len(call.query)} queries, cache_leftpad {pad}"


def _unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
