"""Decode graphs: steps of single tokens, padded to a bucket and replayed in one launch.

    rows of a bucket of 8 | sequence 0 | … | sequence 4 | padding | padding | padding |

A padding row is a sequence of one token whose keys and values go to the anchor page: to block 0, or to slot 0 in the
region view, which no sequence owns. So a graph is captured with padding rows alone, before there is any sequence.

Graphs stay valid while the memory maps and unmaps, because addresses never move. They read block tables and lengths
from tensors at fixed addresses, which each step fills.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Collection
from typing import cast

import torch

from folio.app.engine.execution.captured_graphs import CapturedGraphs, GraphKey, GraphKind, GraphPlan
from folio.app.engine.execution.graph import Graph
from folio.app.engine.layers.batch import BatchPart, StepBatch
from folio.kernels import VarlenBatch
from folio.vmem import CacheTensors, View, ViewPolicy

logger = logging.getLogger(__name__)

# Graphs captured at the start take at most this share of the bound: those that the load needs later must still fit.
_START_SHARE = 0.5
# (buckets up to this one, their distance)
_STEPS = ((64, 8), (1 << 20, 16))


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then steps of 8 up to 64 and of 16 beyond; the last one is `max_num_seqs`."""
    buckets = [1, 2, 4, 8]
    for end, distance in _STEPS:
        while buckets[-1] < min(end, max_num_seqs):
            buckets.append(buckets[-1] + distance)
    return (*(bucket for bucket in buckets if bucket < max_num_seqs), max_num_seqs)


class DecodeGraphs(GraphKind):
    """The graphs of decode steps.

    Args:
        graphs: all graphs of the model.
        forward: logits `[num_logits, vocab_size]` of a batch, on its device.
    """

    setting = "decode_graphs", "auto"
    steps = "decode steps"

    def __init__(
        self,
        plan: GraphPlan,
        graphs: CapturedGraphs,
        tensors: CacheTensors,
        device: torch.device,
        forward: Callable[[StepBatch], torch.Tensor],
    ) -> None:
        self.new_graph, self._buckets = plan.new_graph, plan.buckets
        self._graphs, self._tensors, self._device, self._forward = graphs, tensors, device, forward
        self._inputs: dict[str, DecodeInputs] = {}  # by view
        graphs.add_kind(self)

    def run(self, batch: StepBatch) -> torch.Tensor | None:
        """Logits `[num_logits, vocab_size]`, valid until the next call; `None` if no graph can compute the batch:
        it does not only decode, has states, adapters or two views, or its graph does not fit the budget.

        Raises:
            ModelError: the model cannot be captured, and the plan requires it.
        """
        view = decode_view(batch)
        if view is None:
            return None
        num_seqs = len(batch.token_ids)
        bucket = self._bucket(view, num_seqs)
        if bucket is None:
            return None
        self._inputs[view].load(batch)
        return self._graphs.replay((view, bucket), num_seqs)

    def capture_all(self, policy: ViewPolicy) -> None:
        """Capture the buckets of the view that sequences have first, the largest first: smaller ones reuse the memory
        of its pool.

        Raises:
            ModelError: the model cannot be captured, and the plan requires it.
        """
        has_regions = any(self._tensors.region_tokens)
        view: View = "region" if has_regions and policy != "block_table" else "block_table"
        taken, largest, graphs = 0, 0, self._graphs
        for bucket in reversed(self._buckets):
            if taken + largest > _START_SHARE * graphs.room_bytes:
                break
            before = graphs.num_bytes
            if not graphs.capture(self, (view, bucket)):
                break
            largest = graphs.num_bytes - before  # the next one takes no more
            taken += largest
        logger.info(
            "captured %d of %d decode graphs, %.1f MiB with their buffers",
            sum(captured == view for captured, _ in graphs.captured),
            len(self._buckets),
            graphs.held_bytes / 2**20,
        )

    def _bucket(self, view: View, num_seqs: int) -> int | None:
        """The bucket to replay, captured now if need be; if it does not fit, a captured one of up to twice its size."""
        buckets, graphs = self._buckets, self._graphs
        first = bisect.bisect_left(buckets, num_seqs)
        if first == len(buckets):
            return None
        if graphs.wants(self, (view, buckets[first])):
            return buckets[first]
        larger = (bucket for bucket in buckets[first:] if bucket <= 2 * buckets[first])
        return next((bucket for bucket in larger if (view, bucket) in graphs.captured), None)

    @property
    def buffer_bytes(self) -> int:
        return sum(inputs.num_bytes for inputs in list(self._inputs.values()))

    def describe(self, key: GraphKey) -> str:
        return f"decode graph of {key[1]} sequences, {key[0]}"

    def capture(self, key: GraphKey, graph: Graph) -> object:
        view, bucket = key
        if view not in self._inputs:
            self._inputs[view] = DecodeInputs(self._tensors, cast(View, view), self._buckets[-1], self._device)
        inputs = self._inputs[view]
        inputs.clear()  # capturing runs the step, which must not write to sequences
        batch = inputs.batch(bucket)
        graph.capture(lambda: self._graphs.write_logits(self._forward(batch)))
        return batch

    def drop_buffers(self, captured: Collection[GraphKey]) -> None:
        views = {view for view, _ in captured}
        self._inputs = {view: inputs for view, inputs in self._inputs.items() if view in views}


class DecodeInputs:
    """A decode batch in one view, in tensors at fixed addresses.

    Args:
        num_seqs: the largest bucket.

    Attributes:
        num_bytes: bytes of the tensors.
    """

    @torch.inference_mode()
    def __init__(self, tensors: CacheTensors, view: View, num_seqs: int, device: torch.device) -> None:
        self._view: View = view
        self._token_ids, self._positions, self._rows = torch.zeros(3, num_seqs, dtype=torch.int64, device=device)
        self._rows += torch.arange(num_seqs, device=device)
        self._starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
        self._groups: list[_GroupInputs | None] = []
        for group in tensors.groups:
            if group.is_state:
                self._groups.append(None)
                continue
            width = 1 if view == "region" else group.layout.num_blocks(tensors.max_tokens)
            self._groups.append(_GroupInputs(num_seqs, width, tensors.max_tokens, device))
        self._num_loaded = 0
        own = (self._token_ids, self._positions, self._rows, self._starts)
        self.num_bytes = sum(part.nbytes for part in own) + sum(g.num_bytes for g in self._groups if g is not None)

    def batch(self, bucket: int) -> StepBatch:
        """The batch of the first `bucket` rows, over the same tensors."""
        parts = tuple(
            () if group is None else (group.part(self._view, self._starts, bucket),) for group in self._groups
        )
        return StepBatch(self._token_ids[:bucket], self._positions[:bucket], self._rows[:bucket], parts)

    @torch.inference_mode()
    def load(self, batch: StepBatch) -> None:
        """Copy a decode batch into the first rows; the others are padding rows."""
        num_seqs = len(batch.token_ids)
        self._pad(num_seqs)
        self._token_ids[:num_seqs].copy_(batch.token_ids, non_blocking=True)
        self._positions[:num_seqs].copy_(batch.positions, non_blocking=True)
        for group, parts in zip(self._groups, batch.parts, strict=True):
            if group is not None:
                group.load(parts[0])
        self._num_loaded = num_seqs

    def clear(self) -> None:
        """Make every row a padding row."""
        self._pad(0)
        self._num_loaded = 0

    @torch.inference_mode()
    def _pad(self, start: int) -> None:
        if start >= self._num_loaded:
            return
        rows = slice(start, self._num_loaded)
        self._token_ids[rows] = 0
        self._positions[rows] = 0
        for group in self._groups:
            if group is not None:
                group.pad(rows)


class _GroupInputs:
    """Lengths, cache slots and table of a layer group. Block 0, slot 0 and place 0 are the anchor page's."""

    def __init__(self, num_seqs: int, width: int, most_tokens: int, device: torch.device) -> None:
        self._most_tokens = most_tokens
        self._lengths = torch.ones(num_seqs, dtype=torch.int32, device=device)
        self._slots = torch.zeros(num_seqs, dtype=torch.int64, device=device)
        self._table = torch.zeros(num_seqs, width, dtype=torch.int32, device=device)
        self.num_bytes = self._lengths.nbytes + self._slots.nbytes + self._table.nbytes

    def part(self, view: View, starts: torch.Tensor, bucket: int) -> BatchPart:
        attention = VarlenBatch(
            starts[: bucket + 1],
            self._lengths[:bucket],
            self._table[:bucket],
            max_seqlen_q=1,
            max_seqlen_k=self._most_tokens,
        )
        return BatchPart(view, slice(0, bucket), self._slots[:bucket], attention)

    def load(self, part: BatchPart) -> None:
        table = part.attention.block_table
        num_seqs, width = table.shape
        self._lengths[:num_seqs].copy_(part.attention.cache_seqlens, non_blocking=True)
        self._slots[:num_seqs].copy_(part.slots, non_blocking=True)
        self._table[:num_seqs, :width].copy_(table, non_blocking=True)

    def pad(self, rows: slice) -> None:
        self._lengths[rows] = 1
        self._slots[rows] = 0
        self._table[rows, 0] = 0


def decode_view(batch: StepBatch) -> View | None:
    """The view of a batch that a graph can compute: one token and one row of logits a sequence, one view, and neither
    states nor adapters. `None` for others."""
    if batch.states is not None or batch.adapters is not None or len(batch.logit_rows) != len(batch.token_ids):
        return None
    first: BatchPart | None = None
    for parts in batch.parts:
        if len(parts) != 1:
            return None
        first = parts[0]
        if first.attention.cache_seqlens.numel() != len(batch.token_ids):
            return None
    return None if first is None else first.view
