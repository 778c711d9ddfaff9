"""Row-wise operations of a layer in one pass each, on the CPU (`csrc/elementwise.cpp`)."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu.build import CPP_DTYPES, load_library

_POINTER, _INT64, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class CpuElementwise:
    """float32, bfloat16 and float16; computes in float32 and rounds once.

    Raises:
        KernelError: there is no compiler, or it failed.
    """

    def __init__(self) -> None:
        library = load_library("elementwise")
        self._rms_norm = library.folio_rms_norm
        self._rms_norm.argtypes = [_INT, _POINTER, _POINTER, _POINTER, _INT64, _INT64, _FLOAT, _FLOAT]
        self._rms_norm.restype = None
        self._silu_mul = library.folio_silu_mul
        self._silu_mul.argtypes = [_INT, _POINTER, _POINTER, _INT64, _INT64]
        self._silu_mul.restype = None
        self._rotate = library.folio_rotate
        self._rotate.argtypes = [_INT, _POINTER, _POINTER, _POINTER, *[_INT64] * 5]
        self._rotate.restype = None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
        """`x / rms(x) * (weight + offset)` over the last dimension; `x [..., size]`, `weight [size]`, one dtype."""
        if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
            raise ValueError(f"weight {list(weight.shape)} {weight.dtype} for x {list(x.shape)} {x.dtype}")
        x = x.contiguous()
        out = torch.empty_like(x)
        size = x.shape[-1]
        rows = x.numel() // size
        dtype = CPP_DTYPES[x.dtype]
        self._rms_norm(dtype, x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, size, eps, offset)
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` of `gate_up [..., 2 * size]`, gates first; returns `[..., size]`."""
        if gate_up.shape[-1] % 2:
            raise ValueError(f"the last dimension of {list(gate_up.shape)} must hold gates and ups, an even number")
        gate_up = gate_up.contiguous()
        size = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], size)
        rows = out.numel() // size
        self._silu_mul(CPP_DTYPES[gate_up.dtype], gate_up.data_ptr(), out.data_ptr(), rows, size)
        return out

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotary positions, in place: `x [rows, heads, head_dim]` with stride 1 along the head; `cos`, `sin`
        `[..., rows, dim]` of its dtype, for the first `dim` elements of each head, pairs half of that apart."""
        rows, heads, head_dim = x.shape
        dim = cos.shape[-1]
        if cos.shape != sin.shape or cos.numel() != rows * dim or dim > head_dim or dim % 2:
            raise ValueError(f"cos {list(cos.shape)} and sin {list(sin.shape)} for x {list(x.shape)}")
        if cos.dtype != x.dtype or sin.dtype != x.dtype or x.stride(2) != 1:
            raise ValueError(f"cos {cos.dtype} and sin {sin.dtype} for x {x.dtype} with strides {x.stride()}")
        cos, sin = cos.contiguous(), sin.contiguous()
        dtype = CPP_DTYPES[x.dtype]
        self._rotate(dtype, x.data_ptr(), cos.data_ptr(), sin.data_ptr(), rows, heads, dim, x.stride(0), x.stride(1))
