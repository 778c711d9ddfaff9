"""torch's flash attention (FA2) over ragged batches.

Properties of FA2 that this provider works around (flash-attention v2.8.3, csrc/flash_attn; torch 2.11 to 2.13 compile
the same kernels):

- Keys and values are read in tiles of 64 to 256 tokens. Loads stop at the sequence's length (`Is_even_MN` is false
  whenever lengths are given, and value tiles are zero-filled past it). Where a window begins within a tile, the whole
  tile is read and the tokens before the window get weight 0: NaN if they are NaN, a fault if they are not mapped. So
  reading must begin with the window, which takes a view without blocks.
- Without a block table, sequence i begins at token `cu_seq_k[i]` of one flat run of tokens and has `seqused_k[i]`
  (`BlockInfo`). A cache of regions is such a run if the stride between regions is a multiple of the stride between
  tokens; nothing is copied and no table is needed.
- A block table needs blocks of a multiple of 256 tokens.
- Split reduction of several queries writes to wrong rows (`o_batch_stride` is not set; flash-attention #2550). Splits
  are used only with one query per sequence and grouped heads, where FA2 folds heads into rows.
- That folding needs one query of every sequence.
- With a block table, a sequence with queries and nothing cached writes its logarithm into other rows, or past their
  end (`row_offset_lseaccum` of the early exit). `_without_empty` keeps such sequences away from the kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import varlen as torch_varlen

from folio.kernels.errors import KernelError
from folio.kernels.provider import AttentionCall, Masking, VarlenBatch
from folio.kernels.reference import ReferenceProvider

MAX_SPLITS = 128
BLOCK_MULTIPLE = 256
_VARLEN_NEEDS = frozenset({"scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"})
_OPERATOR_NEEDS = frozenset({"scale", "window_size_left", "window_size_right", "seqused_k"})
_CONFIRMED = 2e-2  # largest difference of float16 results and logarithms, of order 1, from the reference's


class TorchFlashProvider(ReferenceProvider):
    """torch's flash attention: `varlen_attn` if it reads caches (from torch 2.12), else the operator beneath it.

    The choice is made by signature and schema. torch 2.11's operator takes lengths, windows and the scale, but no block
    table. It runs the same `mha_varlen_fwd`, which reads the number of KV heads from the keys (ATen's
    transformers/cuda/flash_attn/flash_api.cpp). The operator is private, so a small batch is compared with the
    reference before it is used.

    Batches with leftpads or windows are read in place in the region view only. `varlen_attn` has no softcap, ALiBi or
    sinks. torch calls FA2 unless `activate_flash_attention_impl` chose another implementation.

    Args:
        varlen, operator: replace `varlen_attn` and `aten::_flash_attention_forward` in tests.
        device_type: of all tensors.

    Raises:
        KernelError: there is no CUDA device, or neither function can read a cache.
    """

    name = "torch-flash"

    def __init__(
        self, varlen: Callable[..., Any] | None = None, operator: Any = None, device_type: str = "cuda"
    ) -> None:
        self._device_type = device_type
        if varlen is None:
            if not torch.cuda.is_available():
                raise KernelError(f"attention {self.name} needs a CUDA device, and torch {torch.__version__} sees none")
            varlen = torch_varlen.varlen_attn
        missing = _VARLEN_NEEDS - inspect.signature(varlen).parameters.keys()
        self._varlen, self._operator = None if missing else varlen, operator
        if self._varlen is not None:
            return
        if operator is None:
            self._operator = torch.ops.aten._flash_attention_forward.default
        taken = frozenset(argument.name for argument in self._operator._schema.arguments)
        lacking = _OPERATOR_NEEDS - taken
        if lacking:
            raise KernelError(
                f"{self.name}: torch {torch.__version__}'s varlen_attn has no {', '.join(sorted(missing))}, and "
                f"_flash_attention_forward no {', '.join(sorted(lacking))}; install torch 2.11 or later"
            )
        self._confirm()

    def unsupported(self, call: AttentionCall) -> str | None:
        masking = call.masking
        scores = masking.softcap > 0, masking.alibi_slopes is not None, masking.sinks is not None
        missing = [name for name, used in zip(("softcap", "alibi", "sinks"), scores, strict=True) if used]
        if missing:
            return f"varlen_attn has no {', '.join(missing)}"
        return self._unsupported_tensors(call) or self._unsupported_view(call)

    def _unsupported_tensors(self, call: AttentionCall) -> str | None:
        query, key_dim, value_dim = call.query, call.query.shape[2], call.value_cache.shape[3]
        if query.device.type != self._device_type:
            return f"runs on {self._device_type}, not on {query.device.type}"
        if query.dtype not in (torch.float16, torch.bfloat16):
            return f"computes in float16 and bfloat16, not in {query.dtype}"
        if call.key_cache.dtype != query.dtype:
            return f"does not read a cache of {call.key_cache.dtype}"
        if key_dim != value_dim:
            return f"keys have {key_dim} dimensions and values {value_dim}; they must be equal"
        if key_dim > 256 or key_dim % 8:
            return f"heads have {key_dim} dimensions; multiples of 8 up to 256 are possible"
        return None

    def _unsupported_view(self, call: AttentionCall) -> str | None:
        block_tokens = call.key_cache.shape[1]
        if call.batch.block_table.shape[1] <= 1:
            return _unsuitable_strides(call, flat=True)
        if self._varlen is None:
            return f"torch {torch.__version__}'s flash attention has no block_table; use the region view"
        if block_tokens % BLOCK_MULTIPLE:
            return f"blocks have {block_tokens} tokens; FA2 takes multiples of {BLOCK_MULTIPLE}"
        if call.masking.window_left >= 0:
            return "with a block table FA2 reads tokens before a window; use the region view"
        if call.batch.cache_leftpad is not None:
            return "varlen_attn has no leftpad with a block table; use the region view"
        return _unsuitable_strides(call, flat=False)

    def run_attend(self, call: AttentionCall) -> torch.Tensor:
        self.refuse_unsupported(call)
        query, batch, lse = call.query, call.batch, call.lse
        num_tokens, num_seqs = len(query), batch.cache_seqlens.numel()
        if not num_tokens or batch.max_seqlen_k <= 0:
            if lse is not None:
                lse.fill_(-torch.inf)
            return torch.zeros_like(query)
        single = batch.max_seqlen_q <= 1 and num_tokens == num_seqs
        hidden = None
        if batch.block_table.shape[1] > 1 and (not single or lse is not None):
            batch, hidden = _without_empty(batch, num_tokens)
        out, found = self._run(call, batch, single=single)
        if hidden is not None:
            out.masked_fill_(hidden[:, None, None], 0.0)
        if lse is not None and found is not None:
            lse.copy_(found.T)
            lse.masked_fill_(lse == torch.inf, -torch.inf)  # FA2's value where nothing is visible
            if hidden is not None:
                lse.masked_fill_(hidden[:, None], -torch.inf)
        return out

    def _run(
        self, call: AttentionCall, batch: VarlenBatch, *, single: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output, and logarithms `[num_q_heads, num_tokens]`; `single`: every sequence has one query."""
        query = call.query if call.query.stride(2) == 1 else call.query.contiguous()
        key, value, masking = call.key_cache, call.value_cache, call.masking
        starts, seqused_k = batch.cu_seqlens_q, batch.cache_seqlens  # with a block table, starts are not read
        paged = batch.block_table.shape[1] > 1
        if not paged:
            (key, region_stride), (value, _) = _flat_tokens(key), _flat_tokens(value)
            starts = batch.block_table[:, 0] * region_stride
            begin = _span_begin(batch, masking)
            if begin is not None:
                starts, seqused_k = starts + begin, seqused_k - begin
            starts = functional.pad(starts, (0, 1))
        # Tokens before a window are left out of the span, and a last token's window has no right side.
        one_query = batch.max_seqlen_q <= 1
        window = (-1, -1) if one_query else (max(masking.window_left, -1), max(masking.window_right, -1))
        max_seqlen_q = 1 if single else max(batch.max_seqlen_q, 2)
        arguments = (query, key, value, batch.cu_seqlens_q, starts, max_seqlen_q, batch.max_seqlen_k)
        if self._varlen is None:
            out, found_lse, *_ = self._operator(
                *arguments,
                0.0,  # dropout
                window == (-1, 0),  # is_causal
                False,  # return_debug_mask
                scale=masking.scale,
                window_size_left=window[0],
                window_size_right=window[1],
                seqused_k=seqused_k,
            )
            return out, found_lse
        grouped = query.shape[1] != call.key_cache.shape[2]
        splits = 1 if paged else None
        if grouped and single:
            splits = min(call.num_splits, MAX_SPLITS) or None
        found: Any = self._varlen(
            *arguments,
            return_aux=torch_varlen.AuxRequest(lse=True) if call.lse is not None else None,
            scale=masking.scale,
            window_size=window,
            enable_gqa=grouped,
            seqused_k=seqused_k,
            block_table=batch.block_table if paged else None,
            num_splits=splits,
        )
        return (found, None) if call.lse is None else (found[0], found[1])

    def _confirm(self) -> None:
        """Raise `KernelError` unless the operator agrees with the reference: grouped heads, regions out of order and
        partly filled, a window; with one query of every sequence, and with several."""
        device = torch.device(self._device_type)
        caches = torch.arange(2 * 2 * 16 * 2 * 32, device=device).sin().view(2, 2, 16, 2, 32).half()
        lengths, table = torch.tensor([[9, 5], [1, 0]], dtype=torch.int32, device=device)
        masking = Masking(0.2, window_left=2)
        for num_queries in (1, 3):
            starts = torch.tensor([0, num_queries, num_queries + 1], dtype=torch.int32, device=device)
            query = torch.arange((num_queries + 1) * 4 * 32, device=device).cos().view(-1, 4, 32).half()
            batch = VarlenBatch(starts, lengths, table[:, None], num_queries, 9)
            lse, expected_lse = torch.empty(2, num_queries + 1, 4, device=device)
            expected = ReferenceProvider().attend(query, caches[0], caches[1], batch, masking, lse=expected_lse)
            try:
                out = self.attend(query, caches[0], caches[1], batch, masking, lse=lse)
            except RuntimeError as error:
                raise KernelError(f"{self.name}: torch {torch.__version__}'s operator fails: {error}") from error
            off = torch.maximum((out - expected).abs().max(), (lse - expected_lse).abs().max()).item()
            if not off <= _CONFIRMED:  # NaN fails too
                raise KernelError(f"{self.name}: torch {torch.__version__}'s operator is off by {off:.2e}")


def _unsuitable_strides(call: AttentionCall, *, flat: bool) -> str | None:
    """The reason why the caches' strides break 16-byte loads or, if `flat`, why they cannot be read as one run of
    tokens; `None` if neither."""
    sizes = num_blocks, block_tokens, _ = call.key_cache.shape[:3]
    both = call.key_cache.stride()[:3], call.value_cache.stride()[:3]
    for strides in both:
        if any(stride % 8 for stride, size in zip(strides, sizes, strict=True) if size > 1):
            return f"all strides of a cache but the last must be multiples of 8 elements, not {strides}"
    if flat:
        apart = [_tokens_apart(num_blocks, block_tokens, strides) for strides in both]
        if None in apart or apart[0] != apart[1]:
            return f"strides {both[0]} and {both[1]} do not make one run of tokens"
        if num_blocks * (apart[0] or 0) >= 2**31:
            return f"{num_blocks} blocks, {apart[0]} tokens apart, exceed the range of an int32"
    return None


def _tokens_apart(num_blocks: int, block_tokens: int, strides: tuple[int, ...]) -> int | None:
    """Tokens from one block's first to the next block's first; `None` if that is not a whole number."""
    block_stride, token_stride = strides[:2]
    if num_blocks == 1:
        return block_tokens
    if block_tokens == 1:
        return 1
    return None if block_stride % token_stride else block_stride // token_stride


def _span_begin(batch: VarlenBatch, masking: Masking) -> torch.Tensor | None:
    """`[num_seqs]` int32, each sequence's first visible cached token, at most its length; `None` for 0 everywhere."""
    begin = batch.cache_leftpad
    if masking.window_left >= 0:
        num_queries = batch.cu_seqlens_q[1:] - batch.cu_seqlens_q[:-1]
        oldest = (batch.cache_seqlens - num_queries - masking.window_left).clamp_(min=0)
        begin = oldest if begin is None else torch.maximum(begin, oldest)
    return None if begin is None else torch.minimum(begin, batch.cache_seqlens)


def _flat_tokens(cache: torch.Tensor) -> tuple[torch.Tensor, int]:
    """View a cache `[num_blocks, block_tokens, num_kv_heads, dim]` as `[num_tokens, num_kv_heads, dim]`; also returns
    the tokens from one block to the next. `_unsuitable_strides` must have accepted the strides."""
    num_blocks, block_tokens, num_kv_heads, dim = cache.shape
    block_stride, token_stride, head_stride, _ = cache.stride()
    apart = _tokens_apart(num_blocks, block_tokens, cache.stride())
    assert apart is not None
    shape = ((num_blocks - 1) * apart + block_tokens, num_kv_heads, dim)
    return cache.as_strided(shape, (block_stride if block_tokens == 1 else token_stride, head_stride, 1)), apart


def _without_empty(batch: VarlenBatch, num_tokens: int) -> tuple[VarlenBatch, torch.Tensor]:
    """Give every sequence without cached tokens the first token of the longest one; also returns `[num_tokens]` bool,
    the rows whose results must be discarded."""
    empty = batch.cache_seqlens <= 0
    longest = batch.cache_seqlens.argmax()
    filled = replace(
        batch,
        cache_seqlens=torch.where(empty, batch.cache_seqlens.max().clamp(0, 1), batch.cache_seqlens),
        block_table=torch.where(empty[:, None], batch.block_table[longest], batch.block_table),
    )
    num_queries = batch.cu_seqlens_q[1:] - batch.cu_seqlens_q[:-1]
    return filled, torch.repeat_interleave(empty, num_queries, output_size=num_tokens)
