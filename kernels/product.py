"""Products of few rows with a weight, as a variant beside torch's: their interface."""

from __future__ import annotations

import importlib
from typing import Protocol

import torch

from folio.kernels.errors import KernelError


class FewRowProduct(Protocol):
    """`x @ weight.T + bias` for a decode step's rows, without split sums: in float32, rounded once.

    Attributes:
        max_rows: most rows of a call.
    """

    max_rows: int

    def unsupported(self, weight: torch.Tensor) -> str | None:
        """Why there is no product with a weight `[outputs, inputs]`; `None` if there is. Values are not read."""
        ...

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The product of `x [..., inputs]` with `weight [outputs, inputs]`, plus `bias [outputs]`: `[..., outputs]`.

        Raises:
            KernelError: more rows, or another weight or dtype, than there are kernels for.
        """
        ...


def select_product(device: torch.device, *, dependent: bool = False) -> FewRowProduct:
    """The product for a device. Args: `dependent` as for `select_elementwise`.

    Raises:
        KernelError: there is none for this device, or Triton is not installed.
    """
    if device.type == "cpu":
        raise KernelError("products of few rows are for CUDA devices; on a CPU weights are packed")
    try:
        product: FewRowProduct = importlib.import_module("folio.kernels.triton.product").TritonProduct(
            dependent=dependent
        )
    except ImportError as error:
        raise KernelError(f"products of few rows need the package triton: {error}") from error
    return product
