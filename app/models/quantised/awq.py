"""Weights of AWQ, as AutoAWQ's version gemm has them.

qweight  int32 [inputs, outputs / 8]   codes of neighbouring outputs, interleaved
qzeros   int32 [groups, outputs / 8]   zero points, likewise
scales         [groups, outputs]
"""

from __future__ import annotations

import torch

from folio.app.config.quantised import Scheme
from folio.app.errors import ModelError
from folio.app.models.quantised.packed import Layout, Parts, grouped
from folio.kernels import QuantisedWeight

_CODES, _ZEROS, _SCALES = ".qweight", ".qzeros", ".scales"
# Where in a word the codes of its eight outputs are: those of the outputs 0, 2, 4, 6 come first.
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


def _read(parts: Parts, scheme: Scheme) -> QuantisedWeight:
    words, zeros = parts.read(_CODES, torch.int32), parts.read(_ZEROS, torch.int32)
    if words.ndim != 2:
        raise ModelError(f"{parts}{_CODES} has the shape {list(words.shape)}, which is not of two dimensions")
    inputs, columns = words.shape
    group = scheme.group or inputs
    count = -(-inputs // group)
    scales = parts.scales(_SCALES)
    parts.expect(_SCALES, scales, count, columns * len(_PLACES))
    parts.expect(_ZEROS, zeros, count, columns)
    return grouped(_by_output(words), 4, scales.t(), _by_output(zeros), group=group)


def _by_output(words: torch.Tensor) -> torch.Tensor:
    """`[rows, words]` → uint8 `[outputs, rows]`."""
    words = words.t().contiguous()
    codes = torch.empty(len(words), len(_PLACES), words.shape[1], dtype=torch.uint8)
    for output, place in enumerate(_PLACES):
        codes[:, output] = (words >> 4 * place) & 15
    return codes.view(-1, words.shape[1])


LAYOUT = Layout((_CODES, _ZEROS, _SCALES), frozenset({_CODES}), _read)
