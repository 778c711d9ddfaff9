"""Packed linear layers and row-wise operations against float64."""

from __future__ import annotations

import pytest
import torch

from kernels import CpuElementwise, CpuLinear, KernelError

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


# Relative to the largest value: one rounding to the dtype, and float32 arithmetic before it.
ROW_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
ROW_SHAPES = [(1, 1, 8), (1, 3, 896), (2, 5, 33), (1, 300, 128), (0, 16)]


def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    if actual.numel():
        difference = ((actual.double() - expected).abs() / expected.abs().max()).max().item()
        assert difference <= ROW_TOLERANCE[actual.dtype], f"maximum difference {difference:.2e}"  # NaN fails too


@pytest.mark.parametrize("dtype", ROW_TOLERANCE)
@pytest.mark.parametrize("shape", ROW_SHAPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, offset: float) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + offset)
    check(CpuElementwise().rms_norm(x, weight, 1e-5, offset), expected)


@pytest.mark.parametrize("dtype", ROW_TOLERANCE)
@pytest.mark.parametrize("shape", ROW_SHAPES)
def test_silu_mul(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(*shape[:-1], 2 * shape[-1]) * 4).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    check(CpuElementwise().silu_mul(gate_up), torch.nn.functional.silu(gate) * up)


def test_extreme_gates_stay_finite() -> None:
    gate_up = torch.tensor([[-1e30, -200.0, 0.0, 200.0, 1.0, 1.0, 1.0, 1.0]])
    assert CpuElementwise().silu_mul(gate_up).tolist() == [[0.0, 0.0, 0.0, 200.0]]


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"weight \[4\]"):
        CpuElementwise().rms_norm(torch.ones(2, 8), torch.ones(4), 1e-5)
    with pytest.raises(ValueError, match="even"):
        CpuElementwise().silu_mul(torch.ones(2, 7))


@pytest.mark.parametrize("dtype", ROW_TOLERANCE)
@pytest.mark.parametrize("dim", [2, 34, 64])
def test_rotate(dim: int, dtype: torch.dtype) -> None:
    """Only the given heads, and of these only the first elements, with any strides."""
    torch.manual_seed(0)
    cos, sin = torch.randn(2, 1, 9, dim).to(dtype)
    whole = torch.randn(9, 5, 64).to(dtype)
    before, (c, s) = whole.double(), (cos[0, :, None].double(), sin[0, :, None].double())
    turned = torch.cat([-before[..., dim // 2 : dim], before[..., : dim // 2]], dim=-1)
    expected = torch.cat([before[..., :dim] * c + turned * s, before[..., dim:]], dim=-1)
    CpuElementwise().rotate(whole[:, 1:4], cos, sin)
    check(whole[:, 1:4], expected[:, 1:4])
    assert torch.equal(whole[:, ::4].double(), before[:, ::4])


def test_wrong_rotary_tables_are_named() -> None:
    x, cos = torch.ones(3, 2, 8), torch.ones(1, 3, 8)
    for wrong in (torch.ones(1, 2, 8), torch.ones(1, 3, 10), torch.ones(1, 3, 8).bfloat16()):
        with pytest.raises(ValueError, match="cos"):
            CpuElementwise().rotate(x, wrong, wrong)
    with pytest.raises(ValueError, match="strides"):
        CpuElementwise().rotate(x.transpose(1, 2), cos[..., :2], cos[..., :2])
