"""Packed linear layers against float64."""

from __future__ import annotations

import pytest
import torch

from kernels import CpuLinear, KernelError

# Relative to the largest value: float32 sums of up to 1,500 products; one rounding to bfloat16.
LINEAR_TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 4e-3}
LINEAR_SHAPES = [(1, 1), (5, 2), (32, 64), (77, 123), (300, 1500)]  # outputs, inputs


@pytest.fixture(scope="module")
def linear() -> CpuLinear:
    return CpuLinear()


def random_layer(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """The values of 8-bit weights, in float64."""
    scale = weight.float().abs().amax(dim=1, keepdim=True) / 127
    return (weight.float() / scale).round().double() * scale.double()


@pytest.mark.parametrize("dtype", LINEAR_TOLERANCE)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", LINEAR_SHAPES)
def test_equals_float64(linear: CpuLinear, shape: tuple[int, int], bias: bool, int8: bool, dtype: torch.dtype) -> None:
    if linear.unsupported(dtype):
        pytest.skip(linear.unsupported(dtype))
    torch.manual_seed(0)
    weight, offset = random_layer(*shape, dtype)
    x = torch.randn(2, 16, shape[1]).to(dtype)
    expected = x.double() @ (rounded(weight) if int8 else weight.double()).T + bias * offset.double()
    actual = linear(x, linear.pack(weight, int8=int8), offset if bias else None)
    difference = ((actual.double() - expected).abs().max() / expected.abs().max()).item()
    assert difference <= LINEAR_TOLERANCE[dtype], f"maximum difference {difference:.2e}"  # NaN fails too


@pytest.mark.parametrize("dtype", LINEAR_TOLERANCE)
@pytest.mark.parametrize("int8", [False, True])
def test_a_row_does_not_depend_on_the_others(linear: CpuLinear, int8: bool, dtype: torch.dtype) -> None:
    """Nor on the number of threads."""
    if linear.unsupported(dtype):
        pytest.skip(linear.unsupported(dtype))
    torch.manual_seed(0)
    weight, bias = random_layer(200, 321, dtype)
    packed = linear.pack(weight, int8=int8)
    x = torch.randn(45, 321).to(dtype)
    together = linear(x, packed, bias)
    threads = torch.get_num_threads()
    try:
        for rows in (1, 2, 5, 6, 14, 15, 28, 29, 45):
            torch.set_num_threads(1 + rows % 2)
            few = linear(x[45 - rows :], packed, bias)
            assert torch.equal(few, together[45 - rows :]), f"{rows} rows"
    finally:
        torch.set_num_threads(threads)


def test_eight_bit_weights_take_half_of_bfloat16(linear: CpuLinear) -> None:
    if linear.unsupported(torch.bfloat16):
        pytest.skip(linear.unsupported(torch.bfloat16))
    weight, _ = random_layer(64, 4096, torch.bfloat16)
    assert linear.pack(weight).nbytes == 2 * 64 * 4096
    assert linear.pack(weight, int8=True).nbytes == 64 * 4096 + 4 * 64


def test_special_sizes(linear: CpuLinear) -> None:
    """An output without weights is its bias, and no rows have no results."""
    if linear.unsupported(torch.float32):
        pytest.skip(linear.unsupported(torch.float32))
    packed = linear.pack(torch.zeros(3, 8), int8=True)
    assert linear(torch.ones(1, 8), packed, torch.tensor([1.0, 2.0, 3.0])).tolist() == [[1.0, 2.0, 3.0]]
    assert linear(torch.ones(0, 8), packed).shape == (0, 3)


def test_wrong_arguments_are_named(linear: CpuLinear) -> None:
    if linear.unsupported(torch.float32):
        pytest.skip(linear.unsupported(torch.float32))
    packed = linear.pack(torch.ones(4, 8))
    with pytest.raises(ValueError, match=r"x \[2, 7\]"):
        linear(torch.ones(2, 7), packed)
    with pytest.raises(ValueError, match="bfloat16"):
        linear(torch.ones(2, 8, dtype=torch.bfloat16), packed)
    with pytest.raises(ValueError, match=r"bias \[5\]"):
        linear(torch.ones(2, 8), packed, torch.ones(5))


def test_unsupported_dtypes_and_processors(linear: CpuLinear) -> None:
    assert linear.unsupported(torch.float16) == "there is no kernel for torch.float16"
    plain = CpuLinear(march="x86-64-v3")
    assert plain.unsupported(torch.bfloat16) == "the processor lacks AVX-512 BF16"
    with pytest.raises(KernelError, match="lacks AVX-512"):
        plain.pack(torch.ones(4, 8))
