"""The Triton provider for GPUs: one kernel for single queries and one for several."""

from __future__ import annotations

import torch

from kernels.errors import KernelError
from kernels.provider import FP8_DTYPES, AttentionCall, AttentionProvider, CacheWrite
from kernels.reference import write_by_index

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_DIM = 256
_MAX_GROUP = 64
_FP8_CAPABILITY = (8, 9)
# Larger heads take tiles of up to 132 KiB, more shared memory than these GPUs (by compute capability) have.
_SMALL_DIM, _SMALL_SHARED_MEMORY = 128, {(7, 0), (7, 5), (8, 6), (8, 9), (12, 0), (12, 1)}


class TritonProvider(AttentionProvider):
    """Attention in Triton, for one stream: calls share the buffers of split reductions.

    A kernel is compiled on first use, which takes seconds; Triton caches the result on disk.

    Raises:
        KernelError: Triton is not installed, or there is no CUDA device.
    """

    name = "triton"

    def __init__(self) -> None:
        try:
            import triton
        except ImportError as error:
            raise KernelError(
                f"attention triton needs the package triton, which torch installs on Linux: {error}"
            ) from error
        if not (torch.cuda.is_available() or triton.knobs.runtime.interpret):
            raise KernelError("attention triton needs a CUDA device; TRITON_INTERPRET=1 interprets it on a CPU")
        from kernels.triton.cache import write_cache
        from kernels.triton.decode import SplitDecode
        from kernels.triton.prefill import attend_prefill
        from kernels.triton.tiles import INTERPRETED

        self._write, self._prefill = write_cache, attend_prefill
        self._decode = SplitDecode()
        self._interpreted = INTERPRETED

    def unsupported(self, call: AttentionCall) -> str | None:
        query, key_cache, device_type = call.query, call.key_cache, call.query.device.type
        if device_type != "cuda" and not self._interpreted:
            return f"runs on cuda, not on {device_type}"
        if query.dtype not in _DTYPES:
            return f"queries cannot be {query.dtype}"
        if key_cache.dtype in FP8_DTYPES and not self._has_fp8(device_type):
            return "8-bit floats need a GPU of compute capability 8.9"
        dims = query.shape[2], call.value_cache.shape[3]
        if max(dims) > _MAX_DIM:
            return f"heads have {dims[0]} and {dims[1]} dimensions, more than {_MAX_DIM}"
        if max(dims) > _SMALL_DIM and not self._has_large_tiles(device_type):
            return f"heads of more than {_SMALL_DIM} dimensions need more shared memory than this GPU has"
        group_size = query.shape[1] // key_cache.shape[2]
        if group_size > _MAX_GROUP:
            return f"{group_size} query heads share a KV head, more than {_MAX_GROUP}"
        return None

    def _has_fp8(self, device_type: str) -> bool:
        return self._interpreted or (device_type == "cuda" and torch.cuda.get_device_capability() >= _FP8_CAPABILITY)

    def _has_large_tiles(self, device_type: str) -> bool:
        return self._interpreted or (
            device_type == "cuda" and torch.cuda.get_device_capability() not in _SMALL_SHARED_MEMORY
        )

    def run_write(self, new: CacheWrite) -> None:
        if new.key_cache.dtype in FP8_DTYPES and not self._has_fp8(new.key.device.type):
            write_by_index(new)
        else:
            self._write(new)

    def run_attend(self, call: AttentionCall) -> torch.Tensor:
        self.refuse_unsupported(call)
        out = call.query.new_empty(*call.query.shape[:2], call.value_cache.shape[3])
        num_seqs = call.batch.cache_seqlens.numel()
        if not out.numel() or not num_seqs:
            return out
        # max_seqlen_q is an upper bound; of a single sequence the number of queries is known.
        max_seqlen_q = len(call.query) if num_seqs == 1 else call.batch.max_seqlen_q
        several = max_seqlen_q > 1
        single = not several or num_seqs > 1
        if several:
            self._prefill(call, out, skip_single=single)
        if single:
            self._decode.attend(call, out)
        return out
