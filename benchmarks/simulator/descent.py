"""Requests of several sequences: which of them gets the next token, and which are forked or freed."""

from __future__ import annotations

from collections import abc
from itertools import groupby
from operator import attrgetter

from folio.app.engine.request.request import Sequence
from folio.app.engine.schedule.scheduler import Scheduler
from folio.vmem import KVMemory

# For each step of a request's outputs, the parent of each of its sequences among those of the step before.
Steps = abc.Sequence[abc.Sequence[int]]


def descend(
    memory: KVMemory, scheduler: Scheduler, sampling: abc.Sequence[Sequence], descents: abc.Mapping[str, Steps]
) -> list[Sequence]:
    """The sequences that get their next token: those of `sampling` without the ones that no child continues, and the
    forks of those that several continue.

    Args:
        sampling: sequences that have computed their last token, those of a request one after the other.
        descents: of beam searches, by request.
    """
    going: list[Sequence] = []
    for request, group in groupby(sampling, key=attrgetter("request")):
        sequences = list(group)
        first = sequences[0]
        parents: abc.Sequence[int] = range(len(sequences))
        if first.num_forks:
            parents, first.num_forks = [0] * (1 + first.num_forks), 0
        elif request.request_id in descents:
            parents = descents[request.request_id][first.num_output_tokens]
        children = [
            sequences[parent] if parent not in parents[:i] else _fork(memory, sequences[parent])
            for i, parent in enumerate(parents)
        ]
        for sequence in sequences:
            if sequence not in children:
                scheduler.remove_sequence(sequence)
        if len(children) > 1 and len(children) == len(request.sequences):
            for i, child in enumerate(children):
                child.index = i
            request.sequences.sort(key=attrgetter("index"))
        going += children
    return going


def _fork(memory: KVMemory, parent: Sequence) -> Sequence:
    assert parent.memory is not None
    chain = parent.chain.fork(parent.num_computed)
    return Sequence(
        parent.request,
        parent.prompt_token_ids,
        parent.params,
        parent.max_tokens,
        None,
        chain,
        parent.token_ids.copy(),
        num_computed=parent.num_computed,
        max_computed=parent.num_computed,
        memory=memory.fork(parent.memory, parent.num_computed, None, chain),
        num_cached_tokens=parent.num_cached_tokens,
        use=parent.use,
    )
