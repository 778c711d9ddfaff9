"""Products of few rows against float64, in Triton's interpreter as on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from folio.kernels import KernelError, select_elementwise, select_product

pytest.importorskip("triton")

from folio.kernels.triton.dependent import unsupported
from folio.kernels.triton.product import ProductTile, TritonProduct, choose_tile

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
pytestmark = [pytest.mark.gpu] if CUDA else []
# One rounding to the dtype; Triton's interpreter cuts bfloat16 off instead of rounding.
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "tile"),
    [
        ((1, 1), 48, 256, None),
        ((1, 3), 40, 192, None),  # the last tile and the last program are cut
        ((1, 8), 16, 64, ProductTile(16, 128, 2)),
        ((2, 8), 72, 320, ProductTile(32, 128, 4)),
        ((1, 17), 64, 128, ProductTile(64, 64, 3)),
        ((64,), 33, 128, None),
        ((1, 0), 16, 64, None),
    ],
    ids=str,
)
def test_products(
    rows: tuple[int, ...], outputs: int, inputs: int, tile: ProductTile | None, dtype: torch.dtype
) -> None:
    """Rows of NaN around the tensors show reads beyond them, and sevens around the result show writes."""
    torch.manual_seed(0)
    x, weight = (
        torch.cat([part, torch.full((4, inputs), torch.nan)]).to(DEVICE, dtype)[: len(part)]
        for part in (torch.randn(torch.Size(rows).numel(), inputs), torch.randn(outputs, inputs))
    )
    bias = torch.randn(outputs).to(DEVICE, dtype)
    product = TritonProduct(tile=tile)
    for given in (None, bias):
        for values in (x, x * 0.5):  # the launch is prepared once
            out = product(values.view(*rows, inputs), weight, given)
            expected = values.double() @ weight.double().T + (0 if given is None else given.double())
            assert (out.shape, out.dtype) == ((*rows, outputs), dtype)
            if out.numel():
                off = ((out.view(-1, outputs) - expected).abs().max() / expected.abs().max()).item()
                assert off <= TOLERANCE[dtype], f"maximum difference {off:.2e}"


def test_batch_invariance() -> None:
    """Of any number of rows, each with the bits that it has alone."""
    torch.manual_seed(0)
    x, weight = torch.randn(150, 192).to(DEVICE).bfloat16(), torch.randn(40, 192).to(DEVICE).bfloat16()
    product = select_product(torch.device("cuda"), batch_invariant=True)
    together = product(x, weight, None)
    expected = x.double() @ weight.double().T
    off = ((together - expected).abs().max() / expected.abs().max()).item()
    assert off <= TOLERANCE[torch.bfloat16], f"maximum difference {off:.2e}"
    for rows in (1, 2, 17, 65):
        assert torch.equal(product(x[-rows:], weight, None), together[-rows:]), f"{rows} rows"


@pytest.mark.gpu
@pytest.mark.skipif(unsupported(DEVICE) is not None, reason="no dependent launches here")
def test_dependent_kernels_in_a_graph() -> None:
    """Hundreds of kernels, each of which reads what the one before wrote, give the bits of ordinary launches."""
    torch.manual_seed(0)
    size, layers = 1024, 32
    x = torch.randn(4, size, device=DEVICE).to(torch.bfloat16)
    weights = (torch.randn(layers, 2 * size, size, device=DEVICE) * size**-0.5).to(torch.bfloat16)
    norm = torch.rand(size, device=DEVICE).to(torch.bfloat16)

    def chain(dependent: bool) -> Callable[[], torch.Tensor]:
        ops, product = select_elementwise(DEVICE, dependent=dependent), TritonProduct(dependent=dependent)

        def work() -> torch.Tensor:
            update, total = x, x
            for weight in weights:
                total, normed = ops.add_rms_norm(update, total, norm, 1e-5)
                update = ops.gate(product(normed, weight, None), "silu")
            return total + update

        return work

    expected, work = chain(dependent=False)(), chain(dependent=True)
    work()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


def test_strided_rows() -> None:
    x, weight = torch.randn(4, 2, 64).to(DEVICE, torch.bfloat16)[:, 1], torch.randn(16, 64).to(DEVICE, torch.bfloat16)
    assert torch.equal(TritonProduct()(x, weight, None), TritonProduct()(x.contiguous(), weight, None))


@pytest.mark.parametrize("num_processors", [132, 78])
def test_one_wave_fills_the_device(num_processors: int) -> None:
    """With the outputs of Llama-3-8B and Qwen2.5-0.5B, if the smallest tile has enough programs."""
    for outputs in (6144, 4096, 28672, 1152, 896):
        tile = choose_tile(outputs, num_processors)
        programs, most = outputs / tile.outputs, outputs / 16
        assert programs >= 0.9 * min(num_processors, most)
        assert tile.outputs == 64 or outputs / (2 * tile.outputs) < 0.9 * num_processors


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.ones(65, 64).bfloat16(), torch.ones(16, 64).bfloat16(), "at most 64 rows"),
        (torch.ones(1, 64).half(), torch.ones(16, 64).bfloat16(), "of the weight's dtype"),
        (torch.ones(1, 64), torch.ones(16, 64), "float32, neither"),
        (torch.ones(1, 40).half(), torch.ones(16, 40).half(), "whole cache lines"),
        (torch.ones(1, 64).half(), torch.ones(64, 16).half().T, "strides"),
    ],
)
def test_what_is_refused(x: torch.Tensor, weight: torch.Tensor, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        TritonProduct()(x.to(DEVICE), weight.to(DEVICE), None)


def test_where_there_is_none() -> None:
    with pytest.raises(KernelError, match="for CUDA devices"):
        select_product(torch.device("cpu"))
    if not CUDA:
        assert "interpreter" in str(unsupported(DEVICE))
