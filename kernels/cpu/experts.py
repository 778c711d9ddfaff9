"""Products with the packed weights of experts, each with its own rows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from folio.kernels.cpu.build import load_function
from folio.kernels.cpu.ops import CPP_DTYPES, PackedWeight, WeightFields, address, packed_memory

_POINTER, _INT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
# Tensors of a `WeightPart` that differ among experts.
_BY_EXPERT = ("codes", "scales", "supers", "factors")


def stacked(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Weights of experts as one whose tensors have a dimension of experts in front: its shape is that of one expert.
    Raises `ValueError` if their kinds differ."""
    if len({_kind(weight) for weight in weights}) > 1:
        raise ValueError("experts of several kinds")
    first = weights[0]
    parts = []
    for p, part in enumerate(first.parts):
        by_expert: dict[str, Any] = {
            name: _stacked([getattr(w.parts[p], name) for w in weights]) for name in _BY_EXPERT
        }
        parts.append(replace(part, **by_expert))
    return replace(first, parts=tuple(parts), order=_stacked([weight.order for weight in weights]))


class CpuExperts:
    """`x @ weight[expert].T + bias[expert]` for the rows of each expert, as `CpuLinear` computes it.

    Args:
        march: the compiler's name of the processor.

    Raises:
        KernelError: the library cannot be compiled.
    """

    def __init__(self, march: str = "native") -> None:
        load, fields = partial(load_function, "linear", march=march), ctypes.POINTER(WeightFields)
        self._panel_bytes = load("folio_linear_panel_bytes", _INT, fields, _INT64, result=_INT64)
        self._multiply = load("folio_experts", _INT, fields, *[_POINTER] * 2, _INT64, *[_POINTER] * 3)

    def __call__(
        self, x: torch.Tensor, weight: PackedWeight, counts: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A product for each expert.

        Args:
            x: `[rows, inputs]`, the rows of the first expert first.
            weight: of `stacked`.
            counts: `[experts]` int64, the rows of each.
            bias: `[experts, outputs]`, contiguous.

        Returns:
            `[rows, outputs]`.
        """
        ends, rows = counts.cumsum(0), len(x)
        if x.shape[1:] != (weight.inputs,) or x.dtype != weight.dtype or int(ends[-1]) != rows:
            raise ValueError(f"x {list(x.shape)} {x.dtype} for {weight.inputs} inputs of {weight.dtype}")
        if len(counts) != len(weight.parts[0].codes):
            raise ValueError(f"counts of {len(counts)} experts, not {len(weight.parts[0].codes)}")
        x, dtype = x.contiguous(), CPP_DTYPES[x.dtype]
        out = x.new_empty(rows, weight.outputs)
        if rows == 0:
            return out
        tensors = [bias, weight.order, *(getattr(part, name) for part in weight.parts for name in _BY_EXPERT)]
        strides = (_INT64 * len(tensors))(*(0 if t is None else t.stride(0) * t.element_size() for t in tensors))
        fields = WeightFields.of(weight, bias)
        panels = torch.empty(self._panel_bytes(dtype, fields, int(counts.max())), dtype=torch.uint8)
        self._multiply(dtype, fields, strides, ends.data_ptr(), len(ends), *map(address, (x, out, panels)))
        return out


def _kind(weight: PackedWeight) -> tuple[Any, ...]:
    """Everything but the values."""
    found: list[Any] = [weight.inputs, weight.dtype, weight.order is None]
    for part in weight.parts:
        found += [part.outputs, part.bits, part.zero, part.every, part.has_offsets]
        found += [None if part.table is None else tuple(part.table.tolist())]
        found += [None if (tensor := getattr(part, name)) is None else tensor.shape for name in _BY_EXPERT]
    return tuple(found)


def _stacked(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    given = [tensor for tensor in tensors if tensor is not None]
    if not given:
        return None
    first = given[0]
    out = packed_memory(len(given) * first.nbytes, first.device).view(first.dtype).view(len(given), *first.shape)
    return torch.stack(given, out=out)
