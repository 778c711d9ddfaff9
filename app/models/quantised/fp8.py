"""Weights in FP8 of the form of DeepSeek and Qwen.

    weight             float8 [outputs, inputs]
    weight_scale_inv   [outputs / height, inputs / width] of blocks, rounded up; or one number

Codes are the floats; on CPUs, whose kernels have none, they are rounded when they are packed (`as_integers`).
"""

from __future__ import annotations

import torch

from folio.app.config.quantised import LEAST_GROUP, Scheme
from folio.app.errors import ModelError
from folio.app.models.quantised.packed import Layout, Parts, grouped
from folio.kernels import QuantisedWeight, quantise

_VALUES, _SCALES, _UNUSED = ".weight", ".weight_scale_inv", (".activation_scale", ".input_scale")
DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def _read(parts: Parts, scheme: Scheme) -> QuantisedWeight:
    values, scales = parts.read(_VALUES, *DTYPES), parts.scales(_SCALES)
    if values.ndim != 2:
        raise ModelError(f"{parts}{_VALUES} has the shape {list(values.shape)}, which is not of two dimensions")
    return of_floats(values, *block_scales(parts, _SCALES, scales, scheme, values.shape))


def block_scales(
    parts: Parts, ending: str, scales: torch.Tensor, scheme: Scheme, shape: tuple[int, ...]
) -> tuple[torch.Tensor, int]:
    """`[outputs, groups]` of scales of blocks, or of one scale, and the inputs of a group."""
    outputs, inputs = shape
    if scales.numel() == 1:
        return scales.view(1, 1).expand(outputs, 1), inputs
    height, width = scheme.block or (outputs, inputs)
    parts.expect(ending, scales, -(-outputs // height), -(-inputs // width))
    return scales.repeat_interleave(height, 0)[:outputs], width


def of_floats(values: torch.Tensor, scales: torch.Tensor, group: int) -> QuantisedWeight:
    """The floats as they are; as integers if they are e5m2, or no kernel has their groups. Args: as of `grouped`."""
    if values.dtype == torch.float8_e4m3fn and (scales.shape[1] == 1 or group % LEAST_GROUP == 0):
        return grouped(values, 8, scales, 0, group=group)
    return quantise(values.float() * scales.repeat_interleave(group, 1)[:, : values.shape[1]], 8)


LAYOUT = Layout((_VALUES, _SCALES, *_UNUSED), frozenset({_SCALES}), _read)
