"""Prefix cache: hits, misses, eviction, pins and swapping."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from folio.vmem import (
    IntegrityError,
    KVMemory,
    LayoutKind,
    LocalContents,
    OutOfPages,
    OutOfSwap,
    PinError,
    SequenceMemory,
    StepDemand,
    VmemError,
)
from tests.vmem.conftest import Make
from tests.vmem.sequences import begin, check, compute, launch, prompt, reads, run, serve, submit
from tests.vmem.small_memory import (
    PAGE_BYTES,
    FlakyCuda,
    FlakyHost,
    FlakyMirror,
    Tokens,
    do_background,
    read_state,
)


def decode(memory: KVMemory, sequence: SequenceMemory, tokens: Tokens, token_ids: list[int]) -> None:
    """Compute these tokens in a step each."""
    for token in token_ids:
        tokens.ids.append(token)
        memory.append(sequence, len(tokens.ids))
        memory.prefixes.stage_prefix(sequence, tokens.ids, len(tokens.ids) - 1, len(tokens.ids))
        compute(memory, (sequence, tokens, len(tokens.ids) - 1))


def test_the_hash_is_the_same_everywhere(make: Make) -> None:
    """Replicas and routers compare digests, which must not depend on the process as Python's `hash` does."""
    memory = make()
    chain = memory.prefixes.chain(("salt",))
    chain.extend(list(range(40)))
    assert [digest.hex() for digest in chain.digests] == [
        "490fa165de81294d2998444f726cfdeb",
        "648cfccce9e151791d6d3e5f28f559d1",
    ]


def test_whole_blocks_are_shared_and_a_partial_one_is_copied(make: Make) -> None:
    memory = make()
    first = run(memory, prompt(50), found=0)
    second = run(memory, prompt(50), found=48)
    assert second.groups[0].block_ids[:3] == first.groups[0].block_ids[:3]
    third = run(memory, prompt(40) + prompt(10, 1), found=40)
    assert third.groups[0].block_ids[:2] == first.groups[0].block_ids[:2]
    assert third.groups[0].block_ids[2] != first.groups[0].block_ids[2]
    run(memory, prompt(35) + prompt(9, 2), found=32)  # three tokens are not worth a copy
    serve(memory, prompt(48), found=47)  # the last token's logits are wanted
    assert memory.report().hit_tokens == 48 + 40 + 32 + 47


@pytest.mark.parametrize(
    ("settings", "served"),
    [
        (
            {},
            [
                (prompt(50), "", 0),
                (prompt(50), "a", 0),
                (prompt(50), "b", 0),
                (prompt(50), "a", 48),
                (prompt(50), "", 48),
            ],
        ),
        ({"prefix_cache": False}, [(prompt(50), "", 0), (prompt(50), "", 0)]),
        (  # with one hash for everything the first prefix is found, and never by mistake
            {"hash": lambda parent, content: b"same"},
            [
                (prompt(50), "", 0),
                (prompt(50, 1), "", 0),
                (prompt(50), "", 16),  # its own second unit has the hash of its first
                (prompt(20), "", 16),
            ],
        ),
    ],
    ids=["salts", "no cache", "collisions"],
)
def test_freed_prefixes_are_found_by_their_tokens_and_keys(
    make: Make, settings: dict[str, Any], served: list[tuple[list[int], str, int]]
) -> None:
    memory = make(**settings)
    for ids, salt, found in served:
        serve(memory, ids, found, (salt,) if salt else ())
        assert (memory.report().cached_bytes > 0) == memory.prefixes.enabled


def test_eviction_without_knowledge_is_least_recently_used_first_and_ends_before_beginnings(make: Make) -> None:
    memory = make(num_pages=12)
    serve(memory, prompt(64), found=0)
    serve(memory, prompt(64, 1), found=0)
    serve(memory, prompt(96, 2), found=0)  # takes six of twelve: the eight kept lose two
    found = [memory.prefixes.match(memory.prefixes.chain(), prompt(65, which)).num_tokens for which in range(3)]
    assert found == [32, 64, 64]


def test_generated_tokens_are_found_by_the_next_turn(make: Make) -> None:
    memory = make()
    tokens = Tokens(memory.prefixes.chain(), prompt(20))
    sequence = submit(memory, tokens)
    compute(memory, (sequence, tokens, 0))
    decode(memory, sequence, tokens, prompt(30, 7))
    memory.free(sequence)
    serve(memory, tokens.ids + prompt(5, 8), found=48)


def test_requests_of_one_step_share_pending_units(make: Make) -> None:
    memory = make()
    one, two = (Tokens(memory.prefixes.chain(), prompt(40) + prompt(8, seed)) for seed in (1, 2))
    first = submit(memory, one, found=0)
    second = submit(memory, two, found=32)
    assert second.groups[0].block_ids[:2] == first.groups[0].block_ids[:2]
    compute(memory, (first, one, 0), (second, two, 32))


def test_a_match_with_an_announced_prefix_says_wait(make: Make) -> None:
    memory = make()
    tokens = Tokens(memory.prefixes.chain(), prompt(64))
    writer = memory.create_sequence("block_table")
    memory.share_prefix(writer, tokens.chain, tokens.ids)
    memory.prefixes.announce_prefill(writer, 64)
    memory.append(writer, 32)
    memory.prefixes.stage_prefix(writer, tokens.ids, 0, 32)
    other = [*prompt(64), 1]
    match = memory.prefixes.match(memory.prefixes.chain(), other)
    assert (match.num_tokens, match.is_being_computed) == (32, True)
    memory.prefixes.abort_prefixes()
    assert memory.prefixes.match(memory.prefixes.chain(), other).num_tokens == 0
    memory.free(writer)  # it will never come
    assert not memory.prefixes.match(memory.prefixes.chain(), other).is_being_computed


def test_a_staged_unit_says_wait_until_it_has_a_state(make: Make) -> None:
    memory = make(stateful=True)
    tokens = Tokens(memory.prefixes.chain(), prompt(32))
    writer = memory.create_sequence("block_table")
    memory.share_prefix(writer, tokens.chain, tokens.ids)
    memory.append(writer, 32)
    memory.prefixes.stage_prefix(writer, tokens.ids, 0, 32)
    assert memory.prefixes.match(memory.prefixes.chain(), prompt(40)).is_being_computed
    memory.prefixes.abort_prefixes()
    assert not memory.prefixes.match(memory.prefixes.chain(), prompt(40)).is_being_computed


def test_a_sequence_may_be_freed_before_its_step_ends(make: Make) -> None:
    """Nobody shares its units."""
    memory = make()
    memory.free(submit(memory, Tokens(memory.prefixes.chain(), prompt(50))))
    memory.prefixes.commit_prefixes()
    assert memory.report().cached_bytes == 0


def test_units_of_a_failed_launch_are_forgotten(make: Make) -> None:
    memory = make()
    sequence = submit(memory, Tokens(memory.prefixes.chain(), prompt(50)))
    units = memory.prefixes.commit_prefixes()
    match = memory.prefixes.match(memory.prefixes.chain(), prompt(60))
    assert (len(units), match.num_tokens) == (3 * len(memory.groups), 48)
    memory.prefixes.discard_prefixes(units)
    assert memory.prefixes.match(memory.prefixes.chain(), prompt(60)).num_tokens == 0
    memory.free(sequence)


def test_a_fork_of_a_chain_goes_on_with_tokens_of_its_own(make: Make) -> None:
    memory = make()
    parent, expected = memory.prefixes.chain(), memory.prefixes.chain()
    parent.extend(prompt(64))
    fork, ids = parent.fork(40), prompt(32) + prompt(32, 1)
    fork.extend(ids)
    expected.extend(ids)
    assert (fork.units, fork.digests) == (expected.units, expected.digests)


def test_the_prefix_of_a_swapped_sequence_is_cached_again(make: Make) -> None:
    memory = make(swap_pages=20)
    swapped = memory.swap_out([run(memory, prompt(64))])
    memory.tree.clear()
    memory.swap_in(swapped)
    assert memory.report().active_bytes == 4 * PAGE_BYTES
    run(memory, [*prompt(64), 1], found=64)


@pytest.mark.parametrize("stateful", [False, True])
def test_a_pinned_prefix_has_the_pins_blocks(make: Make, stateful: bool) -> None:
    """Two sequences compute one prompt at once, and the one whose blocks are not cached is pinned."""
    memory = make(num_pages=20 if stateful else 16, stateful=stateful)
    begun = []
    for _ in range(2):
        tokens = Tokens(memory.prefixes.chain(), prompt(32))
        sequence = memory.create_sequence("block_table")
        memory.share_prefix(sequence, tokens.chain, tokens.ids)
        begun.append((sequence, tokens, 0))
    for sequence, tokens, _ in begun:
        memory.append(sequence, 32)
        memory.prefixes.stage_prefix(sequence, tokens.ids, 0, 32)
    compute(memory, *begun)
    memory.pin("p", begun[1][0], 32)
    for sequence, *_ in begun:
        memory.free(sequence)
    serve(memory, prompt(150, 5))
    serve(memory, prompt(150, 6))
    serve(memory, prompt(40), found=32)


def test_cached_blocks_up_to_the_floor_are_kept(still: Make) -> None:
    memory = still(floor_pages=12, idle_release_s=0.0, cache_release_s=0.0)
    for seed in range(2):
        serve(memory, prompt(160, seed))
    assert memory.report().cached_bytes > 12 * PAGE_BYTES
    do_background(memory)
    assert memory.report().cached_bytes == memory.report().physical_bytes == 12 * PAGE_BYTES


def test_a_failed_step_caches_nothing(make: Make) -> None:
    memory = make()
    sequence = submit(memory, Tokens(memory.prefixes.chain(), prompt(50)))
    memory.prefixes.abort_prefixes()
    memory.free(sequence)
    assert memory.report().cached_bytes == 0
    serve(memory, prompt(50), found=0)


def test_a_window_needs_only_its_window(make: Make) -> None:
    """A hit does not need the blocks before the window of 40 tokens."""
    memory = make(num_pages=60, windowed=True)
    tokens = Tokens(memory.prefixes.chain(), prompt(112))
    sequence = submit(memory, tokens)
    compute(memory, (sequence, tokens, 0))
    tokens.ids += prompt(1, 3)
    memory.append(sequence, 113, start=112)  # the first four blocks have left the window
    compute(memory, (sequence, tokens, 112))
    windowed = memory.group_memories[1]
    while (block_id := windowed.pool.cached.first()) is not None:
        memory.tree.evict_block(1, block_id)
    memory.free(sequence)
    found = run(memory, prompt(120), found=112)
    assert found.groups[1].first == 4
    memory.free(found)
    serve(memory, prompt(64), found=0)  # here the window's blocks are gone


def test_a_state_is_found_where_a_step_has_ended(make: Make) -> None:
    memory = make(stateful=True)
    tokens = Tokens(memory.prefixes.chain(), prompt(48))
    first = submit(memory, tokens, found=0)
    compute(memory, (first, tokens, 0))
    other = Tokens(memory.prefixes.chain(), prompt(48) + prompt(4, 1))
    second = submit(memory, other, found=48)
    memory.ensure([StepDemand(second, 48, 52)])
    assert read_state(memory, second) == tokens.contents[-1]  # a copy: the first goes on in its own
    compute(memory, (second, other, 48))
    tokens.ids += prompt(1, 2)
    memory.append(first, 49)
    memory.ensure([StepDemand(first, 48, 49)])
    assert read_state(memory, first) == tokens.contents[-2]
    memory.free(first)
    memory.free(second)
    serve(memory, prompt(40), found=0)  # no step ended at 32


def test_a_prompt_waits_for_an_announced_state(make: Make) -> None:
    """The tokens are cached, but not the state after them: another sequence computes it again."""
    memory = make(stateful=True)
    serve(memory, prompt(48))
    second = memory.create_sequence("block_table")
    assert memory.share_prefix(second, memory.prefixes.chain(), prompt(40)) == 0
    memory.append(second, 40)
    memory.prefixes.announce_prefill(second, 40)
    assert not memory.prefixes.match(memory.prefixes.chain(), prompt(40)).is_being_computed
    memory.prefixes.announce_prefill(second, 40, [32])
    assert memory.prefixes.match(memory.prefixes.chain(), prompt(40)).is_being_computed


def test_of_the_states_of_decoding_only_the_last_is_kept(make: Make) -> None:
    memory = make(num_pages=60, stateful=True)
    tokens = Tokens(memory.prefixes.chain(), prompt(16))
    sequence = submit(memory, tokens)
    compute(memory, (sequence, tokens, 0))
    decode(memory, sequence, tokens, prompt(50, 7))
    memory.free(sequence)
    assert memory.report().groups[1].cached_blocks == 2  # states after the prompt, and after 64 tokens
    serve(memory, [*tokens.ids, 5], found=64)


def test_pins_survive_pressure_up_to_a_quota(make: Make) -> None:
    memory = make(num_pages=40)
    sequence = run(memory, prompt(64))
    memory.pin("system", sequence, 64)
    with pytest.raises(PinError, match="pinned already"):
        memory.pin("system", sequence, 48)
    memory.free(sequence)
    [pin] = memory.report().pins
    assert (pin.name, pin.num_tokens, pin.num_bytes) == ("system", 64, 4 * PAGE_BYTES)
    assert memory.report().pinned_bytes == memory.report().active_bytes == 4 * PAGE_BYTES
    for seed in range(1, 8):
        serve(memory, prompt(150, seed), found=0)
    found = run(memory, prompt(70), found=64)
    memory.check_integrity()
    memory.free(found)
    large = run(memory, prompt(112, 9))
    with pytest.raises(PinError, match="that may be pinned"):  # a quarter of 40 pages is 10
        memory.pin("large", large, 112)
    memory.free(large)
    memory.check_idle()
    memory.unpin("system")
    with pytest.raises(PinError, match="no prefix named 'system'"):
        memory.unpin("system")
    assert memory.report().active_bytes == 0


@pytest.mark.parametrize(("kind", "num_pages"), [("interleaved", 40), ("per_layer", 80)])
def test_pins_may_take_exactly_their_quota(make: Make, kind: LayoutKind, num_pages: int) -> None:
    """A quarter of the pages: those of 10 blocks."""
    memory = make(kind=kind, num_pages=num_pages)
    long, short = run(memory, prompt(160)), run(memory, prompt(16, 1))
    memory.pins.check_pin("long", memory.prefixes.chain(), prompt(160))
    memory.pin("long", long, 160)
    with pytest.raises(PinError, match="that may be pinned"):
        memory.pin("short", short, 16)
    memory.unpin("long")
    memory.pin("short", short, 16)
    with pytest.raises(PinError, match="that may be pinned"):
        memory.pin("long", long, 160)


@pytest.mark.parametrize(("num_pages", "num_pinned"), [(10, 0), (12, 2)])
def test_pages_for_the_longest_sequence_are_never_pinned(make: Make, num_pages: int, num_pinned: int) -> None:
    """Its 10 pages are left even where a quarter of the budget, the quota, would be more."""
    memory = make(num_pages=num_pages)
    sequence = run(memory, prompt(64))
    with pytest.raises(PinError, match="that may be pinned"):
        memory.pin("more", sequence, 16 * (num_pinned + 1))
    if num_pinned:
        memory.pin("most", sequence, 16 * num_pinned)


@pytest.mark.parametrize("windowed", [False, True])
def test_pins_beyond_the_quota_are_refused_before_the_prefill(make: Make, windowed: bool) -> None:
    """Except with windows: how many blocks a prefix has left then depends on its prefill."""
    memory = make(num_pages=24, windowed=windowed)
    with nullcontext() if windowed else pytest.raises(PinError, match="that may be pinned"):
        memory.pins.check_pin("p", memory.prefixes.chain(), prompt(112))


def test_pages_needed_beside_those_that_others_own(make: Make) -> None:
    """A freed prefix is found, but its pages count as free."""
    memory = make(num_pages=60, windowed=True)

    def needed(num_cached: int) -> int:
        match = memory.prefixes.match(memory.prefixes.chain(), prompt(64))
        assert match.num_tokens == num_cached
        return memory.prefixes.pages_needed(match, 64)

    assert needed(0) == 8  # four blocks in each group
    owner = run(memory, prompt(50))
    assert needed(48) == 2
    memory.free(owner)
    assert needed(48) == 8


def test_blocks_shared_by_two_pins_count_once(make: Make) -> None:
    memory = make(num_pages=40)
    sequence = run(memory, prompt(128))
    memory.pin("long", sequence, 128)
    memory.pin("short", sequence, 64)
    assert memory.report().pinned_bytes == 8 * PAGE_BYTES
    memory.unpin("long")
    assert memory.report().pinned_bytes == 4 * PAGE_BYTES


@pytest.mark.parametrize("backend", [FlakyHost, FlakyMirror])
def test_a_swapped_group_comes_back_as_it_was(make: Make, backend: type) -> None:
    """A parent and its fork share blocks before, during and after; on every rank."""
    memory = make(backend, num_pages=40, swap_pages=8, prefix_cache=False)
    tokens = Tokens(memory.prefixes.chain(), prompt(40))
    parent = submit(memory, tokens)
    compute(memory, (parent, tokens, 0))
    child = memory.fork(parent, 40)
    own = tokens.first(40)
    own.ids += prompt(1, 1)
    memory.append(child, 41)
    compute(memory, (child, own, 40))
    swapped = memory.swap_out([parent, child])
    assert swapped.num_bytes == memory.report().swapped_bytes == 4 * PAGE_BYTES
    assert memory.report().active_bytes == 0
    run(memory, prompt(150, 5))
    parent, child = memory.swap_in(swapped)
    assert memory.report().swapped_bytes == 0
    assert parent.groups[0].block_ids[:2] == child.groups[0].block_ids[:2]
    for sequence, written in ((parent, tokens), (child, own)):
        check(memory, sequence, written, "home")


def test_without_swap_space_nothing_is_swapped(make: Make) -> None:
    memory = make(swap_pages=2)
    sequence = run(memory, prompt(40))
    with pytest.raises(OutOfSwap, match=r"8192 of 8192 \(swap_bytes\) are free"):
        memory.swap_out([sequence])


@pytest.mark.parametrize("failing", [0, 1, None])
def test_copies_are_dropped_on_every_rank(make: Make, monkeypatch: pytest.MonkeyPatch, failing: int | None) -> None:
    """After a swap-out for which the peer (0) or rank 0 (1) has no host memory, and with the swapped sequences."""
    kept: set[tuple[LocalContents, int]] = set()
    calls = itertools.count()

    def save(contents: LocalContents, key: int, g: int, block_ids: Sequence[int]) -> None:
        if next(calls) == failing:
            raise OutOfSwap("injected")
        kept.add((contents, key))

    monkeypatch.setattr(LocalContents, "save", save)
    monkeypatch.setattr(LocalContents, "discard", lambda contents, key: kept.discard((contents, key)))
    memory = make(FlakyMirror, swap_pages=8)
    sequence = run(memory, prompt(40))
    with nullcontext() if failing is None else pytest.raises(OutOfSwap, match="injected"):
        swapped = memory.swap_out([sequence])
        assert len(kept) == 2
        memory.swapping.discard_swapped(swapped)
    assert not kept


def test_a_failed_swap_in_loses_nothing(make: Make) -> None:
    memory = make(num_pages=16, swap_pages=20, prefix_cache=False)
    sequence = run(memory, prompt(100))
    swapped = memory.swap_out([sequence])
    filler = run(memory, prompt(160, 1))
    with pytest.raises(OutOfPages):
        memory.swap_in(swapped)
    memory.check_integrity()
    memory.free(filler)
    [sequence] = memory.swap_in(swapped)
    check(memory, sequence, Tokens(memory.prefixes.chain(), prompt(100)))


def test_the_last_free_swap_space_is_used(make: Make) -> None:
    memory = make(swap_pages=4, prefix_cache=False)
    memory.swap_in(memory.swap_out([run(memory, prompt(64))]))


def test_a_copy_that_is_due_is_made_before_a_swap(make: Make) -> None:
    memory = make(swap_pages=20, prefix_cache=False)
    parent = begin(memory, 40, "block_table")
    child = memory.fork(parent, 40, "block_table")
    memory.append(child, 48)
    swapped = memory.swap_out([child])
    memory.free(parent)
    [child] = memory.swap_in(swapped)
    assert reads(memory, child, 40, "home")


def test_a_sequence_without_a_region_is_not_swapped_in(make: Make) -> None:
    memory = make(num_pages=40, num_regions=1, swap_pages=20, prefix_cache=False)
    swapped = memory.swap_out([run(memory, prompt(64), policy="region")])
    other = run(memory, prompt(32, 1), policy="region")
    before = memory.report()
    with pytest.raises(VmemError, match="region"):
        memory.swap_in(swapped)
    assert memory.report().active_bytes == before.active_bytes
    memory.free(other)
    memory.swap_in(swapped)


def test_blocks_still_cached_are_not_copied_in(make: Make) -> None:
    memory = make(num_pages=40, swap_pages=20)
    sequence = run(memory, prompt(64))
    block_ids = list(sequence.groups[0].block_ids)
    swapped = memory.swap_out([sequence])
    [sequence] = memory.swap_in(swapped)
    assert sequence.groups[0].block_ids == block_ids


# ---- what a second reader found ----


def test_a_cached_state_is_copied_before_the_next_step(make: Make) -> None:
    """Regression: with blocks for the next tokens in place nothing was copied, and the cached state was overwritten."""
    memory = make(stateful=True)
    tokens = Tokens(memory.prefixes.chain(), prompt(16))
    sequence = memory.create_sequence("block_table")
    memory.share_prefix(sequence, tokens.chain, prompt(48))
    memory.append(sequence, 48)
    for end in (16, 32):
        memory.append(sequence, end, start=end - 16)
        memory.prefixes.stage_prefix(sequence, prompt(48), end - 16, end)
        tokens.ids = prompt(end)
        compute(memory, (sequence, tokens, end - 16))
    other = Tokens(memory.prefixes.chain(), prompt(16) + prompt(8, 1))
    second = submit(memory, other, found=16)
    memory.ensure([StepDemand(second, 16, 24)])
    assert read_state(memory, second) == Tokens(memory.prefixes.chain(), prompt(16)).contents[-1]
    memory.prefixes.abort_prefixes()


def test_other_tokens_after_a_truncation_have_other_digests(make: Make) -> None:
    """Regression: the chain kept the digests of truncated tokens, and new tokens were found under them."""
    memory = make()
    tokens = Tokens(memory.prefixes.chain(), prompt(40))
    sequence = submit(memory, tokens)
    compute(memory, (sequence, tokens, 0))
    memory.append(sequence, 64)
    memory.prefixes.stage_prefix(sequence, prompt(64), 40, 64)
    memory.prefixes.abort_prefixes()
    memory.truncate(sequence, 40)
    tokens.ids = prompt(40) + prompt(24, 5)
    memory.append(sequence, 64)
    memory.prefixes.stage_prefix(sequence, tokens.ids, 40, 64)
    compute(memory, (sequence, tokens, 40))
    memory.free(sequence)
    serve(memory, prompt(70), found=40)
    serve(memory, [*tokens.ids, 1], found=64)


def test_a_step_cannot_be_committed_after_the_writer_of_shared_units_is_freed(make: Make) -> None:
    memory = make()
    first = submit(memory, Tokens(memory.prefixes.chain(), prompt(48)))
    second = submit(memory, Tokens(memory.prefixes.chain(), prompt(40) + prompt(8, 1)), found=32)
    bystander = submit(memory, Tokens(memory.prefixes.chain(), prompt(16, 2)))
    memory.free(first)
    memory.free(bystander)
    with pytest.raises(IntegrityError, match="between stage and commit"):
        memory.prefixes.commit_prefixes()
    memory.prefixes.abort_prefixes()
    memory.prefixes.commit_prefixes()  # of nothing
    memory.free(second)
    serve(memory, prompt(48), found=0)


def test_units_not_yet_computed_are_never_copied(make: Make) -> None:
    """Regression: without its writer a unit passed for computed; a copy is made before the step."""
    memory = make()
    writer = memory.create_sequence("block_table")
    chain = memory.prefixes.chain()
    memory.share_prefix(writer, chain, prompt(64))
    memory.prefixes.announce_prefill(writer, 64)
    other = memory.create_sequence("block_table")
    memory.share_prefix(other, memory.prefixes.chain(), prompt(64))
    memory.append(other, 64)
    memory.prefixes.stage_prefix(other, prompt(64), 0, 64)
    memory.free(writer)
    assert memory.prefixes.match(memory.prefixes.chain(), prompt(45) + prompt(8, 1)).num_tokens == 32
    memory.prefixes.abort_prefixes()


def test_a_lowered_budget_evicts_no_more_than_it_must(still: Make) -> None:
    """Regression: while a fence was open, each search for work evicted another block."""
    memory = still(FlakyCuda, num_pages=60)
    for seed in range(3):
        serve(memory, prompt(112, seed))
    sequence = memory.create_sequence("block_table")
    memory.append(sequence, 32)
    memory.ensure([StepDemand(sequence, 0, 32)])
    launch(memory, StepDemand(sequence, 0, 32))
    memory.free(sequence)
    kept = memory.report().cached_bytes
    created = memory.report().physical_bytes
    memory.set_budget(created - PAGE_BYTES, 1)
    for _ in range(10):
        do_background(memory)
    assert memory.report().cached_bytes == kept
    memory.backend.fake.finish_work()
    do_background(memory)
    assert memory.report().physical_bytes == created - PAGE_BYTES
    assert memory.report().cached_bytes == kept


def test_places_before_the_window_do_not_keep_pages(still: Make) -> None:
    """Regression: an adopted region mapped, before the window, free blocks that could not be allocated."""
    memory = still(num_pages=48, windowed=True, num_regions=2)
    memory.free(run(memory, prompt(112), 0, policy="region"))
    run(memory, prompt(120), 112, policy="region")
    while memory.group_memories[1].pool.num_cached:
        memory.tree.evict(1, 100)
    with memory.lock:
        block_ids = memory.allocator.allocate(memory.group_memories[0], memory.num_free_pages, at_home=True)
    assert memory.num_free_pages == 0
    memory.allocator.free(memory.group_memories[0], block_ids)


def test_a_failed_prefix_share_changes_nothing(make: Make) -> None:
    memory = make(num_pages=60, windowed=True, num_regions=1)
    serve(memory, prompt(112))
    holder = memory.create_sequence("region")
    memory.append(holder, 16)
    sequence = memory.create_sequence("region")
    with pytest.raises(VmemError, match="are held by other sequences"):
        memory.share_prefix(sequence, memory.prefixes.chain(), prompt(112))
    assert [table.first for table in sequence.groups] == [0, 0]


def test_free_blocks_of_another_group_go_before_cached_ones(make: Make) -> None:
    memory = make(num_pages=48, windowed=True)
    serve(memory, prompt(96))
    with memory.lock:
        block_ids = memory.allocator.allocate(memory.group_memories[1], memory.pages.num_claimable, at_home=True)
        memory.allocator.free(memory.group_memories[1], block_ids)
    sequence = memory.create_sequence("block_table")
    memory.append(sequence, 64)
    assert memory.report().evicted_blocks == 0


def test_misuse_is_refused(make: Make) -> None:
    memory = make(swap_pages=20)
    sequence = run(memory, prompt(40))
    with pytest.raises(VmemError, match="cannot begin with a cached prefix"):
        memory.share_prefix(sequence, memory.prefixes.chain(), prompt(40))
    with pytest.raises(IntegrityError, match="twice"):
        memory.swap_out([sequence, sequence])
    with pytest.raises(PinError, match="cannot be pinned"):
        memory.pin("long", sequence, 41)
    swapped = memory.swap_out([sequence])
    memory.swapping.discard_swapped(swapped)
    with pytest.raises(IntegrityError, match="discarded before"):
        memory.swapping.discard_swapped(swapped)
    with pytest.raises(IntegrityError, match="discarded before"):
        memory.swap_in(swapped)


def test_shared_tokens_of_forks(make: Make) -> None:
    memory = make(num_pages=60, windowed=True)
    parent = run(memory, prompt(112))
    tokens = Tokens(parent.prefix.chain or memory.prefixes.chain(), prompt(112))
    child = memory.fork(parent, 112, chain=tokens.chain.fork(112))
    assert memory.prefixes.shared_tokens([parent]) == [112]
    assert memory.prefixes.shared_tokens([parent, child]) == [0, 112]
