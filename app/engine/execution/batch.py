"""Step batch: a step's work as a plan for all ranks, and as the tensors that each rank builds from it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from app.engine.execution.recurrent import StateBatch
from app.engine.lora.layers import AdapterBatch, adapter_batch
from app.engine.scheduler import Scheduled
from kernels import VarlenBatch
from vmem import CacheTensors, KVMemory, SequenceMemory, StepDemand, View

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """The tokens that a step computes and the places of their cache, as arrays that peers receive unchanged.

    Attributes:
        num_tokens, num_computed: `[num_seqs]` int32, tokens to compute and tokens cached before them.
        num_logits: `[num_seqs]` int32, number of last tokens with logits.
        in_region: `[num_seqs]` bool, whether the sequence is read in the region view.
        token_ids: `[sum(num_tokens)]` int32.
        pending: `[2, num_pending]` int64, tokens that the host does not know yet: their place in the step, and their
            row in the previous step's sampled tokens.
        states: `[num_seqs]` int32, the block of each sequence's recurrent state; empty for models without.
        adapters: `[num_seqs]` int32, the slot of each sequence's adapter, -1 without; empty if none has one.
        tables: for each layer group without states and each run of adjacent sequences with one view: `[run, width]`
            int32, the regions' slots, or block tables padded with zeros.
    """

    num_tokens: Array
    num_computed: Array
    num_logits: Array
    in_region: Array
    token_ids: Array
    pending: Array
    states: Array
    adapters: Array
    tables: tuple[Array, ...]

    @property
    def runs(self) -> Iterator[tuple[View, int, int]]:
        """(view, start, end) of each run of sequences with one view."""
        start = 0
        for in_region, run in itertools.groupby(self.in_region.tolist()):
            end = start + len(list(run))
            yield "region" if in_region else "block_table", start, end
            start = end


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
    """All tokens of a step, packed sequence by sequence.

    Attributes:
        token_ids, positions: `[num_tokens]` int64.
        logit_rows: `[num_logits]` int64, tokens with logits.
        parts: for each layer group the parts of the batch; none for a group of states.
        states: places of recurrent states; `None` for models without.
        adapters: rows of each adapter; `None` if no sequence has one.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    parts: tuple[tuple[BatchPart, ...], ...]
    states: StateBatch | None = None
    adapters: AdapterBatch | None = None


def plan_step(
    scheduled: Sequence[Scheduled],
    memory: KVMemory,
    *,
    all_logits: bool = False,
    adapter_slots: Mapping[str, int] | None = None,
) -> StepPlan:
    """Plan scheduled tokens, whose blocks must be owned, and mapped in the region view (`KVMemory.ensure`).

    Adjacent sequences with the same view, and with the same adapter, make fewer parts.

    Args:
        all_logits: compute the logits of every token.
        adapter_slots: name → slot of every adapter in use.
    """
    sequences = [memory_of(s) for s in scheduled]
    token_ids: list[int] = []
    pending: list[tuple[int, int]] = []
    for s in scheduled:
        if s.pending_row is not None:
            pending.append((len(token_ids), s.pending_row))
            token_ids.append(0)
            continue
        token_ids += s.request.token_ids[s.start : s.start + s.num_tokens]
        token_ids += s.drafts
    views = [sequence.view for sequence in sequences]
    tables = []
    for g, group in enumerate(memory.groups):
        if not group.is_state:
            for view, run in itertools.groupby(zip(views, sequences, strict=True), key=itemgetter(0)):
                tables.append(_block_table([sequence for _, sequence in run], g, view))
    at = memory.tensors.state_group
    adapters = [_slot(s, adapter_slots) for s in scheduled] if adapter_slots else []
    return StepPlan(
        num_tokens=np.array([s.num_tokens for s in scheduled], dtype=np.int32),
        num_computed=np.array([s.start for s in scheduled], dtype=np.int32),
        num_logits=np.array([s.num_tokens if all_logits else s.num_logits for s in scheduled], dtype=np.int32),
        in_region=np.array([view == "region" for view in views], dtype=np.bool_),
        token_ids=np.array(token_ids, dtype=np.int32),
        pending=np.array(pending, dtype=np.int64).reshape(-1, 2).T.copy(),
        states=np.array([] if at is None else [s.groups[at].block_ids[0] for s in sequences], dtype=np.int32),
        adapters=np.array(adapters, dtype=np.int32),
        tables=tuple(tables),
    )


def build_batch(
    plan: StepPlan, tensors: CacheTensors, device: torch.device, sampled: torch.Tensor | None = None
) -> StepBatch:
    """Build the tensors of a plan; those for attention on `device`.

    Args:
        sampled: the previous step's sampled tokens, `[rows]` int64 on `device`, for `plan.pending`; `None` on a peer,
            which gets `token_ids` from rank 0.
    """
    num_tokens, first = plan.num_tokens.astype(np.int64), plan.num_computed.astype(np.int64)
    starts = np.zeros(len(num_tokens) + 1, dtype=np.int64)
    np.cumsum(num_tokens, out=starts[1:])
    sequence_of = np.repeat(np.arange(len(num_tokens)), num_tokens)
    positions = np.arange(starts[-1]) - starts[sequence_of] + first[sequence_of]
    tables = iter(plan.tables)
    runs = []
    for view, begin, end in plan.runs:
        cu_seqlens_q = torch.from_numpy((starts[begin : end + 1] - starts[begin]).astype(np.int32)).to(device)
        num_cached = (first + num_tokens)[begin:end]
        cache_seqlens = torch.from_numpy(num_cached.astype(np.int32)).to(device)
        most = int(num_tokens[begin:end].max()), int(num_cached.max())
        runs.append((view, begin, slice(int(starts[begin]), int(starts[end])), cu_seqlens_q, cache_seqlens, most))
    parts: list[list[BatchPart]] = [[] for _ in tensors.groups]
    for g, group in enumerate(tensors.groups):
        if group.is_state:
            continue
        for view, begin, tokens, cu_seqlens_q, cache_seqlens, most in runs:
            table = next(tables)
            block_tokens = tensors.region_tokens[g] if view == "region" else group.layout.block_tokens
            at = positions[tokens]
            slots = table[sequence_of[tokens] - begin, at // block_tokens] * np.int64(block_tokens) + at % block_tokens
            attention = VarlenBatch(cu_seqlens_q, cache_seqlens, torch.from_numpy(table).to(device), *most)
            parts[g].append(BatchPart(view, tokens, torch.from_numpy(slots).to(device), attention))
    num_logits = plan.num_logits.astype(np.int64)
    ends = np.cumsum(num_logits)  # of each sequence's rows of logits
    logit_rows = np.arange(ends[-1]) + np.repeat(starts[1:] - ends, num_logits)
    states = None
    if tensors.state_group is not None:
        states = StateBatch(starts.tolist(), plan.states.tolist(), (first == 0).tolist())
    token_ids = torch.from_numpy(plan.token_ids.astype(np.int64))
    if plan.pending.size:
        token_ids = token_ids.to(device)
        if sampled is not None:
            places, rows = torch.from_numpy(plan.pending).to(device)
            token_ids.index_copy_(0, places, sampled[rows])
    return StepBatch(
        token_ids=token_ids,
        positions=torch.from_numpy(positions),
        logit_rows=torch.from_numpy(logit_rows),
        parts=tuple(map(tuple, parts)),
        states=states,
        adapters=adapter_batch(plan.adapters, num_tokens, logit_rows, device) if len(plan.adapters) else None,
    )


def demands(scheduled: Sequence[Scheduled]) -> list[StepDemand]:
    """The memory demands of scheduled tokens."""
    return [StepDemand(memory_of(s), s.start, s.start + s.num_tokens) for s in scheduled]


def next_demands(scheduled: Sequence[Scheduled]) -> list[StepDemand]:
    """Expected demands of the next step: one more token of each sequence, or as many prompt tokens again."""
    following = []
    for s in scheduled:
        start = s.start + s.num_tokens
        end = start + 1 if s.samples else min(start + s.num_tokens, len(s.request.token_ids))
        if s.drafts:
            end = min(end + len(s.drafts), s.request.most_tokens)
        following.append(StepDemand(memory_of(s), start, end))
    return following


def memory_of(scheduled: Scheduled) -> SequenceMemory:
    assert scheduled.request.memory is not None
    return scheduled.request.memory


def _slot(scheduled: Scheduled, adapter_slots: Mapping[str, int]) -> int:
    name = scheduled.request.group.adapter
    return -1 if name is None else adapter_slots[name]


def _block_table(sequences: Sequence[SequenceMemory], group: int, view: View) -> Array:
    """`[num_seqs, width]` int32, region slots or block ids."""
    tables = [sequence.groups[group] for sequence in sequences]
    if view == "region":
        slots = [[table.region.slot if table.region is not None else -1] for table in tables]
        return np.array(slots, dtype=np.int32)
    block_table = np.zeros((len(tables), max(len(table.block_ids) for table in tables)), dtype=np.int32)
    for i, table in enumerate(tables):
        block_table[i, : len(table.block_ids)] = table.block_ids
    return block_table
