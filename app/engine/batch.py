"""A step's work as tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from app.engine.scheduler import Scheduled
from app.engine.states import StateBatch
from kernels import VarlenBatch
from vmem import Demand, KVMemory, SequenceMemory, View


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Neighbouring sequences of a step that are read through the same view.

    Attributes:
        tokens: the step's tokens that are theirs.
        slots: `[num_tokens]` int64, where each token's keys and values go: block · block_tokens + position within, a
            region counting as one block.
        attention: where each sequence's queries and cache lie.
    """

    view: View
    tokens: slice
    slots: torch.Tensor
    attention: VarlenBatch


@dataclass(frozen=True, slots=True)
class StepBatch:
    """All tokens of a step, packed one sequence after the other.

    Attributes:
        token_ids, positions: `[num_tokens]` int64.
        sample_rows: `[num_samples]` int64, the tokens whose logits are needed.
        parts: for each layer group the parts of the batch, one for each view that occurs; none for a group of states.
        states: whose recurrent state is where; `None` for models without.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    sample_rows: torch.Tensor
    parts: tuple[tuple[BatchPart, ...], ...]
    states: StateBatch | None = None


def build_batch(
    scheduled: Sequence[Scheduled], memory: KVMemory, device: torch.device, *, sample_all: bool = False
) -> StepBatch:
    """Lay out the scheduled tokens. Their blocks must be owned, and in the region view mapped (`KVMemory.ensure`).

    Sequences of one view should be neighbours, or there are more parts than need be.

    Args:
        device: where attention will want its part of it.
        sample_all: ask for the logits of every token, not only of those that sample.
    """
    num_tokens = np.array([s.num_tokens for s in scheduled], dtype=np.int64)
    first = np.array([s.request.num_computed for s in scheduled], dtype=np.int64)
    starts = np.zeros(len(scheduled) + 1, dtype=np.int64)
    np.cumsum(num_tokens, out=starts[1:])
    token_ids: list[int] = []
    for s in scheduled:
        start = s.request.num_computed
        token_ids += s.request.token_ids[start : start + s.num_tokens]
    sequence_of = np.repeat(np.arange(len(scheduled)), num_tokens)
    positions = np.arange(starts[-1]) - starts[sequence_of] + first[sequence_of]
    sequences = [memory_of(s) for s in scheduled]
    parts: list[list[BatchPart]] = [[] for _ in memory.groups]
    begin = 0
    for view, run in itertools.groupby(sequences, key=lambda sequence: sequence.view):
        end = begin + len(list(run))
        tokens = slice(int(starts[begin]), int(starts[end]))
        cu_seqlens_q = torch.from_numpy((starts[begin : end + 1] - starts[begin]).astype(np.int32)).to(device)
        num_cached = (first + num_tokens)[begin:end]
        cache_seqlens = torch.from_numpy(num_cached.astype(np.int32)).to(device)
        most_queries, most_cached = int(num_tokens[begin:end].max()), int(num_cached.max())
        for g in range(len(memory.groups)):
            if memory.groups[g].is_state:
                continue
            table, block_tokens = _block_table(sequences[begin:end], memory, g, view)
            at = positions[tokens]
            slots = table[sequence_of[tokens] - begin, at // block_tokens] * np.int64(block_tokens) + at % block_tokens
            block_table = torch.from_numpy(table).to(device)
            attention = VarlenBatch(cu_seqlens_q, cache_seqlens, block_table, most_queries, most_cached)
            parts[g].append(BatchPart(view, tokens, torch.from_numpy(slots).to(device), attention))
        begin = end
    sample_rows = np.arange(starts[-1]) if sample_all else starts[1:][np.array([s.samples for s in scheduled])] - 1
    return StepBatch(
        token_ids=torch.tensor(token_ids),
        positions=torch.from_numpy(positions),
        sample_rows=torch.from_numpy(sample_rows),
        parts=tuple(map(tuple, parts)),
        states=_states(scheduled, memory, starts.tolist()),
    )


def _states(scheduled: Sequence[Scheduled], memory: KVMemory, starts: list[int]) -> StateBatch | None:
    g = memory.state_group()
    if g is None:
        return None
    blocks = [memory_of(s).groups[g].block_ids[0] for s in scheduled]
    return StateBatch(starts, blocks, [not s.request.num_computed for s in scheduled])


def demands(scheduled: Sequence[Scheduled]) -> list[Demand]:
    """What these tokens need of the memory."""
    return [Demand(memory_of(s), s.request.num_computed, s.request.num_computed + s.num_tokens) for s in scheduled]


def next_demands(scheduled: Sequence[Scheduled]) -> list[Demand]:
    """What the step after will need, if every request goes on: one more token, or as much of its prompt again."""
    following = []
    for s in scheduled:
        start = s.request.num_computed + s.num_tokens
        end = start + 1 if s.samples else min(start + s.num_tokens, len(s.request.token_ids))
        following.append(Demand(memory_of(s), start, end))
    return following


def num_attended(scheduled: Sequence[Scheduled]) -> int:
    """Cached tokens that the queries of the step see, all together, windows left aside."""
    return sum(s.num_tokens * s.request.num_computed + s.num_tokens * (s.num_tokens + 1) // 2 for s in scheduled)


def memory_of(scheduled: Scheduled) -> SequenceMemory:
    """The memory of a scheduled request, which it has from the moment it is scheduled."""
    assert scheduled.request.memory is not None
    return scheduled.request.memory


def _block_table(
    sequences: Sequence[SequenceMemory], memory: KVMemory, group: int, view: View
) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.int32]], int]:
    """`[num_seqs, width]` int32, each sequence's region or blocks, and how many tokens each entry stands for."""
    tables = [sequence.groups[group] for sequence in sequences]
    if view == "region":
        slots = [[table.region.slot if table.region is not None else -1] for table in tables]
        return np.array(slots, dtype=np.int32), memory.region_tokens(group)
    block_table = np.zeros((len(tables), max(len(table.block_ids) for table in tables)), dtype=np.int32)
    for i, table in enumerate(tables):
        block_table[i, : len(table.block_ids)] = table.block_ids
    return block_table, memory.groups[group].layout.block_tokens
