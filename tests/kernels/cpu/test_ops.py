"""Packed linear layers against float64."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from folio.kernels import CpuLinear, KernelError, quantise
from tests.kernels.marches import MARCHES, WITHOUT_AVX2

# Relative to the largest value: float32 sums of up to 1,500 products; one rounding to bfloat16.
LINEAR_TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 4e-3}
# Outputs, inputs.
LINEAR_SHAPES = [(1, 1), (5, 2), (32, 64), (77, 123), (70, 255), (33, 256), (130, 513), (300, 1500)]
ROWS = [*range(1, 14), 16, 18, 19, 48, 49, 100, 400]


@pytest.fixture(scope="module", params=MARCHES)
def linear(request: pytest.FixtureRequest) -> CpuLinear:
    return CpuLinear(request.param)


@pytest.fixture(params=LINEAR_TOLERANCE, ids=str)
def dtype(request: pytest.FixtureRequest, linear: CpuLinear) -> torch.dtype:
    dtype: torch.dtype = request.param
    if reason := linear.unsupported(dtype):
        pytest.skip(reason)
    return dtype


def random_layer(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", LINEAR_SHAPES)
def test_equals_float64(linear: CpuLinear, shape: tuple[int, int], bias: bool, dtype: torch.dtype) -> None:
    """One to several panels of rows, and inputs of more than one chunk, with and without a rest."""
    weight, offset = random_layer(*shape, dtype)
    packed, exact = linear.pack(weight), weight.double()
    for rows in ROWS:
        x = torch.randn(2, rows, shape[1]).to(dtype)[: 1 + (rows == 16)]
        expected = x.double() @ exact.T + bias * offset.double()
        difference = linear(x, packed, offset if bias else None).double() - expected
        off = (difference.abs().max() / expected.abs().max()).item()
        assert off <= LINEAR_TOLERANCE[dtype], f"{rows} rows: maximum difference {off:.2e}"  # NaN fails too


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_a_row_does_not_depend_on_the_others(
    linear: CpuLinear, bits: Literal[4, 8] | None, dtype: torch.dtype, invariant: bool
) -> None:
    """Nor on the number of threads, where there are enough for matrix tiles, or too few; batch-invariant weights are
    not multiplied in tiles."""
    weight, bias = random_layer(200, 321, dtype)
    packed = linear.pack(weight) if bits is None else linear.pack_quantised(quantise(weight, bits), dtype)
    packed = replace(packed, batch_invariant=invariant)
    x = torch.randn(45, 321).to(dtype)
    together = linear(x, packed, bias)
    threads = torch.get_num_threads()
    try:
        tiled = not invariant and dtype == torch.bfloat16 and "amx_bf16" in Path("/proc/cpuinfo").read_text()
        few_together = linear(x[40:], packed, bias) if tiled else together
        for rows in (1, 2, 4, 5, 16, 28, 29, 45) if tiled else (1, 2, 5, 6, 14, 15, 28, 29, 45):
            torch.set_num_threads(1 + rows % 2)
            few = linear(x[45 - rows :], packed, bias)
            assert torch.equal(few, (few_together if rows <= 5 else together)[-rows:]), f"{rows} rows"
    finally:
        torch.set_num_threads(threads)


def test_special_sizes_and_inputs(linear: CpuLinear, dtype: torch.dtype) -> None:
    """An output without weights is its bias, no rows have no results, and infinity and NaN stay."""
    packed, bias = linear.pack(torch.zeros(3, 8, dtype=dtype)), torch.tensor([1.0, 2.0, 3.0]).to(dtype)
    assert linear(torch.ones(1, 8, dtype=dtype), packed, bias).tolist() == [[1.0, 2.0, 3.0]]
    assert linear(torch.ones(0, 8, dtype=dtype), packed).shape == (0, 3)
    x = torch.ones(3, 30, dtype=dtype)
    x[1, 7], x[2, 9] = float("inf"), float("nan")
    out = linear(x, linear.pack(torch.ones(40, 30, dtype=dtype)))
    assert (out[0] == 30).all()
    assert (out[1] == float("inf")).all()
    assert out[2].isnan().all()


@pytest.mark.parametrize(
    ("x", "bias", "message"),
    [
        (torch.ones(2, 7), None, r"x \[2, 7\]"),
        (torch.ones(2, 8, dtype=torch.bfloat16), None, "bfloat16"),
        (torch.ones(2, 8), torch.ones(5), r"bias \[5\]"),
    ],
)
def test_wrong_arguments_are_named(x: torch.Tensor, bias: torch.Tensor | None, message: str) -> None:
    linear = CpuLinear()
    if linear.unsupported(torch.float32):
        pytest.skip(linear.unsupported(torch.float32))
    with pytest.raises(ValueError, match=message):
        linear(x, linear.pack(torch.ones(4, 8)), bias)


@pytest.mark.skipif("x86-64-v3" not in MARCHES, reason="this processor lacks AVX2")
def test_widened_weights_give_the_sums_of_float32() -> None:
    linear = CpuLinear("x86-64-v3")
    weight, _ = random_layer(100, 700, torch.bfloat16)
    for rows in (1, 5, 40):
        x = torch.randn(rows, 700).bfloat16()
        exact = linear(x.float(), linear.pack(weight.float()))
        assert torch.equal(linear(x, linear.pack(weight)), exact.bfloat16()), f"{rows} rows"


def test_unsupported_dtypes_and_processors(linear: CpuLinear) -> None:
    assert linear.unsupported(torch.float16) == "there is no kernel for torch.float16"
    if platform.machine() == "x86_64":
        plain = CpuLinear(march=WITHOUT_AVX2)
        assert plain.unsupported(torch.bfloat16) == "the processor lacks AVX2 with FMA"
        with pytest.raises(KernelError, match="lacks AVX2"):
            plain.pack(torch.ones(4, 8))
