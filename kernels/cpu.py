"""The CPU provider: `csrc/attention.cpp`, compiled for this machine's processor when it is first used.

The library needs no torch headers and shares torch's OpenMP runtime (torch is imported before it is loaded), so
`torch.set_num_threads` governs it.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from kernels.provider import KernelError, Masking, VarlenBatch, check_shapes

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).parent / "csrc" / "attention.cpp"
# No -ffast-math: linked into a library it sets flush-to-zero for the whole process.
_FLAGS = ["-std=c++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-ffp-contract=fast", "-shared", "-fPIC"]
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
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
        self._library = ctypes.CDLL(str(build_library()))
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
        if query.dtype not in _DTYPES or num_heads // key_cache.shape[2] > _MAX_GROUP_SIZE:
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
            _DTYPES[query.dtype],
            masking.scale,
            masking.softcap,
        )
        if self._library.folio_attention(call):
            raise KernelError(f"the cpu kernel does not support head size {key_dim} in {query.dtype}: it must be even")
        return out


def _unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@cache
def build_library() -> Path:
    """Compile the kernel unless this source, compiler and processor have met before; returns the library's path."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise KernelError("no C++ compiler (g++) found; install one, for example `apt-get install g++`")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    key = hashlib.sha256()
    for part in (_SOURCE.read_text(), version, " ".join(_FLAGS), _cpu_flags()):
        key.update(part.encode())
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "folio"
    library = folder / f"attention-{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    logger.info("compiling the CPU attention kernel into %s", library)
    with tempfile.TemporaryDirectory(dir=folder) as build:
        built = Path(build) / library.name
        result = subprocess.run([compiler, *_FLAGS, str(_SOURCE), "-o", str(built)], capture_output=True, text=True)
        if result.returncode:
            raise KernelError(f"{compiler} failed on {_SOURCE.name}:\n{result.stderr[-2000:]}")
        built.replace(library)  # atomic: another process may be building the same one
    return library


def _cpu_flags() -> str:
    """What `-march=native` depends on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
