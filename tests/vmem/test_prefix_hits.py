"""Hits of cached prefixes, deliberate eviction, and pins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from folio.vmem import KVMemory, PinError, TokenChain
from folio.vmem.prefix.prefix_summary import HotNodes
from tests.vmem.conftest import Make
from tests.vmem.sequences import prompt, run, serve

UNIT = 16


def ask(memory: KVMemory, ids: list[int], times: int = 1, keys: tuple[str, ...] = ()) -> None:
    for _ in range(times):
        serve(memory, ids, keys=keys)


def hot(memory: KVMemory, most_tokens: int = 10_000) -> list[tuple[int, tuple[str, ...], int]]:
    """(tokens, keys, hits) of each."""
    memory.check_integrity()
    return [(len(p.token_ids), p.keys, p.hits) for p in memory.prefixes.hot_prefixes(most_tokens)]


def test_hot_prefixes_are_ordered_by_hits_then_latest_first(make: Make) -> None:
    memory = make()
    for seed, times in ((1, 2), (2, 4), (3, 2), (4, 1)):  # the first time nothing is found
        ask(memory, prompt(33, seed), times)
    assert [(p.token_ids[0], p.hits) for p in memory.prefixes.hot_prefixes(10_000)] == [(2000, 3), (3000, 1), (1000, 1)]
    assert memory.prefixes.hot_prefixes(10_000)[0].token_ids == tuple(prompt(32, 2))


def test_hot_prefixes_have_their_keys(make: Make) -> None:
    memory = make()
    ask(memory, prompt(20), 2, ("tenant:a", "salt:b"))
    ask(memory, prompt(20), 3, ("tenant:ab",))
    assert hot(memory) == [(16, ("tenant:ab",), 2), (16, ("tenant:a", "salt:b"), 1)]


def test_common_units_of_hot_prefixes_count_once(make: Make) -> None:
    """Two prefixes continue the same 32 tokens, which have the most hits."""
    memory = make()
    common = prompt(32)
    ask(memory, [*common, 7], 5)
    for seed in (1, 2):
        ask(memory, common + prompt(33, seed), 2)
    assert hot(memory) == [(64, (), 1), (64, (), 1)]
    assert hot(memory, 64) == [(64, (), 1)]
    assert hot(memory, 63) == [(32, (), 6)]
    assert hot(memory, 31) == []


def test_evicted_prefixes_are_not_hot(make: Make) -> None:
    memory = make()
    ask(memory, prompt(20), 3)
    memory.tree.clear()
    assert hot(memory) == []


def test_hits_are_counted_for_the_latest_prefixes_only() -> None:
    nodes: HotNodes[int] = HotNodes(most=2)
    for node in (1, 1, 2, 3):
        nodes.note(node)
    assert nodes.best(100, lambda node: [node], lambda _: True) == [(3, 1), (2, 1)]


def test_long_chains_that_do_not_fit_are_walked_once() -> None:
    """Regression: the walk held the memory's lock for too long."""
    nodes: HotNodes[tuple[int, int]] = HotNodes()  # (chain, units down to here)
    visited = 0

    def units_of(node: tuple[int, int]) -> Iterator[tuple[int, int]]:
        nonlocal visited
        for depth in range(node[1], 0, -1):
            visited += 1
            yield node[0], depth

    for chain in range(20):
        for depth in range(1000, 1100):
            nodes.note((chain, depth))
    nodes.note((0, 100))
    nodes.note((0, 100))
    assert nodes.best(120, units_of, lambda _: True) == [((0, 100), 2)]
    assert visited < 20 * 1100 + 2 * 2000
    nodes.note((0, 101))
    assert nodes.best(120, units_of, lambda _: True) == [((0, 101), 1)], "the other one is its beginning"
    nodes.forget((0, 101))
    assert nodes.best(1100, units_of, lambda _: True) == [((0, 100), 2), ((19, 1000), 1)]


def test_prefixes_are_evicted_by_their_keys(make: Make) -> None:
    memory = make()
    ask(memory, prompt(40), 2)
    ask(memory, prompt(40), 2, ("warm-up",))
    memory.prefixes.evict_prefixes(("warm-up",))
    assert hot(memory) == [(32, (), 1)]
    memory.prefixes.reset_counts()
    assert memory.report().queried_tokens == memory.report().hit_tokens == 0
    serve(memory, prompt(40), 0, ("warm-up",))
    serve(memory, prompt(40), 32)


def pin(memory: KVMemory, name: str, ids: list[int], keys: tuple[str, ...] = ()) -> None:
    memory.pins.check_pin(name, memory.prefixes.chain(keys), ids)
    sequence = run(memory, [*ids, 7], keys=keys)
    try:
        memory.pin(name, sequence, len(ids))
    finally:
        memory.free(sequence)
        memory.check_integrity()


def test_pinning_the_same_prefix_again_changes_nothing(make: Make) -> None:
    memory = make(num_pages=64)
    pin(memory, "p", prompt(32), ("tenant:a",))
    before = memory.report()
    pin(memory, "p", prompt(32), ("tenant:a",))
    assert memory.report().pins == before.pins
    assert memory.report().pinned_bytes == before.pinned_bytes
    for tail in (0, 1):  # what comes after it does not matter
        longer = run(memory, prompt(32) + prompt(32, tail), keys=("tenant:a",))
        memory.pin("p", longer, 32)
        memory.free(longer)
    memory.unpin("p")


def test_a_pin_outlives_the_truncation_of_its_sequence(make: Make) -> None:
    """The pin had its sequence's own chain, which `truncate` shortened: its tokens were gone."""
    memory = make()
    sequence = run(memory, prompt(16))
    memory.pin("p", sequence, 16)
    memory.truncate(sequence, 3)
    assert memory.pins.pinned_prefixes()[0].token_ids == tuple(prompt(16))
    memory.free(sequence)
    memory.check_integrity()


@pytest.mark.parametrize(
    ("ids", "keys"),
    [(prompt(48), ("tenant:a",)), (prompt(16), ("tenant:a",)), (prompt(32), ()), (prompt(32, 1), ("tenant:a",))],
)
def test_a_pin_name_belongs_to_one_prefix(make: Make, ids: list[int], keys: tuple[str, ...]) -> None:
    memory = make(num_pages=64)
    pin(memory, "p", prompt(32), ("tenant:a",))
    with pytest.raises(PinError, match="another prefix named 'p'"):
        memory.pins.check_pin("p", memory.prefixes.chain(keys), ids)
    sequence = run(memory, [*ids, 7], keys=keys)
    with pytest.raises(PinError, match="another prefix named 'p'"):
        memory.pin("p", sequence, len(ids))


def test_pinned_prefixes_are_listed(make: Make) -> None:
    memory = make(num_pages=64)
    pin(memory, "first", prompt(32), ("salt:s",))
    pin(memory, "second", prompt(16, 1))
    found = [(p.pin_name, p.token_ids, p.keys) for p in memory.pins.pinned_prefixes()]
    assert found == [("first", tuple(prompt(32)), ("salt:s",)), ("second", tuple(prompt(16, 1)), ())]


def test_digests_depend_on_the_keys() -> None:
    digests = set()
    for keys in ((), ("tenant:a",), ("tenant:a", "salt:b"), ("tenant:ab", "salt:"), ("tenant:asalt:b",), ("salt:a",)):
        chain = TokenChain(UNIT, keys)
        chain.extend(prompt(UNIT))
        digests.add(chain.digests[0])
    assert len(digests) == 6
