"""Products with quantised weights against float64, for every form, on every processor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from folio.kernels import CpuLinear, QuantisedWeight
from folio.kernels.quantised import LEAST_GROUP, Bits
from tests.kernels.marches import MARCHES
from tests.kernels.quantised_weights import CASES, INPUTS, random_weight

# Relative to the largest value: float32 sums of 512 products; inputs rounded to 8 bits, but for the larger ones.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 0.02}


@pytest.fixture(scope="module", params=MARCHES)
def linear(request: pytest.FixtureRequest) -> CpuLinear:
    return CpuLinear(request.param)


def check(linear: CpuLinear, weights: list[QuantisedWeight], dtype: torch.dtype, rows: int) -> None:
    exact = torch.cat([weight.dequantised().double() for weight in weights])
    first, *rest = (linear.pack_quantised(weight, dtype) for weight in weights)
    packed = replace(first, parts=sum((weight.parts for weight in rest), first.parts))
    bias, x = torch.randn(len(exact)).to(dtype), torch.randn(rows, exact.shape[1]).to(dtype)
    expected = x.double() @ exact.T + bias.double()
    off = ((linear(x, packed, bias).double() - expected).abs().max() / expected.abs().max()).item()
    assert off <= TOLERANCE[dtype], f"{rows} rows: maximum difference {off:.2e}"  # NaN fails too


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("bits", "form"), CASES)
def test_products_equal_those_of_the_values(linear: CpuLinear, bits: Bits, form: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for outputs in (37, 64):
        for rows in (1, 2, 3, 8, 9, 30, 33):
            check(linear, [random_weight(bits, form, outputs)], dtype, rows)


@pytest.mark.parametrize(("bits", "form"), CASES)
def test_rows_are_the_values(linear: CpuLinear, bits: Bits, form: str) -> None:
    weight = random_weight(bits, form, 37)
    rows = linear.rows(linear.pack_quantised(weight, torch.float32), torch.tensor([[36, 0], [5, 5]]))
    torch.testing.assert_close(rows.flatten(0, 1), weight.dequantised()[[36, 0, 5, 5]], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_parts_may_have_different_forms(linear: CpuLinear, dtype: torch.dtype) -> None:
    """As query, key and value projections of one file may."""
    weights = [random_weight(4, "nested offsets", 40), random_weight(6, "nested", 20), random_weight(8, "scales", 7)]
    for rows in (1, 20, 300):
        check(linear, weights, dtype, rows)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_rest_of_a_slab(linear: CpuLinear, dtype: torch.dtype) -> None:
    for inputs in (1, 31, 33, 100):
        for rows in (3, 40):
            check(linear, [random_weight(8, "scales", 20, inputs)], dtype, rows)


@pytest.mark.parametrize("bits", LEAST_GROUP)
def test_largest_codes_and_inputs_do_not_overflow(linear: CpuLinear, bits: Bits) -> None:
    """Pairs of products are added in 16 bits where there are no products of 8-bit integers."""
    for code in (0, 2**bits - 1):
        codes, scales = torch.full((16, INPUTS), code), torch.ones(16, INPUTS // LEAST_GROUP[bits])
        weight = QuantisedWeight(codes.byte(), bits, LEAST_GROUP[bits], scales.half())
        for sign in (-1, 1):
            x = torch.full((1, INPUTS), sign * 127.0).bfloat16()
            assert linear(x, linear.pack_quantised(weight, torch.bfloat16)).unique().tolist() == [
                torch.tensor(float(sign * 127 * INPUTS * code)).bfloat16().item()
            ]


@pytest.mark.parametrize(("bits", "form"), [(4, "offsets"), (4, "table"), (6, "nested"), (8, "scales")])
def test_inputs_that_stand_out_have_16_bits(linear: CpuLinear, bits: Bits, form: str) -> None:
    """Rounded to 8 they made most of a model's error. Rows with and without them share a panel, and are as alone."""
    weight = random_weight(bits, form, 40)
    packed, exact = linear.pack_quantised(weight, torch.bfloat16), weight.dequantised().double()
    x = torch.randn(9, INPUTS, generator=torch.Generator().manual_seed(0))
    x[::2, 64:96] *= 300
    x = x.bfloat16()
    out, expected = linear(x, packed, unrounded=True), x.double() @ exact.T
    off = (out.double() - expected).abs().amax(1) / expected.abs().amax(1)
    assert off[::2].max() < 4e-4, off
    assert off[1::2].max() < TOLERANCE[torch.bfloat16], off
    assert torch.equal(linear(x, packed), out.bfloat16())
    for row in range(len(x)):
        assert torch.equal(linear(x[row : row + 1], packed, unrounded=True), out[row : row + 1])


@pytest.mark.parametrize("rows", [2, 40])
def test_infinity_and_nan_are_seen(linear: CpuLinear, rows: int) -> None:
    packed = linear.pack_quantised(random_weight(4, "scales", 16), torch.bfloat16)
    for value in ("inf", "nan"):
        x = torch.ones(rows, INPUTS).bfloat16()
        x[1, 9] = float(value)
        out = linear(x, packed)
        assert out[::2].isfinite().all()
        assert not out[1].isfinite().any()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_inputs_may_have_another_order(linear: CpuLinear, dtype: torch.dtype) -> None:
    weight = replace(random_weight(4, "offsets", 40), order=torch.randperm(INPUTS))
    for rows in (1, 9, 40):
        check(linear, [weight], dtype, rows)


@pytest.mark.parametrize("bits", LEAST_GROUP)
def test_many_rows_depend_on_no_other_rows(linear: CpuLinear, bits: Bits) -> None:
    packed = linear.pack_quantised(random_weight(bits, "scales", 50), torch.bfloat16)
    x = torch.randn(600, INPUTS).bfloat16()
    out = linear(x, packed, unrounded=True)
    for first, last in ((0, 16), (5, 52), (100, 600)):
        assert torch.equal(linear(x[first:last], packed, unrounded=True), out[first:last])


def test_memory_is_that_of_the_codes_and_scales(linear: CpuLinear) -> None:
    weight = random_weight(4, "nested offsets", 64)
    bits = linear.pack_quantised(weight, torch.bfloat16).nbytes * 8 / (64 * INPUTS)
    assert bits == 4 + 2 * 8 / 32 + 2 * 16 / 256


def test_wrong_arguments_are_named(linear: CpuLinear) -> None:
    weight = random_weight(4, "wide groups", 8)
    with pytest.raises(ValueError, match="float16"):
        linear.pack_quantised(weight, torch.float16)
    for outputs in ([-1], [8]):
        with pytest.raises(IndexError, match="of 8"):
            linear.rows(linear.pack_quantised(weight, torch.float32), torch.tensor(outputs))
