"""Products beside torch's: of few rows, and with packed weights. Their interfaces."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol

import torch

from folio.kernels.errors import KernelError

if TYPE_CHECKING:
    from folio.kernels.cpu.ops import PackedWeight
    from folio.kernels.quantised import QuantisedWeight


class FewRowProduct(Protocol):
    """`x @ weight.T + bias` without split sums, in float32, rounded once: for a decode step's rows, or in one order for
    any number of rows.

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


def select_product(device: torch.device, *, dependent: bool = False, batch_invariant: bool = False) -> FewRowProduct:
    """The product for a device.

    Args:
        dependent: as for `select_elementwise`.
        batch_invariant: any number of rows, whose sums have one order.

    Raises:
        KernelError: there is none for this device, or Triton is not installed.
    """
    if device.type == "cpu":
        raise KernelError("products of few rows are for CUDA devices; on a CPU weights are packed")
    try:
        product: FewRowProduct = importlib.import_module("folio.kernels.triton.product").TritonProduct(
            dependent=dependent, batch_invariant=batch_invariant
        )
    except ImportError as error:
        raise KernelError(f"products of few rows need the package triton: {error}") from error
    return product


class PackedProduct(Protocol):
    """`x @ weight.T + bias` with packed weights, for one device: `CpuLinear`, and `TritonCodes` on CUDA.

    Attributes:
        int8_group: inputs that have one scale in weights which Folio rounds to 8 bits.
    """

    int8_group: int

    def unsupported(self, dtype: torch.dtype) -> str | None:
        """Why there are no products in this dtype, as a sentence; `None` if there are."""

    def pack(self, weight: torch.Tensor) -> PackedWeight | None:
        """A plain weight `[outputs, inputs]`, packed; `None` if torch's product is the one to use."""

    def pack_quantised(self, weight: QuantisedWeight, dtype: torch.dtype) -> PackedWeight:
        """A quantised weight, packed on the device for inputs and results of a dtype. Several with the same inputs can
        be joined by their `parts`."""

    def merged(self, weight: PackedWeight) -> PackedWeight:
        """The same weight, in as few parts as is best for `__call__`."""

    def rows(self, weight: PackedWeight, outputs: torch.Tensor) -> torch.Tensor:
        """The values `[..., inputs]` of these outputs, int64 `[...]`, of a quantised weight."""

    def __call__(self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The product of `x [..., inputs]`, plus `bias [outputs]`: `[..., outputs]`, all of the weight's dtype."""

    def by_expert(
        self, x: torch.Tensor, weight: PackedWeight, ends: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The products of each expert's rows, as `__call__` computes them.

        Args:
            x: `[rows, inputs]`, the rows of the first expert first.
            weight: of `experts.stacked`.
            ends: `[experts]` int64: where the rows of each end.
            bias: `[experts, outputs]`, contiguous.

        Returns:
            `[rows, outputs]`.
        """


def select_packed_product(device: torch.device) -> PackedProduct:
    """The product with packed weights for a device. Raises `KernelError` if there is none here."""
    name, package = ("cpu.ops", "a C++ compiler") if device.type == "cpu" else ("triton.codes", "the package triton")
    try:
        module = importlib.import_module(f"folio.kernels.{name}")
    except ImportError as error:
        raise KernelError(f"products with packed weights need {package}: {error}") from error
    product: PackedProduct = module.CpuLinear() if device.type == "cpu" else module.TritonCodes(device)
    return product
