"""Replay of a trace against one cache, one request at a time, in an order of eviction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.simulator import single_cache
from benchmarks.simulator.device import Device
from benchmarks.simulator.eviction_orders import LeastRecentlyUsed, Optimal, Uses
from benchmarks.simulator.memory import make_memory, prompt_of
from benchmarks.simulator.traffic import Arrival
from folio.vmem import PrefixUse

ORDERS = ("lru", "folio", "optimal")
# Generated tokens differ from all tokens of prompts.
_GENERATED = 1 << 24


@dataclass(frozen=True, slots=True)
class Replayed:
    """Outcome of a replay.

    Attributes:
        infinite_hit_share: of a cache that evicts nothing.
        num_harmful: evicted blocks that a later prompt needed.
    """

    order: str
    hit_share: float
    infinite_hit_share: float
    num_harmful: int


def replay(arrivals: Sequence[Arrival], order: str, device: Device, cache_tokens: int) -> Replayed:
    """Replay these requests; each ends, with its output, before the next one begins."""
    now, unit = 0.0, device.unit_tokens
    tokens = cache_tokens // unit * unit
    uses = Uses([arrival.digests for arrival in arrivals])
    eviction = {"lru": LeastRecentlyUsed(), "folio": None, "optimal": Optimal(uses.next_use)}[order]
    memory = make_memory(replace(device, cache_tokens=tokens), tokens, eviction, lambda: now)
    known = single_cache.known_hits(arrivals, unit)
    found = harmful = 0
    for number, arrival in enumerate(arrivals):
        now, uses.now = arrival.at, number
        chain, prompt = prompt_of(arrival, memory)
        sequence = memory.create_sequence("block_table")
        cached = memory.share_prefix(sequence, chain, prompt, PrefixUse(arrival.kind, len(prompt)))
        cached = cached // unit * unit
        found += cached
        harmful += (known[number] - cached) // unit
        whole = (prompt + [_GENERATED + number] * arrival.num_output_tokens)[: memory.max_tokens]
        memory.append(sequence, len(whole))
        memory.prefixes.stage_prefix(sequence, whole, cached, len(whole))
        memory.prefixes.commit_prefixes()
        memory.free(sequence)
    memory.check_integrity()
    memory.close()
    total = sum(arrival.num_tokens for arrival in arrivals)
    return Replayed(order, found / total, sum(known) / total, harmful)
