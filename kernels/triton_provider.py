"""The provider for GPUs: Triton kernels, one for single queries and one for several."""

from __future__ import annotations

import torch

from kernels.provider import (
    FP8_DTYPES,
    CacheScales,
    KernelError,
    Masking,
    Problem,
    VarlenBatch,
    check_attend,
    check_write,
    problem_of,
)
from kernels.rotary import Rotary

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_DIM = 256
_MAX_GROUP = 64
_FP8_CAPABILITY = (8, 9)


class TritonProvider:
    """Attention by Triton. Calls share the space where splits meet, so one provider serves one stream.

    A kernel is compiled when first needed, which takes seconds; Triton keeps the result on disk.

    Raises:
        KernelError: Triton is not installed, or there is no CUDA device.
    """

    name = "triton"

    def __init__(self) -> None:
        try:
            import triton
        except ImportError as error:
            raise KernelError(f"attention triton needs the package triton, which comes with torch: {error}") from error
        if not (torch.cuda.is_available() or triton.knobs.runtime.interpret):
            raise KernelError("attention triton needs a CUDA device, or TRITON_INTERPRET=1 to be tried without one")
        from kernels import triton_cache, triton_decode, triton_prefill

        self._write = triton_cache.write_cache
        self._decode = triton_decode.SplitDecode()
        self._prefill = triton_prefill.attend_prefill
        self._interpreted = triton_decode.INTERPRETED

    def unsupported(self, problem: Problem) -> str | None:
        if problem.device_type != "cuda" and not self._interpreted:
            return f"Triton does not run on {problem.device_type}"
        if problem.dtype not in _DTYPES:
            return f"queries of {problem.dtype}"
        if problem.cache_dtype in FP8_DTYPES:
            if problem.device_type == "cuda" and not self._interpreted:
                capability = torch.cuda.get_device_capability()
                if capability < _FP8_CAPABILITY:
                    return f"8-bit floats need compute capability 8.9, this GPU has {capability[0]}.{capability[1]}"
        elif problem.cache_dtype != problem.dtype:
            return f"a cache of {problem.cache_dtype} for queries of {problem.dtype}"
        if max(problem.key_dim, problem.value_dim) > _MAX_DIM:
            return f"heads of {problem.key_dim} and {problem.value_dim} dimensions, more than {_MAX_DIM}"
        group_size = problem.num_q_heads // problem.num_kv_heads
        if group_size > _MAX_GROUP:
            return f"{group_size} query heads share a KV head, more than {_MAX_GROUP}"
        return None

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
        check_write(key, value, key_cache, value_cache, slots)
        self._write(key, value, key_cache, value_cache, slots, rotary, scales)

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
        check_attend(query, key_cache, value_cache, batch, masking, lse)
        reason = self.unsupported(problem_of(query, key_cache, value_cache, batch, masking, lse))
        if reason is not None:
            raise KernelError(f"attention triton does not support {reason}")
        out = query.new_empty(*query.shape[:2], value_cache.shape[3])
        num_seqs = batch.cache_seqlens.numel()
        if not out.numel() or not num_seqs:
            return out
        # The maximum is a bound, but a lone sequence has all queries.
        max_seqlen_q = query.shape[0] if num_seqs == 1 else batch.max_seqlen_q
        several = max_seqlen_q > 1
        single = not several or num_seqs > 1
        if several:
            self._prefill(query, key_cache, value_cache, out, batch, masking, scales, lse, skip_single=single)
        if single:
            self._decode.attend(query, key_cache, value_cache, out, batch, masking, scales, lse, num_splits)
        return out
