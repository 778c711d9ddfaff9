from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from app.engine.linear import PackedLinear, pack_linears


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_equals_plain(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(48, 80, bias=bias, dtype=dtype)
    packed = PackedLinear(plain.weight.detach(), plain.bias.detach() if bias else None)
    for rows in (1, 3, 70):
        x = torch.randn(1, rows, 48, dtype=dtype)
        torch.testing.assert_close(packed(x), plain(x), rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=2e-2)


def test_every_linear_of_a_model_is_replaced() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(Conv1D(4, 8), nn.ReLU()), nn.Embedding(4, 4))
    x = torch.randn(1, 5, 8)
    expected = model[1][0](model[0](x)).relu()  # type: ignore[index]
    assert pack_linears(model) == 2
    torch.testing.assert_close(model[1](model[0](x)), expected)
    assert [type(m).__name__ for m in model[1]] == ["PackedLinear", "ReLU"]  # type: ignore[union-attr]


def test_unsupported_dtypes_stay_unpacked_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.float64))
    assert pack_linears(model) == 0
    assert "stay unpacked" in caplog.text
    assert type(model[0]) is nn.Linear
