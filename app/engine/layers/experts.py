"""Mixtures of experts with packed weights, for the experts' modules that transformers computes by its interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn

from folio.kernels import PackedProduct, quantise
from folio.kernels.cpu.ops import PackedWeight
from folio.kernels.experts import stacked
from folio.kernels.threads import each

# Parameters of an experts' module, of which it has two, and the names of its projections in checkpoints that have them
# apart.
PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}


class ExpertProduct(nn.Module):
    """One projection of all experts. Args: `packed`: of `stacked`; `bias`: `[experts, outputs]`."""

    def __init__(self, packed: PackedWeight, bias: torch.Tensor | None, linear: PackedProduct) -> None:
        super().__init__()
        self.packed, self.bias, self._linear = packed, bias, linear

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return self._linear.by_expert(x, self.packed, ends, self.bias)


class PackedExperts(nn.Module):
    """Experts with packed weights; the rows of each are multiplied at once.

    Args:
        original: an experts' module; its activation is used, and its parameters are freed.
        packed: weights of `stacked` by the names of its parameters.
    """

    def __init__(self, original: nn.Module, packed: Mapping[str, PackedWeight], linear: PackedProduct) -> None:
        super().__init__()
        for name, weight in packed.items():
            bias = getattr(original, f"{name}_bias", None)
            product = ExpertProduct(weight, None if bias is None else bias.detach().contiguous(), linear)
            self.add_module(name, product)
            setattr(original, name, None)
            if bias is not None:
                setattr(original, f"{name}_bias", None)
        self.original: Any = original
        self._first = next(name for name in packed if name != "down_proj")

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """`x [tokens, hidden]`, the experts of each token and their weights `[tokens, top_k]`; as transformers'
        `grouped_mm_experts_forward`. Nothing waits for the device."""
        (tokens, top_k), original = top_k_index.shape, self.original
        experts, order = top_k_index.reshape(-1).sort(stable=True)
        every = torch.arange(original.num_experts, dtype=experts.dtype, device=x.device)
        ends = torch.searchsorted(experts, every, right=True)
        rows = self.get_submodule(self._first)(x.index_select(0, order // top_k), ends)
        rows = original._apply_gate(rows) if original.has_gate else original.act_fn(rows)
        rows = self.get_submodule("down_proj")(rows, ends)
        if getattr(original, "has_post_expert_norm", False):
            rows = original.post_expert_norm(rows)
        out = torch.empty_like(rows).index_copy_(0, order, rows)
        out = out.view(tokens, top_k, -1) * top_k_weights.reshape(tokens, top_k, 1)
        return out.sum(1).to(x.dtype)


def experts_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(path, module) of the experts' modules that `PackedExperts` can replace."""
    for path, module in list(model.named_modules()):
        if hasattr(module, "is_transposed") and hasattr(module, "_apply_gate") and projections_of(module):
            yield path, module


def projections_of(module: nn.Module) -> list[str]:
    """Names of an experts' module's weights."""
    return [name for name in PROJECTIONS if isinstance(getattr(module, name, None), nn.Parameter)]


def quantise_experts(model: nn.Module, bits: Literal[4, 8], linear: PackedProduct) -> int:
    """Quantise and pack the weights of all experts' modules, where they are; return the number of these modules."""
    num_packed, group = 0, linear.int8_group if bits == 8 else None
    for path, module in experts_of(model):

        def pack(weights: torch.Tensor, transposed: bool = module.is_transposed) -> PackedWeight:
            found: dict[int, PackedWeight] = {}

            def pack_one(expert: int) -> None:
                weight = weights[expert].t() if transposed else weights[expert]
                found[expert] = linear.pack_quantised(quantise(weight, bits, group), weight.dtype)

            each(pack_one, range(len(weights)))
            return stacked([found[expert] for expert in range(len(weights))])

        packed = {}
        for name in projections_of(module):
            packed[name] = pack(getattr(module, name).detach())
            setattr(module, name, None)  # freed before the next one is packed
        model.set_submodule(path, PackedExperts(module, packed, linear))
        num_packed += 1
    return num_packed


def experts_as(model: nn.Module, find: Callable[[str], PackedWeight | None], linear: PackedProduct) -> None:
    """Replace experts' modules on torch's meta device. Args: `find`: the packed weight of a path, if there is one."""
    for path, module in experts_of(model):
        found = {name: find(f"{path}.{name}") for name in projections_of(module)}
        packed = {name: weight for name, weight in found.items() if weight is not None}
        if packed:
            model.set_submodule(path, PackedExperts(module, packed, linear))
