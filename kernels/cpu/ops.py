"""Operations in C++ beside attention: linear layers with packed weights, row-wise layer operations."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass

import torch

from kernels.cpu.build import load_function
from kernels.elementwise import Elementwise
from kernels.errors import KernelError

_POINTER, _INT64, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float

# Numbers of the dtypes in C++.
CPP_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_TILE = 32  # outputs that the kernel computes together
_WORD_BYTES = 4
_HUGE_PAGE = 2 << 20
_NEEDS = {torch.float32: "AVX-512", torch.bfloat16: "AVX-512 BF16"}


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight `[outputs, inputs]` in the kernel's order.

    Attributes:
        scales: `[outputs]` float32, factors of 8-bit weights; `None` for weights of the dtype itself.
        dtype: of inputs, biases and results.
    """

    data: torch.Tensor
    scales: torch.Tensor | None
    outputs: int
    inputs: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the data and scales."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class CpuLinear:
    """`x @ weight.T + bias`, summed in float32; weights in float32, bfloat16, or 8-bit integers with a scale per
    output. A row's result depends neither on other rows nor on the number of threads.

    Args:
        march: the compiler's name of the processor.

    Raises:
        KernelError: the library cannot be compiled.
    """

    def __init__(self, march: str = "native") -> None:
        self._supports = load_function("linear", "folio_linear_supports", _INT, result=_INT, march=march)
        self._pack = load_function("linear", "folio_linear_pack", _INT, *[_POINTER] * 3, *[_INT64] * 2, march=march)
        self._linear = load_function("linear", "folio_linear", _INT, *[_POINTER] * 6, *[_INT64] * 3, march=march)

    def unsupported(self, dtype: torch.dtype) -> str | None:
        """The reason why weights of this dtype cannot be packed, as a sentence; `None` if they can."""
        if dtype not in _NEEDS:
            return f"there is no kernel for {dtype}"
        return None if self._supports(CPP_DTYPES[dtype]) else f"the processor lacks {_NEEDS[dtype]}"

    def pack(self, weight: torch.Tensor, *, int8: bool = False) -> PackedWeight:
        """Copy `weight [outputs, inputs]` for `__call__`.

        Args:
            int8: round to 8-bit integers, scaled so that each output's largest weight is 127.

        Raises:
            KernelError: `unsupported` gives a reason.
        """
        reason = self.unsupported(weight.dtype)
        if reason:
            raise KernelError(f"a weight of {weight.dtype} cannot be packed: {reason}")
        weight = weight.contiguous()
        outputs, inputs = weight.shape
        num_bytes = -(-outputs // _TILE) * _TILE * _words(inputs, weight.dtype) * _WORD_BYTES
        data = _on_huge_pages(num_bytes // weight.element_size() if int8 else num_bytes)
        scales = torch.empty(outputs) if int8 else None
        pointers = weight.data_ptr(), data.data_ptr(), address(scales)
        self._pack(CPP_DTYPES[weight.dtype], *pointers, outputs, inputs)
        return PackedWeight(data, scales, outputs, inputs, weight.dtype)

    def __call__(self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x [..., inputs]`, `bias [outputs]`; returns `[..., outputs]`, all of the weight's dtype."""
        if x.shape[-1] != weight.inputs or x.dtype != weight.dtype:
            raise ValueError(f"x {list(x.shape)} {x.dtype} for {weight.inputs} inputs of {weight.dtype}")
        if bias is not None and (bias.shape != (weight.outputs,) or bias.dtype != x.dtype or bias.stride(0) != 1):
            raise ValueError(f"bias {list(bias.shape)} {bias.dtype} for {weight.outputs} outputs of {weight.dtype}")
        x = x.contiguous()
        rows = x.numel() // weight.inputs
        out = x.new_empty(*x.shape[:-1], weight.outputs)
        if rows == 0:
            return out
        panels = torch.empty(rows * _words(weight.inputs, x.dtype), dtype=torch.int32)
        pointers = (address(tensor) for tensor in (x, weight.data, weight.scales, bias, out, panels))
        self._linear(CPP_DTYPES[x.dtype], *pointers, rows, weight.outputs, weight.inputs)
        return out


def _words(inputs: int, dtype: torch.dtype) -> int:
    return -(-inputs * dtype.itemsize // _WORD_BYTES)


def _on_huge_pages(num_bytes: int) -> torch.Tensor:
    """Memory on huge pages if it is larger than one: reading weights would else spend time on address translation."""
    if num_bytes < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    data = torch.frombuffer(memory, dtype=torch.uint8)
    start = -data.data_ptr() % _HUGE_PAGE
    return data[start : start + num_bytes]


class CpuElementwise(Elementwise):
    """Each operation in one pass over memory (`csrc/elementwise.cpp`).

    Raises:
        KernelError: the library cannot be compiled.
    """

    def __init__(self) -> None:
        self._rms_norm = load_function(
            "elementwise", "folio_rms_norm", _INT, *[_POINTER] * 3, *[_INT64] * 2, *[_FLOAT] * 2
        )
        self._silu_mul = load_function("elementwise", "folio_silu_mul", _INT, *[_POINTER] * 2, *[_INT64] * 2)
        self._rotate = load_function("elementwise", "folio_rotate", _INT, *[_POINTER] * 3, *[_INT64] * 5)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
        if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
            raise ValueError(f"weight {list(weight.shape)} {weight.dtype} for x {list(x.shape)} {x.dtype}")
        x = x.contiguous()
        out, size = torch.empty_like(x), x.shape[-1]
        pointers = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        self._rms_norm(CPP_DTYPES[x.dtype], *pointers, x.numel() // size, size, eps, offset)
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        if gate_up.shape[-1] % 2:
            raise ValueError(f"the last dimension of {list(gate_up.shape)} must be even: gates, then ups")
        gate_up = gate_up.contiguous()
        size = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], size)
        self._silu_mul(CPP_DTYPES[gate_up.dtype], gate_up.data_ptr(), out.data_ptr(), out.numel() // size, size)
        return out

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        rows, heads, head_dim = x.shape
        dim = cos.shape[-1]
        if cos.shape != sin.shape or cos.numel() != rows * dim or dim > head_dim or dim % 2:
            raise ValueError(f"cos {list(cos.shape)} and sin {list(sin.shape)} for x {list(x.shape)}")
        if cos.dtype != x.dtype or sin.dtype != x.dtype or x.stride(2) != 1:
            raise ValueError(f"cos {cos.dtype} and sin {sin.dtype} for x {x.dtype} with strides {x.stride()}")
        cos, sin = cos.contiguous(), sin.contiguous()
        pointers = x.data_ptr(), cos.data_ptr(), sin.data_ptr()
        self._rotate(CPP_DTYPES[x.dtype], *pointers, rows, heads, dim, x.stride(0), x.stride(1))
