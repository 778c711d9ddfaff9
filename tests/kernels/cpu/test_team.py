"""Work sharing (`csrc/team.h`) among more threads than cores: the system suspends threads in the middle of steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import pytest
import torch

from folio.kernels import CpuLinear, quantise
from tests.kernels.cpu.layers import SIZE, Layer, in_one_call, make_step, make_weights
from tests.kernels.marches import MARCHES, has_layers

THREADS = (2, 3, 4, 8)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """Restores the number of threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    if reason := CpuLinear().unsupported(dtype):
        pytest.skip(reason)
    return dtype


@pytest.fixture
def layer_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if has_layers(dtype) else pytest.skip(f"no layers in one call with {dtype} here")


def check_repeated(layer: Layer, expected: list[torch.Tensor], num_threads: int, times: int) -> None:
    torch.set_num_threads(num_threads)
    for _ in range(times):
        for ours, alone in zip(layer.results(), expected, strict=True):
            assert torch.equal(ours, alone), f"{layer.description}, {num_threads} threads"


def test_layers_equal_those_of_one_thread(layer_dtype: torch.dtype) -> None:
    for seed in range(24):
        layer = Layer(seed, layer_dtype)
        torch.set_num_threads(1)
        expected = layer.results()
        assert expected[0].isfinite().all()
        for num_threads in THREADS:
            check_repeated(layer, expected, num_threads, times=10)


def test_callers_at_once_share_the_pool(layer_dtype: torch.dtype) -> None:
    """As ranks that are threads of one process, or two engines, each with its number of threads: one of them has the
    pool, the others compute alone."""
    layers = [Layer(seed, layer_dtype) for seed in (20, 21, 22)]
    torch.set_num_threads(1)
    expected = [layer.results() for layer in layers]
    with ThreadPoolExecutor(3) as pool:
        for _ in pool.map(check_repeated, layers, expected, (2, 3, 4), (20,) * 3):
            pass


@pytest.mark.parametrize("march", MARCHES)
@pytest.mark.parametrize("bits", [None, 4])
def test_products_equal_those_of_one_thread(march: str, bits: Literal[4] | None, dtype: torch.dtype) -> None:
    linear, rng = CpuLinear(march), random.Random(5)
    if reason := linear.unsupported(dtype):
        pytest.skip(reason)
    torch.manual_seed(0)
    for _ in range(6):
        outputs, inputs = rng.randint(100, 700), rng.randint(100, 700)
        values = torch.randn(outputs, inputs).to(dtype)
        weight = linear.pack(values) if bits is None else linear.pack_quantised(quantise(values, bits), dtype)
        bias = torch.randn(outputs).to(dtype)
        for rows in (2, rng.randint(3, 28), rng.randint(29, 70), 200):
            x = torch.randn(rows, inputs).to(dtype)
            torch.set_num_threads(1)
            expected = linear(x, weight, bias)
            for num_threads in THREADS:
                torch.set_num_threads(num_threads)
                for _ in range(2):
                    assert torch.equal(linear(x, weight, bias), expected), f"{[rows, outputs, inputs]}, {num_threads}"


def test_a_layer_of_no_rows(dtype: torch.dtype) -> None:
    """A division by zero, before."""
    step = make_step([(1, 1)], make_weights(dtype), dtype)
    assert in_one_call(make_weights(dtype), torch.empty(0, SIZE, dtype=dtype), [step]).shape == (0, SIZE)
