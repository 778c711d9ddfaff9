"""The caches that many replicas would like to be."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.simulator.device import Device
from benchmarks.simulator.memory import make_memory, prompt_of
from benchmarks.simulator.traffic import Arrival


def hit_share(arrivals: Sequence[Arrival], device: Device, cache_tokens: int) -> float:
    """Of all prompt tokens, those that one cache of so many tokens has, as large as the replicas' together, say. It
    sees one request at a time, and gives up the least recently used first.

    What is generated is not kept: the whole cache is for prompts.
    """
    memory = make_memory(device, cache_tokens)
    hits = 0
    for arrival in arrivals:
        chain, prompt = prompt_of(arrival, memory)
        sequence = memory.open("block_table")
        cached = memory.reuse(sequence, chain, prompt)
        hits += cached
        memory.append(sequence, len(prompt))
        memory.begin(sequence, prompt, cached, len(prompt))
        memory.commit()
        memory.free(sequence)
    memory.close()
    return hits / sum(arrival.num_tokens for arrival in arrivals)


def infinite_hit_share(arrivals: Sequence[Arrival], unit_tokens: int) -> float:
    """Of all prompt tokens, those in whole units that some prompt before had, too; never a prompt's last token, because
    that is computed in any case."""
    seen: set[bytes] = set()
    hits = 0
    for arrival in arrivals:
        known = next((i for i, digest in enumerate(arrival.digests) if digest not in seen), len(arrival.digests))
        hits += min(known, (arrival.num_tokens - 1) // unit_tokens) * unit_tokens
        seen.update(arrival.digests)
    return hits / sum(arrival.num_tokens for arrival in arrivals)


def infinite_block_hits(arrivals: Sequence[Arrival]) -> float:
    """The trace's own count: of all blocks of prompts, whole or not, those that some prompt before had, too."""
    seen: set[bytes | int] = set()
    hits = blocks = 0
    for arrival in arrivals:
        whole_and_rest: tuple[bytes | int, ...] = (*arrival.digests, *arrival.rest)
        for block in whole_and_rest:
            hits += block in seen
            blocks += 1
            seen.add(block)
    return hits / blocks
