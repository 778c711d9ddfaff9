"""A step's work as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from app.engine.scheduler import Scheduled
from kernels import VarlenBatch
from vmem import KVMemory, View


@dataclass(frozen=True, slots=True)
class StepBatch:
    """All tokens of a step, packed one sequence after the other.

    Attributes:
        token_ids, positions: `[num_tokens]` int64.
        slots: `[num_tokens]` int64, where each token's keys and values go: group · group_tokens + position within.
        sample_rows: `[num_samples]` int64, the tokens whose logits are needed.
        attention: where each sequence's queries and cache lie.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sample_rows: torch.Tensor
    attention: VarlenBatch


def build_batch(scheduled: Sequence[Scheduled], memory: KVMemory, view: View, *, sample_all: bool = False) -> StepBatch:
    """Lay out the scheduled tokens. Their blocks must be owned, and in the region view mapped.

    Args:
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
    block_tokens = memory.layout.block_tokens
    if view == "region":
        groups = np.array([[s.request.memory.region] for s in scheduled], dtype=np.int32)  # type: ignore[union-attr]
        slots = groups[sequence_of, 0] * np.int64(memory.region_blocks * block_tokens) + positions
    else:
        tables = [s.request.memory.block_ids for s in scheduled]  # type: ignore[union-attr]
        groups = np.zeros((len(scheduled), max(map(len, tables))), dtype=np.int32)
        for i, table in enumerate(tables):
            groups[i, : len(table)] = table
        slots = groups[sequence_of, positions // block_tokens] * np.int64(block_tokens) + positions % block_tokens
    sample_rows = np.arange(starts[-1]) if sample_all else starts[1:][np.array([s.samples for s in scheduled])] - 1
    return StepBatch(
        token_ids=torch.tensor(token_ids),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        sample_rows=torch.from_numpy(sample_rows),
        attention=VarlenBatch(
            torch.from_numpy(starts.astype(np.int32)),
            torch.from_numpy((first + num_tokens).astype(np.int32)),
            torch.from_numpy(groups),
        ),
    )
