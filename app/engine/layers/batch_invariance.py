"""Batch invariance: products whose sums have one order for each row, however many rows a step has, so that a token's
logits are the same bits alone and in a batch, in a prompt and in a decode."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from folio.app.engine.layers.linear import FewRowLinear
from folio.app.engine.tensor_parallel.communicator import Communicator, MemoryCommunicator
from folio.app.errors import ConfigError
from folio.kernels import FewRowProduct, select_product
from folio.kernels.cpu.ops import PackedWeight

_MOST_NAMED = 3


class InvariantLinear(FewRowLinear):
    """`nn.Linear` by a kernel that sums in one order for any number of rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, self.weight, self.bias)


def make_batch_invariant(model: nn.Module, recurrent_layers: Collection[int], comm: Communicator | None) -> None:
    """Let the model's products have one order of sums. Before its layers are run in one call, or have collectives.

    Raises:
        ConfigError: some of its sums depend on the number of rows.
        KernelError: there are no such products on its device.
    """
    device = next(model.parameters()).device
    _keep_order(model)
    if device.type != "cpu":
        _replace_linears(model, select_product(device, batch_invariant=True))
    if reasons := list(_variant(model, recurrent_layers, comm)):
        raise ConfigError(
            f"batch_invariant is true, but results would depend on the batch: {'; '.join(reasons)}. Leave "
            "batch_invariant out"
        )


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


def _variant(model: nn.Module, recurrent_layers: Collection[int], comm: Communicator | None) -> Iterator[str]:
    """Reasons why rows depend on each other."""
    if recurrent_layers:
        yield f"{len(recurrent_layers)} layers are recurrent, and scan a prompt in another order than single tokens"
        return
    if comm is not None and comm.size > 2 and not isinstance(comm, MemoryCommunicator):
        yield f"{comm.size} ranks add over {comm.transport}, in an order that depends on the size; use at most 2"
    multiplied = [path for path, module in model.named_modules() if _is_multiplied_elsewhere(module)]
    if multiplied:
        named = ", ".join(multiplied[:_MOST_NAMED])
        yield (
            f"torch multiplies with the weights of {len(multiplied)} modules, such as {named}, for which Folio has no "
            f"kernel in {next(model.parameters()).dtype} here"
        )


def _is_multiplied_elsewhere(module: nn.Module) -> bool:
    """Whether a module has matrices that another product than Folio's multiplies."""
    if isinstance(module, nn.Embedding | InvariantLinear) or "Norm" in type(module).__name__:
        return False  # norms of single heads have a row for each
    packed = getattr(module, "packed", None)
    if packed is not None and not isinstance(packed, PackedWeight):
        return True
    return any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
