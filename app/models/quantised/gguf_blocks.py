"""Blocks of GGUF's tensors as quantised weights, exactly; `ggml-common.h` defines their bytes.

By numpy, whose operations need no team of threads: a model has hundreds of small tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from folio.kernels import QuantisedWeight
from folio.kernels.quantised import Bits

# uint8; of blocks: [outputs, blocks, bytes].
Bytes: TypeAlias = npt.NDArray[Any]

_IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the values of e2m1.
_MXFP4_TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Exponents of the powers of 2 that float16 holds.
_LEAST_EXPONENT, _MOST_EXPONENT = -24, 15
_NO_E8M0 = 255
_NO_NUMBERS = "scales that are infinite or no numbers"


def decode(
    kind: str, data: Bytes, shape: tuple[int, ...], columns: tuple[int, int] | None = None
) -> torch.Tensor | QuantisedWeight:
    """A tensor of one of `header.READ_KINDS`.

    Args:
        data: `[bytes]`.
        shape: the innermost size last; of quantised kinds two sizes.
        columns: the first and the end of those that are decoded, unless blocks would be cut; `None`: all.

    Raises:
        ValueError: what is wrong with it, after "has".
    """
    if kind in _DENSE:
        return torch.from_numpy(data).view(_DENSE[kind]).view(shape)
    values, num_bytes, read = _BLOCKS[kind]
    outputs, inputs = shape
    blocks = data.reshape(outputs, inputs // values, num_bytes)
    if columns is not None and not any(column % values for column in columns):
        blocks = blocks[:, columns[0] // values : columns[1] // values]
    return read(blocks)


def _weight(codes: Bytes, bits: Bits, group: int, *parts: npt.NDArray[Any], **settings: Any) -> QuantisedWeight:
    """Args: parts: scales, offsets, super scales, super offsets, as far as there are any, of each block."""
    flat = [torch.from_numpy(part.reshape(len(part), -1)) for part in (codes, *parts)]
    named: dict[str, Any] = dict(zip(("scales", "offsets", "super_scales", "super_offsets"), flat[1:], strict=False))
    return QuantisedWeight(flat[0], bits, group, **named, **settings)


def _half(blocks: Bytes, start: int) -> npt.NDArray[np.float16]:
    """A float16 of each block."""
    halves = np.ascontiguousarray(blocks[..., start : start + 2]).view("<f2")
    if not np.isfinite(halves).all():
        raise ValueError(_NO_NUMBERS)
    return halves


def _fields(data: Bytes, bits: int, width: int) -> Bytes:
    """Fields of `bits` bits: of each `width` bytes first all lowest fields, then all second ones, …

    Returns:
        `[outputs, blocks, bytes * 8 / bits]`.
    """
    parts = data.reshape(*data.shape[:2], -1, width)
    fields = np.empty((*parts.shape[:3], 8 // bits, width), np.uint8)
    for index in range(8 // bits):
        field = fields[..., index, :]
        np.right_shift(parts, index * bits, out=field)
        np.bitwise_and(field, 2**bits - 1, out=field)
    return fields.reshape(*data.shape[:2], -1)


def _joined(low: Bytes, high: Bytes, bits: int = 4) -> Bytes:
    """Fields whose `bits` lower bits are apart from the others."""
    return low | high << bits


def _q4_0(blocks: Bytes) -> QuantisedWeight:
    return _weight(_fields(blocks[..., 2:], 4, 16), 4, 32, _half(blocks, 0), zero=8)


def _q4_1(blocks: Bytes) -> QuantisedWeight:
    return _weight(_fields(blocks[..., 4:], 4, 16), 4, 32, _half(blocks, 0), _half(blocks, 2))


def _five_bits(blocks: Bytes, start: int) -> Bytes:
    """Codes of Q5_0 and Q5_1: the highest bits of 32 values, their lower 4 bits."""
    high = np.unpackbits(blocks[..., start : start + 4], axis=-1, bitorder="little")
    return _joined(_fields(blocks[..., start + 4 :], 4, 16), high)


def _q5_0(blocks: Bytes) -> QuantisedWeight:
    return _weight(_five_bits(blocks, 2), 5, 32, _half(blocks, 0), zero=16)


def _q5_1(blocks: Bytes) -> QuantisedWeight:
    return _weight(_five_bits(blocks, 4), 5, 32, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes) -> QuantisedWeight:
    return _weight(blocks[..., 2:] ^ 128, 8, 32, _half(blocks, 0), zero=128)  # int8 + 128


def _q2_k(blocks: Bytes) -> QuantisedWeight:
    codes, scales = _fields(blocks[..., 16:80], 2, 32), blocks[..., :16]
    return _weight(codes, 2, 16, scales & 15, scales >> 4, _half(blocks, 80), -_half(blocks, 82))


def _q3_k(blocks: Bytes) -> QuantisedWeight:
    codes = _joined(_fields(blocks[..., 32:96], 2, 32), _fields(blocks[..., :32], 1, 32), 2)
    scales = _signed(_fields(blocks[..., 96:104], 4, 8), _fields(blocks[..., 104:108], 2, 4))
    return _nested(codes, 3, 16, scales, _half(blocks, 108), zero=4)


def _signed(low: Bytes, high: Bytes) -> npt.NDArray[np.int8]:
    """Scales of 4 and 2 bits that begin at -32."""
    return _joined(low, high).view(np.int8) - np.int8(32)


def _nested(
    codes: Bytes, bits: Bits, group: int, scales: npt.NDArray[np.int8], supers: npt.NDArray[np.float16], **settings: Any
) -> QuantisedWeight:
    """A weight with super scales and without offsets."""
    super_scales = torch.from_numpy(supers.reshape(len(supers), -1))
    return _weight(codes, bits, group, scales, super_scales=super_scales, **settings)


def _k_scales(blocks: Bytes) -> tuple[Bytes, Bytes]:
    """Scales and offsets of Q4_K and Q5_K: 8 of 6 bits each in 12 bytes."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = np.concatenate([first & 63, _joined(third & 15, first >> 6)], -1)
    offsets = np.concatenate([second & 63, _joined(third >> 4, second >> 6)], -1)
    return scales, offsets


def _q4_k(blocks: Bytes) -> QuantisedWeight:
    codes = _fields(blocks[..., 16:], 4, 32)
    return _weight(codes, 4, 32, *_k_scales(blocks), _half(blocks, 0), -_half(blocks, 2))


def _q5_k(blocks: Bytes) -> QuantisedWeight:
    codes = _joined(_fields(blocks[..., 48:], 4, 32), _fields(blocks[..., 16:48], 1, 32))
    return _weight(codes, 5, 32, *_k_scales(blocks), _half(blocks, 0), -_half(blocks, 2))


def _q6_k(blocks: Bytes) -> QuantisedWeight:
    codes = _joined(_fields(blocks[..., :128], 4, 64), _fields(blocks[..., 128:192], 2, 32))
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return _nested(codes, 6, 16, scales, _half(blocks, 208), zero=32)


def _iq4_nl(blocks: Bytes) -> QuantisedWeight:
    return _weight(_fields(blocks[..., 2:], 4, 16), 4, 32, _half(blocks, 0), table=_IQ4_TABLE)


def _iq4_xs(blocks: Bytes) -> QuantisedWeight:
    scales = _signed(_fields(blocks[..., 4:8], 4, 1), _fields(blocks[..., 2:4], 2, 1))
    return _nested(_fields(blocks[..., 8:], 4, 16), 4, 32, scales, _half(blocks, 0), table=_IQ4_TABLE)


def _mxfp4(blocks: Bytes) -> QuantisedWeight:
    return mxfp4(_fields(blocks[..., 1:], 4, 16), blocks[..., 0])


def mxfp4(codes: Bytes, scales: Bytes) -> QuantisedWeight:
    """Scales are powers of 2 from 2 ** -128 on. Where float16 lacks one of an output, the highest one is its factor.

    Args:
        codes: `[outputs, blocks, 32]`.
        scales: `[outputs, blocks]`.

    Raises:
        ValueError: as of `decode`.
    """
    if scales.max(initial=0) == _NO_E8M0:
        raise ValueError(_NO_NUMBERS)
    exponents = scales.astype(np.int32) - 128
    highest = exponents.max(-1)
    lacks = (exponents < _LEAST_EXPONENT).any(-1) | (highest > _MOST_EXPONENT)
    shift = np.where(lacks, highest - _MOST_EXPONENT, 0)
    halves = np.exp2((exponents - shift[:, None]).astype(np.float64)).astype(np.float16)
    factors = torch.from_numpy(np.exp2(shift.astype(np.float64)).astype(np.float32)) if lacks.any() else None
    return _weight(codes, 4, 32, halves, factors=factors, table=_MXFP4_TABLE)


# Kind: values and bytes of a block, its reader.
_BLOCKS: dict[str, tuple[int, int, Callable[[Bytes], QuantisedWeight]]] = {
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q5_0": (32, 22, _q5_0),
    "Q5_1": (32, 24, _q5_1),
    "Q8_0": (32, 34, _q8_0),
    "Q2_K": (256, 84, _q2_k),
    "Q3_K": (256, 110, _q3_k),
    "Q4_K": (256, 144, _q4_k),
    "Q5_K": (256, 176, _q5_k),
    "Q6_K": (256, 210, _q6_k),
    "IQ4_NL": (32, 18, _iq4_nl),
    "IQ4_XS": (256, 136, _iq4_xs),
    "MXFP4": (32, 17, _mxfp4),
}
