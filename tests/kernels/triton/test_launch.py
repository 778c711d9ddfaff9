"""Prepared launches compute with the tensors that they are given, in Triton's interpreter as on a GPU."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from folio.kernels.triton.launch import Kernel  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
pytestmark = [pytest.mark.gpu] if CUDA else []


@triton.jit
def _add_kernel(x_ptr: tl.tensor, y_ptr: tl.tensor, out_ptr: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    x = tl.load(x_ptr + at, mask=there)
    if y_ptr is not None:
        x += tl.load(y_ptr + at, mask=there)
    tl.store(out_ptr + at, x, mask=there)


@pytest.mark.parametrize("offset", [0, 1])
def test_changing_tensors_replace_the_first(offset: int) -> None:
    """With another alignment than the prepared ones', too."""
    size = 37
    x, y = torch.randn(2, size).to(DEVICE)
    out = torch.empty(size, device=DEVICE)
    arguments = {"x_ptr": x, "y_ptr": y, "out_ptr": out, "size": size, "BLOCK": 16}
    launch = Kernel(_add_kernel).prepare(arguments, ("x_ptr", "out_ptr"), num_warps=1)
    for _ in range(2):
        other, result = torch.randn(size + offset, device=DEVICE)[offset:], torch.zeros(size + 3, device=DEVICE)
        launch((3, 1, 1), other, result)
        assert torch.equal(result, torch.cat([other + y, torch.zeros(3, device=DEVICE)]))


def test_equal_arguments_share_a_variant() -> None:
    """And other tensors, numbers and absent pointers do not."""
    kernel = Kernel(_add_kernel)
    for size, with_y in ((37, True), (16, True), (37, False), (37, True)):
        x, y, out = torch.randn(3, size).to(DEVICE).unbind()
        arguments = {"x_ptr": x, "y_ptr": y.clone() if with_y else None, "out_ptr": out.clone(), "size": size}
        result = torch.empty(size, device=DEVICE)
        kernel.prepare(arguments | {"BLOCK": 16}, ("x_ptr", "out_ptr"), num_warps=1)((3, 1, 1), x, result)
        assert torch.equal(result, x + y if with_y else x)


def test_tensors_of_several_devices_are_refused() -> None:
    x = torch.ones(4)
    arguments = {"x_ptr": x, "y_ptr": x.to("meta"), "out_ptr": x, "size": 4, "BLOCK": 16}
    with pytest.raises(ValueError, match="several devices: cpu, meta"):
        Kernel(_add_kernel).prepare(arguments, ("x_ptr", "out_ptr"), num_warps=1)
