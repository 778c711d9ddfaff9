"""The plans of steps and the batches built from them, against batches made from block tables alone."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("hypothesis")
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from torch.utils._python_dispatch import TorchDispatchMode

from folio.app.engine.execution.builder import BatchBuilder
from folio.app.engine.execution.planner import StepPlanner
from folio.app.engine.layers.batch import PlanHeader, StepBatch, StepPlan, memory_of
from folio.app.engine.ranks.processes import pack_step, unpack_step
from folio.app.engine.request.request import Request, Sequence
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.schedule.scheduled import Scheduled
from folio.vmem import KVMemory, SequenceMemory, StepDemand, ViewPolicy
from tests.app.engine.execution.plain_batch import check_batch
from tests.app.engine.runs import on_gpu
from tests.nightly import examples
from tests.vmem.memory_machine import MemoryMachine
from tests.vmem.small_memory import FlakyHost, make_memory

CPU = torch.device("cpu")


def scheduled_of(memory: KVMemory, own: SequenceMemory, ids: list[int], start: int, end: int) -> Scheduled:
    """The tokens `start … end - 1` of a sequence that has these ids."""
    request = Request("", SamplingParams())
    sequence = Sequence(request, ids, request.params, 1, None, memory.prefixes.chain(), ids[:end], memory=own)
    sequence.num_computed = start
    return Scheduled(sequence, end - start)


def pending(s: Scheduled, row: int) -> Scheduled:
    """The same with its only token not known yet."""
    del s.sequence.token_ids[-1]
    s.sequence.num_awaited, s.sequence.pending_row = 1, row
    return Scheduled(s.sequence, 1)


def drafted(s: Scheduled) -> Scheduled:
    """The same with its last token a draft."""
    return Scheduled(s.sequence, s.num_tokens, (s.sequence.token_ids.pop(),))


class Ranks:
    """A planner, its rank, and a peer that receives messages."""

    def __init__(self, memory: KVMemory, num_rows: int = 2) -> None:
        self.memory = memory
        self.here, self.there = (BatchBuilder(memory.tensors, CPU, num_rows) for _ in range(2))
        self.planner = StepPlanner(memory, self.here, num_rows)

    def plan(self, scheduled: list[Scheduled], **settings: Any) -> StepPlan:
        return self.planner.plan(scheduled, **settings)

    def build(self, plan: StepPlan, sampled: torch.Tensor | None = None) -> tuple[StepBatch, StepBatch]:
        self.here.expected = plan.header.number
        batches = self.here.build(plan), self.there.build(unpack_step(pack_step(plan)))
        if sampled is not None:
            for batch in batches:
                batch.fill_pending(sampled)
        return batches

    def check(self, scheduled: list[Scheduled], *, all_logits: bool = False, sampled: Any = None) -> StepPlan:
        """Plan and build a step, and compare it on both ranks."""
        plan = self.plan(scheduled, all_logits=all_logits)
        for batch in self.build(plan, sampled):
            check_batch(batch, scheduled, self.memory, all_logits=all_logits, sampled=sampled)
        return plan


class PlannedMachine(MemoryMachine):
    """Random use of a memory; the sequences of each step are planned and built, some a second time as decodes."""

    ranks: Ranks
    missed = False
    order = 0

    def _step(self, demands: list[StepDemand], view: str, *, fails: bool = False) -> bool:
        if not super()._step(demands, view, fails=fails):
            return False
        if not hasattr(self, "ranks"):
            self.ranks = Ranks(self.memory)
        scheduled = []
        for demand in demands:
            ids = self.written[demand.sequence].ids
            scheduled.append(scheduled_of(self.memory, demand.sequence, ids, demand.start, demand.end))
        if scheduled:
            self._check(scheduled)
        return True

    def _check(self, scheduled: list[Scheduled]) -> None:
        if self.missed:
            self.missed = False
            self.ranks.plan(list(scheduled))  # and no rank gets it
        sampled = torch.arange(90, 90 + len(scheduled))
        for i, s in enumerate(scheduled):
            if (i + self.order) % 2:
                row = (i + self.order) % len(scheduled)
                scheduled[i] = pending(s, row) if s.num_tokens == 1 else drafted(s)
        self.ranks.check(scheduled, all_logits=self.order % 3 == 0, sampled=sampled)

    @rule(which=st.permutations(range(8)), count=st.integers(1, 8))
    def decode(self, which: list[int], count: int) -> None:
        """The last tokens of some sequences once more, in any order."""
        if not hasattr(self, "ranks") or self.memory.prefixes.has_states:  # of forks, states are copied first
            return
        open_ones = [(s, self.written[s].ids) for s in self.written if self.written[s].ids]
        chosen = [open_ones[i] for i in which[:count] if i < len(open_ones)]
        if chosen := [(s, ids) for s, ids in chosen if s.num_tokens >= len(ids)]:
            self._check([scheduled_of(self.memory, s, ids, len(ids) - 1, len(ids)) for s, ids in chosen])

    @rule(order=st.integers(0, 11))
    def turn(self, order: int) -> None:
        self.order = order

    @rule()
    def miss(self) -> None:
        """The next plan is not built, as when a step fails before it is launched."""
        self.missed = True


PlannedMachine.TestCase.settings = settings(
    max_examples=examples(60, nightly=1500),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestPlannedMachine = PlannedMachine.TestCase


def make_sequences(memory: KVMemory, lengths: abc.Sequence[int], view: ViewPolicy = "block_table") -> list[Scheduled]:
    """Decodes of sequences of these lengths."""
    scheduled = []
    for length in lengths:
        sequence = memory.create_sequence(view)
        memory.append(sequence, length)
        scheduled.append(scheduled_of(memory, sequence, list(range(length)), length - 1, length))
    return scheduled


def grow(memory: KVMemory, s: Scheduled) -> Scheduled:
    """The same sequence's decode in the next step."""
    sequence, ids = memory_of(s), [*s.sequence.token_ids, 7]
    memory.append(sequence, len(ids))
    return scheduled_of(memory, sequence, ids, len(ids) - 1, len(ids))


@pytest.fixture
def memory() -> Iterator[KVMemory]:
    made, _ = make_memory(FlakyHost, num_pages=200, max_tokens=320, num_regions=8)
    yield made
    for sequence in list(made.tables.sequences):
        made.free(sequence)
    made.close()


class Transfers(TorchDispatchMode):
    """Counts copies from one device to another."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [arg.device for arg in args if isinstance(arg, torch.Tensor)]
        self.count += isinstance(result, torch.Tensor) and any(device != result.device for device in given)
        return result


@pytest.mark.parametrize("view", ["region", "block_table"])
def test_a_batch_is_copied_to_the_device_at_once(view: ViewPolicy, memory: KVMemory) -> None:
    """Six tensors and a table for each part were, each by a copy that waits. The meta device stands in for one that
    has memory of its own."""
    builder = BatchBuilder(memory.tensors, torch.device("meta"), 8)
    planner = StepPlanner(memory, builder, 8)
    scheduled = make_sequences(memory, (40, 3, 90), view)
    for several in (False, True, False):
        step = [Scheduled(s.sequence, 1) for s in scheduled]
        if several:
            step[0].sequence.num_computed -= 4
            step[0] = Scheduled(step[0].sequence, 5)
        with Transfers() as transfers:
            batch = builder.build(planner.plan(step))
        builder.expected += 1
        assert transfers.count == 1
        tensors = [batch.token_ids, batch.positions, batch.logit_rows]
        for part in batch.parts[0]:
            tensors += [part.slots, part.attention.block_table, part.attention.cu_seqlens_q]
        assert all(tensor.is_meta for tensor in tensors)


def test_a_message_does_not_grow_with_the_context(memory: KVMemory) -> None:
    """Nor does the work: a step's plan has the new blocks only."""
    sizes = []
    for length in (17, 250):
        ranks = Ranks(memory, num_rows=8)
        scheduled = make_sequences(memory, [length] * 4)
        first = len(pack_step(ranks.check(scheduled)))
        plan = ranks.check([grow(memory, s) for s in scheduled])
        assert not len(plan.changed)
        sizes.append(len(pack_step(plan)))
        assert sizes[-1] < first
        for s in scheduled:
            memory.free(memory_of(s))
    assert sizes[0] == sizes[1]


def test_rows_in_use_stay_the_first_ones(memory: KVMemory) -> None:
    """So that a decode batch reads the tables in place, whichever sequences have ended."""
    ranks = Ranks(memory, num_rows=8)
    scheduled = make_sequences(memory, (20, 30, 40, 50, 60, 70))
    ranks.check(list(scheduled))
    for ended in (1, 3, 3):
        memory.free(memory_of(scheduled.pop(ended)))
        scheduled = [grow(memory, s) for s in scheduled]
        step = list(reversed(scheduled))
        plan = ranks.check(step)
        assert plan.rows.tolist() == list(range(len(scheduled)))
        assert plan.runs[0].adjacent
    plan = ranks.check([step[2], step[0]])
    assert not plan.runs[0].adjacent, "a part of the sequences: their tables are gathered"


def test_a_block_table_moves_and_changes_in_one_step(memory: KVMemory) -> None:
    """A row that moves, new blocks, a block copied on write and a table cut short, all between two steps."""
    ranks = Ranks(memory, num_rows=8)
    scheduled = make_sequences(memory, (16, 32, 90, 40, 48))
    ranks.check(list(scheduled))
    fork = memory.fork(memory_of(scheduled[3]), 40)  # the next token of either is written to a block of its own
    memory.free(memory_of(scheduled.pop(0)))
    memory.truncate(memory_of(scheduled[1]), 32)
    scheduled[1].sequence.token_ids[32:] = []
    scheduled = [grow(memory, s) for s in scheduled]
    scheduled.append(grow(memory, scheduled_of(memory, fork, list(range(40)), 39, 40)))
    for _ in range(20):  # some tables have one more block in most of these
        plan = ranks.check(list(scheduled))
        scheduled = [grow(memory, s) for s in scheduled]
    assert len(plan.changed) <= len(scheduled)


def test_batches_last_until_the_one_after_the_next(memory: KVMemory) -> None:
    """A step may run while the next one is built; a longer one moves the numbers to a new buffer."""
    ranks = Ranks(memory)
    scheduled = make_sequences(memory, (5, 9))
    first = ranks.build(ranks.plan(list(scheduled)))[0]
    long = make_sequences(memory, (250,) * 5)
    for s in long:
        s.sequence.num_computed = 0
    step = [grow(memory, s) for s in scheduled] + [Scheduled(s.sequence, 250) for s in long]
    second = ranks.build(ranks.plan(step))[0]
    check_batch(first, scheduled, memory)
    check_batch(second, step, memory)


def test_a_missed_plan_is_told_again(memory: KVMemory) -> None:
    """A step that fails between its plan and its launch left ranks with tables that later differences did not fit."""
    ranks = Ranks(memory, num_rows=8)
    scheduled = make_sequences(memory, (15, 16))
    assert ranks.check(list(scheduled)).header.base == 0
    scheduled = [grow(memory, s) for s in scheduled]
    ranks.plan(list(scheduled))
    scheduled = [grow(memory, s) for s in scheduled]
    plan = ranks.check(list(scheduled))
    assert (plan.header.number, plan.header.base) == (3, 0)
    with pytest.raises(AssertionError, match="follows plan 3"):
        ranks.here.build(replace(plan, header=PlanHeader(9, 8, 8)))
    assert ranks.check(list(scheduled)).header.base == 0, "a rank could not build the last plan that it got"
    assert ranks.check(list(scheduled)).header.base == 4


def test_adapters_are_adjacent(memory: KVMemory) -> None:
    ranks = Ranks(memory, num_rows=8)
    scheduled = make_sequences(memory, (20, 30, 40, 50))
    for s, name in zip(scheduled, ("b", None, "a", "b"), strict=True):
        s.sequence.request.adapter = name
    plan = ranks.plan(scheduled, adapter_slots={"a": 4, "b": 2})
    assert plan.adapters.tolist() == [-1, 2, 2, 4]
    assert [s.sequence.request.adapter for s in scheduled] == [None, "b", "b", "a"]
    batch, _ = ranks.build(plan)
    assert batch.adapters is not None
    assert batch.adapters.tokens == ((2, slice(1, 3)), (4, slice(3, 4)))
    scheduled = [grow(memory, s) for s in scheduled]
    for s in scheduled:
        s.sequence.request.adapter = None
    assert not len(ranks.check(scheduled).adapters)


@on_gpu
@pytest.mark.parametrize("view", ["region", "block_table"])
def test_on_a_device(view: ViewPolicy, memory: KVMemory) -> None:
    """While the device is steps behind, plans and pinned buffers are overwritten."""
    builder = BatchBuilder(memory.tensors, torch.device("cuda"), 2)
    planner = StepPlanner(memory, builder, 2)
    scheduled = make_sequences(memory, (5, 9, 40), view)
    work = torch.randn(4096, 4096, device="cuda")
    positions = []
    for _ in range(20):
        scheduled = [grow(memory, s) for s in scheduled]
        for _ in range(5):
            torch.mm(work, work)
        plan = planner.plan(scheduled)
        builder.expected = plan.header.number
        batch = builder.build(plan)
        positions.append(batch.positions.clone())
    check_batch(batch, scheduled, memory)
    assert torch.stack(positions).diff(dim=0).eq(1).all()
