"""The plans of steps and the batches built from them, against batches made from block tables alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("hypothesis")
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from app.engine.engine import Engine
from app.engine.execution.batch import StepBatch, StepPlan
from app.engine.execution.builder import BatchBuilder
from app.engine.execution.planner import StepPlanner
from app.engine.request import Request, SequenceGroup
from app.engine.sampling.params import SamplingParams
from app.engine.scheduler import Scheduled
from app.engine.tensor_parallel.processes import pack_step, unpack_step
from tests.app.engine.execution.plain_batch import check_batch
from tests.app.engine.test_isolation import make_engine, work
from tests.conftest import MakeCheckpoint
from tests.nightly import examples
from tests.vmem.test_memory_machine import MemoryMachine
from vmem import KVMemory, SequenceMemory, StepDemand

CPU = torch.device("cpu")


def scheduled_of(memory: KVMemory, sequence: SequenceMemory, ids: list[int], start: int, end: int) -> Scheduled:
    """The tokens `start … end - 1` of a sequence that has these ids."""
    request = Request(
        "", ids, SamplingParams(), 1, None, memory.prefixes.chain(), SequenceGroup(0, 0), ids[:end], memory=sequence
    )
    request.num_computed = start
    return Scheduled(request, end - start)


def pending(s: Scheduled, row: int) -> Scheduled:
    """The same with its only token not known yet."""
    del s.request.token_ids[-1]
    return Scheduled(s.request, 1, pending_row=row)


def drafted(s: Scheduled) -> Scheduled:
    """The same with its last token a draft."""
    return Scheduled(s.request, s.num_tokens, (s.request.token_ids.pop(),))


class Ranks:
    """A planner, its rank, and a peer that receives messages."""

    def __init__(self, memory: KVMemory, num_rows: int = 2) -> None:
        self.memory = memory
        self.here, self.there = (BatchBuilder(memory.tensors, CPU, num_rows) for _ in range(2))
        self.planner = StepPlanner(memory, self.here, num_rows)

    def plan(self, scheduled: list[Scheduled], **settings: Any) -> StepPlan:
        return self.planner.plan(scheduled, **settings)

    def build(self, plan: StepPlan, sampled: torch.Tensor | None = None) -> tuple[StepBatch, StepBatch]:
        message = pack_step(plan)
        return self.here.build(plan, sampled), self.there.build(unpack_step(message), sampled)

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


def watch(engine: Engine) -> Counter[str]:
    """Check every batch of an engine from now on; counts what they had."""
    seen: Counter[str] = Counter()
    planner, builder = engine.executor.planner, engine.executor._builder
    latest: list[list[Scheduled]] = []
    plan, build = planner.plan, builder.build

    def note_and_plan(scheduled: list[Scheduled], **settings: Any) -> StepPlan:
        latest[:] = [scheduled]
        return plan(scheduled, **settings)

    def build_and_check(plan: StepPlan, sampled: torch.Tensor | None = None) -> StepBatch:
        batch = build(plan, sampled)
        check_batch(batch, latest[0], engine.memory, sampled=sampled)
        views = {part.view for parts in batch.parts for part in parts}
        seen.update({"steps": 1, "changes": len(plan.changed), "full": not plan.header.base, "mixed": len(views) > 1})
        return batch

    planner.plan, builder.build = note_and_plan, build_and_check  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("view", ["region", "block_table", "auto"])
@pytest.mark.parametrize("model", ["llama", "gemma2", "bamba"])
def test_every_step_of_an_engine(model: str, view: str, make_checkpoint: MakeCheckpoint) -> None:
    """Samples, beams, drafts, prefixes in common, cancellation, preemption by swap and by recompute."""
    engine = make_engine(model, view, make_checkpoint)
    seen = watch(engine)
    for way in ("swap", "recompute"):
        work(engine, way)
    assert seen["steps"] > 30
    assert seen["full"] <= 1, "no step failed: the tables are told once"
    if view != "auto":
        assert (seen["changes"] > 0) == (view == "block_table" or model == "bamba")
    engine.memory.tree.clear()
    engine.close()
