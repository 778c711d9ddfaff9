"""The CPU attention provider, over `csrc/attention.cpp`."""

from __future__ import annotations

import ctypes

import torch

from kernels.build import CPP_DTYPES, load_library
from kernels.provider import KernelError, Masking, VarlenBatch, check_shapes, check_write

_MAX_GROUP_SIZE = 64

_POINTER, _INT64, _INT32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class _AttentionCall(ctypes.Structure):
    """`AttentionCall` of attention.cpp, field by field."""

    _fields_ = [
        *((name, _POINTER) for name in ("query", "key", "value", "out")),
        *((name, _POINTER) for name in ("cu_seqlens_q", "cache_seqlens", "groups", "sinks")),
        *((f"query_{name}_stride", _INT64) for name in ("token", "head")),
        *((f"key_{name}_stride", _INT64) for name in ("group", "token", "head")),
        *((f"value_{name}_stride", _INT64) for name in ("group", "token", "head")),
        *((name, _INT64) for name in ("table_stride", "group_tokens")),
        *((name, _INT32) for name in ("num_seqs", "num_q_heads", "num_kv_heads", "key_dim", "value_dim")),
        *((name, _INT32) for name in ("window_left", "dtype")),
        *((name, _FLOAT) for name in ("scale", "softcap")),
    ]


class _WriteCall(ctypes.Structure):
    """`WriteCall` of attention.cpp, field by field."""

    _fields_ = [
        *((name, _POINTER) for name in ("key", "value", "key_cache", "value_cache", "slots")),
        *((f"{side}_{name}_stride", _INT64) for side in ("key", "value") for name in ("token", "head")),
        *(
            (f"{side}_{name}_stride", _INT64)
            for side in ("key_cache", "value_cache")
            for name in ("group", "token", "head")
        ),
        ("group_tokens", _INT64),
        *((name, _INT32) for name in ("num_tokens", "num_kv_heads", "key_dim", "value_dim", "element_bytes")),
    ]


class CpuProvider:
    """Reads region views and block tables in place, decode and chunked prefill; float32, bfloat16, float16.

    Raises:
        KernelError: there is no compiler, or it failed.
    """

    name = "cpu"

    def __init__(self) -> None:
        self._library = load_library("attention")
        self._library.folio_attention.argtypes = [ctypes.POINTER(_AttentionCall)]
        self._library.folio_attention.restype = ctypes.c_int
        self._library.folio_write.argtypes = [ctypes.POINTER(_WriteCall)]
        self._library.folio_write.restype = None

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        check_write(key, value, key_cache, value_cache, slots)
        key, value = _unit_stride(key), _unit_stride(value)
        call = _WriteCall(
            key.data_ptr(),
            value.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            slots.data_ptr(),
            *key.stride()[:2],
            *value.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            key_cache.shape[1],
            *key.shape,
            value.shape[2],
            key.element_size(),
        )
        self._library.folio_write(call)

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: VarlenBatch,
        masking: Masking,
    ) -> torch.Tensor:
        check_shapes(query, key_cache, value_cache)
        query = _unit_stride(query)
        num_tokens, num_heads, key_dim = query.shape
        if query.dtype not in CPP_DTYPES or num_heads // key_cache.shape[2] > _MAX_GROUP_SIZE:
            raise KernelError(
                f"the cpu kernel takes float32, bfloat16, float16 and at most {_MAX_GROUP_SIZE} query heads a KV head, "
                f"got {query.dtype} and {num_heads} over {key_cache.shape[2]}"
            )
        out = query.new_empty(num_tokens, num_heads, value_cache.shape[3])
        call = _AttentionCall(
            query.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            out.data_ptr(),
            batch.cu_seqlens_q.data_ptr(),
            batch.cache_seqlens.data_ptr(),
            batch.groups.data_ptr(),
            None if masking.sinks is None else masking.sinks.data_ptr(),
            *query.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            batch.groups.shape[1],
            key_cache.shape[1],
            batch.cache_seqlens.numel(),
            num_heads,
            key_cache.shape[2],
            key_dim,
            value_cache.shape[3],
            masking.window_left,
            CPP_DTYPES[query.dtype],
            masking.scale,
            masking.softcap,
        )
        if self._library.folio_attention(call):
            raise KernelError(f"the cpu kernel does not support head size {key_dim} in {query.dtype}: it must be even")
        return out


def _unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
