"""Layers that keep a state between tokens (Mamba mixers, gated delta nets, short convolutions) in a packed forward.

transformers' mixers compute a batch of sequences of one length, and keep their states in a `Cache` that they are given.
Here each mixer is wrapped: the wrapper cuts the packed row into its sequences and runs the mixer on each, with a cache
over that sequence's states in memory of ours. Which states there are is observed, as the geometry of attention is.

A state, unlike keys and values, is overwritten by every step. So a step that failed halfway cannot be run again: its
sequences begin anew, or from a copy.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from app.engine.states import Kind, RecurrentLayer, StateBatch, StateCache, StateSpec, state_views
from app.errors import ModelError


@dataclass(frozen=True, slots=True)
class FoundMixer:
    """A mixer, its dotted path in the model, and the argument in which its forward takes the cache."""

    module: nn.Module
    path: str
    cache_argument: str


class RecurrentState(Protocol):
    """Who answers a mixer's call."""

    def mix(self, layer: int, mixer: PackedMixer, hidden_states: torch.Tensor) -> torch.Tensor:
        """`mixer.run` over the packed row `[1, num_tokens, hidden_size]`; returns the same shape."""
        ...


class PackedMixer(nn.Module):
    """A mixer in a packed forward. While nothing is bound to it, it is the mixer that it wraps."""

    state: RecurrentState | None = None

    def __init__(self, layer: int, found: FoundMixer) -> None:
        super().__init__()
        self.layer = layer
        self.mixer = found.module
        self._cache_argument = found.cache_argument

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.state is None:
            out: torch.Tensor = self.mixer(hidden_states, *args, **kwargs)
            return out
        if args:  # the wrapper knows by name what it leaves out
            raise ModelError(
                f"{type(self.mixer).__name__} of layer {self.layer} keeps a state and is not called as a mixer is; "
                "Folio cannot serve it"
            )
        # Masks and packed lengths describe the row as transformers sees it; the mixer gets whole sequences.
        return self.state.mix(self.layer, self, hidden_states)

    def run(self, hidden_states: torch.Tensor, cache: StateCache) -> torch.Tensor:
        """The mixer itself: `[num_seqs, num_tokens, hidden_size]`, and a cache of as many sequences."""
        out: torch.Tensor = self.mixer(hidden_states, **{self._cache_argument: cache})
        return out


def find_recurrent_layers(model: nn.Module) -> dict[int, FoundMixer]:
    """Layer → its mixer, for every layer that keeps a state other than keys and values.

    Raises:
        ModelError: a layer has several.
    """
    found: dict[int, FoundMixer] = {}
    for path, module in model.named_modules():
        argument = _cache_argument(module)
        if argument is None or any(_cache_argument(part) for part in module.modules() if part is not module):
            continue  # a block hands the cache on to the mixer in it
        layer: int = module.layer_idx
        if layer in found:
            raise ModelError(f"layer {layer} keeps state in {found[layer].path} and in {path}; one mixer is supported")
        found[layer] = FoundMixer(module, path, argument)
    return found


def _cache_argument(module: nn.Module) -> str | None:
    if not isinstance(getattr(module, "layer_idx", None), int):
        return None
    parameters = inspect.signature(module.forward).parameters
    if "cache_params" in parameters:
        return "cache_params"
    # A short convolution takes its cache under the name that attention uses.
    if "past_key_values" in parameters and any(isinstance(child, nn.Conv1d) for child in module.children()):
        return "past_key_values"
    return None


def install(model: nn.Module) -> frozenset[int]:
    """Wrap every mixer, once; returns the layers. Nothing changes until something is bound."""
    found = find_recurrent_layers(model)
    for layer, mixer in found.items():
        model.set_submodule(mixer.path, PackedMixer(layer, mixer))
    return frozenset(found)


def bind(model: nn.Module, state: RecurrentState | None) -> None:
    """Let every wrapped mixer be answered by `state`; with `None`, by itself, as transformers would run it."""
    for module in model.modules():
        if isinstance(module, PackedMixer):
            module.state = state


class StateProbe:
    """Runs the call's tokens as one fresh sequence, and notes each layer's states on the way."""

    def __init__(self) -> None:
        self._layers: dict[int, list[RecurrentLayer]] = {}

    def mix(self, layer: int, mixer: PackedMixer, hidden_states: torch.Tensor) -> torch.Tensor:
        cache = _ProbeCache(layer, {}, fresh=True)
        out = mixer.run(hidden_states, cache)
        seen = RecurrentLayer(cache.specs(), cache.resumes(mixer, hidden_states))
        self._layers.setdefault(layer, []).append(seen)
        return out

    def layers(self, installed: Collection[int]) -> dict[int, RecurrentLayer]:
        """What was seen in one forward of several tokens. Raises `ModelError` unless each layer ran exactly once."""
        calls = {layer: len(seen) for layer, seen in self._layers.items()}
        if calls != dict.fromkeys(installed, 1):
            raise ModelError(f"mixers of layers {sorted(installed)} should run once in a forward; it ran {calls}")
        return {layer: self._layers[layer][0] for layer in sorted(self._layers)}


class _ProbeCache(StateCache):
    """Makes a state when the mixer first writes it."""

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        shape = (*conv_states.shape[:-1], conv_kernel_size or conv_states.shape[-1])
        self._states.setdefault(("conv", state_idx), conv_states.new_zeros(shape))
        return super().update_conv_state(conv_states, layer_idx, state_idx)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        self._states.setdefault(("recurrent", state_idx), torch.zeros_like(recurrent_states))
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx)

    def specs(self) -> tuple[StateSpec, ...]:
        return tuple(
            StateSpec(kind, state_idx, tuple(state.shape[1:]), state.dtype)
            for (kind, state_idx), state in sorted(self._states.items())
        )

    def resumes(self, mixer: PackedMixer, hidden_states: torch.Tensor) -> bool:
        """Whether several tokens see the state at all: from an enormous one the output is another than from zeros."""
        if not self.recurrent_states:
            return True
        outs = []
        for value in (0.0, 1e3):
            states = {
                key: state.clone() if key[0] == "conv" else torch.full_like(state, value)
                for key, state in self._states.items()
            }
            outs.append(mixer.run(hidden_states, StateCache(self._layer, states, fresh=False)))
        unchanged = (outs[1] - outs[0]).abs().max() <= 0.1 * outs[0].abs().max()  # an overflow is a change
        return not unchanged.item()


@dataclass(frozen=True, slots=True)
class _Plan:
    """A step's sequences by how they run.

    Attributes:
        alone: first token, end, block, fresh.
        rows, blocks: `[num_decodes]` int64 on the device, of sequences that add one token to a state: one call for all.
    """

    num_tokens: int
    alone: list[tuple[int, int, int, bool]]
    rows: torch.Tensor
    blocks: torch.Tensor


class CachedStates:
    """Answers from the state memory. `set_batch` comes before each forward, and each forward changes the states."""

    def __init__(self, memory: torch.Tensor, layers: Mapping[int, RecurrentLayer]) -> None:
        self._device = memory.device
        self._resumes = {index: layer.resumes for index, layer in layers.items()}
        self._views: dict[int, dict[tuple[Kind, int], torch.Tensor]] = {
            index: {(spec.kind, spec.state_idx): view for spec, view in zip(layers[index].states, views, strict=True)}
            for index, views in state_views(memory, layers).items()
        }
        self._plan: _Plan | None = None

    def set_batch(self, batch: StateBatch) -> None:
        """The batch that the next forward computes."""
        sequences = list(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], batch.blocks, batch.fresh, strict=True))
        decodes = [(start, block) for start, end, block, fresh in sequences if end - start == 1 and not fresh]
        if len(decodes) == 1:
            decodes = []  # alone it needs no copies
        together = {block for _, block in decodes}
        self._plan = _Plan(
            num_tokens=batch.cu_seqlens[-1],
            alone=[sequence for sequence in sequences if sequence[2] not in together],
            rows=self._indices([row for row, _ in decodes]),
            blocks=self._indices([block for _, block in decodes]),
        )

    def mix(self, layer: int, mixer: PackedMixer, hidden_states: torch.Tensor) -> torch.Tensor:
        plan = self._plan
        assert plan is not None
        assert hidden_states.shape[:2] == (1, plan.num_tokens)
        if not plan.alone:  # decodes in the order of their rows: nothing to pick or put back
            return self._decode(layer, mixer, hidden_states.transpose(0, 1), plan.blocks).transpose(0, 1)
        out = torch.empty_like(hidden_states)
        for start, end, block, fresh in plan.alone:
            out[:, start:end] = self._run_alone(layer, mixer, hidden_states[:, start:end], block, fresh)
        if len(plan.rows):
            decoded = self._decode(layer, mixer, hidden_states[0, plan.rows][:, None], plan.blocks)
            out[0, plan.rows] = decoded[:, 0]
        return out

    def _run_alone(
        self, layer: int, mixer: PackedMixer, hidden_states: torch.Tensor, block: int, fresh: bool
    ) -> torch.Tensor:
        """The states are the memory's own. `[1, num_tokens, hidden_size]`."""
        states = {key: view[block : block + 1] for key, view in self._views[layer].items()}
        cache = StateCache(layer, states, fresh=fresh)
        if fresh or self._resumes[layer]:
            return mixer.run(hidden_states, cache)
        return torch.cat([mixer.run(token, cache) for token in hidden_states.split(1, dim=1)], dim=1)

    def _decode(
        self, layer: int, mixer: PackedMixer, hidden_states: torch.Tensor, blocks: torch.Tensor
    ) -> torch.Tensor:
        """The states are gathered, and put back. `[num_decodes, 1, hidden_size]`."""
        states = {key: view.index_select(0, blocks) for key, view in self._views[layer].items()}
        out = mixer.run(hidden_states, StateCache(layer, states, fresh=False))
        for key, view in self._views[layer].items():
            view.index_copy_(0, blocks, states[key])
        return out

    def _indices(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device)
