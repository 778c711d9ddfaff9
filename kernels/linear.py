"""Linear layers with packed weights on the CPU (`csrc/linear.cpp`)."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.build import CPP_DTYPES, load_library
from kernels.provider import KernelError

_POINTER, _INT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int

_TILE = 32  # outputs that the kernel computes together
_WORD_BYTES = 4
_HUGE_PAGE = 2 << 20
_NEEDS = {torch.float32: "AVX-512", torch.bfloat16: "AVX-512 BF16"}

Layer = tuple[torch.Tensor, torch.Tensor | None]


class _Part(ctypes.Structure):
    """`Part` of linear.cpp."""

    _fields_ = [("out", _POINTER), ("first_tile", _INT64), ("outputs", _INT64)]


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayers:
    """Linear layers of one input as the kernel reads them.

    Attributes:
        scales: `[padded outputs]` float32, what 8-bit weights are multiplied with; `None` for weights of the dtype.
        bias: `[padded outputs]` or `None`.
        outputs: of each layer.
        dtype: of inputs, biases and results.
    """

    data: torch.Tensor
    scales: torch.Tensor | None
    bias: torch.Tensor | None
    outputs: tuple[int, ...]
    inputs: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return sum(tensor.nbytes for tensor in (self.data, self.scales, self.bias) if tensor is not None)


class CpuLinear:
    """`x @ weight.T + bias`, summed in float32; weights in float32, bfloat16, or 8-bit integers with a scale for each
    output. A row's result depends neither on the other rows nor on the number of threads.

    Args:
        march: the processor to compile for, as the compiler names it.

    Raises:
        KernelError: there is no compiler, or it failed.
    """

    def __init__(self, march: str = "native") -> None:
        library = load_library("linear", march)
        self._supports = library.folio_linear_supports
        self._supports.argtypes = [_INT]
        self._supports.restype = _INT
        self._pack = library.folio_linear_pack
        self._pack.argtypes = [_INT, *[_POINTER] * 3, _INT64, _INT64]
        self._pack.restype = None
        self._linear = library.folio_linear
        self._linear.argtypes = [_INT, *[_POINTER] * 5, _INT, _POINTER, _INT64, _INT64]
        self._linear.restype = None

    def unsupported(self, dtype: torch.dtype) -> str | None:
        """Why layers of this dtype cannot be packed, as a sentence; `None` if they can."""
        if dtype not in _NEEDS:
            return f"it has no products of {dtype}"
        return None if self._supports(CPP_DTYPES[dtype]) else f"the processor lacks {_NEEDS[dtype]}"

    def pack(self, layers: Sequence[Layer], *, int8: bool = False) -> PackedLayers:
        """A copy of layers `(weight [outputs, inputs], bias [outputs] or None)` of one input, for `__call__`.

        Args:
            int8: round weights to 8-bit integers, the largest of each output to 127.

        Raises:
            KernelError: `unsupported` gives a reason.
        """
        dtype, inputs = layers[0][0].dtype, layers[0][0].shape[1]
        reason = self.unsupported(dtype)
        if reason is not None:
            raise KernelError(f"weights of {dtype} cannot be packed: {reason}")
        for weight, bias in layers:
            _check(weight, "weight", (len(weight), inputs), dtype)
            if bias is not None:
                _check(bias, "bias", (len(weight),), dtype)
        outputs = tuple(len(weight) for weight, _ in layers)
        padded = sum(map(_padded, outputs))
        words = _words(inputs, dtype)
        output_bytes = words * _WORD_BYTES // (dtype.itemsize if int8 else 1)
        data = _on_huge_pages(padded * output_bytes)
        scales = torch.ones(padded) if int8 else None
        biases = torch.zeros(padded, dtype=dtype) if any(bias is not None for _, bias in layers) else None
        start = 0
        for weight, bias in layers:
            weight = weight.contiguous()
            at = data.data_ptr() + start * output_bytes
            scales_at = None if scales is None else scales[start:].data_ptr()
            self._pack(CPP_DTYPES[dtype], weight.data_ptr(), at, scales_at, len(weight), inputs)
            if biases is not None and bias is not None:
                biases[start : start + len(bias)] = bias
            start += _padded(len(weight))
        return PackedLayers(data, scales, biases, outputs, inputs, dtype)

    def __call__(self, x: torch.Tensor, layers: PackedLayers) -> list[torch.Tensor]:
        """Each layer's `[..., outputs]` of `x [..., inputs]`, all of the layers' dtype."""
        if x.shape[-1] != layers.inputs or x.dtype != layers.dtype:
            raise ValueError(f"x {list(x.shape)} {x.dtype} for {layers.inputs} inputs of {layers.dtype}")
        x = x.contiguous()
        rows = x.numel() // layers.inputs
        outs = [x.new_empty(*x.shape[:-1], outputs) for outputs in layers.outputs]
        if rows == 0:
            return outs
        parts = (_Part * len(outs))()
        tile = 0
        for part, out, outputs in zip(parts, outs, layers.outputs, strict=True):
            part.out, part.first_tile, part.outputs = out.data_ptr(), tile, outputs
            tile += _padded(outputs) // _TILE
        panels = torch.empty(rows * _words(layers.inputs, x.dtype), dtype=torch.int32)
        self._linear(
            CPP_DTYPES[x.dtype],
            x.data_ptr(),
            layers.data.data_ptr(),
            None if layers.scales is None else layers.scales.data_ptr(),
            None if layers.bias is None else layers.bias.data_ptr(),
            parts,
            len(outs),
            panels.data_ptr(),
            rows,
            layers.inputs,
        )
        return outs


def _words(inputs: int, dtype: torch.dtype) -> int:
    return -(-inputs * dtype.itemsize // _WORD_BYTES)


def _padded(outputs: int) -> int:
    return -(-outputs // _TILE) * _TILE


def _check(tensor: torch.Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(f"{name} is {list(tensor.shape)} {tensor.dtype}, expected {list(shape)} {dtype}")


def _on_huge_pages(num_bytes: int) -> torch.Tensor:
    """Memory of its own, from a huge page on where it is larger than one: streams of weights would else spend a part of
    their time on address translation."""
    if num_bytes < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    data = torch.frombuffer(memory, dtype=torch.uint8)
    start = -data.data_ptr() % _HUGE_PAGE
    return data[start : start + num_bytes]
