"""Decode graphs: steps of single tokens, padded to a bucket and replayed in one launch.

    rows of a bucket of 8 | sequence 0 | … | sequence 4 | padding | padding | padding |

A padding row is a sequence of one token whose keys and values go to the anchor page: to block 0, or to slot 0 in the
region view, which no sequence owns. So a graph is captured with padding rows alone, before there is any sequence.

Graphs stay valid while the memory maps and unmaps, because addresses never move. They read block tables and lengths
from tensors that stay where they are, and that each step fills.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from app.engine.charges import DeviceCharges
from app.engine.execution.batch import BatchPart, StepBatch
from app.engine.execution.graph import CaptureError, Graph
from app.errors import ModelError
from kernels import VarlenBatch, note_compilation
from vmem import CacheTensors, KVMemory, View, ViewPolicy

logger = logging.getLogger(__name__)

# Graphs and the memory of their steps, at most.
GRAPH_BYTES = 1 << 30
# Graphs captured at the start take at most this share of it: what the load turns out to need must still fit.
_START_SHARE = 0.5
# A graph that was released is captured again when so many steps have wanted it: capturing takes as long as launching
# about so many steps kernel by kernel, so that it costs at most twice the better choice.
_STEPS_TO_RECAPTURE = 16
# (buckets up to this one, their distance)
_STEPS = ((64, 8), (1 << 20, 16))


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then steps of 8 up to 64 and of 16 beyond; the last one is `max_num_seqs`."""
    buckets = [1, 2, 4, 8]
    for end, distance in _STEPS:
        while buckets[-1] < min(end, max_num_seqs):
            buckets.append(buckets[-1] + distance)
    return (*(bucket for bucket in buckets if bucket < max_num_seqs), max_num_seqs)


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """How decode steps are captured.

    Attributes:
        buckets: ascending numbers of sequences.
        new_graph: makes an empty graph.
        pauses: whether the mapper pauses during a capture. Capturing in one thread while another calls the driver's
            memory management is not documented to be safe, whatever the mode of the capture.
        required: raise an error, rather than launch kernel by kernel, if the model cannot be captured.
        budget_bytes: of all graphs.
    """

    buckets: Sequence[int]
    new_graph: Callable[[], Graph]
    pauses: bool = True
    required: bool = False
    budget_bytes: int = GRAPH_BYTES


class DecodeGraphs:
    """The graphs of one model over one KV memory.

    Args:
        forward: logits `[num_logits, vocab_size]` of a batch, on its device.
        charges: of a device that other models share, to which graphs and their buffers are charged.

    Attributes:
        captured: (view, bucket) of each graph.
        num_bytes: memory of all graphs.
        limit_bytes: bound of it now, at most the plan's.
        mixed_bytes: returns the memory of mixed graphs, which have a part of the bound.
        wanted_bytes: what a graph would take that a step has wanted, and for which a shared device had no memory.
    """

    def __init__(
        self,
        plan: GraphPlan,
        memory: KVMemory,
        device: torch.device,
        forward: Callable[[StepBatch], torch.Tensor],
        charges: DeviceCharges | None = None,
    ) -> None:
        self._plan = plan
        self._memory = memory
        self._device = device
        self._forward = forward
        self._inputs: dict[View, DecodeInputs] = {}
        self._logits: torch.Tensor | None = None  # [largest bucket, vocab_size]
        self._batches: list[StepBatch] = []  # of the graphs, which do not keep what they read
        self._charges = charges
        self._sizes: dict[tuple[View, int], int] = {}  # of graphs captured before
        self._to_wait: dict[tuple[View, int], int] = {}  # steps until a released graph is captured again
        self.captured: dict[tuple[View, int], Graph] = {}
        self.num_bytes = self.wanted_bytes = 0
        self.limit_bytes = self._budget_bytes = plan.budget_bytes
        self.mixed_bytes: Callable[[], int] = lambda: 0
        self._is_refused = False
        self._capture_s = 0.0  # since the last release

    @property
    def held_bytes(self) -> int:
        """Memory of the device: graphs, and the buffers that they read and write. From any thread."""
        buffers, logits = list(self._inputs.values()), self._logits
        return self.num_bytes + sum(b.num_bytes for b in buffers) + (0 if logits is None else logits.nbytes)

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
        self.captured[view, bucket].replay()
        assert self._logits is not None
        return self._logits[:num_seqs]

    def capture_all(self, policy: ViewPolicy) -> None:
        """Capture the buckets of the view that sequences have first, the largest first: smaller ones take their memory
        from its pool.

        Raises:
            ModelError: the model cannot be captured, and the plan requires it.
        """
        has_regions = any(self._memory.tensors.region_tokens)
        view: View = "region" if has_regions and policy != "block_table" else "block_table"
        taken, largest = 0, 0
        for bucket in reversed(self._plan.buckets):
            if taken + largest > _START_SHARE * self._room_bytes:
                break
            before = self.num_bytes
            if not self._capture(view, bucket):
                break
            largest = self.num_bytes - before  # the next one takes no more
            taken += largest
        logger.info(
            "captured %d of %d decode graphs, %.1f MiB",
            len(self.captured),
            len(self._plan.buckets),
            self.num_bytes / 2**20,
        )

    def release(self) -> None:
        """Give the memory of all graphs back to the device. No step may be under way. Graphs that are wanted later are
        captured again."""
        if self.captured:
            logger.info(
                "gave back %d decode graphs, %.1f MiB; capturing them took %.2f s",
                len(self.captured),
                self.held_bytes / 2**20,
                self._capture_s,
            )
        self._capture_s = 0.0
        self._to_wait |= dict.fromkeys(self.captured, _STEPS_TO_RECAPTURE)
        self.captured.clear()
        self._batches.clear()
        self.num_bytes = self.wanted_bytes = 0
        self._budget_bytes = self._plan.budget_bytes
        self._settle()

    def _bucket(self, view: View, num_seqs: int) -> int | None:
        """The bucket to replay, captured now if need be; if it does not fit, a captured one of up to twice its size."""
        buckets = self._plan.buckets
        first = bisect.bisect_left(buckets, num_seqs)
        if first == len(buckets):
            return None
        key = view, buckets[first]
        if key in self.captured:
            return buckets[first]
        if left := self._to_wait.get(key, 0):
            self._to_wait[key] = left - 1
        elif self._capture(*key):
            return buckets[first]
        larger = (bucket for bucket in buckets[first:] if bucket <= 2 * buckets[first])
        return next((bucket for bucket in larger if (view, bucket) in self.captured), None)

    def _capture(self, view: View, bucket: int) -> bool:
        """Capture a graph; False if it does not fit, or if the model cannot be captured."""
        self.wanted_bytes = 0
        expected = self._sizes.get((view, bucket), 0)
        fits = self.num_bytes + max(expected, 1) <= self._room_bytes
        if self._is_refused or not fits or not self._take(expected, wanted=expected):
            return False
        began = time.perf_counter()
        try:
            return self._record(view, bucket, expected)
        finally:
            self._settle()
            self._capture_s += time.perf_counter() - began

    @torch.inference_mode()
    def _record(self, view: View, bucket: int, charged: int) -> bool:
        """See `_capture`; `charged`: for this graph already."""
        held_before = self.held_bytes
        graph = self._plan.new_graph()
        try:
            if view not in self._inputs:
                self._inputs[view] = DecodeInputs(self._memory.tensors, view, self._plan.buckets[-1], self._device)
            inputs = self._inputs[view]
            inputs.clear()  # capturing runs the step, which must not write to sequences
            batch = inputs.batch(bucket)
            with self._memory.mapper.paused() if self._plan.pauses else nullcontext():
                logits = self._logits_of(batch)

                def work() -> None:
                    logits[:bucket].copy_(self._forward(batch))

                graph.capture(work)
        except torch.OutOfMemoryError as error:
            self._budget_bytes = self.num_bytes
            logger.warning("no memory for a decode graph of %d sequences, nor for others: %s", bucket, error)
            return False
        except CaptureError as error:
            self._is_refused = True
            if self._plan.required:
                raise ModelError(
                    f"decode_graphs is 'on', but decode steps of this model cannot be captured: {error}; use 'auto'"
                ) from error
            logger.warning(
                "decode steps of this model cannot be captured, each of their kernels is launched: %s", error
            )
            return False
        if (view, bucket) not in self._sizes:  # else it has been captured before
            note_compilation(f"decode graph of {bucket} sequences, {view}")
        self._sizes[view, bucket] = size = graph.num_bytes + self.held_bytes - held_before
        if not self._take(max(size - charged, 0), wanted=size):
            return False
        self._batches.append(batch)
        self.captured[view, bucket] = graph
        self.num_bytes += graph.num_bytes
        return True

    @property
    def _room_bytes(self) -> int:
        return min(self._budget_bytes, self.limit_bytes - self.mixed_bytes())

    def _take(self, num_bytes: int, *, wanted: int) -> bool:
        """Charge memory to a shared device; if it has too little, note what is wanted, and return False."""
        if self._charges is None or self._charges.take(num_bytes):
            return True
        self.wanted_bytes = wanted
        return False

    def _settle(self) -> None:
        """Give back what is held or charged without a graph."""
        views = {view for view, _ in self.captured}
        self._inputs = {view: inputs for view, inputs in self._inputs.items() if view in views}
        if not self.captured:
            self._logits = None
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # the pool of graphs that are gone is nobody else's while torch keeps it
        if self._charges is not None:
            self._charges.give_back(self._charges.charged_bytes - self.held_bytes)

    def _logits_of(self, batch: StepBatch) -> torch.Tensor:
        """The tensor that all graphs write their logits to."""
        if self._logits is None:
            example = self._forward(batch)
            self._logits = example.new_zeros(self._plan.buckets[-1], example.shape[1])
        return self._logits


class DecodeInputs:
    """A decode batch in one view, in tensors that stay where they are.

    Args:
        num_seqs: the largest bucket.

    Attributes:
        num_bytes: of the tensors.
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
    """Places of a layer group's cache. Block 0, slot 0 and place 0 are the anchor's."""

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
