"""Experts of a quantised checkpoint, packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from folio.app.engine.layers.experts import PROJECTIONS, PackedExperts, experts_of, projections_of
from folio.app.engine.layers.sharding import ShardPlan, WeightShard
from folio.app.errors import ModelError
from folio.app.models.quantised.checkpoint import QuantisedCheckpoint
from folio.kernels import CpuLinear, QuantisedWeight
from folio.kernels.cpu.experts import CpuExperts, stacked
from folio.kernels.cpu.ops import PackedWeight
from folio.kernels.quantised import as_integers

# Fields of a `QuantisedWeight` that have a row for each output.
_BY_OUTPUT = ("codes", "scales", "offsets", "super_scales", "super_offsets", "factors")


class ExpertReader:
    """Reads the projections of experts, which a checkpoint has apart: `PATH.EXPERT.gate_proj.weight`, or
    `PATH.EXPERT.gate_up_proj.weight` in the order of the module's own rows. Args: `plan`: of a rank's share."""

    def __init__(self, model: nn.Module, checkpoint: QuantisedCheckpoint, plan: ShardPlan | None = None) -> None:
        self._checkpoint, self._plan, known = checkpoint, plan, checkpoint.names()
        self._modules: dict[str, Any] = dict(experts_of(model))
        self.found = {
            f"{path}.{name}": parts
            for path, module in self._modules.items()
            for name in projections_of(module)
            if f"{path}.{name}" not in known
            for parts in ((name,), PROJECTIONS[name])
            if all(f"{path}.{e}.{part}.weight" in known for e in range(module.num_experts) for part in parts)
        }

    def read(self, path: str, module: Any, linear: object) -> PackedExperts | None:
        """A module's experts; `None` if it has none, or is filled because none is quantised. Raises `ModelError`."""
        if not any(f"{path}.{name}" in self.found for name in PROJECTIONS):
            return None
        weights = {name: self._weights(path, name, linear) for name in projections_of(module)}
        dense = {name: weight for name, weight in weights.items() if isinstance(weight, torch.Tensor)}
        for name, weight in dense.items():
            old = getattr(module, name)
            weight = weight.transpose(1, 2).contiguous() if module.is_transposed else weight
            setattr(module, name, nn.Parameter(weight.to(old.dtype), requires_grad=False))
        if len(dense) == len(weights):
            return None
        packed = {}
        for name, found in weights.items():
            if isinstance(found, torch.Tensor):
                own = getattr(module, name).detach()
                assert isinstance(linear, CpuLinear)
                packed[name] = stacked([linear.pack(one.t() if module.is_transposed else one) for one in own])
            else:
                packed[name] = found
        return PackedExperts(module, packed, CpuExperts())

    def _weights(self, path: str, name: str, linear: object) -> PackedWeight | torch.Tensor:
        """Of all experts: packed, or `[experts, outputs, inputs]`."""
        count, dtype = self._modules[path].num_experts, getattr(self._modules[path], name).dtype

        def read(*, plain: bool) -> PackedWeight | torch.Tensor:
            found: list[Sequence[PackedWeight | torch.Tensor]] = []
            for expert in range(count):
                values = self._expert(path, name, expert)
                if isinstance(values, torch.Tensor):
                    found.append([values.to(dtype)])
                elif isinstance(linear, CpuLinear):
                    found.append([linear.pack_quantised(_plain(one) if plain else one, dtype) for one in values])
                else:
                    raise ModelError(f"{path}.{name} is quantised; quantised experts are computed on CPUs only so far")
            return _together(found)

        try:
            return read(plain=False)
        except ValueError:  # zero points that are the same within some experts only, or factors of some
            try:
                return read(plain=True)
            except ValueError:
                raise ModelError(f"{path}.{name} has experts that are quantised in different ways") from None

    def _expert(self, path: str, name: str, expert: int) -> list[QuantisedWeight] | torch.Tensor:
        """The weight of one expert, or a rank's share of it, if it is quantised in its parts."""
        module, parts = self._modules[path], self.found[f"{path}.{name}"]
        shape = list(getattr(module, name).shape[1:])
        outputs, inputs = reversed(shape) if module.is_transposed else shape
        names = [f"{path}.{expert}.{part}.weight" for part in parts]
        values = [self._checkpoint.read(one) for one in names]
        for one, value in zip(names, values, strict=True):
            if tuple(value.shape) != (outputs // len(parts), inputs):
                raise ModelError(f"the weight {one} is {list(value.shape)}, not {[outputs // len(parts), inputs]}")
        if len(parts) > 1 and not getattr(module, "is_concatenated", True):
            values = [_alternating(f"{path}.{expert}", values)]
        if self._plan is not None and isinstance(cut := self._plan.cuts.get(f"{path}.{name}"), WeightShard):
            rows = outputs // len(values)
            cuts = [cut.of_one(module.is_transposed, i * rows, rows) for i in range(len(values))]
            values = [self._plan.part_of(names[0], *pair) for pair in zip(values, cuts, strict=True)]
        dense = [value for value in values if isinstance(value, torch.Tensor)]
        if len(dense) == len(values):
            return torch.cat(dense)
        if dense:
            raise ModelError(f"{' and '.join(names)} are partly quantised, which is not read")
        return [as_integers(value) for value in values if isinstance(value, QuantisedWeight)]


def _together(found: Sequence[Sequence[Any]]) -> PackedWeight | torch.Tensor:
    """The parts of each expert, as one weight."""
    kinds = {type(part) for parts in found for part in parts}
    if kinds == {torch.Tensor}:
        return torch.stack([parts[0] for parts in found])
    if kinds != {PackedWeight}:
        raise ValueError("experts that are partly quantised")
    whole = [stacked(parts) for parts in zip(*found, strict=True)]
    if len({None if part.order is None else part.order.numpy().tobytes() for part in whole}) > 1:
        raise ValueError("inputs in different orders")
    return replace(whole[0], parts=tuple(part for one in whole for part in one.parts))


def _plain(weight: QuantisedWeight) -> QuantisedWeight:
    """With offsets in place of a zero point, with factors, and with an order."""
    changed: dict[str, Any] = {}
    if weight.offsets is None and weight.super_scales is None and weight.table is None:
        changed = {"offsets": (weight.scales.float() * -weight.zero).half(), "zero": 0}
    if weight.factors is None:
        changed["factors"] = torch.ones(weight.shape[0])
    if weight.order is None:
        changed["order"] = torch.arange(weight.shape[1])
    return replace(weight, **changed)


def _alternating(path: str, values: Sequence[Any]) -> Any:
    """Rows of the first weight and of the second one in turns."""
    first = values[0]
    rows = torch.arange(2 * first.shape[0]).view(2, -1).t().reshape(-1)
    if all(isinstance(value, torch.Tensor) for value in values):
        return torch.cat(list(values))[rows]
    same = ("bits", "group", "zero", "table", "order")
    if not all(isinstance(value, QuantisedWeight) for value in values) or any(
        getattr(value, name) != getattr(first, name) for value in values for name in same
    ):
        raise ModelError(f"{path} has gates and ups that are quantised in different ways")
    parts: dict[str, Any] = {}
    for name in _BY_OUTPUT:
        given = [getattr(value, name) for value in values]
        if name == "factors" and any(part is not None for part in given):
            given = [torch.ones(first.shape[0]) if part is None else part for part in given]
        parts[name] = None if given[0] is None else torch.cat(given)[rows]
    return replace(first, **parts)
