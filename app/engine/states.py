"""Recurrent states of sequences: what a layer keeps, and where it lies in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

Kind = Literal["conv", "recurrent"]
ALIGNMENT_BYTES = 64  # a cache line, and more than any dtype or vector load asks for


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One state tensor of one layer and sequence.

    Attributes:
        state_idx: tells states of one kind in one layer apart.
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
    """What a forward showed of a layer.

    Attributes:
        resumes: whether the mixer can compute several tokens at once from a state. Mamba-1's cannot: it would start
            the scan from zeros without a word, so such a layer is given the tokens of a later chunk one by one.
    """

    states: tuple[StateSpec, ...]
    resumes: bool


@dataclass(frozen=True, slots=True)
class StateBatch:
    """Whose tokens a step computes, and where their states are.

    Attributes:
        cu_seqlens: `num_seqs + 1`, where each sequence's tokens begin in the packed row, and their number. Each has
            at least one.
        blocks: `num_seqs`, the row of the state memory that is each sequence's, and no other's.
        fresh: `num_seqs`, True for a sequence that has computed nothing yet: whatever its row holds is not read.
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
    """What mixers use of transformers' `Cache`: the states `[num_seqs, *shape]` of one layer, changed in place.

    A state that is not `known` counts as none, until the mixer has written it.
    """

    record_past = False

    def __init__(self, layer: int, states: Mapping[tuple[Kind, int], torch.Tensor], *, fresh: bool) -> None:
        self._layer = layer
        self._states = dict(states)
        self._known = set[tuple[Kind, int]]() if fresh else set(self._states)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return any(state_idx in (None, known) for _, known in self._known)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether old states are kept so that tokens can be taken back. Never."""
        return self.record_past

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._get("conv", state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._get("recurrent", state_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Append columns `[num_seqs, channels, num_tokens]` to the state, which keeps the last of them; returns all,
        those of the state first."""
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

    # Until transformers 5.21 mixers read the attributes of `cache.layers[layer_idx]` instead of asking the cache.

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
        memory: `[num_blocks, block_bytes]` uint8, a sequence a row. Its address and its row stride must be multiples
            of `ALIGNMENT_BYTES`, and its columns dense.

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
