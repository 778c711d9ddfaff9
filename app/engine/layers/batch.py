"""Step batch: a step's work as a plan for all ranks, and as the tensors that each rank builds from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from folio.app.engine.layers.recurrent import StateBatch
from folio.app.engine.schedule.scheduled import Scheduled
from folio.kernels import VarlenBatch
from folio.vmem import LayerGroup, SequenceMemory, StepDemand, View

Array = np.ndarray[Any, Any]


class PlanHeader(NamedTuple):
    """Number of a plan, and the block tables to which its changes apply.

    Attributes:
        number: number of the plan, from 1 on.
        base: number of the plan before, to whose block tables the changes apply; 0: the changes are complete tables.
        num_rows: rows of the block tables.
    """

    number: int
    base: int
    num_rows: int


class PlanRun(NamedTuple):
    """Adjacent sequences of a step that are read in the same view.

    Attributes:
        max_seqlen_q, max_seqlen_k: most tokens that the step computes of a sequence, and most cached ones.
        adjacent: whether their rows are adjacent and ascending, so that their block tables need no copy.
    """

    in_region: bool
    num_seqs: int
    num_tokens: int
    max_seqlen_q: int
    max_seqlen_k: int
    adjacent: bool


# (slot of an adapter, its rows): a slice if the rows are adjacent.
Spans = tuple[tuple[int, slice | torch.Tensor], ...]


@dataclass(frozen=True, slots=True)
class AdapterBatch:
    """The rows of each adapter in a step.

    Attributes:
        tokens: rows of all tokens, for every layer but the last.
        samples: rows with logits, for the output layer.
    """

    tokens: Spans
    samples: Spans


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """The tokens that a step computes and the places of their cache, as arrays that peers receive unchanged.

    A sequence keeps its row of the block tables from step to step, and the plan contains only their changes: its size
    does not grow with the context.

    Attributes:
        runs: the sequences by view, in the order of the batch.
        num_tokens: `[num_seqs]` int32, tokens to compute.
        states: `[num_seqs]` int32, the block of each sequence's recurrent state; empty for models without.
        adapters: `[num_seqs]` int32, the slot of each sequence's adapter, -1 without; empty if none has one.
        token_ids, positions: `[sum(num_tokens)]` int64. The ids of pending tokens are not known yet, and 0.
        logit_rows: `[num_logits]` int64, tokens with logits.
        pending: `[2, num_pending]` int64, tokens that the host does not know yet: their place in the step, and their
            row in the previous step's sampled tokens.
        rows: `[num_seqs]` int64, rows in the block tables.
        slots: `[num_groups, sum(num_tokens)]` int64, of each layer group without states, place of each token's keys and
            values: block · block_tokens + offset; a region counts as one block.
        changed: `[num_changes]` int64, entries of the block tables that change, by `TableLayout`.
        cu_seqlens: `[num_seqs + num_runs]` int32, of each run the starts of its sequences, and their end.
        cache_seqlens: `[num_seqs]` int32, cached tokens when the step is computed.
        regions: `[num_groups, num_seqs]` int32, of each layer group without states the sequences' regions, -1 without.
        block_ids: `[num_changes]` int32, the entries' new values.
    """

    header: PlanHeader
    runs: tuple[PlanRun, ...]
    num_tokens: Array
    states: Array
    adapters: Array
    token_ids: Array
    positions: Array
    logit_rows: Array
    pending: Array
    rows: Array
    slots: Array
    changed: Array
    cu_seqlens: Array
    cache_seqlens: Array
    regions: Array
    block_ids: Array


class TableLayout:
    """Block tables of all layer groups in one array: of each group `[num_rows, width]`, one after the other. A state is
    a table of one block.

    Args:
        max_tokens: most tokens of a sequence.

    Attributes:
        block_tokens, widths: tokens of a block, and blocks of a row, of each group.
        starts: index of each group's first entry.
        size: number of entries.
    """

    def __init__(self, groups: Sequence[LayerGroup], max_tokens: int, num_rows: int) -> None:
        self.num_rows = num_rows
        self.block_tokens = [1 if group.is_state else group.layout.block_tokens for group in groups]
        self.widths = [1 if group.is_state else group.layout.num_blocks(max_tokens) for group in groups]
        self.starts = [num_rows * sum(self.widths[:g]) for g in range(len(groups))]
        self.size = num_rows * sum(self.widths)

    def spans(self) -> list[tuple[slice, tuple[int, int]]]:
        """For each group the slice of its entries, and their shape."""
        shapes = [(self.num_rows, width) for width in self.widths]
        return [
            (slice(start, start + rows * width), (rows, width))
            for start, (rows, width) in zip(self.starts, shapes, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Adjacent sequences of a step that are read in the same view.

    Attributes:
        tokens: their tokens in the step.
        slots: `[num_tokens]` int64, place of each token's keys and values: block · block_tokens + offset; a region
            counts as one block.
        attention: places of each sequence's queries and cache.
    """

    view: View
    tokens: slice
    slots: torch.Tensor
    attention: VarlenBatch


@dataclass(frozen=True, slots=True)
class StepBatch:
    """All tokens of a step, packed sequence by sequence. The tensors are on the device, and valid until the batch after
    the next one is built.

    Attributes:
        token_ids, positions: `[num_tokens]` int64.
        logit_rows: `[num_logits]` int64, tokens with logits.
        parts: for each layer group the parts of the batch; none for a group of states.
        states: places of recurrent states; `None` for models without.
        adapters: rows of each adapter; `None` if no sequence has one.
        pending: see `StepPlan`.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    parts: tuple[tuple[BatchPart, ...], ...]
    states: StateBatch | None = None
    adapters: AdapterBatch | None = None
    pending: torch.Tensor | None = None

    def fill_pending(self, sampled: torch.Tensor) -> None:
        """Put the previous step's sampled tokens, `[rows]` int64 on the device, in the places of pending ones."""
        assert self.pending is not None
        places, rows = self.pending
        self.token_ids.index_copy_(0, places, sampled.index_select(0, rows))


def demands(scheduled: Sequence[Scheduled]) -> list[StepDemand]:
    """The memory demands of scheduled tokens."""
    return [StepDemand(memory_of(s), s.start, s.start + s.num_tokens) for s in scheduled]


def next_demands(scheduled: Sequence[Scheduled], step_tokens: int) -> list[StepDemand]:
    """Expected demands of the next step: one more token of each sequence that decodes, and as many prompt tokens as a
    step of `step_tokens` has left, in this step's order."""
    following = []
    left = step_tokens - sum(s.samples for s in scheduled)
    for s in scheduled:
        start = s.start + s.num_tokens
        if s.samples:
            end = start + 1
        else:
            end = min(start + left, len(s.sequence.token_ids))
            left -= end - start
        if s.drafts:
            end = min(end + len(s.drafts), s.sequence.most_tokens)
        following.append(StepDemand(memory_of(s), start, end))
    return following


def memory_of(scheduled: Scheduled) -> SequenceMemory:
    assert scheduled.sequence.memory is not None
    return scheduled.sequence.memory
