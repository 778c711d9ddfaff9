"""Module from a quantised checkpoint: codes go from the file into the kernels' order, a layer at a time, and are
dequantised only while their layer is fused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from folio.app.engine.layers.experts import ExpertProduct, experts_as
from folio.app.engine.layers.fusion_record import FusionRecord
from folio.app.engine.layers.linear import PackedEmbedding, PackedLinear, pack_linears
from folio.app.engine.layers.recurrent import PackedMixer, unwrapped
from folio.app.engine.layers.sharding import ShardPlan, WeightShard, ZeroShard
from folio.app.engine.model.quantised_experts import ExpertReader
from folio.app.errors import ModelError
from folio.app.models.quantised.checkpoint import QuantisedCheckpoint
from folio.app.models.quantised.share import Share
from folio.kernels import PackedProduct, QuantisedWeight
from folio.kernels.cpu.ops import PackedWeight, WeightPart

logger = logging.getLogger(__name__)

# (module, record) → number of fused modules.
Fuse = Callable[[nn.Module, FusionRecord], int]
Pack = Callable[[str, nn.Module], PackedLinear | None]  # for `pack_linears`
# Packed weights by the paths of their modules, described by plain values: see `described`.
Descriptions = Mapping[str, Any]
Blanks = Mapping[str, PackedWeight]


class QuantisedLoader:
    """Fills a module, whose parameters are on torch's meta device, from a checkpoint.

    Args:
        linear: of the device.
        plan: of a rank's share, with which alone the module is filled.

    Raises:
        ModelError: the checkpoint lacks weights, or has others than the module.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        checkpoint: QuantisedCheckpoint,
        linear: PackedProduct,
        device: torch.device,
        plan: ShardPlan | None = None,
    ) -> None:
        self._plan = plan
        self._module, self._checkpoint, self._linear, self._device = module, checkpoint, linear, device
        self._sources: dict[str, PackedWeight] = {}  # of linear layers that are not replaced yet
        self._embeddings: dict[str, PackedWeight] = {}
        # Cuts and parameters of embeddings that are not quantised, by their sources: output layers may be tied to them.
        self._dense: dict[str, tuple[WeightShard | ZeroShard | None, nn.Parameter]] = {}
        # Tied parameters have several names.
        names: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        known = checkpoint.names()
        self._mixers = [path for path, part in module.named_modules() if isinstance(part, PackedMixer)]
        self._experts = ExpertReader(module, checkpoint, linear, device, plan)
        found = {
            name: next((first for n in same if (first := unwrapped(n, self._mixers)) in known), None)
            for same in names.values()
            for name in same
        }
        missing = sorted(name for name, source in found.items() if source is None and name not in self._experts.found)
        if missing:
            raise ModelError(f"the checkpoint lacks {len(missing)} weights, {missing[0]} among them")
        self._names = {name: str(source) for name, source in found.items()}

    def load(self, fuse: Fuse, record: FusionRecord) -> int:
        """Fill, fuse and pack all layers; return the number of fused modules."""
        return by_layer(self._module, self._fill, fuse, record, self._pack)

    def _fill(self, path: str) -> None:
        """Read the parameters of a module that are not there yet."""
        self._sources.clear()
        for where, module in list(self._module.get_submodule(path).named_modules(prefix=path)):
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                name = f"{where}.{leaf}" if where else leaf
                if not parameter.is_meta or name in self._experts.found or self._names[name] in self._embeddings:
                    continue  # the last: a tied output layer
                self._fill_parameter(where, module, leaf, parameter)
            if (experts := self._experts.read(where, module)) is not None:
                self._module.set_submodule(where, experts)

    def _fill_parameter(self, path: str, module: nn.Module, leaf: str, parameter: nn.Parameter) -> None:
        name = f"{path}.{leaf}" if path else leaf
        source, cut = self._names[name], self._cut(name)
        if (tied := self._dense.get(source)) is not None and cut == tied[0]:
            setattr(module, leaf, tied[1])
            return
        value = self._read(name, source, tuple(parameter.shape))
        if isinstance(value, QuantisedWeight):
            if isinstance(module, nn.Embedding):
                self._embed(path, module, source, value)
                return
            if leaf == "weight" and type(module) is nn.Linear:
                packed = self._linear.pack_quantised(value, parameter.dtype)
                self._sources[name] = packed
                value = self._linear.rows(packed, torch.arange(value.shape[0], device=self._device))
            else:
                value = value.dequantised()
        filled = nn.Parameter(value.to(self._device, parameter.dtype), requires_grad=False)
        setattr(module, leaf, filled)
        if isinstance(module, nn.Embedding):
            self._dense[source] = cut, filled

    def _read(self, name: str, source: str, shape: tuple[int, ...]) -> torch.Tensor | QuantisedWeight:
        """A weight, or the rank's part of it."""
        cut = self._cut(name)
        share = Share(shape, cut.dim, cut.spans) if isinstance(cut, WeightShard) else None
        value = self._checkpoint.read(source, share)
        if share is not None and tuple(value.shape) == share.shape:
            return value
        if tuple(value.shape) != shape:
            raise ModelError(f"the weight {name} is {list(value.shape)}, not {list(shape)}")
        return value if self._plan is None else self._plan.part_of(name, value, cut)

    def _cut(self, name: str) -> WeightShard | ZeroShard | None:
        return None if self._plan is None else self._plan.cuts.get(unwrapped(name, self._mixers))

    def _embed(self, path: str, module: nn.Embedding, source: str, value: QuantisedWeight) -> None:
        packed = self._linear.pack_quantised(value, module.weight.dtype)
        self._embeddings[source] = packed
        self._module.set_submodule(path, PackedEmbedding(module, packed, self._linear))

    def _pack(self, path: str, layer: nn.Module) -> PackedLinear | None:
        linear: Any = layer
        if type(linear) is not nn.Linear:
            return None
        merged: tuple[tuple[str, int], ...] = getattr(linear, "merged", ())
        bias = None if linear.bias is None else linear.bias.detach()
        packed = self._embeddings.get(self._names.get(f"{path}.weight", ""))
        if packed is None:
            parent = path.rpartition(".")[0]
            names = [f"{parent}.{name}.weight" for name, _ in merged] or [f"{path}.weight"]
            packed = joined([self._sources.get(name) for name in names])
            if packed is None:
                if any(name in self._sources for name in names):
                    logger.warning("%s is not packed: its parts differ in their kinds", path)
                packed = self._linear.pack(linear.weight.detach())
                if packed is None:
                    return None
            packed = self._linear.merged(packed)
        return PackedLinear(packed, (packed.outputs, packed.inputs), bias, self._linear, merged)


def by_layer(module: nn.Module, fill: Callable[[str], None], fuse: Fuse, record: FusionRecord, pack: Pack) -> int:
    """Fill, fuse and pack one layer after the other, so that the device has the values of one only; return the number
    of fused modules. Args: `fill`: what is not there yet of a module, by its path."""
    num_fused = 0
    layers = list(_layer_paths(module))
    for path in [*layers, ""]:
        fill(path)
        record.scope = _scope(path, () if path else layers)
        num_fused += fuse(module, record)
        pack_linears(module.get_submodule(path), pack, f"{path}." if path else "")
    record.scope = lambda _: True
    return num_fused


def joined(weights: Sequence[PackedWeight | None]) -> PackedWeight | None:
    """The outputs of several quantised weights, one after the other; `None` if one is missing, or the inputs have
    different orders."""
    given = [weight for weight in weights if weight is not None]
    orders = [None if weight.order is None else weight.order.tolist() for weight in given]
    if len(given) < len(weights) or any(order != orders[0] for order in orders):
        return None
    return replace(given[0], parts=tuple(part for weight in given for part in weight.parts))


def _scope(parent: str, done: Sequence[str]) -> Callable[[str], bool]:
    return lambda path: _within(path, parent) and not any(_within(path, other) for other in done)


def _within(path: str, parent: str) -> bool:
    return not parent or path == parent or path.startswith(f"{parent}.")


def _layer_paths(module: nn.Module) -> Iterator[str]:
    """Paths of the members of the outermost lists of modules: the decoder layers."""
    lists: list[str] = []
    for path, part in module.named_modules():
        if isinstance(part, nn.ModuleList) and not any(_within(path, outer) for outer in lists):
            lists.append(path)
            yield from (f"{path}.{name}" for name, _ in part.named_children())


# ---- for files of weights ----


def described(model: nn.Module) -> dict[str, Any]:
    """The quantised packed weights of a model, and those of packed experts, by path, in plain values: tensors by dtype
    and shape, and a weight that several modules share once, then by its first path."""
    found: dict[str, Any] = {}
    paths: dict[int, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, ExpertProduct) or (
            isinstance(module, PackedEmbedding | PackedLinear) and _is_quantised(module.packed)
        ):
            first = paths.setdefault(id(module.packed), path)
            found[path] = _plain(module.packed) if first == path else first
    return found


def blanks(descriptions: Descriptions) -> Blanks:
    """The weights, on torch's meta device."""
    made = {path: _blank(found) for path, found in descriptions.items() if not isinstance(found, str)}
    return {path: made[found if isinstance(found, str) else path] for path, found in descriptions.items()}


def packed_as(weights: Blanks, linear: PackedProduct) -> Pack:
    """Packs linear layers of a module on torch's meta device as `weights`; for `pack_linears`."""

    def pack(path: str, layer: Any) -> PackedLinear | None:
        packed = weights[path] if path in weights else linear.pack(layer.weight.detach())
        if packed is None:
            return None
        return PackedLinear(packed, (packed.outputs, packed.inputs), layer.bias, linear, getattr(layer, "merged", ()))

    return pack


def embed_as(model: nn.Module, weights: Blanks, linear: PackedProduct) -> None:
    """Replace the embeddings and experts of a module on torch's meta device that have `weights`."""
    experts_as(model, weights.get, linear)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Embedding) and path in weights:
            model.set_submodule(path, PackedEmbedding(module, weights[path], linear))


def _is_quantised(packed: object) -> bool:
    return isinstance(packed, PackedWeight) and packed.is_quantised


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _blank(description: Mapping[str, Any]) -> PackedWeight:
    parts = tuple(WeightPart(**{name: _meta(value) for name, value in part.items()}) for part in description["parts"])
    dtype = getattr(torch, description["dtype"])
    return PackedWeight(parts, description["inputs"], dtype, _meta(description["order"]))


def _meta(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return torch.empty(value["shape"], dtype=getattr(torch, value["dtype"]), device="meta")
