"""KV memory in simulated time: the real one, without contents."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.simulator.backend import CountingBackend
from benchmarks.simulator.device import Device
from benchmarks.simulator.traffic import Arrival
from folio.vmem import EvictionOrder, KVMemory, LayerGroup, LayerSpec, MappingOptions, TokenChain, plan_layout
from folio.vmem.tensors import LocalContents

_NEVER_S = 1e9
_PAGE_BYTES = 4096


def make_memory(
    device: Device,
    cache_tokens: int,
    eviction: EvictionOrder | None = None,
    clock: Callable[[], float] = time.monotonic,
    *,
    prefix_cache: bool = True,
) -> KVMemory:
    """KV memory for this many tokens, and at least for one replica's."""
    # The width of a row of keys and values makes a block one page.
    tokens = device.unit_tokens
    dim = -(-_PAGE_BYTES // (2 * tokens))
    layout = plan_layout([LayerSpec(1, dim, dim)], torch.int8, granularity_bytes=_PAGE_BYTES, block_tokens=tokens)
    return KVMemory(
        CountingBackend(),
        [LayerGroup((0,), layout)],
        budget_bytes=max(cache_tokens, device.cache_tokens) // tokens * layout.page_bytes,
        num_regions=1,
        max_tokens=device.cache_tokens,
        prefix_cache=prefix_cache,
        eviction=eviction,
        contents=lambda tensors: LocalContents(tensors, copy_blocks=lambda *_: None),
        clock=clock,
        options=MappingOptions(background=False, overlap=False, eager_allocation=False, idle_release_s=_NEVER_S),
    )


def prompt_of(arrival: Arrival, memory: KVMemory) -> tuple[TokenChain, list[int]]:
    """The prompt's hashes, and tokens. Tokens of whole units are all alike, because only their hashes matter."""
    chain = memory.prefixes.chain(())
    chain.units, chain.digests = list(arrival.units), list(arrival.digests)
    whole = len(arrival.units) * memory.prefixes.unit_tokens
    return chain, [0] * whole + [arrival.tail] * (arrival.num_tokens - whole)
