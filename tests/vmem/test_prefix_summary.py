"""Prefix summary: its keys, changes and strides."""

from __future__ import annotations

import itertools

import pytest

from folio.vmem import CHANGE_BYTES, KEY_BYTES, NO_KEYS, CachedKeys, IntegrityError, key_of, split_keys
from folio.vmem.prefix.prefix_summary import MOST_CHANGES, PrefixSummary
from tests.vmem.conftest import Make
from tests.vmem.sequences import serve

UNIT = 16


def keys_of(summary: PrefixSummary, most: int) -> CachedKeys:
    """The answer to a new reader."""
    return summary.keys(most, NO_KEYS, -1)


def changes_of(cached: CachedKeys) -> dict[bytes, bool]:
    changes = [cached.changes[at : at + CHANGE_BYTES] for at in range(0, len(cached.changes), CHANGE_BYTES)]
    return {change[1:]: bool(change[0]) for change in changes}


def digest(i: int) -> bytes:
    return i.to_bytes(KEY_BYTES, "big") + b"rest of the hash"


def test_all_keys_while_there_are_few() -> None:
    summary = PrefixSummary()
    for depth in range(1, 9):
        summary.add(digest(depth), depth)
    cached = keys_of(summary, 8)
    assert cached.stride == 1
    assert set(split_keys(cached.keys)) == {key_of(digest(depth)) for depth in range(1, 9)}
    assert keys_of(summary, 0).keys == b""


def test_depths_that_are_no_multiples_go_first() -> None:
    summary = PrefixSummary()
    for depth in range(1, 101):
        summary.add(digest(depth), depth)
    cached = keys_of(summary, 30)
    assert cached.stride == 4
    assert set(split_keys(cached.keys)) == {key_of(digest(depth)) for depth in range(4, 101, 4)}


def test_never_more_than_asked_for() -> None:
    """A thousand prefixes of one depth: no stride leaves fewer."""
    summary = PrefixSummary()
    for i in range(1000):
        summary.add(digest(i), 512)
    assert len(set(split_keys(keys_of(summary, 100).keys))) == 100


def test_versions_and_removal() -> None:
    summary = PrefixSummary()
    summary.add(digest(1), 1)
    before = keys_of(summary, 8)
    summary.add(digest(2), 2)
    summary.remove(digest(1), 1)
    after = summary.keys(8, before, 1)
    assert after.version == before.version + 2
    assert after.keys == before.keys
    assert changes_of(after) == {key_of(digest(2)): True, key_of(digest(1)): False}
    assert set(split_keys(keys_of(summary, 8).keys)) == {key_of(digest(2))}
    summary.check_integrity({(key_of(digest(2)), 2)})
    with pytest.raises(IntegrityError):
        summary.check_integrity({(key_of(digest(1)), 1)})


def test_two_prefixes_with_one_key() -> None:
    """One of them is evicted: the key stays."""
    summary = PrefixSummary()
    summary.add(digest(1), 1)
    summary.add(digest(1)[:KEY_BYTES] + b"another", 3)
    summary.remove(digest(1), 1)
    assert set(split_keys(keys_of(summary, 8).keys)) == {key_of(digest(1))}


def test_keys_are_put_together_now_and_then() -> None:
    """An answer stays below its bound, and a reader that has missed a few can still follow."""
    summary, most, cached, since = PrefixSummary(), 20_000, NO_KEYS, -1
    for i in range(10_000):
        summary.add(digest(i), 1)
    anew = 0
    for i in range(10_000, 20_000, 100):
        for j in range(i, i + 100):
            summary.add(digest(j), 1)
        before, cached, since = cached, summary.keys(most, cached, since), summary.num_changes
        assert len(cached.changes) <= MOST_CHANGES * CHANGE_BYTES
        anew += cached.keys is not before.keys
        known = set(split_keys(cached.keys)) | changes_of(cached).keys()
        assert known == {key_of(digest(j)) for j in range(i + 100)}
    assert 1 < anew <= 1 + 10_000 // (MOST_CHANGES // 2)
    assert len(cached.changes) >= MOST_CHANGES // 2 * CHANGE_BYTES


def test_too_many_changes_for_one_answer() -> None:
    summary = PrefixSummary()
    first = keys_of(summary, 100_000)
    for i in range(MOST_CHANGES + 1):
        summary.add(digest(i), 1)
    second = summary.keys(100_000, first, 0)
    assert len(set(split_keys(second.keys))) == MOST_CHANGES + 1
    assert not second.changes
    assert second.version > first.version


def test_the_stride_does_not_flutter() -> None:
    """The number of prefixes varies around the most keys: each change of the stride costs routers all keys."""
    summary, cached, since, strides = PrefixSummary(), NO_KEYS, -1, []
    for num_cached in [*range(100), *range(99, 90, -1), *range(91, 100), *range(99, 40, -1)]:
        if num_cached < len(summary):
            summary.remove(digest(num_cached), num_cached + 1)
        elif num_cached == len(summary):
            summary.add(digest(num_cached), num_cached + 1)
        last = cached.version
        cached, since = summary.keys(95, cached, since), summary.num_changes
        assert cached.version >= last
        strides.append(cached.stride)
    assert [stride for stride, _ in itertools.groupby(strides)] == [1, 2, 1]


@pytest.mark.parametrize("windowed", [False, True])
def test_cached_keys_name_the_prefixes_that_a_prompt_would_hit(make: Make, windowed: bool) -> None:
    memory = make(windowed=windowed)
    keys = serve(memory, list(range(5 * UNIT)))
    assert set(split_keys(memory.prefixes.cached_keys(100).keys)) == set(keys)
    serve(memory, list(range(1000, 1000 + 9 * UNIT)))
    serve(memory, list(range(2000, 2000 + 9 * UNIT)))
