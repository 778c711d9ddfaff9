"""Quantised weights: small numbers with a scale for each group of inputs. Every kind that is read becomes this form.

Q4_0, Q5_0, Q8_0, GPTQ, AWQ, int8      scale · (code − zero)
Q4_1, Q5_1                             scale · code + offset
Q2_K, Q4_K, Q5_K                       super scale · scale · code + super offset · offset
Q3_K, Q6_K                             super scale · scale · (code − zero)
IQ4_NL, IQ4_XS, MXFP4                  [super scale ·] scale · table[code]
FP8                                    scale · code, a float
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from folio.kernels.threads import each

Bits = Literal[2, 3, 4, 5, 6, 8]
# Inputs of a super scale.
SUPER_GROUP = 256
# Inputs of the least group that the kernels have for codes of these bits.
LEAST_GROUP: dict[int, int] = {2: 16, 3: 16, 4: 32, 5: 32, 6: 16, 8: 32}
_TABLE_ENTRIES = 16
# Values that are quantised at once: they stay in a core's cache.
_VALUES_AT_ONCE = 1 << 16
_ROWS_ON_A_DEVICE = 1024
# Fits of scales to codes of 4 bits: on normally distributed weights, two make the error 6 % less, a third one 0.4 %.
_FITS = 2


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedWeight:
    """A weight `[outputs, inputs]`. The value of a code is

        scale · (table[code] if there is a table else code − zero) + offset

    with the scale and the offset of its group: `group` neighbouring inputs of an output, or the rest.

    Attributes:
        codes: `[outputs, inputs]` uint8, less than 2 ** bits; or float8_e4m3fn, whose zero is 0.
        group: inputs with one scale: `LEAST_GROUP[bits]` times a whole number.
        scales: `[outputs, ceil(inputs / group)]` float16; with super scales int8 or
            uint8, and group is `LEAST_GROUP[bits]`.
        offsets: like `scales`, or none; beside super scales uint8.
        super_scales: `[outputs, inputs / SUPER_GROUP]` float16; a scale is the product of both. `None`: one level.
        super_offsets: likewise for the offsets.
        factors: `[outputs]` float32, of all values of an output: what the float16 of the scales might not hold.
        zero: subtracted from each code; 0 beside offsets.
        table: 16 values from -127 to 127, for codes of 4 bits.
        order: `[inputs]` int64: column i of the codes belongs to the input `order[i]`; `None`: to input i.
    """

    codes: torch.Tensor
    bits: Bits
    group: int
    scales: torch.Tensor
    offsets: torch.Tensor | None = None
    super_scales: torch.Tensor | None = None
    super_offsets: torch.Tensor | None = None
    factors: torch.Tensor | None = None
    zero: int = 0
    table: tuple[int, ...] | None = None
    order: torch.Tensor | None = None

    def __post_init__(self) -> None:
        outputs, inputs = self.codes.shape
        least, groups = LEAST_GROUP[self.bits], (outputs, -(-inputs // self.group))
        nested = self.super_scales is not None
        if self.group % least or (nested and (self.group != least or inputs % SUPER_GROUP)):
            raise ValueError(f"groups of {self.group} of {inputs} inputs in {self.bits} bits")
        if self.table is not None and (self.bits != 4 or len(self.table) != _TABLE_ENTRIES):
            raise ValueError(f"a table of {len(self.table)} for codes of {self.bits} bits")
        supers = (outputs, inputs // SUPER_GROUP)
        shapes = {"scales": groups, "offsets": groups, "super_scales": supers, "super_offsets": supers}
        for name, shape in {**shapes, "factors": (outputs,), "order": (inputs,)}.items():
            if (tensor := getattr(self, name)) is not None and tensor.shape != shape:
                raise ValueError(f"{name} {list(tensor.shape)}, not {list(shape)}")

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        outputs, inputs = self.codes.shape
        return outputs, inputs

    def rows(self, start: int, end: int) -> QuantisedWeight:
        """The outputs `start` to `end - 1`."""
        return self.select(torch.arange(start, end))

    def select(self, outputs: torch.Tensor) -> QuantisedWeight:
        """These outputs, in this order."""
        names = ("codes", "scales", "offsets", "super_scales", "super_offsets", "factors")
        parts = {name: getattr(self, name) for name in names}
        chosen: dict[str, Any] = {name: None if part is None else part[outputs] for name, part in parts.items()}
        return replace(self, **chosen)

    def columns(self, start: int, end: int) -> QuantisedWeight:
        """The inputs `start` to `end - 1`; groups that this would cut become smaller ones.

        Raises:
            ValueError: the inputs have an order, or the kernels have no groups so small.
        """
        inputs, nested = self.shape[1], self.super_scales is not None
        # Whatever the last group lacks.
        stop = end if end < inputs else 0
        least = SUPER_GROUP if nested else LEAST_GROUP[self.bits]
        if self.order is not None:
            raise ValueError("its inputs are grouped by their activations (desc_act)")
        if start % least or stop % least:
            raise ValueError(f"inputs {start} to {end - 1} of {inputs} would cut a group of {least}")
        group = self.group if nested else math.gcd(self.group, start, stop)

        def cut(values: torch.Tensor | None, old: int, new: int) -> torch.Tensor | None:
            return None if values is None else values.repeat_interleave(old // new, 1)[:, start // new : -(-end // new)]

        by_group = {name: cut(getattr(self, name), self.group, group) for name in ("scales", "offsets")}
        supers = {f"super_{name}": cut(getattr(self, f"super_{name}"), SUPER_GROUP, SUPER_GROUP) for name in by_group}
        changed: dict[str, Any] = {**by_group, **supers}
        return replace(self, codes=self.codes[:, start:end], group=group, **changed)

    def dequantised(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values `[outputs, inputs]`: the definition, computed in float32."""
        inputs = self.shape[1]
        padded = nn.functional.pad(self.codes, (0, -inputs % self.group)).unflatten(1, (-1, self.group))
        if self.table is None:
            values = padded.float() - self.zero
        else:
            values = torch.tensor(self.table, dtype=torch.float32)[padded.long()]
        values = values * _nested(self.scales, self.super_scales, self.group)
        if self.offsets is not None:
            values = values + _nested(self.offsets, self.super_offsets, self.group)
        values = values.flatten(1)[:, :inputs]
        if self.factors is not None:
            values = values * self.factors[:, None]
        if self.order is not None:
            values = torch.empty_like(values).index_copy_(1, self.order, values)
        return values.to(dtype)


def _nested(scales: torch.Tensor, supers: torch.Tensor | None, group: int) -> torch.Tensor:
    values = scales.float()
    if supers is not None:
        values = values * supers.float().repeat_interleave(SUPER_GROUP // group, 1)
    return values[..., None]


def rounded_scales(
    scales: torch.Tensor, offsets: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Scales and offsets `[outputs, groups]` in float16, and factors of the outputs if some are beyond its range."""
    parts = [scales.float()] if offsets is None else [scales.float(), offsets.float()]
    factors = None
    if not all(map(_fits_float16, parts)):
        most = torch.stack([part.abs().amax(1) for part in parts]).amax(0)
        # Powers of 2 round nothing.
        factors = torch.exp2(most.frexp().exponent.clamp(-126, 127).float())
        parts = [part / factors[:, None] for part in parts]
    return parts[0].half(), None if offsets is None else parts[1].half(), factors


def as_integers(weight: QuantisedWeight) -> QuantisedWeight:
    """The weight itself; or codes that are floats, rounded to integers of 8 bits in the least groups. That is 0.5 % of
    the norm, and FP8 itself is 2.6 % from the weight that it was made from: 2.7 % in all."""
    return quantise(weight.dequantised(), 8) if weight.codes.is_floating_point() else weight


def _fits_float16(values: torch.Tensor) -> bool:
    return bool(((values.half().float() - values).abs() <= values.abs() * 2**-11).all())


def quantise(weight: torch.Tensor, bits: Literal[4, 8], group: int | None = None) -> QuantisedWeight:
    """Round a weight `[outputs, inputs]` to the nearest codes of its groups: symmetric in 8 bits, with an offset in 4.

    Args:
        group: by default the least.
    """
    group = group or LEAST_GROUP[bits]
    outputs, inputs = weight.shape
    more = -inputs % group
    groups = (inputs + more) // group
    codes = torch.empty(outputs, groups, group, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(outputs, groups, dtype=torch.float16, device=weight.device)
    offsets = torch.empty_like(scales) if bits == 4 else None
    factors = torch.ones(outputs, device=weight.device)
    on_cpu = weight.device.type == "cpu"
    at_once = max(1, _VALUES_AT_ONCE // max(1, inputs)) if on_cpu else _ROWS_ON_A_DEVICE
    starts = range(0, outputs, at_once)

    def fill(start: int) -> None:
        rows = slice(start, start + at_once)
        values = weight[rows].float().contiguous()  # experts may be transposed
        if more:  # the last input again: zeros might widen the range of its group
            values = torch.cat((values, values[:, -1:].expand(-1, more)), 1)
        values = values.view(len(values), groups, group)
        steps, lows = _least_squares(values) if bits == 4 else (values.abs().amax(-1) / 127, None)
        scales[rows], halves, found = rounded_scales(steps, lows)
        factor = 1.0 if found is None else found[:, None]
        steps = scales[rows].float() * factor
        if offsets is None or halves is None:
            codes[rows] = _codes(values, steps, steps * -128, 255)
        else:
            offsets[rows] = halves
            codes[rows] = _codes(values, steps, halves.float() * factor, 15)
        if found is not None:
            factors[rows] = found

    if on_cpu:
        each(fill, starts)
    else:
        for start in starts:
            fill(start)
    return QuantisedWeight(
        codes.view(outputs, -1)[:, :inputs],
        bits,
        group,
        scales,
        offsets,
        factors=None if bool((factors == 1).all()) else factors,
        zero=128 if bits == 8 else 0,
    )


def _least_squares(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and offsets of codes from 0 to 15: of the least and the largest value first, then fitted to the codes that
    these give."""
    lows, tops = values.aminmax(dim=-1)
    steps, means = (tops - lows) / 15, values.mean(-1)
    for _ in range(_FITS):
        codes = _codes(values, steps, lows, 15)
        middles = codes.mean(-1)
        codes -= middles[..., None]
        variances = torch.linalg.vector_norm(codes, dim=-1).square_()
        steps = torch.where(variances > 0, codes.mul_(values).sum(-1) / variances, steps)
        lows = means - steps * middles
    return steps, lows


def _codes(values: torch.Tensor, steps: torch.Tensor, lows: torch.Tensor, most: int) -> torch.Tensor:
    """The nearest codes, as float32."""
    steps = torch.where(steps == 0, 1.0, steps)
    return (values - lows[..., None]).div_(steps[..., None]).round_().clamp_(0, most)
