"""Packed weights of experts, as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from folio.kernels.cpu.ops import BY_EXPERT, PackedWeight, packed_memory


def stacked(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Weights of experts as one whose tensors have a dimension of experts in front: its shape is that of one expert.
    Raises `ValueError` if their kinds differ."""
    if len({_kind(weight) for weight in weights}) > 1:
        raise ValueError("experts of several kinds")
    first = weights[0]
    parts = []
    for p, part in enumerate(first.parts):
        by_expert: dict[str, Any] = {name: _stacked([getattr(w.parts[p], name) for w in weights]) for name in BY_EXPERT}
        parts.append(replace(part, **by_expert))
    return replace(first, parts=tuple(parts), order=_stacked([weight.order for weight in weights]))


def _kind(weight: PackedWeight) -> tuple[Any, ...]:
    """Everything but the values."""
    found: list[Any] = [weight.inputs, weight.dtype, weight.order is None]
    for part in weight.parts:
        found += [part.outputs, part.bits, part.zero, part.every, part.has_offsets]
        found += [None if part.table is None else tuple(part.table.tolist())]
        tensors = [getattr(part, name) for name in BY_EXPERT]
        found += [None if tensor is None else (tensor.dtype, tensor.shape) for tensor in tensors]
    return tuple(found)


def _stacked(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    given = [tensor for tensor in tensors if tensor is not None]
    if not given:
        return None
    first = given[0]
    out = packed_memory(len(given) * first.nbytes, first.device).view(first.dtype).view(len(given), *first.shape)
    return torch.stack(given, out=out)
