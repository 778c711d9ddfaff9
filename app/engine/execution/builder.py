"""Batch builder: makes one rank's tensors of each step from its plan, with one copy to the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import torch

from folio.app.engine.layers.batch import Array, BatchPart, PlanRun, StepBatch, StepPlan, TableLayout
from folio.app.engine.layers.recurrent import StateBatch
from folio.app.engine.lora.layers import adapter_batch
from folio.kernels import VarlenBatch
from folio.vmem import CacheTensors

# Widths of copied tables are multiples of this, so that few kernels are compiled.
_WIDTH_UNIT = 16
_LEAST_WORDS = 1 << 13

# Tensors of int64 arrays, of int32 arrays, and of the changed entries with their values.
Copied = tuple[list[torch.Tensor], list[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class BatchBuilder:
    """Builds the batches of one rank over one memory, and keeps its block tables on the device.

    The tables change in the order of the calls and of the device's work. On a CPU, where work is not queued, a batch
    must not be built before the forward of the last one has ended.

    Args:
        num_rows: rows of the block tables, which keep their addresses until a plan has more.

    Attributes:
        expected: number of the last plan that was submitted to be built; -1 after a failure.
        number: number of the last plan that was built; 0 before.
        tables: block tables of each layer group, `[num_rows, width]` int32, on the device.
    """

    def __init__(self, tensors: CacheTensors, device: torch.device, num_rows: int) -> None:
        self._tensors, self._device = tensors, device
        self._groups = [g for g, group in enumerate(tensors.groups) if not group.is_state]
        self._staging = Staging(device)
        self.expected = self.number = 0
        self._allocate(num_rows)

    def _allocate(self, num_rows: int) -> None:
        self._layout = TableLayout(self._tensors.groups, self._tensors.max_tokens, num_rows)
        self._entries = torch.zeros(self._layout.size, dtype=torch.int32, device=self._device)
        self.tables = [self._entries[span].view(shape) for span, shape in self._layout.spans()]
        # For each group the adjacent rows of the last step, and their tables.
        self._in_place = [(slice(0, num_rows), table) for table in self.tables]

    def build(self, plan: StepPlan) -> StepBatch:
        """Build the tensors of a plan. Pending tokens are 0, see `StepBatch.fill_pending`."""
        try:
            return self._build(plan)
        except BaseException:
            self.expected = -1  # later plans do not fit the tables of this rank
            raise

    def _build(self, plan: StepPlan) -> StepBatch:
        header = plan.header
        assert header.base in (0, self.number), f"{header} follows plan {self.number}"
        if header.num_rows != self._layout.num_rows:
            self._allocate(header.num_rows)
        elif not header.base:
            self._entries.zero_()
        longs, ints = [plan.token_ids, plan.positions, plan.logit_rows, plan.pending], []
        begin = first = 0
        for number, run in enumerate(plan.runs):
            end, past = begin + run.num_seqs, first + run.num_tokens
            longs += [plan.rows[begin:end], *plan.slots[:, first:past]]
            ints += [plan.cu_seqlens[begin + number : end + number + 1], plan.cache_seqlens[begin:end]]
            ints += [*plan.regions[:, begin:end, None]]
            begin, first = end, past
        given = longs, ints, (plan.changed, plan.block_ids)
        (token_ids, positions, logit_rows, pending, *longs_of_runs), ints_of_runs, changes = self._staging.copy(*given)
        if len(plan.changed):
            self._entries.index_copy_(0, *changes)
        self.number = header.number
        parts: list[list[BatchPart]] = [[] for _ in self._tensors.groups]
        num_groups, of_longs, of_ints = len(self._groups), iter(longs_of_runs), iter(ints_of_runs)
        begin = first = 0
        for run in plan.runs:
            rows, *slots = islice(of_longs, 1 + num_groups)
            cu_seqlens, cache_seqlens, *regions = islice(of_ints, 2 + num_groups)
            tokens = slice(first, first + run.num_tokens)
            for g, places, region in zip(self._groups, slots, regions, strict=True):
                table = region if run.in_region else self._table(g, run, int(plan.rows[begin]), rows)
                attention = VarlenBatch(cu_seqlens, cache_seqlens, table, run.max_seqlen_q, run.max_seqlen_k)
                parts[g].append(BatchPart("region" if run.in_region else "block_table", tokens, places, attention))
            begin, first = begin + run.num_seqs, tokens.stop
        return StepBatch(
            token_ids=token_ids,
            positions=positions,
            logit_rows=logit_rows,
            parts=tuple(map(tuple, parts)),
            states=_states(plan) if len(plan.states) else None,
            adapters=adapter_batch(plan.adapters, plan.num_tokens, plan.logit_rows, self._device)
            if len(plan.adapters)
            else None,
            pending=pending,
        )

    def _table(self, g: int, run: PlanRun, first: int, rows: torch.Tensor) -> torch.Tensor:
        """`[num_seqs, width]`, the block tables of a run: in place if its rows are adjacent."""
        if run.adjacent:
            adjacent = slice(first, first + run.num_seqs)
            if self._in_place[g][0] != adjacent:
                self._in_place[g] = adjacent, self.tables[g][adjacent]
            return self._in_place[g][1]
        width = -(-run.max_seqlen_k // self._layout.block_tokens[g])
        return self.tables[g][:, : -(-width // _WIDTH_UNIT) * _WIDTH_UNIT].index_select(0, rows)


class Staging:
    """Copies arrays to the device in one transfer, through pinned memory. There are two buffers on either side: a step
    may run while the next one is built."""

    def __init__(self, device: torch.device) -> None:
        self._buffers = [_Buffer(device), _Buffer(device)]

    def copy(self, longs: Sequence[Array], ints: Sequence[Array], changes: tuple[Array, Array]) -> Copied:
        """Tensors of int64 arrays, of int32 arrays, and of an int64 and an int32 array of any size, on the device;
        valid until the call after the next one."""
        self._buffers.reverse()
        return self._buffers[0].copy(longs, ints, changes)


class _Buffer:
    """One buffer on the host, its copy on the device, and the end of its last transfer.

    While the arrays keep their shapes, the tensors over them are reused (those of changes: one pair for each number of
    changes), because making a view takes microseconds.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._shapes: list[tuple[int, ...]] = []
        self._allocate(_LEAST_WORDS)

    def _allocate(self, num_words: int) -> None:
        self._host = torch.empty(num_words, dtype=torch.int64, pin_memory=self._copied is not None)
        self._longs, self._ints = self._host.numpy(), self._host.numpy().view(np.int32)
        is_here = self._device.type == "cpu"
        self._on_device = self._host if is_here else torch.empty(num_words, dtype=torch.int64, device=self._device)
        self._ints_on_device = self._on_device.view(torch.int32)

    def copy(self, longs: Sequence[Array], ints: Sequence[Array], changes: tuple[Array, Array]) -> Copied:
        if self._copied is not None:
            self._copied.synchronize()  # the transfer of two steps ago
        shapes = [array.shape for array in (*longs, *ints)]
        if shapes != self._shapes:
            self._num_longs = sum(array.size for array in longs)
            self._end = 2 * self._num_longs + sum(array.size for array in ints)  # in int32
        num_changes = len(changes[0])
        first = -(-self._end // 2)  # of the changes, in int64
        past = 2 * (first + num_changes)
        grows = past + num_changes > len(self._ints)
        if grows:
            self._allocate(past + num_changes)
        if grows or shapes != self._shapes:
            self._shapes = shapes
            self._tensors = (
                _cut(self._on_device[: self._num_longs], longs),
                _cut(self._ints_on_device[2 * self._num_longs : self._end], ints),
            )
            self._of_changes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        np.concatenate(longs, axis=None, out=self._longs[: self._num_longs])
        np.concatenate(ints, axis=None, out=self._ints[2 * self._num_longs : self._end])
        self._longs[first : first + num_changes], self._ints[past : past + num_changes] = changes
        if self._on_device is not self._host:
            num_words = -(-(past + num_changes) // 2)
            self._on_device[:num_words].copy_(self._host[:num_words], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        if num_changes not in self._of_changes:
            values = self._ints_on_device[past : past + num_changes]
            self._of_changes[num_changes] = self._on_device[first : first + num_changes], values
        return *self._tensors, self._of_changes[num_changes]


def _cut(tensor: torch.Tensor, arrays: Sequence[Array]) -> list[torch.Tensor]:
    """Views of a tensor with the arrays' shapes, one after the other."""
    parts = tensor.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _states(plan: StepPlan) -> StateBatch:
    starts = np.zeros(len(plan.num_tokens) + 1, dtype=np.int64)
    np.cumsum(plan.num_tokens, out=starts[1:])
    return StateBatch(starts.tolist(), plan.states.tolist(), (plan.positions[starts[:-1]] == 0).tolist())
