"""Upper bounds for every fleet: hits of one cache for all requests, and load of an ideal placement."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from benchmarks.simulator.device import Device
from benchmarks.simulator.memory import make_memory, prompt_of
from benchmarks.simulator.traffic import Arrival


def hit_share(arrivals: Sequence[Arrival], device: Device, cache_tokens: int) -> float:
    """Hit share of one cache of this many tokens that sees one request at a time, with LRU eviction. It keeps no
    generated tokens."""
    memory = make_memory(device, cache_tokens)
    hits = 0
    for arrival in arrivals:
        chain, prompt = prompt_of(arrival, memory)
        sequence = memory.create_sequence("block_table")
        cached = memory.share_prefix(sequence, chain, prompt)
        hits += cached
        memory.append(sequence, len(prompt))
        memory.prefixes.stage_prefix(sequence, prompt, cached, len(prompt))
        memory.prefixes.commit_prefixes()
        memory.free(sequence)
    memory.close()
    return hits / sum(arrival.num_tokens for arrival in arrivals)


def infinite_hit_share(arrivals: Sequence[Arrival], unit_tokens: int) -> float:
    """Share of prompt tokens in whole units that an earlier prompt had, too; without a prompt's last token, which is
    always computed."""
    return sum(known_hits(arrivals, unit_tokens)) / sum(arrival.num_tokens for arrival in arrivals)


def known_hits(arrivals: Sequence[Arrival], unit_tokens: int) -> list[int]:
    """Tokens of each prompt in whole units that an earlier prompt had, too, without the last token."""
    seen: set[bytes] = set()
    hits = []
    for arrival in arrivals:
        known = next((i for i, digest in enumerate(arrival.digests) if digest not in seen), len(arrival.digests))
        hits.append(min(known, (arrival.num_tokens - 1) // unit_tokens) * unit_tokens)
        seen.update(arrival.digests)
    return hits


def load_bounds(arrivals: Sequence[Arrival], device: Device, num_replicas: int) -> tuple[float, float]:
    """Load of the most loaded replica over the mean, for ideal placements: a request finds anywhere the prefix of any
    earlier prompt, and only the work computed so far counts, no queues and caches. The worse of balancing prompt tokens
    and of balancing the seconds that they take alone.

    Returns:
        for placement in order of arrival, each at the replica with the least work; and with all requests known in
            advance, the longest placed first. The first is the bound for a router, which cannot know that the trace
            ends.
    """
    hits = known_hits(arrivals, device.unit_tokens)
    tokens = [float(arrival.num_tokens - hit) for arrival, hit in zip(arrivals, hits, strict=True)]
    seconds = [
        device.step_s(round(n), round(n * hit + n * (n + 1) / 2), 0) for n, hit in zip(tokens, hits, strict=True)
    ]
    come, known = (
        max(_max_over_mean(sorted(jobs, reverse=True) if known else jobs, num_replicas) for jobs in (tokens, seconds))
        for known in (False, True)
    )
    return come, known


def _max_over_mean(jobs: Sequence[float], num_replicas: int) -> float:
    """Of jobs placed in this order, each where there is least work."""
    totals = [0.0] * num_replicas
    for job in jobs:
        heapq.heapreplace(totals, totals[0] + job)
    return max(totals) * num_replicas / sum(totals)
