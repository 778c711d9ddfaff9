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
from folio.kernels import CpuLinear, PackedProduct, QuantisedWeight
from folio.kernels.cpu.ops import PackedWeight
from folio.kernels.experts import stacked
from folio.kernels.quantised import as_integers

# Fields of a `QuantisedWeight` that have a row for each output.
_BY_OUTPUT = ("codes", "scales", "offsets", "super_scales", "super_offsets", "factors")


class ExpertReader:
    """Reads the projections of experts, which a checkpoint has apart: `PATH.EXPERT.gate_proj.weight`, or
    `PATH.EXPERT.gate_up_proj.weight` in the order of the module's own rows. Args: as of `QuantisedLoader`."""

    def __init__(
        self,
        model: nn.Module,
        checkpoint: QuantisedCheckpoint,
        linear: PackedProduct,
        device: torch.device,
        plan: ShardPlan | None = None,
    ) -> None:
        self._linear, self._device, self._plan = linear, device, plan
        self._checkpoint, known = checkpoint, checkpoint.names()
        self._modules: dict[str, Any] = dict(experts_of(model))
        self.found = {
            f"{path}.{name}": parts
            for path, module in self._modules.items()
            for name in projections_of(module)
            if f"{path}.{name}" not in known
            for parts in ((name,), PROJECTIONS[name])
            if all(f"{path}.{e}.{part}.weight" in known for e in range(module.num_experts) for part in parts)
        }

    def read(self, path: str, module: Any) -> PackedExperts | None:
        """A module's experts; `None` if it has none, or is filled because none is quantised. Raises `ModelError`."""
        if not any(f"{path}.{name}" in self.found for name in PROJECTIONS):
            return None
        packed: dict[str, PackedWeight] = {}
        for name in projections_of(module):
            weights = self._weights(path, name)
            if isinstance(weights, PackedWeight):
                packed[name] = weights
            else:
                values = weights.transpose(1, 2).contiguous() if module.is_transposed else weights
                setattr(module, name, nn.Parameter(values.to(self._device), requires_grad=False))
        if not packed:
            return None
        for name in projections_of(module):
            if name not in packed:
                own = getattr(module, name).detach()
                plain = [self._linear.pack(one.t() if module.is_transposed else one) for one in own]
                if None in plain:
                    raise ModelError(f"{path}.{name} is not quantised, as the others are; only CPUs compute with both")
                packed[name] = stacked([one for one in plain if one is not None])
        return PackedExperts(module, packed, self._linear)

    def _weights(self, path: str, name: str) -> PackedWeight | torch.Tensor:
        """Of all experts: packed, or `[experts, outputs, inputs]`."""
        count, dtype = self._modules[path].num_experts, getattr(self._modules[path], name).dtype

        def read(*, plain: bool) -> PackedWeight | torch.Tensor:
            found: list[PackedWeight | torch.Tensor] = []
            for expert in range(count):
                values = self._expert(path, name, expert)
                if isinstance(values, torch.Tensor):
                    found.append(values.to(dtype))
                else:
                    parts = [_plain(value) if plain else value for value in values]
                    found.append(_packed(parts, self._linear, dtype))
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
        weights = [value for value in values if isinstance(value, QuantisedWeight)]
        return [as_integers(weight) for weight in weights] if isinstance(self._linear, CpuLinear) else weights


def _packed(parts: Sequence[QuantisedWeight], linear: PackedProduct, dtype: torch.dtype) -> PackedWeight:
    """Of one expert."""
    weights = [linear.pack_quantised(part, dtype) for part in parts]
    if len({None if weight.order is None else tuple(weight.order.tolist()) for weight in weights}) > 1:
        raise ValueError("inputs in different orders")
    return linear.merged(replace(weights[0], parts=tuple(part for weight in weights for part in weight.parts)))


def _together(found: Sequence[PackedWeight | torch.Tensor]) -> PackedWeight | torch.Tensor:
    """The experts, as one weight."""
    packed = [weight for weight in found if isinstance(weight, PackedWeight)]
    dense = [weight for weight in found if isinstance(weight, torch.Tensor)]
    if packed and dense:
        raise ValueError("experts that are partly quantised")
    return stacked(packed) if packed else torch.stack(dense)


def _plain(weight: QuantisedWeight) -> QuantisedWeight:
    """With offsets in place of a zero point, with factors, and with an order."""
    changed: dict[str, Any] = {}
    is_plain = weight.offsets is None and weight.super_scales is None and weight.table is None
    if is_plain and not weight.codes.is_floating_point():
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
