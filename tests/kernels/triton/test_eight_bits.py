"""Products of rows in 8 bits against float64, in Triton's interpreter as on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from folio.kernels import QuantisedWeight, quantise
from folio.kernels.experts import stacked
from folio.kernels.quantised import Bits
from tests.kernels.quantised_weights import random_weight

pytest.importorskip("triton")

from folio.kernels.triton.code_tiles import EIGHT_BIT_TILES, CodeTile, choose_tile
from folio.kernels.triton.codes import TritonCodes
from folio.kernels.triton.eight_bits import DTYPES, LEAST_ROWS, EightBitProduct, RoundedRows

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
LACKS_FP8 = CUDA and torch.cuda.get_device_capability() < (8, 9)
# The interpreter multiplies what memory has beyond the last row, too.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), *([pytest.mark.gpu] if CUDA else [])]
INT8, FLOAT8 = DTYPES
ALL_INPUTS = 1 << 20
# Of the largest value: of sums in float32, rounded to float16; the interpreter cuts bfloat16 off. Tensor cores' sums of
# 128 products of 8-bit floats have 14 bits on a Hopper.
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
HOPPER = 2e-3
# What rounding normally distributed rows adds, of a product's norm; docs/guides/quantised.md has them.
ROUNDING = {INT8: 0.008, FLOAT8: 0.028}


def weight_of(dtype: torch.dtype, outputs: int, inputs: int, group: int, **others: Any) -> QuantisedWeight:
    """Args: `group`: `ALL_INPUTS` for one scale of an output."""
    values = torch.randn(outputs, inputs)
    group = min(group, -(-inputs // 32) * 32)
    scales = (torch.rand(outputs, -(-inputs // group)) / 100 + 0.01).half()
    if dtype == INT8:
        codes = (values * 40 + 128).round().clamp(0, 255).byte()
        return QuantisedWeight(codes, 8, group, scales, zero=128, **others)
    return QuantisedWeight((values * 100).clamp(-448, 448).to(dtype), 8, group, scales, **others)


def values_of(rounded: RoundedRows, inputs: int) -> torch.Tensor:
    """In float64, `[rows, inputs]`."""
    codes = rounded.codes.cpu()[: rounded.num_rows].double().unflatten(2, (16, 8)).transpose(2, 3).flatten(2)
    scales = rounded.scales.cpu().double().t()[: rounded.num_rows, :, None]
    return (codes * scales).flatten(1)[:, :inputs]


def check(weight: QuantisedWeight, rows: int, dtype: torch.dtype, tile: CodeTile | None = None) -> None:
    product = EightBitProduct(tile)
    [part] = TritonCodes(DEVICE).pack_quantised(weight, dtype).parts
    assert product.fits(part)
    outputs, inputs = weight.shape
    x, bias = torch.randn(rows, inputs).to(dtype), torch.randn(outputs).to(dtype)
    rounded = product.round(x.to(DEVICE), part.codes.dtype)
    out = torch.full((rows, outputs + 3), 7.0, dtype=dtype, device=DEVICE)
    product(rounded, part, bias.to(DEVICE), out[:, :outputs])
    expected = values_of(rounded, inputs) @ weight.dequantised().double().T + bias.double()
    off = ((out[:, :outputs].cpu().double() - expected).abs().max() / expected.abs().max()).item()
    most = TOLERANCE[dtype] + (HOPPER if CUDA and part.codes.is_floating_point() else 0)
    assert off <= most, f"{rows} rows: maximum difference {off:.2e}"  # NaN fails too
    assert bool((out[:, outputs:] == 7).all())


@pytest.mark.skipif(LACKS_FP8, reason="no tensor cores for 8-bit floats")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("inputs", "group"), [(31, ALL_INPUTS), (100, ALL_INPUTS), (576, ALL_INPUTS), (576, 128), (576, 384)]
)
def test_products_equal_those_of_the_rounded_rows(dtype: torch.dtype, inputs: int, group: int) -> None:
    torch.manual_seed(0)
    check(weight_of(dtype, 37, inputs, group, factors=torch.rand(37)), 5, torch.float16)
    check(weight_of(dtype, 70, inputs, group), 33, torch.bfloat16)


@pytest.mark.skipif(LACKS_FP8, reason="no tensor cores for 8-bit floats")
@pytest.mark.parametrize("tile", sorted({t for tiles in EIGHT_BIT_TILES.values() for t in tiles}, key=str), ids=str)
def test_every_tile_cuts_the_last_rows_and_outputs(tile: CodeTile) -> None:
    torch.manual_seed(0)
    for dtype in DTYPES:
        check(weight_of(dtype, tile.outputs + 5, 256, 128), tile.rows + 3, torch.float16, tile)


@pytest.mark.skipif(LACKS_FP8, reason="no tensor cores for 8-bit floats")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [ALL_INPUTS, 128])
def test_experts_have_their_rows(dtype: torch.dtype, group: int) -> None:
    """From the mean of rows on that others are rounded at; one has none, and the last tile ends behind all rows."""
    torch.manual_seed(0)
    linear, ends = TritonCodes(DEVICE), torch.tensor([5, 5, 40, 3 * LEAST_ROWS + 100])
    weights = [weight_of(dtype, 40, 300, group, factors=torch.rand(40)) for _ in ends]
    packed = stacked([linear.pack_quantised(weight, torch.float16) for weight in weights])
    rows = int(ends[-1])
    x, bias = (torch.randn(rows, 300) / 8).half(), torch.randn(len(ends), 40).half()
    out = linear.by_expert(x.to(DEVICE), packed, ends.to(DEVICE), bias.to(DEVICE)).cpu().double()
    values = values_of(EightBitProduct().round(x.to(DEVICE), packed.parts[0].codes.dtype), 300)
    counts = ends.diff(prepend=torch.zeros(1, dtype=torch.int64)).tolist()
    expected = torch.cat(
        [
            part @ weight.dequantised().double().T + one.double()
            for part, weight, one in zip(values.split(counts), weights, bias, strict=True)
        ]
    )
    off = ((out - expected).abs().max() / expected.abs().max()).item()
    assert off <= TOLERANCE[torch.float16] + (HOPPER if CUDA else 0), f"maximum difference {off:.2e}"
    few = linear.by_expert(x[:5].to(DEVICE), packed, torch.full((4,), 5, device=DEVICE)).cpu().double()
    exact = x[:5].double() @ weights[0].dequantised().double().T
    assert ((few - exact).norm() / exact.norm()).item() < 1e-3, "few rows are not rounded"


def test_many_tiles_of_rows() -> None:
    """More than read the same outputs at the same time."""
    torch.manual_seed(0)
    check(weight_of(INT8, 40, 128, 128), 32 * 9 + 1, torch.float16, CodeTile(32, 32, 1, 2, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16], ids=str)
def test_rows_are_rounded_to_the_nearest_codes(dtype: torch.dtype, given: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(19, 1100).to(given)
    x[3], x[4, :128], x[5, 7] = 0, 1e-7, 300
    padded = torch.nn.functional.pad(x.float(), (0, 1152 - 1100)).view(19, 9, 128)
    scales = padded.abs().amax(2) / (127 if dtype == INT8 else 448)
    values = padded / torch.where(scales > 0, scales, 1)[..., None]
    codes = values.round() if dtype == INT8 else values.to(dtype).float()
    rounded = EightBitProduct().round(x.to(DEVICE), dtype)
    assert torch.equal(rounded.scales[:, :19].cpu(), scales.t())
    expected = (codes.double() * scales[..., None].double()).flatten(1)[:, :1100]
    assert torch.equal(values_of(rounded, 1100), expected)


@pytest.mark.skipif(LACKS_FP8, reason="no tensor cores for 8-bit floats")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_rounding_costs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, linear = weight_of(dtype, 96, 1024, 128), TritonCodes(DEVICE)
    packed, x = linear.pack_quantised(weight, torch.float16), (torch.randn(LEAST_ROWS, 1024) / 64).half()
    exact = x.double() @ weight.dequantised().double().T
    few, many = (linear(x[:rows].to(DEVICE), packed).cpu().double() for rows in (LEAST_ROWS - 1, LEAST_ROWS))
    off = [((out - exact[: len(out)]).norm() / exact[: len(out)].norm()).item() for out in (few, many)]
    assert off[0] < 1e-3, "few rows are not rounded"
    assert ROUNDING[dtype] / 2 < off[1] < ROUNDING[dtype], f"{off[1]:.4f} of the norm"


def test_a_row_that_is_no_number_stays_so() -> None:
    linear = TritonCodes(DEVICE)
    packed = linear.pack_quantised(weight_of(INT8, 8, 256, 128), torch.float16)
    x = torch.ones(LEAST_ROWS, 256, dtype=torch.float16, device=DEVICE)
    x[3, 200], x[5, 100] = torch.nan, torch.inf
    finite = linear(x, packed).isfinite().all(1)
    assert finite.cpu().tolist() == [row not in (3, 5) for row in range(LEAST_ROWS)]


@pytest.mark.skipif(LACKS_FP8, reason="no tensor cores for 8-bit floats")
def test_parts_choose_their_products() -> None:
    """Those that fit are multiplied in 8 bits, others in the same weight are not; columns may have an order."""
    torch.manual_seed(0)
    order = torch.randperm(512)
    weights = [
        replace(weight, order=order)
        for weight in (
            weight_of(INT8, 24, 512, 128),
            weight_of(FLOAT8, 40, 512, ALL_INPUTS),
            random_weight(8, "scales", 9),
            weight_of(FLOAT8, 12, 512, 64),
        )
    ]
    linear, product = TritonCodes(DEVICE), EightBitProduct()
    packed = [linear.pack_quantised(weight, torch.float16) for weight in weights]
    assert [product.fits(weight.parts[0]) for weight in packed] == [True, True, False, False]
    joined = replace(packed[0], parts=tuple(part for weight in packed for part in weight.parts))
    x = torch.randn(20, 512).half()
    exact = x.double() @ torch.cat([weight.dequantised().double() for weight in weights]).T
    off = (linear(x.to(DEVICE), joined).cpu().double() - exact).split([24, 40, 9, 12], 1)
    errors = [(one.norm() / all_.norm()).item() for one, all_ in zip(off, exact.split([24, 40, 9, 12], 1), strict=True)]
    assert [error > 2e-3 for error in errors] == [True, True, False, False], errors
    assert max(errors) < ROUNDING[FLOAT8]


@pytest.mark.parametrize(
    ("bits", "form"), [(8, "scales"), (8, "offsets"), (8, "wide groups"), (8, "nested"), (4, "scales"), (6, "nested")]
)
def test_other_forms_are_widened(bits: Bits, form: str) -> None:
    [part] = TritonCodes(DEVICE).pack_quantised(random_weight(bits, form, 8), torch.bfloat16).parts
    assert not EightBitProduct().fits(part)


def test_weights_that_are_rounded_here_fit() -> None:
    linear = TritonCodes(DEVICE)
    for inputs in (96, 576):
        weight = quantise(torch.randn(8, inputs), 8, linear.int8_group)
        assert EightBitProduct().fits(linear.pack_quantised(weight, torch.bfloat16).parts[0])


@pytest.mark.parametrize("group", [32, 64, 128, ALL_INPUTS])
def test_floats_are_read_exactly(group: int) -> None:
    """All of them that are numbers, subnormal ones too."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = torch.where(codes.float().isnan(), torch.zeros(256), codes.float()).to(torch.float8_e4m3fn)
    scales = torch.full((3, -(-256 // min(group, 256))), 2.0**-3).half()
    weight, linear = QuantisedWeight(codes.expand(3, -1), 8, min(group, 256), scales), TritonCodes(DEVICE)
    packed = linear.pack_quantised(weight, torch.float16)
    rows = linear.rows(packed, torch.arange(3, device=DEVICE)).cpu()
    assert torch.equal(rows.float(), weight.dequantised())
    x = torch.zeros(1, 256, dtype=torch.float16, device=DEVICE)
    x[0, 1] = 1  # the least of all
    assert linear(x, packed).tolist() == [[2.0**-12] * 3]


def test_tiles_fill_the_device_where_they_can() -> None:
    for outputs in (6144, 4096, 28672):
        for rows in (17, 32, 33, 64, 65, 256, 8192):
            tile = choose_tile(rows, outputs, 132, EIGHT_BIT_TILES)
            assert -(-outputs // tile.outputs) * -(-rows // tile.rows) >= 0.9 * 128


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA or LACKS_FP8, reason="no CUDA device with tensor cores for 8-bit floats")
def test_products_in_a_graph() -> None:
    """Roundings and products of several parts: nothing of it waits for the device."""
    torch.manual_seed(0)
    linear = TritonCodes(DEVICE)
    packed = [linear.pack_quantised(weight_of(dtype, 320, 1024, 128), torch.bfloat16) for dtype in DTYPES]
    joined = replace(packed[0], parts=tuple(part for weight in packed for part in weight.parts))
    x = torch.randn(256, 1024, dtype=torch.bfloat16, device=DEVICE)

    def work() -> list[torch.Tensor]:
        return [linear(x[:rows], joined) for rows in (1, 16, 17, 64, 256)]

    expected = work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work()
    graph.replay()
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
