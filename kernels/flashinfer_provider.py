"""The package flashinfer: kernels that are planned on the host and then run for every layer of a step."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

import torch

from kernels.provider import (
    CacheScales,
    KernelError,
    Masking,
    Problem,
    VarlenBatch,
    check_attend,
    problem_of,
    refuse_unsupported,
)
from kernels.reference import GatherProvider
from kernels.torch_flash import flat_tokens, half_precision_only, nothing_visible, require_cuda, unsuitable_strides

HEAD_DIMS = (64, 128, 256)
# At most so many tokens make a piece of a region. The planner splits a sequence between its pieces only, so that a
# region in one piece would keep a single processor busy.
REGION_PIECE_TOKENS = 64
# What flashinfer's documentation recommends for the partial results of split sequences.
WORKSPACE_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class _Key:
    """What a wrapper is planned for besides the batch. All layers of one kind share a plan."""

    device: torch.device
    dtype: torch.dtype
    single: bool
    num_q_heads: int
    num_kv_heads: int
    dim: int
    block_tokens: int
    piece_tokens: int
    block_stride_tokens: int
    window_left: int
    softcap: float
    scale: float
    split: bool


@dataclass(slots=True)
class _Plan:
    """A wrapper, the batch that it was planned for last, and `[num_tokens]` bool, which rows see nothing, if any do."""

    wrapper: Any
    batch: VarlenBatch | None = None
    hidden: torch.Tensor | None = None


class FlashInferProvider(GatherProvider):
    """`BatchDecodeWithPagedKVCacheWrapper` where every sequence has one query, `BatchPrefillWithPagedKVCacheWrapper`
    elsewhere; caches in place, in NHD layout.

    flashinfer calls a unit of its index lists a page; here it is a *piece*: a block, or an equal part of one. A piece
    is read as far as the sequence's length, and from its first token. A sequence with a window or a leftpad is
    therefore read in pieces of one token, from the first that a query sees: exact in both views, at four bytes of
    index for each of those tokens.

    `plan` needs lengths on the host: the first layer that meets a batch waits for the device. Later layers of the same
    kind find the plan by the batch object's identity, so a batch's tensors must not change once it was attended, and a
    CUDA graph cannot be replayed with other lengths. `num_splits` 1 forbids splitting; other numbers are the planner's
    choice.

    Args:
        module: stands in for the package.
        device_type: where tensors must be.
        workspace_bytes: of partial results, allocated once on each device at the first call.

    Raises:
        KernelError: the package is missing, or there is no CUDA device.
    """

    name = "flashinfer"

    def __init__(self, module: Any = None, device_type: str = "cuda", workspace_bytes: int = WORKSPACE_BYTES) -> None:
        if module is None:
            require_cuda(self.name)
            try:
                module = importlib.import_module("flashinfer")
            except ImportError as error:
                raise KernelError(f"attention {self.name} needs the package flashinfer-python: {error}") from error
        self._module = module
        self._device_type = device_type
        self._workspace_bytes = workspace_bytes
        self._workspaces: dict[torch.device, torch.Tensor] = {}
        self._plans: dict[_Key, _Plan] = {}

    def unsupported(self, problem: Problem) -> str | None:
        reason = half_precision_only(problem, self._device_type)
        if reason is not None:
            return reason
        if problem.key_dim not in HEAD_DIMS:
            return f"heads have {problem.key_dim} dimensions; flashinfer is compiled for {HEAD_DIMS}"
        if "alibi" in problem.extras:
            return "computes ALiBi slopes of its own"
        if "right" in problem.extras:
            return "a window ends at the query"
        if problem.key_strides != problem.value_strides:
            return f"keys and values must have equal strides, not {problem.key_strides} and {problem.value_strides}"
        if problem.key_strides[0] >= 2**32:
            return f"it cannot step over {problem.key_strides[0]} elements from block to block, at most 2^32"
        return unsuitable_strides(problem, flat=not problem.paged or bool({"window", "leftpad"} & problem.extras))

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
        refuse_unsupported(self, problem_of(query, key_cache, value_cache, batch, masking, lse))
        if not len(query) or batch.max_seqlen_k <= 0:
            return nothing_visible(query, lse)
        exact = masking.window_left >= 0 or batch.cache_leftpad is not None
        keys, stride_tokens = _pieces(key_cache, exact, batch.block_table.shape[1] == 1)
        values, _ = _pieces(value_cache, exact, batch.block_table.shape[1] == 1)
        single = batch.max_seqlen_q <= 1 and len(query) == batch.cache_seqlens.numel()
        key = _Key(
            query.device,
            query.dtype,
            single,
            query.shape[1],
            key_cache.shape[2],
            query.shape[2],
            key_cache.shape[1],
            keys.shape[1],
            stride_tokens,
            masking.window_left,
            masking.softcap,
            masking.scale,
            num_splits != 1,
        )
        plan = self._planned(key, batch)
        found = plan.wrapper.run(
            query if query.stride(2) == 1 else query.contiguous(), (keys, values), return_lse=lse is not None
        )
        out: torch.Tensor = found if lse is None else found[0]
        if plan.hidden is not None:
            out = out.masked_fill(plan.hidden[:, None, None], 0.0)
        if lse is not None:
            torch.mul(found[1], math.log(2.0), out=lse)  # flashinfer's is to base 2
            if plan.hidden is not None:
                lse.masked_fill_(plan.hidden[:, None], -torch.inf)
        return out

    def _planned(self, key: _Key, batch: VarlenBatch) -> _Plan:
        if key not in self._plans:
            self._plans[key] = _Plan(self._wrapper(key))
        plan = self._plans[key]
        if plan.batch is batch:
            return plan
        plan.batch = None  # planning may fail
        starts, lengths = batch.cu_seqlens_q.cpu(), batch.cache_seqlens.cpu()
        num_queries = starts.diff()
        begin = torch.zeros_like(lengths) if batch.cache_leftpad is None else batch.cache_leftpad.cpu()
        plan.hidden = _hidden(num_queries, lengths - begin, batch.cu_seqlens_q.device)
        if key.window_left >= 0:
            begin = torch.maximum(begin, lengths - num_queries - key.window_left)
        # A sequence without queries is not read.
        spans = torch.where(num_queries > 0, (lengths - begin).clamp(min=0), 0)
        counts = (spans + key.piece_tokens - 1) // key.piece_tokens
        last = torch.where(counts > 0, spans - (counts - 1) * key.piece_tokens, 0).int()
        indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        indices = _piece_indices(batch.block_table, begin // key.piece_tokens, indptr, key)
        common = {
            "window_left": key.window_left if not key.single else -1,
            "logits_soft_cap": key.softcap,
            "sm_scale": key.scale,
            "q_data_type": key.dtype,
            "kv_data_type": key.dtype,
        }
        if not key.split:
            common["disable_split_kv"] = True
        shape = (key.num_q_heads, key.num_kv_heads, key.dim, key.piece_tokens)
        if key.single:
            plan.wrapper.plan(indptr, indices, last, *shape, **common)
        else:
            plan.wrapper.plan(starts, indptr, indices, last, *shape, causal=True, **common)
        plan.batch = batch
        return plan

    def _wrapper(self, key: _Key) -> Any:
        if key.device not in self._workspaces:
            self._workspaces[key.device] = torch.zeros(self._workspace_bytes, dtype=torch.uint8, device=key.device)
        workspace = self._workspaces[key.device]
        if not key.single:
            return self._module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        # The kernel without tensor cores is compiled for some group sizes only and cannot be kept from splitting.
        grouped = key.num_q_heads // key.num_kv_heads >= 4 or not key.split
        return self._module.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=grouped, backend="fa2"
        )


def _pieces(cache: torch.Tensor, exact: bool, region: bool) -> tuple[torch.Tensor, int]:
    """The cache as a view `[num_pieces, piece_tokens, num_kv_heads, dim]`, and how many tokens lie from one block's
    first to the next's: as many as it has if the blocks are the pieces."""
    block_tokens = cache.shape[1]
    if not exact and not region:
        return cache, block_tokens
    tokens, apart = flat_tokens(cache)
    piece_tokens = 1 if exact else math.gcd(apart, block_tokens, REGION_PIECE_TOKENS)
    return tokens.view(-1, piece_tokens, *tokens.shape[1:]), apart


def _piece_indices(table: torch.Tensor, first: torch.Tensor, indptr: torch.Tensor, key: _Key) -> torch.Tensor:
    """`[indptr[-1]]` int32, where each sequence's pieces from its `first` on lie; computed where the table is."""
    device, num_pieces = table.device, int(indptr[-1])
    counts = indptr.diff().to(device)
    sequence = torch.repeat_interleave(counts, output_size=num_pieces)
    shift = (first - indptr[:-1]).to(device)
    position = torch.arange(num_pieces, device=device) + shift[sequence]
    in_block = key.block_tokens // key.piece_tokens
    block = table[sequence, position // in_block].long()
    return (block * (key.block_stride_tokens // key.piece_tokens) + position % in_block).int()


def _hidden(num_queries: torch.Tensor, visible: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    """`[num_tokens]` bool, the queries before a sequence's first visible token; `None` if there are none."""
    blind = torch.minimum((num_queries - visible).clamp(min=0), num_queries)
    if not blind.any():
        return None
    sequence = torch.repeat_interleave(num_queries)
    row = torch.arange(len(sequence)) - (num_queries.cumsum(0) - num_queries)[sequence]
    return (row < blind[sequence]).to(device)
