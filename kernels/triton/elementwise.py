"""Operations between the matrix products of a layer, each in one launch."""

# ruff: noqa: N803, N806 (compile-time constants are capitals in Triton's kernels)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from folio.kernels.elementwise import ACTIVATIONS, Activation, Elementwise, RotaryWrite, WriteLayer
from folio.kernels.errors import KernelError
from folio.kernels.provider import FP8_DTYPES
from folio.kernels.triton.cache import store_cached
from folio.kernels.triton.dependent import launch_options, start_next, wait_for_previous
from folio.kernels.triton.launch import Kernel, Launch

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WARP_ELEMENTS = 1024  # of a row: 32 per thread
_MAX_WARPS = 16
_GATE_BLOCK = 1024  # elements per program: 8 per thread
_TILE_ELEMENTS = 2048  # of one token's heads per program: 16 per thread


@triton.jit
def _norm_kernel(
    x_ptr: tl.tensor,  # [rows, SIZE]
    residual_ptr: tl.tensor,  # [rows, SIZE] or None
    weight_ptr: tl.tensor,  # [SIZE]
    out_ptr: tl.tensor,  # [rows, SIZE]
    sum_ptr: tl.tensor,  # [rows, SIZE] or None: the residual is added before the norm, else after it
    eps: tl.tensor,
    offset: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """One program per row."""
    wait_for_previous(DEPENDENT)
    start_next(DEPENDENT)
    columns = tl.arange(0, BLOCK)
    there = columns < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + columns
    x = tl.load(x_ptr + at, mask=there, other=0.0).to(tl.float32)
    if sum_ptr is not None:
        x += tl.load(residual_ptr + at, mask=there, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, rounded, mask=there)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=there, other=0.0).to(tl.float32) + offset
    out = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)) * weight
    if sum_ptr is None and residual_ptr is not None:
        out += tl.load(residual_ptr + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _gate_kernel(
    gate_up_ptr: tl.tensor,  # [rows, 2 * SIZE]
    out_ptr: tl.tensor,  # [rows, SIZE]
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """One program per row and block of columns: `[rows, blocks]`."""
    wait_for_previous(DEPENDENT)
    start_next(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < SIZE
    gates = gate_up_ptr + row * 2 * SIZE + columns
    gate = tl.load(gates, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gates + SIZE, mask=there, other=0.0).to(tl.float32)
    if ACTIVATION == "gelu":
        active = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(u)) / 2 = sigmoid(2 u)
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        active = gate * tl.sigmoid(gate)
    tl.store(out_ptr + row * SIZE + columns, (active * up).to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _rotate(
    rows_ptr: tl.tensor,  # [BLOCK_HEADS, 1]: each head's first element
    weight_ptr: tl.tensor,  # [DIM] or None
    eps: tl.tensor,
    offset: tl.tensor,
    cos_ptr: tl.tensor,  # the token's row
    sin_ptr: tl.tensor,
    valid: tl.tensor,  # [BLOCK_HEADS, 1]
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF_TABLES: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Norm and rotate: both halves of the rotated elements, and the rest: `[BLOCK_HEADS, BLOCK_HALF or BLOCK_REST]`."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    rest_dims = ROTARY_DIM + tl.arange(0, BLOCK_REST)[None, :]
    paired = pairs < HALF
    resting = rest_dims < DIM
    first = tl.load(rows_ptr + pairs, mask=valid & paired, other=0.0).to(tl.float32)
    second = tl.load(rows_ptr + HALF + pairs, mask=valid & paired, other=0.0).to(tl.float32)
    rest = tl.load(rows_ptr + rest_dims, mask=valid & resting, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        squares = tl.sum(first * first + second * second, 1) + tl.sum(rest * rest, 1)
        scale = (1.0 / tl.sqrt(squares / DIM + eps))[:, None]
        first = first * scale * (tl.load(weight_ptr + pairs, mask=paired, other=0.0).to(tl.float32) + offset)
        second = second * scale * (tl.load(weight_ptr + HALF + pairs, mask=paired, other=0.0).to(tl.float32) + offset)
        rest = rest * scale * (tl.load(weight_ptr + rest_dims, mask=resting, other=0.0).to(tl.float32) + offset)
    cos = tl.load(cos_ptr + pairs, mask=paired, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + pairs, mask=paired, other=0.0).to(tl.float32)
    cos_second = cos
    sin_second = sin
    if not HALF_TABLES:
        cos_second = tl.load(cos_ptr + HALF + pairs, mask=paired, other=0.0).to(tl.float32)
        sin_second = tl.load(sin_ptr + HALF + pairs, mask=paired, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos_second + first * sin_second, rest


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _rotary_write_kernel(
    heads_ptr: tl.tensor,  # [num_tokens, NUM_Q_HEADS + 2 * NUM_KV_HEADS, DIM]
    cos_ptr: tl.tensor,  # [num_tokens, ROTARY_DIM or half of it]
    sin_ptr: tl.tensor,
    key_cache_ptr: tl.tensor,  # [num_blocks, block_tokens, NUM_KV_HEADS, DIM]
    value_cache_ptr: tl.tensor,
    slots_ptr: tl.tensor,  # [num_tokens]
    query_weight_ptr: tl.tensor,  # [DIM] or None
    key_weight_ptr: tl.tensor,
    key_scales_ptr: tl.tensor,  # [NUM_KV_HEADS] or None
    value_scales_ptr: tl.tensor,
    query_eps: tl.tensor,
    query_offset: tl.tensor,
    key_eps: tl.tensor,
    key_offset: tl.tensor,
    block_tokens: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    key_block_stride: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_block_stride: tl.tensor,
    value_token_stride: tl.tensor,
    value_head_stride: tl.tensor,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF_TABLES: tl.constexpr,
    BLOCK_Q_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    EMULATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """One program per token and block of heads: blocks of queries, then of keys, then of values."""
    wait_for_previous(DEPENDENT)
    start_next(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    Q_PARTS: tl.constexpr = (NUM_Q_HEADS + BLOCK_Q_HEADS - 1) // BLOCK_Q_HEADS
    KV_PARTS: tl.constexpr = (NUM_KV_HEADS + BLOCK_KV_HEADS - 1) // BLOCK_KV_HEADS
    COLUMNS: tl.constexpr = ROTARY_DIM // 2 if HALF_TABLES else ROTARY_DIM
    source = heads_ptr + token * token_stride
    cos_row = cos_ptr + token * COLUMNS
    sin_row = sin_ptr + token * COLUMNS
    pairs = tl.arange(0, BLOCK_HALF)
    later = ROTARY_DIM // 2 + pairs
    rest_dims = ROTARY_DIM + tl.arange(0, BLOCK_REST)
    # The branches' variables have names of their own: their tiles differ in size.
    if part < Q_PARTS:
        q_heads = part * BLOCK_Q_HEADS + tl.arange(0, BLOCK_Q_HEADS)
        q_valid = (q_heads < NUM_Q_HEADS)[:, None]
        q_rows = source + q_heads.to(tl.int64)[:, None] * head_stride
        q_first, q_second, q_rest = _rotate(
            q_rows,
            query_weight_ptr,
            query_eps,
            query_offset,
            cos_row,
            sin_row,
            q_valid,
            DIM,
            ROTARY_DIM,
            HALF_TABLES,
            BLOCK_HALF,
            BLOCK_REST,
        )
        dtype = heads_ptr.dtype.element_ty
        q_paired = q_valid & (pairs < ROTARY_DIM // 2)[None, :]
        tl.store(q_rows + pairs[None, :], q_first.to(dtype), mask=q_paired)
        tl.store(q_rows + later[None, :], q_second.to(dtype), mask=q_paired)
        if query_weight_ptr is not None and DIM > ROTARY_DIM:
            tl.store(q_rows + rest_dims[None, :], q_rest.to(dtype), mask=q_valid & (rest_dims < DIM)[None, :])
    else:
        slot = tl.load(slots_ptr + token)
        block = slot // block_tokens
        within = slot % block_tokens
        if part < Q_PARTS + KV_PARTS:
            k_heads = (part - Q_PARTS) * BLOCK_KV_HEADS + tl.arange(0, BLOCK_KV_HEADS)
            k_valid = (k_heads < NUM_KV_HEADS)[:, None]
            k_first, k_second, k_rest = _rotate(
                source + (NUM_Q_HEADS + k_heads).to(tl.int64)[:, None] * head_stride,
                key_weight_ptr,
                key_eps,
                key_offset,
                cos_row,
                sin_row,
                k_valid,
                DIM,
                ROTARY_DIM,
                HALF_TABLES,
                BLOCK_HALF,
                BLOCK_REST,
            )
            keys = key_cache_ptr + block * key_block_stride + within * key_token_stride
            k_paired = k_valid & (pairs < ROTARY_DIM // 2)[None, :]
            store_cached(
                k_first, keys, key_head_stride, key_scales_ptr, k_heads, pairs, k_paired, NUM_KV_HEADS, EMULATED
            )
            store_cached(
                k_second, keys, key_head_stride, key_scales_ptr, k_heads, later, k_paired, NUM_KV_HEADS, EMULATED
            )
            if DIM > ROTARY_DIM:
                k_resting = k_valid & (rest_dims < DIM)[None, :]
                store_cached(
                    k_rest, keys, key_head_stride, key_scales_ptr, k_heads, rest_dims, k_resting, NUM_KV_HEADS, EMULATED
                )
        else:
            v_heads = (part - Q_PARTS - KV_PARTS) * BLOCK_KV_HEADS + tl.arange(0, BLOCK_KV_HEADS)
            dims = tl.arange(0, BLOCK_DIM)
            v_there = (v_heads < NUM_KV_HEADS)[:, None] & (dims < DIM)[None, :]
            v_rows = source + (NUM_Q_HEADS + NUM_KV_HEADS + v_heads).to(tl.int64)[:, None] * head_stride
            value = tl.load(v_rows + dims[None, :], mask=v_there)
            values = value_cache_ptr + block * value_block_stride + within * value_token_stride
            store_cached(
                value, values, value_head_stride, value_scales_ptr, v_heads, dims, v_there, NUM_KV_HEADS, EMULATED
            )


class TritonElementwise(Elementwise):
    """The operations in Triton. A kernel is compiled for each size on first use, which takes seconds.

    Args:
        dependent: programmatic dependent launch, see `folio.kernels.triton.dependent`.
    """

    def __init__(self, *, dependent: bool = False) -> None:
        self._dependent = dependent
        self._launches: dict[tuple[object, ...], Launch] = {}
        self._rotary_write = Kernel(_rotary_write_kernel)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
        return self._norm(x, None, weight, eps, offset, summed=False)[1]

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._norm(x, residual, weight, eps, offset, summed=True)

    def rms_norm_add(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
    ) -> torch.Tensor:
        return self._norm(x, residual, weight, eps, offset, summed=False)[1]

    def _norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        offset: float,
        *,
        summed: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum if `summed`, else `x`; and the result."""
        size = x.shape[-1]
        if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
            raise ValueError(f"weight {list(weight.shape)} {weight.dtype} for x {list(x.shape)} {x.dtype}")
        if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
            raise ValueError(f"residual {list(residual.shape)} {residual.dtype} for x {list(x.shape)} {x.dtype}")
        x = x.contiguous()
        out = torch.empty_like(x)
        total = torch.empty_like(x) if summed else x
        rows = x.numel() // size if size else 0
        if not rows:
            return total, out
        tensors = [x, weight, out]
        if residual is not None:
            tensors.append(residual.contiguous())
        if summed:
            tensors.append(total)
        key = "norm", size, eps, offset, len(tensors), x.dtype, x.device
        launch = self._launches.get(key)
        if launch is None:
            names = ("x_ptr", "weight_ptr", "out_ptr", "residual_ptr", "sum_ptr")[: len(tensors)]
            block = triton.next_power_of_2(size)
            numbers = {"residual_ptr": None, "sum_ptr": None, "eps": float(eps), "offset": float(offset)}
            constants = {"SIZE": size, "BLOCK": block}
            num_warps = min(_MAX_WARPS, max(1, block // _WARP_ELEMENTS))
            launch = self._launches[key] = self._prepare(_norm_kernel, names, tensors, numbers | constants, num_warps)
        launch((rows, 1, 1), *tensors)
        return total, out

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        if gate_up.shape[-1] % 2:
            raise ValueError(f"the last dimension of {list(gate_up.shape)} must be even: gates, then ups")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
        gate_up = gate_up.contiguous()
        size = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], size)
        if not out.numel():
            return out
        key = "gate", size, activation, gate_up.dtype, gate_up.device
        launch = self._launches.get(key)
        if launch is None:
            constants = {"SIZE": size, "ACTIVATION": activation, "BLOCK": _GATE_BLOCK}
            names = ("gate_up_ptr", "out_ptr")
            launch = self._launches[key] = self._prepare(_gate_kernel, names, (gate_up, out), constants, 4)
        launch((out.numel() // size, triton.cdiv(size, _GATE_BLOCK), 1), gate_up, out)
        return out

    def prepare_rotary_write(self, call: RotaryWrite) -> WriteLayer:
        heads, key_cache, value_cache, scales = call.heads, call.key_cache, call.value_cache, call.scales
        if heads.dtype not in _DTYPES:
            raise KernelError(f"there is no kernel for {heads.dtype}")
        if key_cache.dtype not in FP8_DTYPES:
            scales = None
        num_tokens, _, dim = heads.shape
        query_norm, key_norm = call.query_norm, call.key_norm
        block_dim = triton.next_power_of_2(dim)
        most = max(1, _TILE_ELEMENTS // block_dim)
        block_q_heads = min(triton.next_power_of_2(call.num_q_heads), most)
        block_kv_heads = min(triton.next_power_of_2(call.num_kv_heads), most)
        arguments = {
            "heads_ptr": heads,
            "cos_ptr": call.cos.contiguous(),
            "sin_ptr": call.sin.contiguous(),
            "key_cache_ptr": key_cache,
            "value_cache_ptr": value_cache,
            "slots_ptr": call.slots,
            "query_weight_ptr": None if query_norm is None else query_norm.weight,
            "key_weight_ptr": None if key_norm is None else key_norm.weight,
            "key_scales_ptr": None if scales is None else scales.key.contiguous(),
            "value_scales_ptr": None if scales is None else scales.value.contiguous(),
            "query_eps": 0.0 if query_norm is None else float(query_norm.eps),
            "query_offset": 0.0 if query_norm is None else float(query_norm.offset),
            "key_eps": 0.0 if key_norm is None else float(key_norm.eps),
            "key_offset": 0.0 if key_norm is None else float(key_norm.offset),
            "block_tokens": key_cache.shape[1],
            "token_stride": heads.stride(0),
            "head_stride": heads.stride(1),
            "key_block_stride": key_cache.stride(0),
            "key_token_stride": key_cache.stride(1),
            "key_head_stride": key_cache.stride(2),
            "value_block_stride": value_cache.stride(0),
            "value_token_stride": value_cache.stride(1),
            "value_head_stride": value_cache.stride(2),
            "NUM_Q_HEADS": call.num_q_heads,
            "NUM_KV_HEADS": call.num_kv_heads,
            "DIM": dim,
            "ROTARY_DIM": call.rotary_dim,
            "HALF_TABLES": call.cos.shape[-1] != call.rotary_dim,
            "BLOCK_Q_HEADS": block_q_heads,
            "BLOCK_KV_HEADS": block_kv_heads,
            "BLOCK_DIM": block_dim,
            "BLOCK_HALF": triton.next_power_of_2(call.rotary_dim // 2),
            "BLOCK_REST": triton.next_power_of_2(max(1, dim - call.rotary_dim)),
            "EMULATED": not isinstance(_rotary_write_kernel, JITFunction),
            "DEPENDENT": self._dependent,
        }
        q_parts, kv_parts = triton.cdiv(call.num_q_heads, block_q_heads), triton.cdiv(call.num_kv_heads, block_kv_heads)
        grid = num_tokens, q_parts + 2 * kv_parts, 1
        if not num_tokens:
            return lambda *_: None
        changing = ["heads_ptr", "key_cache_ptr", "value_cache_ptr"]
        if query_norm is not None:
            changing += ["query_weight_ptr", "key_weight_ptr"]
        launch = self._rotary_write.prepare(arguments, changing, num_warps=4, **launch_options(self._dependent))
        return lambda heads, key_cache, value_cache, *norm_weights: launch(
            grid, heads, key_cache, value_cache, *norm_weights
        )

    def _prepare(
        self,
        kernel: Any,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        others: Mapping[str, Any],
        num_warps: int,
    ) -> Launch:
        """A launch that replaces all its tensors."""
        if tensors[0].dtype not in _DTYPES:
            raise KernelError(f"there is no kernel for {tensors[0].dtype}")
        arguments = dict(others) | dict(zip(names, tensors, strict=True)) | {"DEPENDENT": self._dependent}
        return Kernel(kernel).prepare(arguments, names, num_warps=num_warps, **launch_options(self._dependent))
