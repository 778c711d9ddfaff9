"""Weights in FP8 of the form of DeepSeek and Qwen.

    weight             float8 [outputs, inputs]
    weight_scale_inv   [outputs / height, inputs / width] of blocks, rounded up; or one number

Codes of a `QuantisedWeight` are integers: the values are rounded to 8 bits in groups of 32. That is 0.5 % of the
weight's norm, and FP8 itself is 2.6 % from the weight that it was made from: 2.7 % in all. bfloat16 would be 0.2 %, in
twice the memory.
"""

from __future__ import annotations

import torch

from folio.app.config.quantised import Scheme
from folio.app.errors import ModelError
from folio.app.models.quantised.packed import Layout, Parts
from folio.kernels import QuantisedWeight, quantise

_VALUES, _SCALES, _UNUSED = ".weight", ".weight_scale_inv", (".activation_scale", ".input_scale")
DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def _read(parts: Parts, scheme: Scheme) -> QuantisedWeight:
    values, scales = parts.read(_VALUES, *DTYPES), parts.scales(_SCALES)
    if values.ndim != 2:
        raise ModelError(f"{parts}{_VALUES} has the shape {list(values.shape)}, which is not of two dimensions")
    return rounded(values, block_scales(parts, _SCALES, scales, scheme, values.shape))


def block_scales(
    parts: Parts, ending: str, scales: torch.Tensor, scheme: Scheme, shape: tuple[int, ...]
) -> torch.Tensor:
    """Scales of blocks, or one scale, that can be multiplied with values of this shape."""
    if scales.numel() == 1:
        return scales.view(1, 1)
    outputs, inputs = shape
    height, width = scheme.block or (outputs, inputs)
    parts.expect(ending, scales, -(-outputs // height), -(-inputs // width))
    return scales.repeat_interleave(height, 0)[:outputs].repeat_interleave(width, 1)[:, :inputs]


def rounded(values: torch.Tensor, scales: torch.Tensor) -> QuantisedWeight:
    """Floats of 8 bits as integers of 8."""
    return quantise(values.float() * scales, 8)


LAYOUT = Layout((_VALUES, _SCALES, *_UNUSED), frozenset({_SCALES}), _read)
