"""Weights of bitsandbytes in NF4.

weight                                 bytes of two codes, the first one in the high bits, in the order of the values
weight.absmax                          float32 [blocks]; or uint8, which nested_quant_map turns into numbers
weight.quant_state.bitsandbytes__nf4   the bytes of a JSON object: shape, blocksize, nested_offset, …
weight.nested_absmax                   float32, a scale for each nested_blocksize of absmax
weight.nested_quant_map                float32 [256]
weight.quant_map                       float32 [16]: the levels
"""

from __future__ import annotations

import json
import math
from typing import Any, TypeGuard

import torch

from folio.app.config.quantised import LEAST_GROUP, Scheme
from folio.app.errors import ModelError
from folio.app.models.quantised.packed import Layout, Parts
from folio.kernels import QuantisedWeight, rounded_scales

_BYTES, _SCALES, _STATE = ".weight", ".weight.absmax", ".weight.quant_state.bitsandbytes__nf4"
_NESTED, _MAP, _LEVELS = ".weight.nested_absmax", ".weight.nested_quant_map", ".weight.quant_map"
# The integers that are nearest to NF4's levels, and their unit: 0.5 % of the weight's norm from them (bfloat16: 0.2 %;
# NF4 itself: 9 % from the weight that it was made from).
_TABLE = (-124, -86, -65, -49, -35, -23, -11, 0, 10, 20, 31, 42, 55, 70, 90, 124)
_UNIT = 0.0080571


def _read(parts: Parts, scheme: Scheme) -> QuantisedWeight | torch.Tensor:
    state = _state(parts)
    (outputs, inputs), block = state["shape"], state["blocksize"]
    packed = parts.read(_BYTES).contiguous().view(torch.uint8).view(-1)
    if len(packed) * 2 != outputs * inputs:
        raise ModelError(f"{parts}{_BYTES} has {len(packed)} bytes, which are not of {[outputs, inputs]}")
    codes = torch.stack((packed >> 4, packed & 15), 1).view(outputs, inputs)
    scales, levels = parts.finite(_SCALES, _scales(parts, state)), parts.read(_LEVELS, torch.float32)
    parts.expect(_SCALES, scales, -(-outputs * inputs // block))
    parts.expect(_LEVELS, levels, len(_TABLE))
    if not (levels - torch.tensor(_TABLE) * _UNIT).abs().max() <= _UNIT:  # or no numbers
        raise ModelError(f"{parts}{_LEVELS} has other levels than NF4")
    group = math.gcd(inputs, block)  # blocks may go on in the next output
    if group % LEAST_GROUP:
        values = levels[codes.long()].view(-1) * scales.repeat_interleave(block)[: outputs * inputs]
        return values.view(outputs, inputs).bfloat16()
    scales = scales.repeat_interleave(block // group)[: outputs * inputs // group]
    halves, _, factors = rounded_scales(scales.view(outputs, -1) * _UNIT)
    return QuantisedWeight(codes, 4, group, halves, factors=factors, table=_TABLE)


def _state(parts: Parts) -> dict[str, Any]:
    try:
        state = json.loads(bytes(parts.read(_STATE, torch.uint8).reshape(-1).tolist()))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{parts}{_STATE} is no JSON object: {error}") from None
    shape = state.get("shape") if isinstance(state, dict) else None
    if not isinstance(shape, list) or len(shape) != 2 or not all(map(_is_size, shape)):
        raise ModelError(f"{parts}{_STATE} has the shape {shape}; it must be one of two dimensions")
    if not _is_size(state.get("blocksize")):
        raise ModelError(f"{parts}{_STATE} has the blocksize {state.get('blocksize')}")
    return state


def _scales(parts: Parts, state: dict[str, Any]) -> torch.Tensor:
    scales = parts.read(_SCALES, torch.float32, torch.uint8)
    if scales.dtype == torch.float32:
        return scales
    block, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if not _is_size(block) or not isinstance(offset, float):
        raise ModelError(f"{parts}{_STATE} lacks nested_blocksize or nested_offset")
    nested, table = parts.read(_NESTED, torch.float32), parts.read(_MAP, torch.float32)
    parts.expect(_NESTED, nested, -(-len(scales) // block))
    parts.expect(_MAP, table, 256)
    return table[scales.long()] * nested.repeat_interleave(block)[: len(scales)] + offset


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


LAYOUT = Layout((_BYTES, _SCALES, _STATE, _NESTED, _MAP, _LEVELS), frozenset({_SCALES}), _read)
