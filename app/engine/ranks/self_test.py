"""Self-test of a loaded model: logits of packed batches are compared with those of transformers' own attention.

Some models ignore a registered attention function, others silently mix the sequences of a packed batch. Two short
prompts are computed by Folio, in chunks that mix prefill and decode, and by transformers, one prompt at a time.

For `batch_invariant` each prompt is also computed whole and token by token, to be compared bit for bit.

With a cache of 8-bit floats the packed logits are compared with those of one prompt at a time whose keys and values are
rounded in the same way; these may differ from transformers' by no more than rounding explains.
"""

from __future__ import annotations

import logging
import statistics
from collections import abc

import torch

from folio.app.engine.layers.batch import demands
from folio.app.engine.layers.batch_invariance import VariantOperations, variance
from folio.app.engine.model.loader import LoadedModel
from folio.app.engine.ranks.executor import Executor
from folio.app.engine.request.request import Request, Sequence
from folio.app.engine.sampling.params import SamplingParams
from folio.app.engine.schedule.scheduled import Scheduled
from folio.app.errors import ModelError
from folio.vmem import KVMemory, LayerGroup, ViewPolicy, VmemError, select_backend
from folio.vmem.tensor_parallel.mirror import mirror

logger = logging.getLogger(__name__)

# Most relative difference of a row of logits. Mixed sequences give about 1 in nearly every row; rounding gives far less
# than these.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.03}
# Least tolerance with a cache of 8-bit floats, where a difference in the last bit may round to another value; and the
# most by which such a cache may change transformers' logits.
TOLERANCE_8_BITS, TOLERANCE_OF_ROUNDING = 0.03, 0.8
# Tokens of both prompts in each step: prefill, a mixed step, a chunk beside a decode, decodes.
STEPS = ((11, 0), (1, 7), (1, 13), (1, 1))


def self_test(
    executor: Executor, groups: abc.Sequence[LayerGroup], view: ViewPolicy, *, batch_invariant: bool = False
) -> None:
    """Raise `ModelError` unless packed logits agree with the model's own. Creates a small KV memory for the test.

    With "auto" one prompt is read in the region view and the other in the home view.

    Args:
        batch_invariant: raise `ConfigError`, too, unless whole prompts and single tokens have the same logits.
    """
    model = executor.model
    generator = torch.Generator().manual_seed(0)
    lengths = [sum(counts) for counts in zip(*STEPS, strict=True)]
    prompts = [torch.randint(model.vocab_size, (length,), generator=generator) for length in lengths]
    expected, tolerance = [executor.own_logits(prompt) for prompt in prompts], TOLERANCE[model.dtype]
    if model.generates and (width := expected[0].shape[1]) < model.vocab_size:  # kernels change logits by token id
        raise ModelError(f"the model has {width} logits per token, fewer than its vocab_size of {model.vocab_size}")
    if model.cache_dtype != model.dtype:
        own, expected = expected, [executor.rounded_logits(prompt) for prompt in prompts]
        _check_rounding(model, expected, own)
        tolerance = max(tolerance, TOLERANCE_8_BITS)
    views: tuple[ViewPolicy, ...] = ("block_table", "region") if view == "auto" else (view, view)
    memory = _make_memory(executor, groups, lengths)
    try:
        executor.bind_memory(memory)
        actual = _logits(executor, memory, prompts, views, STEPS)
        if batch_invariant:
            with VariantOperations() as operations:
                executor.run_largest(lengths[0], 1)
            if operations.names:
                names = ", ".join(sorted(operations.names))
                raise variance(f"torch computes {names} in {model.module.config.model_type}")
            whole = _logits(executor, memory, prompts, views, [(lengths[0], 0), (0, lengths[1])])
            single = [(int(i < lengths[0]), int(i < lengths[1])) for i in range(max(lengths))]
            _check_equal(model, whole, actual)
            _check_equal(model, whole, _logits(executor, memory, prompts, views, single))
    finally:
        memory.close()
    difference = _difference(model, actual, expected)
    if not difference <= tolerance:  # NaN fails too
        raise ModelError(
            f"self-test failed: {model.module.config.model_type} gives other logits in a packed batch than alone "
            f"(relative difference {difference:.2g}, allowed {tolerance}); outputs would be wrong"
        )
    logger.info("self-test passed: relative difference %.2g", difference)


def _make_memory(executor: Executor, groups: abc.Sequence[LayerGroup], lengths: list[int]) -> KVMemory:
    """A memory for sequences of these lengths, on all ranks."""
    num_pages = sum(len(lengths) * group.most_pages(max(lengths), max(lengths)) for group in groups)
    page_bytes = groups[0].layout.page_bytes
    extent_pages = groups[0].layout.extent_pages
    num_pages = -(-num_pages // extent_pages) * extent_pages
    capacity = num_pages * page_bytes + groups[0].layout.handle_bytes  # and the anchor page
    local = select_backend(executor.model.module.device, capacity_bytes=capacity)
    backend, contents = mirror(local, executor.ranks, capacity_bytes=capacity)
    try:
        return KVMemory(
            backend,
            groups,
            budget_bytes=num_pages * page_bytes,
            num_regions=len(lengths),
            max_tokens=max(lengths),
            prefix_cache=False,
            contents=contents,
        )
    except VmemError:
        backend.close()
        raise


def _check_equal(model: LoadedModel, whole: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    different = sum(int((a != b).any(-1).sum()) for a, b in zip(whole, others, strict=True))
    if different:
        raise variance(
            f"{different} of {sum(map(len, whole))} tokens of {model.module.config.model_type} have other logits in "
            "other steps than in those of a whole prompt"
        )


def _check_rounding(model: LoadedModel, rounded: list[torch.Tensor], own: list[torch.Tensor]) -> None:
    kind = model.module.config.model_type
    difference = statistics.median(_relative(torch.cat(rounded), torch.cat(own)))
    logger.info("KV cache of %s: relative difference of logits %.2g", model.cache_dtype, difference)
    if not difference <= TOLERANCE_OF_ROUNDING:
        raise ModelError(
            f"self-test failed: a KV cache of {model.cache_dtype} changes the logits of {kind} "
            f"(relative difference {difference:.2g}, allowed {TOLERANCE_OF_ROUNDING}); set kv_dtype to auto"
        )


def _logits(
    executor: Executor,
    memory: KVMemory,
    prompts: list[torch.Tensor],
    views: abc.Sequence[ViewPolicy],
    steps: abc.Sequence[tuple[int, ...]],
) -> list[torch.Tensor]:
    """Each prompt's logits `[num_tokens, vocab_size]`, computed in these steps."""
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    sequences = []
    for i, tokens in enumerate(prompt.tolist() for prompt in prompts):
        params = SamplingParams()
        request = Request(f"self-test-{i}", params)
        sequences.append(Sequence(request, tokens, params, 1, None, memory.prefixes.chain(), tokens.copy()))
    memories = [memory.create_sequence(view) for view in views]
    try:
        for sequence, own in zip(sequences, memories, strict=True):
            sequence.memory = own
            memory.append(own, len(sequence.token_ids))
        for counts in steps:
            scheduled = [Scheduled(sequence, n) for sequence, n in zip(sequences, counts, strict=True) if n]
            memory.ensure(demands(scheduled))
            actual = executor.run(executor.planner.plan(scheduled, all_logits=True), memory)
            for s, rows in zip(scheduled, actual.split([s.num_tokens for s in scheduled]), strict=True):
                logits[sequences.index(s.sequence)].append(rows.clone())
                s.sequence.num_computed += s.num_tokens
    finally:
        for own in memories:
            memory.free(own)
    return [torch.cat(rows) for rows in logits]


def _difference(model: LoadedModel, actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The relative difference of rows in first chunks, or of rows that read tokens cached by earlier steps if that is
    larger."""
    fresh: list[float] = []
    cached: list[float] = []
    for rows, correct, counts in zip(actual, expected, zip(*STEPS, strict=True), strict=True):
        first, relative = next(filter(None, counts)), _relative(rows, correct)
        fresh += relative[:first]
        cached += relative[first:]
    # With few bits rounding can change a router's choice of experts, and with that single rows; mixed sequences change
    # nearly all rows that read the cache, or nearly all that do not.
    summary = max if model.cache_dtype == torch.float32 else statistics.median
    return max(summary(fresh), summary(cached))


def _relative(actual: torch.Tensor, correct: torch.Tensor) -> list[float]:
    """Relative difference of each row."""
    relative: list[float] = ((actual.float() - correct).norm(dim=-1) / correct.norm(dim=-1)).tolist()
    return relative
