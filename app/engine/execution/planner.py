"""Step planner: scheduled tokens as arrays. What a step has in common with the one before is not computed again."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from app.engine.execution.batch import Array, PlanHeader, PlanRun, StepPlan
from app.engine.execution.builder import BatchBuilder
from app.engine.execution.rows import SequenceRows
from app.engine.scheduler import Scheduled
from vmem import KVMemory, SequenceMemory

_NONE: Array = np.zeros(0, dtype=np.int32)


class StepPlanner:
    """Plans the steps over one memory, on rank 0.

    Args:
        builder: this rank's. If it has not built the last plan, because of a failure, ranks are told of all tables.
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
        # The scheduled sequences and their adapters; what follows from these holds until they change or move.
        self._given: list[SequenceMemory] = []
        self._adapters = _NONE
        self._version = -1
        self._order: list[int] = []
        self._row_of = _NONE  # [num_seqs] int64
        self._regions = np.zeros((len(self._groups), 0), dtype=np.int64)  # [num_groups, num_seqs]
        self._runs: list[tuple[bool, int, int, bool]] = []  # in the region view, begin, end, adjacent rows

    def plan(
        self,
        scheduled: list[Scheduled],
        *,
        all_logits: bool = False,
        adapter_slots: Mapping[str, int] | None = None,
    ) -> StepPlan:
        """Plan scheduled tokens, whose blocks must be owned, and mapped in the region view (`KVMemory.ensure`).

        Sorts `scheduled` in place: the batch, its logits, and the tokens sampled from them have that order. Sequences
        with one view, and of these with one adapter, become adjacent.

        Args:
            all_logits: compute the logits of every token.
            adapter_slots: name → slot of every adapter in use.
        """
        self._arrange(scheduled, adapter_slots)
        base = self._last.number
        if self._builder.number != base or self._rows.layout.num_rows != self._last.num_rows:
            self._rows.tell_again()
            base = 0
        changed, block_ids = self._rows.tell()
        self._last = PlanHeader(self._last.number + 1, base, self._rows.layout.num_rows)

        counts = [s.num_tokens for s in scheduled]
        computed = [s.request.num_computed for s in scheduled]
        num_seqs, num_tokens = len(counts), sum(counts)
        starts = np.zeros(num_seqs + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        positions, row_of_token = np.array(computed, dtype=np.int64), self._row_of
        if num_tokens > num_seqs:
            sequence_of = np.repeat(np.arange(num_seqs), counts)
            positions = np.arange(num_tokens) + (positions - starts[:-1])[sequence_of]
            row_of_token = self._row_of[sequence_of]
        token_ids, pending = _tokens(scheduled, computed)
        cached = positions[starts[1:] - 1] + 1
        runs, cu_seqlens = self._cut(starts, counts, cached)
        at = self._state_group
        return StepPlan(
            header=self._last,
            runs=runs,
            num_tokens=np.array(counts, dtype=np.int32),
            states=_NONE if at is None else self._rows.tables[at][self._row_of, 0],
            adapters=self._adapters,
            token_ids=token_ids,
            positions=positions,
            logit_rows=_last_rows(starts[1:], counts if all_logits else [s.num_logits for s in scheduled]),
            pending=pending,
            rows=self._row_of,
            slots=self._slots(positions, row_of_token, starts),
            changed=changed,
            cu_seqlens=cu_seqlens,
            cache_seqlens=cached.astype(np.int32),
            regions=self._regions.astype(np.int32),
            block_ids=block_ids,
        )

    def _arrange(self, scheduled: list[Scheduled], adapter_slots: Mapping[str, int] | None) -> None:
        """Give the sequences rows, and sort them by view, adapter and row."""
        sequences = cast(list[SequenceMemory], [s.request.memory for s in scheduled])
        self._rows.follow(sequences)
        adapters = _NONE
        if adapter_slots:
            adapters = np.array([_slot(s, adapter_slots) for s in scheduled], dtype=np.int32)
        if sequences != self._given or self._rows.version != self._version or len(adapters) or len(self._adapters):
            self._given, self._version = sequences, self._rows.version
            rows = self._rows.rows_of(sequences)
            in_region: Array = np.any(self._rows.regions[:, rows] >= 0, axis=0)
            order = np.lexsort((rows, adapters, in_region) if len(adapters) else (rows, in_region))
            self._order = order.tolist()
            self._row_of, in_region = rows[order], in_region[order]
            self._adapters = adapters[order] if len(adapters) else _NONE
            self._regions = self._rows.regions[self._groups][:, self._row_of]
            cuts = [0, *(np.flatnonzero(np.diff(in_region)) + 1).tolist(), len(sequences)]
            self._runs = [
                (bool(in_region[begin]), begin, end, bool((np.diff(self._row_of[begin:end]) == 1).all()))
                for begin, end in itertools.pairwise(cuts)
            ]
        scheduled[:] = [scheduled[i] for i in self._order]

    def _cut(self, starts: Array, counts: Sequence[int], cached: Array) -> tuple[tuple[PlanRun, ...], Array]:
        """The runs, and the starts of their sequences `[num_seqs + num_runs]`."""
        runs, cu_seqlens = [], []
        for in_region, begin, end, adjacent in self._runs:
            cu_seqlens.append(starts[begin : end + 1] - starts[begin])
            most = max(counts[begin:end]), int(cached[begin:end].max())
            runs.append(PlanRun(in_region, end - begin, int(cu_seqlens[-1][-1]), *most, adjacent))
        return tuple(runs), np.concatenate(cu_seqlens, dtype=np.int32, casting="same_kind")

    def _slots(self, positions: Array, row_of_token: Array, starts: Array) -> Array:
        """`[num_groups, num_tokens]` int64, see `StepPlan`."""
        slots = np.empty((len(self._groups), len(positions)), dtype=np.int64)
        for in_region, begin, end, _ in self._runs:
            tokens = slice(int(starts[begin]), int(starts[end]))
            at, rows = positions[tokens], row_of_token[tokens]
            for i, g in enumerate(self._groups):
                if in_region:
                    slots[i, tokens] = self._rows.regions[g, rows] * self._region_tokens[i] + at
                else:
                    blocks, offsets = np.divmod(at, self._block_tokens[i])
                    slots[i, tokens] = self._rows.tables[g][rows, blocks] * np.int64(self._block_tokens[i]) + offsets
        return slots


def _tokens(scheduled: Sequence[Scheduled], computed: Sequence[int]) -> tuple[Array, Array]:
    """The tokens' ids, and which of them are pending, see `StepPlan`."""
    ids: list[int] = []
    pending: list[tuple[int, int]] = []
    for s, start in zip(scheduled, computed, strict=True):
        if s.pending_row is not None:
            pending.append((len(ids), s.pending_row))
            ids.append(0)
        elif s.num_tokens == 1:
            ids.append(s.request.token_ids[start])
        else:
            ids += s.request.token_ids[start : start + s.num_tokens]
            ids += s.drafts
    return np.array(ids, dtype=np.int64), np.array(pending, dtype=np.int64).reshape(-1, 2).T


def _last_rows(ends: Array, counts: Sequence[int]) -> Array:
    """The last `counts` rows of each sequence, of which `ends` are the ends."""
    if counts == [1] * len(counts):
        last: Array = ends - 1
        return last
    past = np.cumsum(counts)
    rows: Array = np.arange(past[-1]) + np.repeat(ends - past, counts)
    return rows


def _slot(scheduled: Scheduled, adapter_slots: Mapping[str, int]) -> int:
    name = scheduled.request.group.adapter
    return -1 if name is None else adapter_slots[name]
