"""Blocks against the package of llama.cpp's authors, which defines them in numpy."""

from typing import Any

import numpy as np
import pytest
import torch

from folio.app.models.quantised.gguf_blocks import _BLOCKS, decode
from folio.kernels import QuantisedWeight

gguf: Any = pytest.importorskip("gguf")
OUTPUTS, BLOCKS = 6, 4


def halves_of(kind: str) -> tuple[int, ...]:
    """Where a block's scales in float16 are."""
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}
    halves |= dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))
    return halves.get(kind, (0,))


def blocks_of(kind: str, seed: int) -> np.ndarray:
    """Random bytes, with scales that are finite."""
    raw = np.random.default_rng(seed).integers(0, 256, (OUTPUTS, BLOCKS, _BLOCKS[kind][1]), dtype=np.uint8)
    for start in halves_of(kind):
        raw[..., start + 1] &= 0xBF  # a smaller exponent
    if kind == "MXFP4":
        raw[..., 0] = 118 + raw[..., 0] % 20
    return raw


def expected(kind: str, raw: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(raw.reshape(OUTPUTS, -1), gguf.GGMLQuantizationType[kind])


def decoded(kind: str, raw: np.ndarray) -> QuantisedWeight:
    weight = decode(kind, raw.reshape(-1), (OUTPUTS, BLOCKS * _BLOCKS[kind][0]))
    assert isinstance(weight, QuantisedWeight)
    return weight


@pytest.mark.parametrize("kind", _BLOCKS)
def test_every_kind(kind: str) -> None:
    raw = blocks_of(kind, seed=0)
    weight = decoded(kind, raw)
    assert int(weight.codes.max()) < 2**weight.bits
    np.testing.assert_array_equal(weight.dequantised().numpy(), expected(kind, raw))


def test_scales_of_mxfp4_beyond_float16() -> None:
    """A scale is any power of 2: rows that float16 cannot hold have a factor; only what is less than 2 ** -39 of the
    row's largest scale is lost."""
    raw = blocks_of("MXFP4", seed=1)
    raw[0, :, 0] = 200, 190, 199, 170
    raw[1, :, 0] = 1, 20, 3, 10
    raw[2, :, 0] = 0, 0, 0, 0
    raw[3, :, 0] = 254, 254, 100, 254
    with np.errstate(over="ignore"):
        found, wanted = decoded("MXFP4", raw).dequantised().numpy(), expected("MXFP4", raw)
    lost = found != wanted
    assert set(zip(*np.nonzero(lost), strict=True)) <= {(3, column) for column in range(64, 96)}
    assert (found[lost] == 0).all()


@pytest.mark.parametrize("kind", _BLOCKS)
def test_scales_that_are_no_numbers(kind: str) -> None:
    """Regression: they were packed, and the model's answers were noise or an error of the self-test."""
    places = halves_of(kind)
    for start in places or (0,):
        raw = blocks_of(kind, seed=2)
        raw[-1, 1, start : start + 2] = (0, 0x7C) if places else (255, 0)
        with pytest.raises(ValueError, match="scales that are infinite or no numbers"):
            decoded(kind, raw)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dense_kinds(dtype: torch.dtype) -> None:
    values = torch.randn(3, 5).to(dtype)
    data = values.view(torch.uint8).numpy().reshape(-1)
    kind = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    found = decode(kind, data, (3, 5))
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found, values, rtol=0, atol=0)
