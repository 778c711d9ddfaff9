"""The cached prefixes in short: which are in it, and what is left out when there are too many."""

from __future__ import annotations

import pytest

from tests.vmem.small_memory import groups
from vmem import KEY_BYTES, HostBackend, IntegrityError, KVMemory, key_of
from vmem.summary import PrefixSummary

UNIT = 16


def split(keys: bytes) -> set[bytes]:
    return {keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)}


def digest(i: int) -> bytes:
    return i.to_bytes(KEY_BYTES, "big") + b"rest of the hash"


def test_all_keys_while_there_are_few() -> None:
    summary = PrefixSummary()
    for depth in range(1, 9):
        summary.add(digest(depth), depth)
    cached = summary.keys(8)
    assert cached.stride == 1
    assert split(cached.keys) == {key_of(digest(depth)) for depth in range(1, 9)}
    assert summary.keys(0).keys == b""


def test_depths_that_are_no_multiples_go_first() -> None:
    summary = PrefixSummary()
    for depth in range(1, 101):
        summary.add(digest(depth), depth)
    cached = summary.keys(30)
    assert cached.stride == 4
    assert split(cached.keys) == {key_of(digest(depth)) for depth in range(4, 101, 4)}


def test_never_more_than_asked_for() -> None:
    """A thousand prefixes of one depth: no stride leaves fewer."""
    summary = PrefixSummary()
    for i in range(1000):
        summary.add(digest(i), 512)
    assert len(split(summary.keys(100).keys)) == 100


def test_versions_and_removal() -> None:
    summary = PrefixSummary()
    summary.add(digest(1), 1)
    before = summary.keys(8)
    summary.add(digest(2), 2)
    summary.remove(digest(1), 1)
    after = summary.keys(8)
    assert before.version != after.version
    assert split(after.keys) == {key_of(digest(2))}
    summary.check_integrity({(key_of(digest(2)), 2)})
    with pytest.raises(IntegrityError):
        summary.check_integrity({(key_of(digest(1)), 1)})


def test_two_prefixes_with_one_key() -> None:
    """One of them is forgotten: the other one's key stays."""
    summary = PrefixSummary()
    summary.add(digest(1), 1)
    summary.add(digest(1)[:KEY_BYTES] + b"another", 3)
    summary.remove(digest(1), 1)
    assert split(summary.keys(8).keys) == {key_of(digest(1))}


def compute(memory: KVMemory, token_ids: list[int]) -> list[bytes]:
    """Let a sequence compute these tokens and end; returns the keys of its prefixes."""
    chain = memory.chain(())
    sequence = memory.open("block_table")
    start = memory.reuse(sequence, chain, token_ids)
    memory.append(sequence, len(token_ids))
    memory.begin(sequence, token_ids, start, len(token_ids))
    memory.commit()
    memory.free(sequence)
    return [key_of(d) for d in chain.digests]


@pytest.mark.parametrize("windowed", [False, True])
def test_a_memory_names_what_a_prompt_would_find(windowed: bool) -> None:
    memory = KVMemory(
        HostBackend(1 << 20),
        groups(windowed=windowed),
        budget_bytes=40 * 4096,
        num_regions=2,
        max_tokens=160,
    )
    keys = compute(memory, list(range(5 * UNIT)))
    assert split(memory.cached_keys(100).keys) == set(keys)
    compute(memory, list(range(1000, 1000 + 9 * UNIT)))
    compute(memory, list(range(2000, 2000 + 9 * UNIT)))
    memory.check_integrity()
    memory.close()
