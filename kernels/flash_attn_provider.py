"""The flash-attn package, version 2.8: FA2 as its authors release it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.torch_version import TorchVersion as Version

from kernels.provider import KernelError, Masking, Problem, VarlenBatch
from kernels.torch_flash import FlashProvider, flash_arguments, require_cuda, span_begin


class FlashAttnProvider(FlashProvider):
    """`flash_attn_with_kvcache` where every sequence has one query, `_flash_attn_varlen_forward` elsewhere.

    The public `flash_attn_varlen_func` passes no `seqused_k` on, and without it regions cannot be read in place; the
    operator that it wraps takes one. See `kernels.torch_flash` for what FA2 reads. Releases after 2.8.3 check the block
    table's width in `flash_attn_with_kvcache` by waiting for the device (flash-attention #2711).

    Args:
        with_kvcache, varlen: stand in for the two functions.
        device_type: where tensors must be.

    Raises:
        KernelError: the package is missing or too old, or there is no CUDA device.
    """

    name = "flash-attn"

    def __init__(
        self,
        with_kvcache: Callable[..., Any] | None = None,
        varlen: Callable[..., Any] | None = None,
        device_type: str = "cuda",
    ) -> None:
        super().__init__(device_type)
        if with_kvcache is None or varlen is None:
            require_cuda(self.name)
            interface = _load(self.name)
            with_kvcache = with_kvcache or interface.flash_attn_with_kvcache
            varlen = varlen or interface._flash_attn_varlen_forward
        self._with_kvcache = with_kvcache
        self._varlen = varlen

    def unsupported(self, problem: Problem) -> str | None:
        reason = super().unsupported(problem)
        if reason is None and not problem.decode and {"alibi", "lse"} <= problem.extras:
            # mask.h adds slope · position where the mask is causal: the softmax stays, its denominator does not.
            reason = "with ALiBi and a causal mask FA2's logarithm of the denominator is shifted"
        return reason

    def _run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: VarlenBatch,
        masking: Masking,
        *,
        single: bool,
        num_splits: int,
        with_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if single:
            return self._decode(query, key_cache, value_cache, batch, masking, num_splits, with_lse)
        arguments = flash_arguments(key_cache, value_cache, batch, masking, single)
        out, found, _, _ = self._varlen(
            query,
            arguments.key,
            arguments.value,
            batch.cu_seqlens_q,
            arguments.starts,
            arguments.max_seqlen_q,
            batch.max_seqlen_k,
            0.0,  # dropout
            masking.scale,
            causal=arguments.window == (-1, 0),
            window_size_left=arguments.window[0],
            window_size_right=arguments.window[1],
            softcap=masking.softcap,
            alibi_slopes=masking.alibi_slopes,
            block_table=arguments.block_table,
            seqused_k=arguments.lengths,
        )
        return out, found

    def _decode(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: VarlenBatch,
        masking: Masking,
        num_splits: int,
        with_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if batch.block_table.shape[1] > 1:
            where: dict[str, Any] = {"block_table": batch.block_table}
        else:
            # The kernel shares out a region's length among the splits; most of it may be unused.
            key_cache, value_cache = (cache[:, : batch.max_seqlen_k] for cache in (key_cache, value_cache))
            where = {
                "cache_batch_idx": batch.block_table[:, 0].contiguous(),
                "cache_leftpad": span_begin(batch, masking),
            }
        found = self._with_kvcache(
            query[:, None],
            key_cache,
            value_cache,
            cache_seqlens=batch.cache_seqlens,
            softmax_scale=masking.scale,
            softcap=masking.softcap,
            alibi_slopes=masking.alibi_slopes,
            num_splits=num_splits,
            return_softmax_lse=with_lse,
            **where,
        )
        if not with_lse:
            return found[:, 0], None
        out, logarithms = found
        return out[:, 0], logarithms[:, :, 0].T


def _load(name: str) -> Any:
    try:
        package = importlib.import_module("flash_attn")
        interface = importlib.import_module("flash_attn.flash_attn_interface")
    except ImportError as error:
        raise KernelError(f"attention {name} needs the package flash-attn 2.8: {error}") from error
    version = str(package.__version__)
    if Version(version) < Version("2.8"):
        raise KernelError(f"attention {name} needs the package flash-attn 2.8, not {version}")
    return interface
