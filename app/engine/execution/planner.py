"""Step planner: turns scheduled tokens into arrays. What a step has in common with the one before is reused."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from folio.app.engine.execution.builder import BatchBuilder
from folio.app.engine.execution.rows import SequenceRows
from folio.app.engine.layers.batch import Array, PlanHeader, PlanRun, StepPlan
from folio.app.engine.schedule.scheduled import Scheduled
from folio.vmem import KVMemory, SequenceMemory

_NONE: Array = np.zeros(0, dtype=np.int32)
_NO_PENDING: Array = np.zeros((2, 0), dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class _Arrangement:
    """The order of a step's sequences, and what follows from it whatever tokens are computed.

    Attributes:
        order: the places in the schedule; empty if it is in order.
        rows, regions, adapters: see `StepPlan`.
        runs: (in the region view, begin, end, adjacent rows) of each run.
        starts: `[num_seqs + 1]` int64, 0, 1, 2 …, the starts of sequences with one token.
        ones: `[num_seqs]` int32.
        cu_seqlens: see `StepPlan`, for sequences with one token.
    """

    order: list[int]
    rows: Array
    regions: Array
    adapters: Array
    runs: list[tuple[bool, int, int, bool]]
    starts: Array
    ones: Array
    cu_seqlens: Array


class StepPlanner:
    """Plans the steps over one memory, on rank 0.

    Args:
        builder: this rank's. If it does not get a plan, because of a failure, the next plan has all tables.
        num_rows: sequences that run at once; more make ranks allocate their tables anew.
    """

    def __init__(self, memory: KVMemory, builder: BatchBuilder, num_rows: int) -> None:
        self._builder = builder
        self._rows = SequenceRows(memory, num_rows)
        self._state_group = memory.tensors.state_group
        self._groups = [g for g, group in enumerate(memory.groups) if not group.is_state]
        self._block_tokens = [memory.groups[g].layout.block_tokens for g in self._groups]
        self._region_tokens = [memory.tensors.region_tokens[g] for g in self._groups]
        self._last = PlanHeader(0, 0, num_rows)
        self._arrangement: _Arrangement | None = None
        self._version = -1  # of the rows that the arrangement is for

    def plan(
        self, scheduled: list[Scheduled], *, all_logits: bool = False, adapter_slots: Mapping[str, int] | None = None
    ) -> StepPlan:
        """Plan scheduled tokens, whose blocks must be owned, and mapped in the region view (`KVMemory.ensure`).

        Sorts `scheduled` in place: the batch, its logits, and the tokens sampled from them have that order. Sequences
        with one view, and of these with one adapter, become adjacent.

        Args:
            all_logits: compute the logits of every token.
            adapter_slots: name → slot of every adapter in use.
        """
        arranged = self._arrange(scheduled, adapter_slots)
        counts = [s.num_tokens for s in scheduled]
        num_logits = counts if all_logits else [s.num_logits for s in scheduled]
        num_seqs = len(counts)
        num_tokens = num_seqs if counts.count(1) == num_seqs else sum(counts)
        positions, rows = np.array([s.start for s in scheduled], dtype=np.int64), arranged.rows
        starts, cu_seqlens = arranged.starts, arranged.cu_seqlens
        counted = arranged.ones if num_tokens == num_seqs else np.array(counts, dtype=np.int32)
        cached = positions + counted
        if num_tokens > num_seqs:
            starts = np.concatenate(([0], np.cumsum(counts)))
            cu_seqlens = _cu_seqlens(starts, arranged.runs)
            sequence_of = np.repeat(np.arange(num_seqs), counts)
            positions = np.arange(num_tokens) + (positions - starts[:-1])[sequence_of]
            rows = rows[sequence_of]
        token_ids, pending = _tokens(scheduled, num_tokens)
        header, changed, block_ids = self._tell()
        return StepPlan(
            header=header,
            runs=tuple(
                PlanRun(
                    in_region,
                    end - begin,
                    int(starts[end] - starts[begin]),
                    1 if counted is arranged.ones else max(counts[begin:end]),
                    int(cached[begin:end].max()),
                    adjacent,
                )
                for in_region, begin, end, adjacent in arranged.runs
            ),
            num_tokens=counted,
            states=_NONE if self._state_group is None else self._rows.tables[self._state_group][arranged.rows, 0],
            adapters=arranged.adapters,
            token_ids=token_ids,
            positions=positions,
            logit_rows=_last_rows(starts[1:], num_logits),
            pending=pending,
            rows=arranged.rows,
            slots=self._slots(positions, rows, [slice(int(starts[b]), int(starts[e])) for _, b, e, _ in arranged.runs]),
            changed=changed,
            cu_seqlens=cu_seqlens,
            cache_seqlens=cached.astype(np.int32),
            regions=arranged.regions,
            block_ids=block_ids,
        )

    def _arrange(self, scheduled: list[Scheduled], adapter_slots: Mapping[str, int] | None) -> _Arrangement:
        """Give the sequences rows, and sort `scheduled` by view, adapter and row."""
        given = cast(list[SequenceMemory], [s.sequence.memory for s in scheduled])
        self._rows.follow(given)
        last = self._arrangement
        if last is None or self._rows.version != self._version or adapter_slots:
            adapters = _NONE
            if adapter_slots:
                adapters = np.array([_slot(s, adapter_slots) for s in scheduled], dtype=np.int32)
            self._arrangement = last = self._new_arrangement(given, adapters)
            self._version = self._rows.version
        if last.order:
            scheduled[:] = [scheduled[place] for place in last.order]
        return last

    def _new_arrangement(self, given: list[SequenceMemory], adapters: Array) -> _Arrangement:
        rows = self._rows.rows_of(given)
        in_region: Array = np.any(self._rows.regions[:, rows] >= 0, axis=0)
        order = np.lexsort((rows, adapters, in_region) if len(adapters) else (rows, in_region))
        rows, in_region = rows[order], in_region[order]
        cuts = [0, *(np.flatnonzero(np.diff(in_region)) + 1).tolist(), len(given)]
        runs = [
            (bool(in_region[begin]), begin, end, bool((np.diff(rows[begin:end]) == 1).all()))
            for begin, end in itertools.pairwise(cuts)
        ]
        starts = np.arange(len(given) + 1)
        return _Arrangement(
            order=order.tolist() if (np.diff(order) < 0).any() else [],
            rows=rows,
            regions=self._rows.regions[self._groups][:, rows].astype(np.int32),
            adapters=adapters[order] if len(adapters) else _NONE,
            runs=runs,
            starts=starts,
            ones=np.ones(len(given), dtype=np.int32),
            cu_seqlens=_cu_seqlens(starts, runs),
        )

    def _tell(self) -> tuple[PlanHeader, Array, Array]:
        """The next header, and what changes in the block tables."""
        last, num_rows = self._last, self._rows.layout.num_rows
        is_known = self._builder.expected == last.number and num_rows == last.num_rows
        if not is_known:
            self._rows.tell_again()
        self._last = PlanHeader(last.number + 1, last.number if is_known else 0, num_rows)
        return self._last, *self._rows.tell()

    def _slots(self, positions: Array, rows: Array, runs: Sequence[slice]) -> Array:
        """`[num_groups, num_tokens]` int64, see `StepPlan`, from every token's row, and the tokens of each run."""
        assert self._arrangement is not None
        slots = np.empty((len(self._groups), len(positions)), dtype=np.int64)
        for (in_region, *_), tokens in zip(self._arrangement.runs, runs, strict=True):
            at, of = positions[tokens], rows[tokens]
            for i, g in enumerate(self._groups):
                if in_region:
                    slots[i, tokens] = self._rows.regions[g, of] * self._region_tokens[i] + at
                else:
                    blocks = at // self._block_tokens[i]
                    slots[i, tokens] = (self._rows.tables[g][of, blocks] - blocks) * self._block_tokens[i] + at
        return slots


def _cu_seqlens(starts: Array, runs: Sequence[tuple[bool, int, int, bool]]) -> Array:
    """For each run the starts of its sequences and their end, int32, from those of all sequences."""
    parts = [starts[begin : end + 1] - starts[begin] for _, begin, end, _ in runs]
    return np.concatenate(parts, dtype=np.int32, casting="same_kind")


def _tokens(scheduled: Sequence[Scheduled], num_tokens: int) -> tuple[Array, Array]:
    """The tokens' ids, and which of them are pending, see `StepPlan`."""
    if num_tokens == len(scheduled):
        found = [s.sequence.token_ids[s.start] if s.pending_row is None else -1 - s.pending_row for s in scheduled]
    else:
        found = []
        for s in scheduled:
            if s.pending_row is None:
                found += s.sequence.token_ids[s.start : s.start + s.num_tokens]
                found += s.drafts
            else:
                found.append(-1 - s.pending_row)
    token_ids = np.array(found, dtype=np.int64)
    (at,) = (token_ids < 0).nonzero()
    if not len(at):
        return token_ids, _NO_PENDING
    pending = np.empty((2, len(at)), dtype=np.int64)
    pending[0], pending[1] = at, -1 - token_ids[at]
    token_ids[at] = 0
    return token_ids, pending


def _last_rows(ends: Array, counts: Sequence[int]) -> Array:
    """The last `counts` rows of each sequence, of which `ends` are the ends."""
    if counts.count(1) == len(counts):
        last: Array = ends - 1
        return last
    past = np.cumsum(counts)
    rows: Array = np.arange(past[-1]) + np.repeat(ends - past, counts)
    return rows


def _slot(scheduled: Scheduled, adapter_slots: Mapping[str, int]) -> int:
    name = scheduled.sequence.request.adapter
    return -1 if name is None else adapter_slots[name]
