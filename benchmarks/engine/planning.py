"""Time to plan and build a decode step, over a memory without contents."""

from __future__ import annotations

import statistics
import time

import torch

from benchmarks.simulator.backend import CountingBackend
from folio.app.engine.execution.builder import BatchBuilder
from folio.app.engine.execution.planner import StepPlanner
from folio.app.engine.request.request import Request, Sequence
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.schedule.scheduled import Scheduled
from folio.vmem import KVMemory, LayerGroup, LayerSpec, MappingOptions, View, plan_layout

BLOCK_TOKENS, PAGE_BYTES = 16, 4096
_NEVER_S, _NO_LIMIT = 1e9, 1 << 60


def make_memory(num_seqs: int, num_tokens: int) -> KVMemory:
    """Memory for sequences of this length: one layer, blocks of 16 tokens, and so many of them."""
    dim = PAGE_BYTES // (2 * BLOCK_TOKENS)
    layout = plan_layout([LayerSpec(1, dim, dim)], torch.int8, granularity_bytes=PAGE_BYTES, block_tokens=BLOCK_TOKENS)
    return KVMemory(
        CountingBackend(),
        [LayerGroup((0,), layout)],
        budget_bytes=num_seqs * layout.num_blocks(num_tokens) * layout.block_bytes,
        num_regions=num_seqs,
        max_tokens=num_tokens,
        prefix_cache=False,
        options=MappingOptions(
            background=False,
            overlap=False,
            eager_allocation=False,
            idle_release_s=_NEVER_S,
            max_mappings=_NO_LIMIT,
        ),
    )


def plan_us(num_seqs: int, context: int, view: View, num_steps: int, device: torch.device) -> float:
    """Median microseconds to plan and to build a decode step, blocks that begin in it included. Sequences begin blocks
    at different steps."""
    memory = make_memory(num_seqs, context + num_steps)
    params, sequences = SamplingParams(), []
    for i in range(num_seqs):
        ids, own = [1] * (context - i % BLOCK_TOKENS), memory.create_sequence(view)
        chain, request = memory.prefixes.chain(), Request(str(i), params)
        sequences.append(Sequence(request, ids, params, 1, None, chain, ids.copy(), memory=own))
    builder = BatchBuilder(memory.tensors, device, num_seqs)
    planner = StepPlanner(memory, builder, num_seqs)
    times = []
    for _ in range(num_steps):
        scheduled = []
        for sequence in sequences:
            assert sequence.memory is not None
            sequence.num_computed = len(sequence.token_ids) - 1
            memory.append(sequence.memory, len(sequence.token_ids))
            scheduled.append(Scheduled(sequence, 1))
        start = time.perf_counter()
        plan = planner.plan(scheduled)
        builder.expected = plan.header.number
        builder.build(plan)
        times.append(time.perf_counter() - start)
        for sequence in sequences:
            sequence.token_ids.append(2)
    for sequence in sequences:
        assert sequence.memory is not None
        memory.free(sequence.memory)
    memory.close()
    return statistics.median(times[num_steps // 4 :]) * 1e6  # the first plans have all tables
