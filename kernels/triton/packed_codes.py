"""Quantised weights in the order of the kernels in `codes`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from folio.kernels.cpu.ops import PackedWeight, WeightPart
from folio.kernels.quantised import QuantisedWeight

SLAB, PARTS, LANES = 128, 8, 16
LOW_BITS = {2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 8: 8}
# By bytes. Words of scales are of several groups.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PACKED_CODES = 1 << 24  # that are packed at a time


def packed(weight: QuantisedWeight, dtype: torch.dtype, device: torch.device) -> PackedWeight:
    """A weight for inputs and results of a dtype."""
    (outputs, inputs), bits, kinds = weight.shape, weight.bits, 1 if weight.offsets is None else 2
    slabs = -(-inputs // SLAB)
    floats = weight.codes.is_floating_point()
    stored = weight.codes.dtype if floats else torch.int8 if bits == 8 else torch.uint8
    codes = torch.empty(slabs, outputs, LANES * bits, dtype=torch.uint8, device=device)
    rows = max(1, _PACKED_CODES // inputs)
    for start in () if weight.codes.is_meta else range(0, outputs, rows):
        codes[:, start : start + rows] = _packed_codes(weight.codes[start : start + rows].to(device), bits)
    # Inputs of a slab that have one scale, and the slabs of a scale for whole ones. A group of all inputs is whole.
    whole = weight.group if weight.group < inputs else slabs * SLAB
    group = math.gcd(whole, SLAB)
    every = 1 if group < SLAB else whole // group
    repeats, entries = whole // group // every, -(-slabs // every)

    def by_slab(values: torch.Tensor | None) -> Iterator[torch.Tensor]:
        """`[entries, outputs, 1, groups of a slab]`."""
        if values is not None:
            every_group = values.to(device).repeat_interleave(repeats, 1)
            filled = nn.functional.pad(every_group, (0, entries * (SLAB // group) - every_group.shape[1]))
            yield filled.view(outputs, entries, 1, -1).transpose(0, 1)

    nested = weight.super_scales is not None
    scales = torch.cat([*by_slab(weight.scales), *by_slab(weight.offsets)], 2).flatten(2).contiguous()
    supers = [s.to(device, torch.float16).t() for s in (weight.super_scales, weight.super_offsets) if s is not None]
    table = None if weight.table is None else torch.tensor(weight.table, dtype=torch.int8).view(torch.int64)
    part = WeightPart(
        codes.view(stored),
        outputs,
        bits,
        scales.to(torch.int8 if nested else torch.float16),
        torch.stack(supers, 2) if supers else None,
        None if weight.factors is None else weight.factors.to(device, torch.float32),
        None if table is None else table.to(device),
        weight.zero,
        every,
        kinds > 1,
    )
    return PackedWeight((part,), inputs, dtype, None if weight.order is None else weight.order.to(device, torch.int32))


def merged(weight: PackedWeight) -> PackedWeight:
    """The same weight, with one part for neighbouring ones of the same form."""
    parts: list[WeightPart] = []
    for part in weight.parts:
        if parts and form(parts[-1]) == form(part) and _table(parts[-1]) == _table(part):
            parts[-1] = _joined(parts[-1], part)
        else:
            parts.append(part)
    return replace(weight, parts=tuple(parts))


def form(part: WeightPart) -> tuple[object, ...]:
    """What equal kernels, and parts that can be joined, have in common."""
    shape = () if part.scales is None else (*part.codes.shape[:-3], part.scales.shape[-3], part.scales.shape[-1])
    optional = (part.supers is None, part.factors is None, part.table is None)
    return part.codes.dtype, part.bits, part.zero, part.every, part.has_offsets, *shape, *optional


def _packed_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes `[outputs, inputs]` as `[slabs, outputs, bytes]`."""
    if bits == 8:
        codes = codes.view(torch.uint8) if codes.is_floating_point() else codes ^ 128
    padded = nn.functional.pad(codes, (0, -codes.shape[1] % SLAB))
    fields = padded.view(len(codes), -1, PARTS, LANES)
    low = LOW_BITS[bits]
    planes = [(0, low), (low, bits - low)] if bits > low else [(0, low)]
    words = []
    for first, width in planes:
        word = torch.zeros(1, dtype=WORDS[width], device=codes.device)
        for part in range(PARTS):
            field = (fields[:, :, part] >> first) & (2**width - 1)
            word = word | field.to(word.dtype) << (width * part)
        words.append(word.view(torch.uint8))
    return torch.cat(words, 2).transpose(0, 1)


def _table(part: WeightPart) -> list[int] | None:
    return None if part.table is None else part.table.tolist()


def _joined(first: WeightPart, second: WeightPart) -> WeightPart:
    """The outputs of both."""
    joined: dict[str, Any] = {}
    for name, dimension in (("codes", 1), ("scales", 1), ("supers", 1), ("factors", 0)):
        parts = getattr(first, name), getattr(second, name)
        joined[name] = None if parts[0] is None else torch.cat(parts, dimension)
    return replace(first, outputs=first.outputs + second.outputs, **joined)
