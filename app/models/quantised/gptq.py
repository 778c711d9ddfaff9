"""Weights of GPTQ, as AutoGPTQ and GPTQModel write them.

qweight  int32 [inputs · bits / 32, outputs]   codes of neighbouring inputs, the lowest bits first
qzeros   int32 [groups, outputs · bits / 32]   zero points of neighbouring outputs; less by 1 in the first format
scales         [groups, outputs]
g_idx    int32 [inputs]                        the group of each input; absent or ascending without desc_act
"""

from __future__ import annotations

import torch

from folio.app.config.quantised import Scheme
from folio.app.errors import ModelError
from folio.app.models.quantised.packed import Layout, Parts, grouped, unpacked
from folio.kernels import QuantisedWeight

_CODES, _ZEROS, _SCALES, _GROUPS = ".qweight", ".qzeros", ".scales", ".g_idx"
# A 1 in each field of a word.
_ONES = {4: 0x11111111, 8: 0x01010101}


def _read(parts: Parts, scheme: Scheme) -> QuantisedWeight:
    (bits,) = scheme.bits
    words, zeros = parts.read(_CODES, torch.int32), parts.read(_ZEROS, torch.int32)
    if words.ndim != 2:
        raise ModelError(f"{parts}{_CODES} has the shape {list(words.shape)}, which is not of two dimensions")
    fields, outputs = 32 // bits, words.shape[1]
    inputs = words.shape[0] * fields
    group = scheme.group or inputs
    count = -(-inputs // group)
    scales = parts.scales(_SCALES)
    parts.expect(_SCALES, scales, count, outputs)
    parts.expect(_ZEROS, zeros, count, outputs // fields)
    if scheme.zeros_less_one:  # in whole words: what the writer's subtraction borrowed is given back
        zeros = zeros + _ONES[bits]
    groups = parts.read(_GROUPS) if _GROUPS in parts.present else None
    if groups is not None:
        parts.expect(_GROUPS, groups, inputs)
    return grouped(unpacked(words.t(), bits), bits, scales.t(), unpacked(zeros, bits).t(), group=group, groups=groups)


LAYOUT = Layout((_CODES, _ZEROS, _SCALES, _GROUPS), frozenset({_CODES}), _read)
