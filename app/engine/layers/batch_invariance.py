"""Batch invariance: products whose sums have one order for each row, however many rows a step has, so that a token's
logits are the same bits alone and in a batch, in a prompt and in a decode."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from folio.app.compat.torch import DispatchMode
from folio.app.engine.layers.linear import FewRowLinear
from folio.app.engine.tensor_parallel.communicator import Communicator, MemoryCommunicator
from folio.app.errors import ConfigError
from folio.kernels import FewRowProduct, select_product
from folio.kernels.cpu.ops import PackedWeight

# Names of operations. In inference mode those of the first two lines are not taken apart.
_PRODUCTS = {"linear", "einsum", "conv1d", "conv2d", "convolution", "scaled_dot_product_attention"}
_PRODUCTS |= {"addmm", "addmv", "baddbmm", "mv", "dot", "_grouped_mm", "_scaled_mm", "_linear_pointwise"}
_OF_TWO = {"matmul", "mm", "bmm"}
_IN_VECTORS = {"sigmoid", "silu", "gelu", "glu", "softplus"}
_ACTIVATIONS = tuple({type(ACT2FN[name]) for name in ("silu", "sigmoid", "gelu_pytorch_tanh")})


class ByRow(nn.Module):
    """An activation, of one row at a time: on CPUs torch has another formula for values that fill no vector, and shares
    out values among threads, not rows."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.activation(row) for row in x.flatten(0, -2)]).view(x.shape)


class InvariantLinear(FewRowLinear):
    """`nn.Linear` by a kernel that sums in one order for any number of rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, self.weight, self.bias)


def make_batch_invariant(model: nn.Module, recurrent_layers: Collection[int], comm: Communicator | None) -> None:
    """Let the model's products have one order of sums. Before its layers are run in one call, or have collectives.

    Raises:
        ConfigError: recurrent layers, or sums over ranks, have no such order.
        KernelError: there are no such products on its device.
    """
    if recurrent_layers:
        raise variance(f"{len(recurrent_layers)} layers are recurrent, and scan a prompt in another order than tokens")
    if comm is not None and comm.size > 2 and not isinstance(comm, MemoryCommunicator):
        raise variance(f"{comm.size} ranks add over {comm.transport}, in an order of its own; use at most 2 ranks")
    _keep_order(model)
    device = next(model.parameters()).device
    if device.type == "cpu":
        _apply_by_row(model)
    else:
        _replace_linears(model, select_product(device, batch_invariant=True))


def variance(reason: str) -> ConfigError:
    return ConfigError(f"batch_invariant is true, but results would depend on the batch: {reason}. Leave it out")


def _keep_order(model: nn.Module) -> None:
    """Mark the packed weights; a weight that several modules share stays one."""
    marked: dict[int, tuple[PackedWeight, PackedWeight]] = {}  # with the old ones, whose ids must stay taken
    for module in model.modules():
        packed: Any = getattr(module, "packed", None)
        if isinstance(packed, PackedWeight):
            known = marked.setdefault(id(packed), (packed, replace(packed, batch_invariant=True)))
            setattr(module, "packed", known[1])  # noqa: B010 (of several types)


def _replace_linears(model: nn.Module, product: FewRowProduct) -> None:
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and product.unsupported(layer.weight) is None:
            model.set_submodule(path, InvariantLinear(layer, product))


def _apply_by_row(model: nn.Module) -> None:
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, _ACTIVATIONS):
            model.set_submodule(path, ByRow(module))


class VariantOperations(DispatchMode):
    """Finds torch's operations, run within its context, that round a row in another way beside others: products, and on
    CPUs functions that have another formula where rows are no whole vectors.

    Attributes:
        names: of those that were run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        varies = name in _PRODUCTS
        if name in _OF_TWO:
            varies = args[0].shape[-1] != 1  # angles are products of one position and frequency
        elif name in _IN_VECTORS and args[0].device.type == "cpu":
            exact = name == "gelu" and kwargs.get("approximate", "none") == "none"
            varies = args[0].numel() != args[0].shape[-1] and not exact
        if varies:
            self.names.add(name)
        return func(*args, **kwargs)
