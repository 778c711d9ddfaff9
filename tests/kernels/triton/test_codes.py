"""Products with quantised weights against float64, in Triton's interpreter as on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from folio.kernels import CpuLinear, QuantisedWeight, select_packed_product
from folio.kernels.cpu.ops import PackedWeight
from folio.kernels.experts import stacked
from folio.kernels.quantised import Bits
from tests.kernels.quantised_weights import CASES, random_weight

pytest.importorskip("triton")

from folio.kernels.triton.code_tiles import ONE_ROW, TILES, CodeTile, choose_tile
from folio.kernels.triton.codes import TritonCodes

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
pytestmark = [pytest.mark.gpu] if CUDA else []
# Of the largest value. Values are rounded to the dtype for several rows, and the interpreter cuts bfloat16 off.
TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


def check(weights: list[QuantisedWeight], rows: int, dtype: torch.dtype, tile: CodeTile | None = None) -> int:
    """Returns the number of parts after they were merged."""
    linear = TritonCodes(DEVICE, tile)
    exact = torch.cat([weight.dequantised().double() for weight in weights])
    first, *rest = (linear.pack_quantised(weight, dtype) for weight in weights)
    packed = linear.merged(replace(first, parts=sum((weight.parts for weight in rest), first.parts)))
    # Small enough for float16.
    bias, x = torch.randn(len(exact)).to(dtype), (torch.randn(rows, exact.shape[1]) / 64).to(dtype)
    expected = x.double() @ exact.T + bias.double()
    out = linear(x.to(DEVICE), packed, bias.to(DEVICE)).cpu().double()
    off = ((out - expected).abs().max() / expected.abs().max()).item()
    assert off <= TOLERANCE[dtype], f"{rows} rows: maximum difference {off:.2e}"  # NaN fails too
    return len(packed.parts)


@pytest.mark.parametrize(("bits", "form"), CASES)
def test_products_equal_those_of_the_values(bits: Bits, form: str) -> None:
    torch.manual_seed(0)
    for rows, dtype in ((1, torch.float16), (3, torch.float16), (20, torch.bfloat16)):
        check([random_weight(bits, form, 37)], rows, dtype)


@pytest.mark.parametrize(
    "tile", sorted({ONE_ROW, *(tile for tiles in TILES.values() for tile in tiles)}, key=str), ids=str
)
def test_every_tile_cuts_the_last_rows_and_outputs(tile: CodeTile) -> None:
    torch.manual_seed(0)
    check([random_weight(4, "nested offsets", tile.outputs + 5)], tile.rows + 3 * (tile.rows > 1), torch.bfloat16, tile)


@pytest.mark.parametrize(("bits", "form"), [(4, "nested offsets"), (8, "wide groups")])
def test_batch_invariance(bits: Bits, form: str) -> None:
    """Each row has the bits that it has alone, also where many would be multiplied in 8 bits."""
    torch.manual_seed(0)
    linear = TritonCodes(DEVICE)
    packed = replace(linear.pack_quantised(random_weight(bits, form, 20), torch.bfloat16), batch_invariant=True)
    x = torch.randn(66, packed.inputs).to(DEVICE).bfloat16()
    together = linear(x, packed)
    for rows in (1, 17):
        assert torch.equal(linear(x[-rows:], packed), together[-rows:]), f"{rows} rows"
    experts = stacked([packed, packed])
    ends = torch.tensor([3, 66], device=DEVICE)
    assert torch.equal(linear.by_expert(x, experts, ends), together)


@pytest.mark.parametrize(("bits", "form"), CASES)
def test_rows_are_the_values(bits: Bits, form: str) -> None:
    weight, linear = random_weight(bits, form, 37), TritonCodes(DEVICE)
    packed = linear.pack_quantised(weight, torch.bfloat16)
    rows = linear.rows(packed, torch.tensor([[36, 0], [5, 5]], device=DEVICE)).cpu().flatten(0, 1).float()
    torch.testing.assert_close(rows, weight.dequantised()[[36, 0, 5, 5]], rtol=8e-3, atol=1e-4)


def test_parts_may_have_different_forms() -> None:
    """As query, key and value projections of one file may; neighbours of one form are one launch."""
    torch.manual_seed(0)
    forms: list[tuple[Bits, str]] = [(4, "nested offsets"), (4, "nested offsets"), (6, "nested"), (8, "scales")]
    weights = [random_weight(bits, form, outputs) for (bits, form), outputs in zip(forms, (40, 24, 16, 7), strict=True)]
    for rows in (1, 20):
        assert check(weights, rows, torch.bfloat16) == 3
    linear, exact = TritonCodes(DEVICE), torch.cat([weight.dequantised() for weight in weights])
    packed = [linear.pack_quantised(weight, torch.float16) for weight in weights]
    joined = replace(packed[0], parts=tuple(part for weight in packed for part in weight.parts))
    ids = torch.tensor([0, 50, 65, 86, 39])
    torch.testing.assert_close(linear.rows(joined, ids.to(DEVICE)).cpu().float(), exact[ids], rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("inputs", [1, 31, 100, 576])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_rest_of_a_slab_and_groups_across_slabs(rows: int, inputs: int) -> None:
    torch.manual_seed(0)
    weight = random_weight(8, "scales", 20, inputs)
    check([weight], rows, torch.float16)
    for group in (96, 192, 256):
        scales = torch.rand(20, -(-inputs // group)).half()
        check([replace(weight, group=group, scales=scales)], rows, torch.float16)


def test_memory_is_that_of_the_codes_and_scales() -> None:
    packed = TritonCodes(DEVICE).pack_quantised(random_weight(4, "nested offsets", 64), torch.bfloat16)
    assert packed.nbytes * 8 / (64 * 512) == 4 + 2 * 8 / 32 + 2 * 16 / 256


def test_the_device_chooses() -> None:
    assert isinstance(select_packed_product(torch.device("cuda")), TritonCodes)
    assert isinstance(select_packed_product(torch.device("cpu")), CpuLinear)


def test_wrong_arguments_are_named() -> None:
    linear, weight = TritonCodes(DEVICE), random_weight(4, "scales", 8)
    with pytest.raises(ValueError, match="float32"):
        linear.pack_quantised(weight, torch.float32)
    packed, x = linear.pack_quantised(weight, torch.bfloat16), torch.ones(1, 512, device=DEVICE)
    for wrong in (x, x[:, :500].bfloat16()):
        with pytest.raises(ValueError, match=r"for 512 inputs of torch\.bfloat16"):
            linear(wrong, packed)
    with pytest.raises(ValueError, match="bias"):
        linear(x.bfloat16(), packed, x[0, :7].bfloat16())
    assert linear(x[:0].bfloat16(), packed).shape == (0, 8)


def test_tiles_fill_the_device_where_they_can() -> None:
    for outputs in (6144, 4096, 28672):
        for rows in (1, 2, 16, 17, 64, 65, 256, 8192):
            tile = choose_tile(rows, outputs, 132)
            assert -(-outputs // tile.outputs) * -(-rows // tile.rows) >= 0.9 * 128


def experts_of(bits: Bits, form: str, count: int, linear: TritonCodes) -> tuple[torch.Tensor, PackedWeight]:
    """Values `[experts, outputs, inputs]`, float64, and the packed weight: two parts of outputs, the second of another
    form."""
    values, packed = [], []
    for expert in range(count):
        weight, order = random_weight(bits, form, 37), torch.randperm(512)
        # Of experts with the same scales, other codes and another order.
        weight = replace(weight.select(torch.randperm(37)), order=None if weight.order is None else order)
        other = replace(random_weight(8, "scales", 9), order=weight.order).select(torch.arange(9).roll(expert))
        values.append(torch.cat([weight.dequantised(), other.dequantised()]).double())
        parts = [linear.pack_quantised(one, torch.float16) for one in (weight, other)]
        packed.append(replace(parts[0], parts=parts[0].parts + parts[1].parts))
    return torch.stack(values), stacked(packed)


def check_experts(bits: Bits, form: str, rows: int, count: int, tile: CodeTile | None = None) -> None:
    torch.manual_seed(0)
    linear = TritonCodes(DEVICE, tile)
    values, packed = experts_of(bits, form, count, linear)
    chosen = torch.randint(1, count, (rows,)).sort().values  # none of the first expert
    ends = torch.searchsorted(chosen, torch.arange(count), right=True)
    x, bias = (torch.randn(rows, 512) / 64).half(), torch.randn(count, 46).half()
    out = linear.by_expert(x.to(DEVICE), packed, ends.to(DEVICE), bias.to(DEVICE)).cpu().double()
    expected = torch.einsum("ri,roi->ro", x.double(), values[chosen]) + bias[chosen].double()
    off = ((out - expected).abs().max() / expected.abs().max()).item()
    assert off <= TOLERANCE[torch.float16], f"{rows} rows: maximum difference {off:.2e}"


@pytest.mark.parametrize(("bits", "form"), [(4, "table"), (4, "wide groups"), (6, "nested"), (5, "nested offsets")])
def test_experts_have_their_rows(bits: Bits, form: str) -> None:
    """Few rows alone, more in tiles; with orders and factors of each expert."""
    for rows, count in ((3, 16), (20, 3), (150, 5)):
        check_experts(bits, form, rows, count)


@pytest.mark.parametrize("tile", [ONE_ROW, TILES[16][0], TILES[64][1]], ids=str)
def test_the_rows_of_experts_fill_as_many_tiles_as_there_are(tile: CodeTile) -> None:
    """Experts of one row more than a tile, of a whole one, and of one row."""
    linear, ends = (
        TritonCodes(DEVICE, tile),
        torch.tensor([0, 1, 1, tile.rows + 1, 3 * tile.rows + 2, 3 * tile.rows + 3]),
    )
    torch.manual_seed(0)
    values, packed = experts_of(4, "scales", len(ends), linear)
    x, chosen = (
        (torch.randn(int(ends[-1]), 512) / 64).half(),
        torch.arange(len(ends)).repeat_interleave(ends.diff(prepend=torch.zeros(1, dtype=torch.int64))),
    )
    out = linear.by_expert(x.to(DEVICE), packed, ends.to(DEVICE)).cpu().double()
    expected = torch.einsum("ri,roi->ro", x.double(), values[chosen])
    assert ((out - expected).abs().max() / expected.abs().max()).item() <= TOLERANCE[torch.float16]
    with pytest.raises(ValueError, match="ends of 5 experts, not 6"):
        linear.by_expert(x.to(DEVICE), packed, ends[1:].to(DEVICE))
    assert linear.by_expert(x[:0].to(DEVICE), packed, ends.to(DEVICE)).shape == (0, 46)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_products_in_a_graph() -> None:
    """With gathered inputs, a look-up and several parts: nothing of it waits for the device."""
    linear, weights = TritonCodes(DEVICE), [random_weight(4, form, 256) for form in ("wide groups", "nested offsets")]
    packed = [linear.pack_quantised(weight, torch.bfloat16) for weight in weights]
    ids = torch.arange(7, device=DEVICE)
    experts, ends = stacked([packed[1]] * 3), torch.tensor([2, 2, 7], device=DEVICE)

    def work() -> list[torch.Tensor]:
        x = linear.rows(packed[1], ids)
        by_expert = linear.by_expert(x, experts, ends)
        return [by_expert, *(linear(x[:rows], weight) for weight in packed for rows in (1, 7))]

    expected = work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work()
    graph.replay()
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
