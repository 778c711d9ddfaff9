"""Recurrent layers (Mamba mixers, gated delta nets, short convolutions) in a packed forward.

transformers' mixers compute sequences of equal length and keep their states in a `Cache` argument. A wrapper around
each mixer cuts the packed row into its sequences and runs the mixer with a cache over states in Folio's memory. The
states' shapes are observed, like the geometry of attention.

A state, unlike keys and values, is overwritten by every step: sequences of a failed step recompute, or continue from a
copy.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from folio.app.errors import ModelError

Kind = Literal["conv", "recurrent"]
ALIGNMENT_BYTES = 64  # a cache line, and more than any dtype or vector load needs


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One state tensor of one layer and sequence.

    Attributes:
        state_idx: number of the state among those of its kind in the layer.
        shape: without the batch dimension. A conv state is `[channels, kernel_width]`, padded with zeros on the left.
        dtype: recurrent states are often float32 in a bfloat16 model.
    """

    kind: Kind
    state_idx: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """Observed properties of a layer.

    Attributes:
        resumes: whether the mixer can compute several tokens from a state. Mamba-1's silently starts the scan from
            zeros; such a layer gets the tokens of later chunks one by one.
    """

    states: tuple[StateSpec, ...]
    resumes: bool


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The sequences of a step and the places of their states.

    Attributes:
        cu_seqlens: `num_seqs + 1`, starts of the sequences in the packed row, and its length; each sequence has at
            least one token.
        blocks: `num_seqs`, each sequence's own row of the state memory.
        fresh: `num_seqs`, whether the sequence has no computed tokens; its row is not read then.
    """

    cu_seqlens: list[int]
    blocks: list[int]
    fresh: list[bool]

    def __post_init__(self) -> None:
        if not len(self.cu_seqlens) - 1 == len(self.blocks) == len(self.fresh):
            lengths = len(self.cu_seqlens), len(self.blocks), len(self.fresh)
            raise ValueError(f"cu_seqlens, blocks and fresh have {lengths} entries; the first needs one more")
        if len(set(self.blocks)) < len(self.blocks):
            raise ValueError(f"two sequences share a state: {self.blocks}")


class StateCache:
    """The methods of transformers' `Cache` that mixers use, over the states `[num_seqs, *shape]` of one layer, changed
    in place.

    States of `fresh` sequences are absent until the mixer writes them.
    """

    record_past = False

    def __init__(self, layer: int, states: Mapping[tuple[Kind, int], torch.Tensor], *, fresh: bool) -> None:
        self._layer = layer
        self._states = dict(states)
        self._known = set[tuple[Kind, int]]() if fresh else set(self._states)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return any(state_idx in (None, known) for _, known in self._known)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether old states are kept for rolling back: never."""
        return self.record_past

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._get("conv", state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._get("recurrent", state_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Append columns `[num_seqs, channels, num_tokens]` to the state, which keeps the last ones; return the old and
        new columns."""
        state, previous = self._states["conv", state_idx], self._get("conv", state_idx)
        width = state.shape[-1]
        if previous is not None:
            columns = torch.cat([previous, conv_states], dim=-1)
        else:
            columns = nn.functional.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        state.copy_(columns[..., -width:])
        self._known.add(("conv", state_idx))
        return columns

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        state = self._states["recurrent", state_idx]
        state.copy_(recurrent_states)
        self._known.add(("recurrent", state_idx))
        return state

    # Before transformers 5.21 mixers read attributes of `cache.layers[layer_idx]`.

    @property
    def layers(self) -> dict[int, StateCache]:
        return {self._layer: self}

    @property
    def conv_states(self) -> dict[int, torch.Tensor]:
        return {state_idx: state for (kind, state_idx), state in self._states.items() if kind == "conv"}

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor]:
        return {state_idx: state for (kind, state_idx), state in self._states.items() if kind == "recurrent"}

    def _get(self, kind: Kind, state_idx: int) -> torch.Tensor | None:
        return self._states[kind, state_idx] if (kind, state_idx) in self._known else None


def state_bytes(layers: Mapping[int, RecurrentLayer]) -> int:
    """Bytes of all states of one sequence, each of them aligned to `ALIGNMENT_BYTES`."""
    return sum(_aligned(spec.num_bytes) for layer in layers.values() for spec in layer.states)


def state_views(memory: torch.Tensor, layers: Mapping[int, RecurrentLayer]) -> dict[int, list[torch.Tensor]]:
    """Layer → its states `[num_blocks, *shape]` in the order of their specs, as views.

    Args:
        memory: `[num_blocks, block_bytes]` uint8, a row for each sequence, with dense columns; address and row stride
            are multiples of `ALIGNMENT_BYTES`.

    Raises:
        ValueError: a row is too short, or not aligned.
    """
    if memory.dtype != torch.uint8 or memory.shape[1] < state_bytes(layers):
        raise ValueError(f"a state takes {state_bytes(layers)} bytes, a row is {memory.shape[1]} {memory.dtype}")
    if memory.stride(1) != 1 or memory.stride(0) % ALIGNMENT_BYTES or memory.data_ptr() % ALIGNMENT_BYTES:
        raise ValueError(
            f"rows at {memory.data_ptr():#x}, strides {memory.stride()}, are not {ALIGNMENT_BYTES}-aligned"
        )
    views: dict[int, list[torch.Tensor]] = {}
    offset = 0
    for index, layer in sorted(layers.items()):
        views[index] = []
        for spec in layer.states:
            columns = memory[:, offset : offset + spec.num_bytes].view(spec.dtype)
            views[index].append(columns.unflatten(1, spec.shape))
            offset += _aligned(spec.num_bytes)
    return views


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class FoundMixer:
    """A mixer, its path in the model, and the name of its cache argument."""

    module: nn.Module
    path: str
    cache_argument: str


class PackedMixer(nn.Module):
    """Wrapper of a mixer for packed forwards; without a bound handler it calls the mixer."""

    state: StateProbe | CachedStates | None = None

    def __init__(self, layer: int, found: FoundMixer) -> None:
        super().__init__()
        self.layer = layer
        self.mixer = found.module
        self._cache_argument = found.cache_argument

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.state is None:
            out: torch.Tensor = self.mixer(hidden_states, *args, **kwargs)
            return out
        if args:  # the wrapper drops arguments by name
            raise ModelError(
                f"{type(self.mixer).__name__} of layer {self.layer} keeps a state and is not called as a mixer; "
                "Folio cannot serve it"
            )
        # Masks and packed lengths describe the packed row; the mixer gets single sequences.
        return self.state.mix(self.layer, self, hidden_states)

    def run(self, hidden_states: torch.Tensor, cache: StateCache) -> torch.Tensor:
        """Call the mixer on `[num_seqs, num_tokens, hidden_size]` with a cache of as many sequences."""
        out: torch.Tensor = self.mixer(hidden_states, **{self._cache_argument: cache})
        return out


def find_recurrent_layers(model: nn.Module) -> dict[int, FoundMixer]:
    """Layer → mixer, for every layer with a state other than keys and values. Raises `ModelError` if a layer has
    several."""
    found: dict[int, FoundMixer] = {}
    for path, module in model.named_modules():
        argument = _cache_argument(module)
        if argument is None or any(_cache_argument(part) for part in module.modules() if part is not module):
            continue  # a block that passes the cache on to its mixer
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
    # A short convolution's cache argument has the name of attention's.
    if "past_key_values" in parameters and any(isinstance(child, nn.Conv1d) for child in module.children()):
        return "past_key_values"
    return None


def install(model: nn.Module) -> frozenset[int]:
    """Wrap every mixer; return the layers. Forwards do not change until a handler is bound."""
    found = find_recurrent_layers(model)
    for layer, mixer in found.items():
        model.set_submodule(mixer.path, PackedMixer(layer, mixer))
    return frozenset(found)


def unwrapped(path: str, wrapped: Collection[str]) -> str:
    """The path in transformers' model of a module or parameter. Args: `wrapped`: paths of the `PackedMixer`s."""
    for wrapper in wrapped:
        if f"{path}.".startswith(f"{wrapper}.mixer."):
            return wrapper + path[len(wrapper) + len(".mixer") :]
    return path


def bind_mixers(model: nn.Module, state: StateProbe | CachedStates | None) -> None:
    """Let `state` compute every wrapped mixer; with `None` mixers run as in transformers."""
    for module in model.modules():
        if isinstance(module, PackedMixer):
            module.state = state


class StateProbe:
    """Runs the call's tokens as one fresh sequence, and records each layer's states."""

    def __init__(self) -> None:
        self._layers: dict[int, list[RecurrentLayer]] = {}

    def mix(self, layer: int, mixer: PackedMixer, hidden_states: torch.Tensor) -> torch.Tensor:
        cache = _ProbeCache(layer, {}, fresh=True)
        out = mixer.run(hidden_states, cache)
        seen = RecurrentLayer(cache.specs(), cache.resumes(mixer, hidden_states))
        self._layers.setdefault(layer, []).append(seen)
        return out

    def layers(self, installed: Collection[int]) -> dict[int, RecurrentLayer]:
        """The layers observed in one forward of several tokens. Raises `ModelError` unless each ran exactly once."""
        calls = {layer: len(seen) for layer, seen in self._layers.items()}
        if calls != dict.fromkeys(installed, 1):
            raise ModelError(f"mixers of layers {sorted(installed)} should run once in a forward; calls: {calls}")
        return {layer: self._layers[layer][0] for layer in sorted(self._layers)}


class _ProbeCache(StateCache):
    """Creates a state when the mixer first writes it."""

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
        """Whether several tokens depend on the state: a large one gives another output than zeros. On the meta device,
        where there are no values, they do."""
        if not self.recurrent_states or hidden_states.is_meta:
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
    """A step's sequences.

    Attributes:
        alone: (first token, end, block, fresh) of sequences that run alone.
        rows, blocks: `[num_decodes]` int64 on the device, of sequences that add one token to a state, all in one call.
    """

    num_tokens: int
    alone: list[tuple[int, int, int, bool]]
    rows: torch.Tensor
    blocks: torch.Tensor


class CachedStates:
    """Mixers over the state memory. Call `set_batch` before each forward, which changes the states."""

    def __init__(self, memory: torch.Tensor, layers: Mapping[int, RecurrentLayer]) -> None:
        self._device = memory.device
        self._resumes = {index: layer.resumes for index, layer in layers.items()}
        self._views: dict[int, dict[tuple[Kind, int], torch.Tensor]] = {
            index: {(spec.kind, spec.state_idx): view for spec, view in zip(layers[index].states, views, strict=True)}
            for index, views in state_views(memory, layers).items()
        }
        self._plan: _Plan | None = None

    def set_batch(self, batch: StateBatch) -> None:
        """Set the batch of the next forward."""
        sequences = list(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], batch.blocks, batch.fresh, strict=True))
        decodes = [(start, block) for start, end, block, fresh in sequences if end - start == 1 and not fresh]
        if len(decodes) == 1:
            decodes = []  # a single sequence needs no copies
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
        if not plan.alone:  # decodes in the order of their rows: no gathering
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
        """Compute `[1, num_tokens, hidden_size]` with views of the memory as states."""
        states = {key: view[block : block + 1] for key, view in self._views[layer].items()}
        cache = StateCache(layer, states, fresh=fresh)
        if fresh or self._resumes[layer]:
            return mixer.run(hidden_states, cache)
        return torch.cat([mixer.run(token, cache) for token in hidden_states.split(1, dim=1)], dim=1)

    def _decode(
        self, layer: int, mixer: PackedMixer, hidden_states: torch.Tensor, blocks: torch.Tensor
    ) -> torch.Tensor:
        """Compute `[num_decodes, 1, hidden_size]` with gathered states, then scatter them back."""
        states = {key: view.index_select(0, blocks) for key, view in self._views[layer].items()}
        out = mixer.run(hidden_states, StateCache(layer, states, fresh=False))
        for key, view in self._views[layer].items():
            view.index_copy_(0, blocks, states[key])
        return out

    def _indices(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device)
