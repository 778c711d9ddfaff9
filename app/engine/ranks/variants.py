"""Variants: steps that make a model's kernels compile, or load, every variant that requests may need later.

Kernels are specialised by the number of a sequence's queries, by whether sequences decode beside others, by whether the
cache of a decode is split, and by the view. Warm-up requests would not need them all: their contexts are short, and all
of them have the view that sequences begin with.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator

from folio.app.engine.layers.batch import demands, memory_of
from folio.app.engine.ranks.executor import Executor
from folio.app.engine.request.request import Request, Sequence
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.schedule.scheduled import Scheduled
from folio.vmem import KVMemory, View, ViewPolicy

# Kernels choose their tiles by the number of queries up to this one.
_MOST_QUERIES = 256
# Contexts that are split, and that are not.
_LONG, _SHORT = 2048, 1

# (tokens cached before the step, tokens to compute) of each sequence.
Shape = tuple[tuple[int, int], ...]


def run_variants(
    executor: Executor, memory: KVMemory, view: ViewPolicy, *, max_num_seqs: int, step_tokens: int
) -> None:
    """Compute a step of each kind in each view that sequences can have. Their tokens are meaningless, and so is what
    they read.

    Raises:
        KernelError: a configured kernel cannot serve this model.
        VmemError: the device refuses memory.
    """
    views: abc.Sequence[View] = ("region", "block_table") if view == "auto" else (view,)
    for shape in step_shapes(max_num_seqs, step_tokens, memory.max_tokens):
        if sum(memory.pages_for(sum(counts)) for counts in shape) <= memory.num_free_pages:
            for one in views:
                _run(executor, memory, shape, [one] * len(shape))
            if len(views) > 1 and len(shape) > 1:  # parts of one step
                _run(executor, memory, shape, [views[i % 2] for i in range(len(shape))])


def step_shapes(max_num_seqs: int, step_tokens: int, max_tokens: int) -> Iterator[Shape]:
    """Prompts alone and beside a short and a long decode; then decodes, short ones and with a long one among them.

    Args:
        max_tokens: most tokens of a sequence.
    """
    contexts = sorted({min(context, max_tokens - 1) for context in (_SHORT, _LONG)})
    powers = [1 << i for i in range(1, _MOST_QUERIES.bit_length())]
    for num_queries in (n for n in powers if n <= min(step_tokens, max_tokens)):
        yield ((0, num_queries),)
        if num_queries < step_tokens and max_num_seqs > 1:
            yield from (((0, num_queries), (context, 1)) for context in contexts)
    counts = [1 << i for i in range(max_num_seqs.bit_length())]
    for count in sorted({*counts, max_num_seqs}):
        yield from (((context, 1), *[(contexts[0], 1)] * (count - 1)) for context in contexts)


def _run(executor: Executor, memory: KVMemory, shape: Shape, views: abc.Sequence[View]) -> None:
    scheduled: list[Scheduled] = []
    try:
        for i, ((num_computed, num_tokens), view) in enumerate(zip(shape, views, strict=True)):
            tokens = [0] * (num_computed + num_tokens)
            params = SamplingParams()
            request = Request(f"variant {i}", params)
            sequence = Sequence(request, tokens, params, 1, None, memory.prefixes.chain(), tokens.copy())
            sequence.memory, sequence.num_computed = memory.create_sequence(view), num_computed
            scheduled.append(Scheduled(sequence, num_tokens))
            memory.append(sequence.memory, len(tokens))
        memory.ensure(demands(scheduled))
        executor.run(executor.planner.plan(scheduled), memory)
    finally:
        for s in scheduled:
            memory.free(memory_of(s))
