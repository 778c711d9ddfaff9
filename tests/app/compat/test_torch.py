"""What Folio uses of torch beyond its documentation."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore

from folio.app.compat import torch as compat

HOUR = timedelta(hours=1)


def test_onednn_products_of_packed_weights() -> None:
    weight, bias, x = torch.randn(24, 16), torch.randn(24), torch.randn(5, 16)
    packed = compat.onednn_pack(weight)
    torch.testing.assert_close(compat.onednn_linear(x, packed, bias), x @ weight.T + bias)
    torch.testing.assert_close(compat.onednn_linear(x, packed, None), x @ weight.T)


def test_onednn_dtypes() -> None:
    assert compat.onednn_supports(torch.float32) == torch.backends.mkldnn.is_available()
    assert not compat.onednn_supports(torch.float64)
    for dtype in (torch.bfloat16, torch.float16):
        assert isinstance(compat.onednn_supports(dtype), bool)


def test_a_gloo_group_of_its_own() -> None:
    group = compat.gloo_group(HashStore(), 0, 1, "127.0.0.1", join_timeout=timedelta(seconds=10), timeout=HOUR)
    assert not torch.distributed.is_initialized(), "torch's default group should be left alone"
    tensor = torch.arange(3)
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [0, 1, 2]


@pytest.mark.gpu
def test_an_nccl_group_of_its_own() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.cuda.set_device(0)
    group = compat.nccl_group(HashStore(), 0, 1, HOUR)
    tensor = torch.arange(3, device="cuda")
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [0, 1, 2]
    assert not torch.distributed.is_initialized()
    group.abort()
