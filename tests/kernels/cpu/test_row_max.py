from __future__ import annotations

import pytest
import torch

from folio.kernels.cpu.row_max import CpuRowMax

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 15, 16, 63, 64, 65, 500, 151_936])
def test_values_and_places_are_torchs(dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(7, size, generator=generator).to(dtype)  # half precision has many equal elements
    x[1] = -INF
    x[2, size // 2] = INF
    x[3, -1] = NAN
    x[4, size // 3] = NAN
    x[5] = -x[5].abs()
    values, places = CpuRowMax()(x)
    expected, _ = x.max(dim=-1)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, expected.float(), rtol=0, atol=0, equal_nan=True)
    for row, place in zip(x, places.tolist(), strict=True):
        is_highest = row.isnan() if row.isnan().any() else row == row.max()
        assert place == int(is_highest.nonzero()[0])


def test_rows_may_be_apart() -> None:
    x = torch.randn(6, 200).bfloat16()
    values, places = CpuRowMax()(x[::2, :100])
    assert values.tolist() == x[::2, :100].float().amax(dim=-1).tolist()
    assert places.tolist() == x[::2, :100].float().argmax(dim=-1).tolist()
    values, _ = CpuRowMax()(x.T)
    assert values.tolist() == x.T.float().amax(dim=-1).tolist()


@pytest.mark.parametrize("x", [torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 0)])
def test_what_it_cannot_read_is_refused(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="rows of float32"):
        CpuRowMax()(x)
