"""Blocks of GGUF's tensors as quantised weights, exactly; `ggml-common.h` defines their bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from folio.kernels import QuantisedWeight

_IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the values of e2m1.
_MXFP4_TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Exponents of the powers of 2 that float16 holds.
_LEAST_EXPONENT, _MOST_EXPONENT = -24, 15


def decode(kind: str, data: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor | QuantisedWeight:
    """A tensor of a kind in `READ_KINDS`.

    Args:
        data: `[bytes]` uint8.
        shape: the innermost size last; of quantised kinds two sizes.
    """
    if kind in _DENSE:
        return data.view(_DENSE[kind]).view(shape)
    values, num_bytes, read = _BLOCKS[kind]
    outputs, inputs = shape
    return read(data.view(outputs, inputs // values, num_bytes))


def _flat(parts: torch.Tensor) -> torch.Tensor:
    """`[outputs, blocks, …]` as `[outputs, values]`."""
    return parts.reshape(parts.shape[0], -1)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """A float16 of each block: `[outputs, blocks]`."""
    return _flat(blocks[..., start : start + 2].contiguous().view(torch.float16))


def _fields(data: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Fields of `bits` bits: of `width` bytes first all lowest fields, then all second ones, …

    Args:
        data: `[outputs, blocks, bytes]` uint8.

    Returns:
        `[outputs, blocks, bytes * 8 / bits]` uint8.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    parts = (data.unflatten(-1, (-1, 1, width)) >> shifts) & (2**bits - 1)
    return parts.flatten(2)


def _q4_0(blocks: torch.Tensor) -> QuantisedWeight:
    return QuantisedWeight(_flat(_fields(blocks[..., 2:], 4, 16)), 4, 32, _half(blocks, 0), zero=8)


def _q4_1(blocks: torch.Tensor) -> QuantisedWeight:
    return QuantisedWeight(_flat(_fields(blocks[..., 4:], 4, 16)), 4, 32, _half(blocks, 0), _half(blocks, 2))


def _five_bits(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Codes of Q5_0 and Q5_1: a bit for each value, its lower 4 bits."""
    high = (blocks[..., start : start + 4, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return _flat(_fields(blocks[..., start + 4 :], 4, 16) | high.flatten(2) << 4)


def _q5_0(blocks: torch.Tensor) -> QuantisedWeight:
    return QuantisedWeight(_five_bits(blocks, 2), 5, 32, _half(blocks, 0), zero=16)


def _q5_1(blocks: torch.Tensor) -> QuantisedWeight:
    return QuantisedWeight(_five_bits(blocks, 4), 5, 32, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> QuantisedWeight:
    return QuantisedWeight(_flat(blocks[..., 2:]) ^ 128, 8, 32, _half(blocks, 0), zero=128)  # int8 + 128


def _q2_k(blocks: torch.Tensor) -> QuantisedWeight:
    scales = _flat(blocks[..., :16])
    codes = _flat(_fields(blocks[..., 16:80], 2, 32))
    return QuantisedWeight(codes, 2, 16, scales & 15, scales >> 4, _half(blocks, 80), -_half(blocks, 82))


def _q3_k(blocks: torch.Tensor) -> QuantisedWeight:
    high = _fields(blocks[..., :32], 1, 32)
    codes = _flat(_fields(blocks[..., 32:96], 2, 32) | high << 2)
    scales = _fields(blocks[..., 96:104], 4, 8) | _fields(blocks[..., 104:108], 2, 4) << 4
    return QuantisedWeight(codes, 3, 16, _flat(_signed(scales)), super_scales=_half(blocks, 108), zero=4)


def _signed(scales: torch.Tensor) -> torch.Tensor:
    """Scales of 6 bits that begin at -32."""
    return scales.view(torch.int8) - 32


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and offsets of Q4_K and Q5_K: 8 of 6 bits each in 12 bytes."""
    first, second, third = blocks[..., 4:16].split(4, -1)
    scales = torch.cat([first & 63, (third & 15) | (first >> 6) << 4], -1)
    offsets = torch.cat([second & 63, third >> 4 | (second >> 6) << 4], -1)
    return _flat(scales), _flat(offsets)


def _q4_k(blocks: torch.Tensor) -> QuantisedWeight:
    codes = _flat(_fields(blocks[..., 16:], 4, 32))
    return QuantisedWeight(codes, 4, 32, *_k_scales(blocks), _half(blocks, 0), -_half(blocks, 2))


def _q5_k(blocks: torch.Tensor) -> QuantisedWeight:
    high = _fields(blocks[..., 16:48], 1, 32)
    codes = _flat(_fields(blocks[..., 48:], 4, 32) | high << 4)
    return QuantisedWeight(codes, 5, 32, *_k_scales(blocks), _half(blocks, 0), -_half(blocks, 2))


def _q6_k(blocks: torch.Tensor) -> QuantisedWeight:
    codes = _flat(_fields(blocks[..., :128], 4, 64) | _fields(blocks[..., 128:192], 2, 32) << 4)
    scales = _flat(blocks[..., 192:208].contiguous().view(torch.int8))
    return QuantisedWeight(codes, 6, 16, scales, super_scales=_half(blocks, 208), zero=32)


def _iq4_nl(blocks: torch.Tensor) -> QuantisedWeight:
    return QuantisedWeight(_flat(_fields(blocks[..., 2:], 4, 16)), 4, 32, _half(blocks, 0), table=_IQ4_TABLE)


def _iq4_xs(blocks: torch.Tensor) -> QuantisedWeight:
    low, high = _fields(blocks[..., 4:8], 4, 1), _fields(blocks[..., 2:4], 2, 1)
    scales = _flat(_signed(low | high << 4))
    codes = _flat(_fields(blocks[..., 8:], 4, 16))
    return QuantisedWeight(codes, 4, 32, scales, super_scales=_half(blocks, 0), table=_IQ4_TABLE)


def _mxfp4(blocks: torch.Tensor) -> QuantisedWeight:
    """Scales are powers of 2 from 2 ** -128 on; where float16 lacks one, the output has the highest one's factor."""
    exponents = blocks[..., 0].int() - 128
    highest = exponents.amax(-1)
    shift = (highest - _MOST_EXPONENT).clamp_min(0)
    low = (exponents < _LEAST_EXPONENT).any(-1)
    shift = torch.where(low, highest - _MOST_EXPONENT, shift)
    scales = torch.exp2((exponents - shift[:, None]).double()).half()
    factors = torch.exp2(shift.double()).float() if shift.any() else None
    codes = _flat(_fields(blocks[..., 1:], 4, 16))
    return QuantisedWeight(codes, 4, 32, scales, factors=factors, table=_MXFP4_TABLE)


# Kind: values and bytes of a block, its reader.
_BLOCKS: dict[str, tuple[int, int, Callable[[torch.Tensor], QuantisedWeight]]] = {
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
READ_KINDS = (*_DENSE, *_BLOCKS)
