"""Packed linear layers against float64, and rows alone against rows in a crowd."""

from __future__ import annotations

import pytest
import torch

from kernels import CpuLinear, KernelError
from kernels.linear import Layer

# Relative to the largest value: float32 sums of up to 1,500 products; one rounding to bfloat16.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 4e-3}
SHAPES = [(1, 1), (5, 2), (32, 64), (77, 123), (300, 1500)]  # outputs, inputs


@pytest.fixture(scope="module")
def linear() -> CpuLinear:
    return CpuLinear()


def random_layer(outputs: int, inputs: int, dtype: torch.dtype, *, bias: bool = True) -> Layer:
    return torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype) if bias else None


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """What 8-bit weights stand for, in float64."""
    scale = weight.float().abs().amax(dim=1, keepdim=True) / 127
    return (weight.float() / scale).round().double() * scale.double()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_float64(linear: CpuLinear, shape: tuple[int, int], bias: bool, int8: bool, dtype: torch.dtype) -> None:
    if linear.unsupported(dtype):
        pytest.skip(linear.unsupported(dtype))
    torch.manual_seed(0)
    weight, offset = random_layer(*shape, dtype, bias=bias)
    x = torch.randn(2, 16, shape[1]).to(dtype)
    expected = x.double() @ (rounded(weight) if int8 else weight.double()).T + (
        0 if offset is None else offset.double()
    )
    (actual,) = linear(x, linear.pack([(weight, offset)], int8=int8))
    difference = ((actual.double() - expected).abs().max() / expected.abs().max()).item()
    assert difference <= TOLERANCE[dtype], f"maximum difference {difference:.2e}"  # NaN fails too


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("int8", [False, True])
def test_a_row_does_not_depend_on_the_others(linear: CpuLinear, int8: bool, dtype: torch.dtype) -> None:
    """Nor on the number of threads."""
    if linear.unsupported(dtype):
        pytest.skip(linear.unsupported(dtype))
    torch.manual_seed(0)
    layers = linear.pack([random_layer(200, 321, dtype)], int8=int8)
    x = torch.randn(45, 321).to(dtype)
    (together,) = linear(x, layers)
    threads = torch.get_num_threads()
    try:
        for rows in (1, 2, 5, 6, 14, 15, 28, 29, 45):
            torch.set_num_threads(1 + rows % 2)
            (few,) = linear(x[45 - rows :], layers)
            assert torch.equal(few, together[45 - rows :]), f"{rows} rows"
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("int8", [False, True])
def test_layers_of_one_input_together_are_each_alone(linear: CpuLinear, int8: bool, dtype: torch.dtype) -> None:
    if linear.unsupported(dtype):
        pytest.skip(linear.unsupported(dtype))
    torch.manual_seed(0)
    layers = [random_layer(outputs, 40, dtype, bias=outputs != 33) for outputs in (70, 33, 16, 96)]
    x = torch.randn(3, 7, 40).to(dtype)
    together = linear(x, linear.pack(layers, int8=int8))
    assert [out.shape for out in together] == [(3, 7, outputs) for outputs in (70, 33, 16, 96)]
    for out, layer in zip(together, layers, strict=True):
        assert torch.equal(out, linear(x, linear.pack([layer], int8=int8))[0])


def test_eight_bit_weights_take_half_of_bfloat16(linear: CpuLinear) -> None:
    if linear.unsupported(torch.bfloat16):
        pytest.skip(linear.unsupported(torch.bfloat16))
    layer = random_layer(64, 4096, torch.bfloat16, bias=False)
    assert linear.pack([layer]).nbytes == 2 * 64 * 4096
    assert linear.pack([layer], int8=True).nbytes == 64 * 4096 + 4 * 64


def test_an_output_without_weights_is_its_bias(linear: CpuLinear) -> None:
    if linear.unsupported(torch.float32):
        pytest.skip(linear.unsupported(torch.float32))
    layer = torch.zeros(3, 8), torch.tensor([1.0, 2.0, 3.0])
    assert linear(torch.ones(1, 8), linear.pack([layer], int8=True))[0].tolist() == [[1.0, 2.0, 3.0]]


def test_wrong_arguments_are_named(linear: CpuLinear) -> None:
    if linear.unsupported(torch.float32):
        pytest.skip(linear.unsupported(torch.float32))
    layers = linear.pack([random_layer(4, 8, torch.float32)])
    with pytest.raises(ValueError, match=r"x \[2, 7\]"):
        linear(torch.ones(2, 7), layers)
    with pytest.raises(ValueError, match="bfloat16"):
        linear(torch.ones(2, 8, dtype=torch.bfloat16), layers)
    with pytest.raises(ValueError, match=r"bias is \[5\]"):
        linear.pack([(torch.ones(4, 8), torch.ones(5))])
    with pytest.raises(ValueError, match=r"weight is \[4, 9\]"):
        linear.pack([(torch.ones(4, 8), None), (torch.ones(4, 9), None)])


def test_other_processors_are_told(linear: CpuLinear) -> None:
    assert linear.unsupported(torch.float16) == "it has no products of torch.float16"
    plain = CpuLinear(march="x86-64-v3")
    assert plain.unsupported(torch.bfloat16) == "the processor lacks AVX-512 BF16"
    with pytest.raises(KernelError, match="lacks AVX-512"):
        plain.pack([(torch.ones(4, 8), None)])
    assert linear(torch.ones(0, 8), linear.pack([(torch.ones(4, 8), None)]))[0].shape == (0, 4)
