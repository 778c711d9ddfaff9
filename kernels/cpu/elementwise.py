"""Row-wise operations of a layer on the CPU, in one pass each (`csrc/elementwise.cpp`)."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu.build import CPP_DTYPES, load_library

_POINTER, _INT64, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class CpuElementwise:
    """RMS norm, gated SiLU and rotary embedding in float32, bfloat16 and float16, rounded once from float32.

    Raises:
        KernelError: the library cannot be compiled.
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
        out, size = torch.empty_like(x), x.shape[-1]
        pointers = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        self._rms_norm(CPP_DTYPES[x.dtype], *pointers, x.numel() // size, size, eps, offset)
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` of `gate_up [..., 2 * size]`, gates first; returns `[..., size]`."""
        if gate_up.shape[-1] % 2:
            raise ValueError(f"the last dimension of {list(gate_up.shape)} must be even: gates, then ups")
        gate_up = gate_up.contiguous()
        size = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], size)
        self._silu_mul(CPP_DTYPES[gate_up.dtype], gate_up.data_ptr(), out.data_ptr(), out.numel() // size, size)
        return out

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate the first `dim` elements of each head in place, pairs `dim / 2` apart.

        Args:
            x: `[rows, heads, head_dim]`, stride 1 along the head.
            cos, sin: `[..., rows, dim]` of its dtype.
        """
        rows, heads, head_dim = x.shape
        dim = cos.shape[-1]
        if cos.shape != sin.shape or cos.numel() != rows * dim or dim > head_dim or dim % 2:
            raise ValueError(f"cos {list(cos.shape)} and sin {list(sin.shape)} for x {list(x.shape)}")
        if cos.dtype != x.dtype or sin.dtype != x.dtype or x.stride(2) != 1:
            raise ValueError(f"cos {cos.dtype} and sin {sin.dtype} for x {x.dtype} with strides {x.stride()}")
        cos, sin = cos.contiguous(), sin.contiguous()
        pointers = x.data_ptr(), cos.data_ptr(), sin.data_ptr()
        self._rotate(CPP_DTYPES[x.dtype], *pointers, rows, heads, dim, x.stride(0), x.stride(1))
