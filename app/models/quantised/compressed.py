"""Weights of compressed-tensors.

    weight_packed      int32 [outputs, inputs · bits / 32]   values + 2^(bits − 1), the lowest bits first
    weight             int8 or float8 [outputs, inputs]      int-quantized, float-quantized, naive-quantized
    weight_scale             [outputs, groups], or of fewer dimensions; [rows, columns] of blocks for float8
    weight_zero_point        like the scales; packed along the outputs beside weight_packed
    weight_shape       int   [2]
    weight_g_idx       int32 [inputs]                        the group of each input (actorder: group)

Static scales of activations are not used: activations are not rounded, or by their own scales.
"""

from __future__ import annotations

import torch

from folio.app.config.quantised import Scheme
from folio.app.errors import ModelError
from folio.app.models.quantised.fp8 import DTYPES, block_scales, of_floats
from folio.app.models.quantised.packed import Layout, Parts, grouped, unpacked
from folio.kernels import QuantisedWeight

_CODES, _VALUES, _SCALES, _ZEROS = ".weight_packed", ".weight", ".weight_scale", ".weight_zero_point"
_SHAPE, _GROUPS = ".weight_shape", ".weight_g_idx"
_UNUSED = (".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point")


def _read(parts: Parts, scheme: Scheme) -> QuantisedWeight:
    if _CODES in parts.present:
        return _packed(parts, scheme)
    values = parts.read(_VALUES, torch.int8, *DTYPES)
    if values.ndim != 2:
        raise ModelError(f"{parts}{_VALUES} has the shape {list(values.shape)}, which is not of two dimensions")
    if values.dtype != torch.int8:
        return _from_fp8(parts, values, scheme)
    codes = (values.view(torch.uint8)) ^ 128
    return _made(parts, codes, 8, parts.read(_ZEROS) if _ZEROS in parts.present else None)


def _packed(parts: Parts, scheme: Scheme) -> QuantisedWeight:
    words, shape = parts.read(_CODES, torch.int32), parts.read(_SHAPE, torch.int64, torch.int32)
    parts.expect(_SHAPE, shape, 2)
    outputs, inputs = shape.tolist()
    found = [bits for bits in sorted(scheme.bits) if words.shape == (outputs, -(-inputs * bits // 32))]
    if outputs < 1 or inputs < 1 or not found:
        raise ModelError(f"{parts}{_CODES} has the shape {list(words.shape)}, which is not of {[outputs, inputs]}")
    bits = found[0]
    zeros = parts.read(_ZEROS) if _ZEROS in parts.present else None
    if zeros is not None and zeros.dtype == torch.int32:
        if zeros.ndim != 2 or zeros.shape[0] != -(-outputs * bits // 32):
            raise ModelError(f"{parts}{_ZEROS} has the shape {list(zeros.shape)}, which is not of {outputs} outputs")
        zeros = (unpacked(zeros.t(), bits)[:, :outputs].t().int() - 2 ** (bits - 1)).to(torch.int8)
    return _made(parts, unpacked(words, bits)[:, :inputs], bits, zeros)


def _made(parts: Parts, codes: torch.Tensor, bits: int, zeros: torch.Tensor | None) -> QuantisedWeight:
    """Args: `zeros`: of signed values."""
    middle, (outputs, inputs) = 2 ** (bits - 1), codes.shape
    scales = _by_output(parts, _SCALES, parts.scales(_SCALES), outputs)
    if zeros is not None:
        zeros = _by_output(parts, _ZEROS, zeros, outputs)
        parts.expect(_ZEROS, zeros, *scales.shape)
    groups = parts.read(_GROUPS) if _GROUPS in parts.present else None
    if groups is not None:
        parts.expect(_GROUPS, groups, inputs)
        groups = None if bool((groups == -1).all()) else groups  # never written by the quantiser
    return grouped(codes, bits, scales, middle if zeros is None else zeros.int() + middle, groups=groups)


def _by_output(parts: Parts, ending: str, tensor: torch.Tensor, outputs: int) -> torch.Tensor:
    """`[outputs, groups]` of one number, one for each output, or one for each group."""
    if tensor.numel() == 1:
        return tensor.reshape(1, 1).expand(outputs, 1)
    if tensor.ndim not in (1, 2) or len(tensor) != outputs:
        raise ModelError(f"{parts}{ending} has the shape {list(tensor.shape)}, which is not of {outputs} outputs")
    return tensor.view(outputs, -1)


def _from_fp8(parts: Parts, values: torch.Tensor, scheme: Scheme) -> QuantisedWeight:
    scales, outputs = parts.scales(_SCALES), len(values)
    if scheme.block is not None:
        return of_floats(values, *block_scales(parts, _SCALES, scales, scheme, values.shape))
    scales = _by_output(parts, _SCALES, scales, outputs)
    parts.expect(_SCALES, scales, outputs, 1)
    return of_floats(values, scales, values.shape[1])


LAYOUT = Layout((_CODES, _VALUES, _SCALES, _ZEROS, _SHAPE, _GROUPS, *_UNUSED), frozenset({_CODES, _SCALES}), _read)
