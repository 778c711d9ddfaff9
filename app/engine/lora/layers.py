"""LoRA layers: linear layers that add the adapters of a step's sequences, each to its own rows (LoRA, Punica).

The base layer computes all rows at once; then `scale · x A^T B^T` is added for the rows of each adapter. An adapter's
weights are in a *slot*, which a step's plan names. In a step without adapters only the base layer runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from folio.app.engine.layers.batch import AdapterBatch, Spans
from folio.app.engine.layers.recurrent import PackedMixer
from folio.app.engine.layers.sharding import ShardPlan, WeightShard
from folio.app.engine.lora.weights import LowRank

# Experts see only the tokens that are routed to them, in another order.
_EXPERT = re.compile(r"(^|\.)experts\.\d+\.")


def adapter_batch(
    slots: np.ndarray[Any, Any],
    num_tokens: np.ndarray[Any, Any],
    sample_rows: np.ndarray[Any, Any],
    device: torch.device,
) -> AdapterBatch | None:
    """The rows of each adapter; `None` if no sequence has one.

    Args:
        slots: `[num_seqs]`, each sequence's adapter, or -1. Rows of sequences that are not adjacent must be gathered.
        num_tokens: `[num_seqs]`.
        sample_rows: `[num_samples]`, tokens with logits.
        device: the model's.
    """
    if not (slots >= 0).any():
        return None
    of_tokens = np.repeat(slots, num_tokens)
    return AdapterBatch(_spans(of_tokens, device), _spans(of_tokens[sample_rows], device))


def _spans(slots: np.ndarray[Any, Any], device: torch.device) -> Spans:
    spans: list[tuple[int, slice | torch.Tensor]] = []
    for slot in np.unique(slots[slots >= 0]).tolist():
        rows = np.flatnonzero(slots == slot)
        if rows[-1] - rows[0] + 1 == len(rows):
            spans.append((slot, slice(int(rows[0]), int(rows[-1]) + 1)))
        else:
            spans.append((slot, torch.from_numpy(rows).to(device)))
    return tuple(spans)


@dataclass(frozen=True, slots=True)
class _Part:
    """An adapter's update of one of the layers that were merged into a linear layer."""

    up: torch.Tensor  # [rank, num_columns], the faster layout for few rows
    ranks: slice
    columns: slice


@dataclass(frozen=True, slots=True)
class Update:
    """An adapter's update of one linear layer, which may be several merged ones.

    Attributes:
        down: `[rank, in_features]`, of all parts: they have one input.
    """

    down: torch.Tensor
    parts: tuple[_Part, ...]

    def add(self, x: torch.Tensor, out: torch.Tensor, rows: slice | torch.Tensor) -> None:
        """Add the update to some rows of `out` `[num_rows, out_features]`, from `x` `[num_rows, in_features]`."""
        low = x[rows] @ self.down.T
        for part in self.parts:
            if isinstance(rows, slice):
                out[rows, part.columns].addmm_(low[:, part.ranks], part.up)
            else:
                out[:, part.columns].index_add_(0, rows, low[:, part.ranks] @ part.up)


class _Step:
    """The current step's rows, shared by all layers of a model."""

    tokens: Spans = ()
    samples: Spans = ()


class LoRALinear(nn.Module):
    """A linear layer with adapters.

    Args:
        base: a linear layer, packed or not.
        for_samples: its rows are the step's rows with logits, rather than all tokens.
    """

    def __init__(self, base: nn.Module, shape: tuple[int, int], step: _Step, *, for_samples: bool) -> None:
        super().__init__()
        self.base = base
        self.out_features, self.in_features = shape
        self.updates: dict[int, Update] = {}  # by slot
        self._step = step
        self.for_samples = for_samples

    @property
    def weight(self) -> Any:
        """The base layer's weight, for models that read it; packed layers have none."""
        return self.base.weight

    @property
    def bias(self) -> Any:
        return self.base.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x)
        spans = self._step.samples if self.for_samples else self._step.tokens
        if spans:
            x_rows, out_rows = x.reshape(-1, self.in_features), out.view(-1, self.out_features)
            for slot, rows in spans:
                if (update := self.updates.get(slot)) is not None:  # an adapter need not change every layer
                    update.add(x_rows, out_rows, rows)
        return out


# An adapter's updates, ready for a slot.
Updates = Mapping[LoRALinear, Update]


class LoRALayers:
    """The layers of a model that adapters can change, between steps.

    Attributes:
        shapes: path in the checkpoint → (out_features, in_features).
        head: the path of the output layer, if adapters can change it.
    """

    def __init__(self, model: PreTrainedModel, plan: ShardPlan | None = None) -> None:
        """Wrap every linear layer of a loaded model, merged or packed ones included.

        Args:
            plan: the shards of its weights, if this rank has only a part of them.
        """
        self._plan = plan
        self._step = _Step()
        self._targets: dict[LoRALinear, dict[str, slice]] = {}  # path in the checkpoint → its output columns
        self.head: str | None = None
        self._output = model.get_output_embeddings()
        self._wrap(model, "")
        self.dtype, self.device = model.dtype, model.device

    @property
    def shapes(self) -> Mapping[str, tuple[int, int]]:
        shapes = {}
        for linear, targets in self._targets.items():
            for path, columns in targets.items():
                shape = [columns.stop - columns.start, linear.in_features]
                if (cut := self._cut(path)) is not None and self._plan is not None:
                    shape[cut.dim] = self._plan.spans[path][-1][1]
                shapes[path] = shape[0], shape[1]
        return shapes

    def _cut(self, path: str) -> WeightShard | None:
        """This rank's shard of a weight; `None` for the complete weight."""
        cut = None if self._plan is None else self._plan.cuts.get(f"{path}.weight")
        return cut if isinstance(cut, WeightShard) else None

    def _share(self, path: str, complete: LowRank) -> LowRank:
        """This rank's shard of an adapter. Where inputs are sharded the update is a partial sum, reduced together with
        the layer's output."""
        cut = self._cut(path)
        if cut is None:
            return complete
        return (
            LowRank(complete.down, cut.of(complete.up)) if cut.dim == 0 else LowRank(cut.of(complete.down), complete.up)
        )

    def _wrap(self, parent: nn.Module, prefix: str) -> None:
        for name, child in list(parent.named_children()):
            path = f"{prefix}{name}"
            shape = _linear_shape(child)
            if isinstance(child, PackedMixer):  # runs one sequence at a time
                continue
            if shape is None:
                self._wrap(child, f"{path}.")
            elif not _EXPERT.search(path):
                linear = LoRALinear(child, shape, self._step, for_samples=child is self._output)
                setattr(parent, name, linear)
                targets, start = self._targets.setdefault(linear, {}), 0
                for part, rows in getattr(child, "merged", ()) or ((name, shape[0]),):
                    targets[prefix + part] = slice(start, start + rows)
                    start += rows
                assert start == linear.out_features
                if child is self._output:
                    self.head = path

    @contextmanager
    def observed(self, num_tokens: int, num_samples: int) -> Iterator[None]:
        """Observe a forward: layers that do not run exactly once over all tokens, or all samples, cannot assign rows to
        adapters, and are excluded from then on."""
        seen: dict[LoRALinear, list[int]] = {linear: [] for linear in self._targets}

        def note(linear: LoRALinear, args: tuple[torch.Tensor]) -> None:
            seen[linear].append(args[0].numel() // linear.in_features)

        hooks = [linear.register_forward_pre_hook(note) for linear in seen]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for linear, rows in seen.items():
            if rows != [num_samples if linear.for_samples else num_tokens]:
                del self._targets[linear]

    def stack(self, weights: dict[str, LowRank]) -> Updates:
        """Convert an adapter's weights to updates, and remove them from `weights`. From any thread, after the observed
        forward."""
        updates: dict[LoRALinear, Update] = {}
        for linear, targets in self._targets.items():
            changed = {path: self._share(path, weights.pop(path)) for path in targets if path in weights}
            if not changed:
                continue
            parts, start = [], 0
            for path, low_rank in changed.items():
                end = start + len(low_rank.down)
                parts.append(_Part(low_rank.up.T.contiguous(), slice(start, end), targets[path]))
                start = end
            downs = [low_rank.down for low_rank in changed.values()]
            updates[linear] = Update(torch.cat(downs) if len(downs) > 1 else downs[0], tuple(parts))
        return updates

    def insert(self, slot: int, updates: Updates) -> None:
        """Put an adapter into an empty slot."""
        for linear, update in updates.items():
            assert slot not in linear.updates
            linear.updates[slot] = update

    def remove_adapter(self, slot: int) -> None:
        """Empty a slot and free its memory."""
        for linear in self._targets:
            linear.updates.pop(slot, None)

    def set_batch(self, batch: AdapterBatch | None) -> None:
        """Set the rows of the next forward."""
        self._step.tokens, self._step.samples = ((), ()) if batch is None else (batch.tokens, batch.samples)


def num_bytes(updates: Updates) -> int:
    return sum(update.down.nbytes + sum(part.up.nbytes for part in update.parts) for update in updates.values())


def _linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """(out_features, in_features) of a linear layer, also a packed one; `None` for other modules."""
    if isinstance(module, nn.Linear):  # the weight may be a rank's shard; attributes are of the complete layer
        return module.weight.shape[0], module.weight.shape[1]
    sizes: tuple[Any, Any] = (getattr(module, "out_features", None), getattr(module, "in_features", None))
    if sizes == (None, None):
        sizes = (getattr(module, "nf", None), getattr(module, "nx", None))  # transformers' Conv1D
    return sizes if isinstance(sizes[0], int) and isinstance(sizes[1], int) else None
