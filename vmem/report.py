"""Where KV memory is, at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupReport:
    """Blocks of one layer group. `free_blocks` have pages; `cached_blocks` of them are kept for their content, others
    are `parked_blocks` that regions still show, and `eager_blocks` of those were mapped ahead for sequences to come."""

    block_tokens: int
    block_bytes: int
    active_blocks: int
    free_blocks: int
    cached_blocks: int
    parked_blocks: int
    eager_blocks: int


@dataclass(frozen=True, slots=True)
class PinReport:
    """One pinned prefix. `num_bytes` counts blocks that it shares with other pins as well."""

    name: str
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """KV memory at one moment. Counts and times run from the start.

    Attributes:
        budget_bytes, budget_revision: what `set_budget` last accepted.
        reserved_bytes: virtual addresses, with or without memory behind them.
        mapped_bytes: virtual addresses with memory behind them; a page mapped twice counts twice.
        physical_bytes: memory taken from the device.
        anchor_bytes: memory taken beside that and beside the budget: the anchor page, which stays.
        active_bytes: of the physical, owned by sequences.
        cached_bytes: of these, free and kept for their content (prefix cache).
        pinned_bytes: of the active, owned by pinned prefixes.
        swapped_bytes, swap_budget_bytes: host memory that preempted sequences take, and may take.
        parked_bytes: of these, free and mapped in some region: where a sequence ended, or ahead of need.
        eager_bytes: of the parked, mapped ahead for the next prompts and tokens.
        num_mappings: pages mapped now, counted once an address.
        map_calls, unmap_calls: pages mapped and unmapped.
        alias_calls: of the pages mapped, those that a region showed already.
        create_calls, destroy_calls: pages taken from the device and given back.
        exposed_us, hidden_us: mapping time that calls of the engine waited for, and that passed beside them.
        num_exposed, num_hidden: units of mapping work in each.
        mapper_failures: units of work the device refused the mapper; it tries again.
        adoptions, adopted_blocks: sequences that took over a parked region, and blocks they found mapped there.
        demotions: sequences that went on through their block table because the mapping budget was used up.
        queried_tokens, hit_tokens: tokens of sequences that began, and how many of them the prefix cache had.
        evicted_blocks: blocks whose content was given up for other content, or with their page.
        cached_prefixes: prefixes known now, one for each unit of tokens.
        copied_blocks: copies on write.
        pins: pinned prefixes.
    """

    budget_bytes: int
    budget_revision: int
    reserved_bytes: int
    mapped_bytes: int
    physical_bytes: int
    anchor_bytes: int
    active_bytes: int
    cached_bytes: int
    pinned_bytes: int
    swapped_bytes: int
    swap_budget_bytes: int
    parked_bytes: int
    eager_bytes: int
    num_mappings: int
    map_calls: int
    unmap_calls: int
    alias_calls: int
    create_calls: int
    destroy_calls: int
    exposed_us: float
    hidden_us: float
    num_exposed: int
    num_hidden: int
    mapper_failures: int
    adoptions: int
    adopted_blocks: int
    demotions: int
    queried_tokens: int
    hit_tokens: int
    evicted_blocks: int
    cached_prefixes: int
    copied_blocks: int
    pins: tuple[PinReport, ...]
    groups: tuple[GroupReport, ...]
