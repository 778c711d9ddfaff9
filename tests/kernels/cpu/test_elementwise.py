"""Row-wise CPU operations against their definitions in float64."""

from __future__ import annotations

import pytest
import torch

from kernels import CpuElementwise

# Relative to the largest value: one rounding to the dtype, and float32 arithmetic before it.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
SHAPES = [(1, 1, 8), (1, 3, 896), (2, 5, 33), (1, 300, 128), (0, 16)]


def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    if actual.numel():
        difference = ((actual.double() - expected).abs() / expected.abs().max()).max().item()
        assert difference <= TOLERANCE[actual.dtype], f"maximum difference {difference:.2e}"  # NaN fails too


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, offset: float) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + offset)
    check(CpuElementwise().rms_norm(x, weight, 1e-5, offset), expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
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


@pytest.mark.parametrize("dtype", TOLERANCE)
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
