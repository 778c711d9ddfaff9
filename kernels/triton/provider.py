"""The Triton provider for GPUs: one kernel for single queries and one for several."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from folio.kernels.errors import KernelError
from folio.kernels.provider import FP8_DTYPES, AttendLayer, AttentionCall, AttentionProvider, CacheWrite, StoreLayer
from folio.kernels.reference import write_by_index

if TYPE_CHECKING:
    from folio.kernels.triton.tiles import AttendInto

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_DIM = 256
_MAX_GROUP = 64
_FP8_CAPABILITY = (8, 9)
# Larger heads take tiles of up to 132 KiB, more shared memory than these GPUs (by compute capability) have.
_SMALL_DIM, _SMALL_SHARED_MEMORY = 128, {(7, 0), (7, 5), (8, 6), (8, 9), (12, 0), (12, 1)}


class TritonProvider(AttentionProvider):
    """Attention in Triton, for one stream: calls share the buffers of split reductions.

    A kernel is compiled on first use, which takes seconds; Triton caches the result on disk.

    Args:
        batch_invariant: single queries are computed like those of prompts, with tiles of one size.

    Raises:
        KernelError: Triton is not installed, or there is no CUDA device.
    """

    name = "triton"

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self._batch_invariant = batch_invariant
        try:
            import triton
        except ImportError as error:
            raise KernelError(
                f"attention triton needs the package triton, which torch installs on Linux: {error}"
            ) from error
        if not (torch.cuda.is_available() or triton.knobs.runtime.interpret):
            raise KernelError("attention triton needs a CUDA device; TRITON_INTERPRET=1 interprets it on a CPU")
        from folio.kernels.triton.cache import prepare_write
        from folio.kernels.triton.decode import SplitDecode
        from folio.kernels.triton.prefill import prepare_prefill
        from folio.kernels.triton.tiles import INTERPRETED

        self._prepare_write, self._prepare_prefill = prepare_write, prepare_prefill
        self._decode = SplitDecode()
        self._interpreted = INTERPRETED

    def unsupported(self, call: AttentionCall) -> str | None:
        query, key_cache, device_type = call.query, call.key_cache, call.query.device.type
        if device_type != "cuda" and not self._interpreted:
            return f"runs on cuda, not on {device_type}"
        if query.dtype not in _DTYPES:
            return f"queries cannot be {query.dtype}"
        if key_cache.dtype == torch.int8:
            return "does not read a cache of int8"
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
        self.prepare_write(new)(new.key, new.value, new.key_cache, new.value_cache)

    def prepare_write(self, new: CacheWrite) -> StoreLayer:
        if new.key_cache.dtype in FP8_DTYPES and not self._has_fp8(new.key.device.type):
            return lambda key, value, key_cache, value_cache: write_by_index(
                CacheWrite(key, value, key_cache, value_cache, new.slots, new.scales)
            )
        return self._prepare_write(new)

    def run_attend(self, call: AttentionCall) -> torch.Tensor:
        return self.prepare_attend(call)(call.query, call.key_cache, call.value_cache)

    def prepare_attend(self, call: AttentionCall) -> AttendLayer:
        self.refuse_unsupported(call)
        query, num_seqs = call.query, call.batch.cache_seqlens.numel()
        shape = *query.shape[:2], call.value_cache.shape[3]
        if not query.numel() or not num_seqs:
            return lambda query, *_: query.new_empty(shape)
        # max_seqlen_q is an upper bound; of a single sequence the number of queries is known.
        max_seqlen_q = len(query) if num_seqs == 1 else call.batch.max_seqlen_q
        invariant = self._batch_invariant
        several = max_seqlen_q > 1 or invariant
        single = not invariant and (not several or num_seqs > 1)
        launches: list[AttendInto] = []
        if several:
            launches.append(self._prepare_prefill(call, skip_single=single, batch_invariant=invariant))
        if single:
            launches.append(self._decode.prepare(call))

        def attend(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> torch.Tensor:
            out = query.new_empty(shape)
            for launch in launches:
                launch(query, key_cache, value_cache, out)
            return out

        return attend
