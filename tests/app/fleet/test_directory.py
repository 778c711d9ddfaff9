"""Which replica has which prefix, against a plain model of it, and by the reports of a real summary."""

from __future__ import annotations

import itertools
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from folio.app.fleet.directory import PrefixDirectory
from folio.vmem import KEY_BYTES, NO_KEYS, CachedKeys, key_of
from folio.vmem.prefix import prefix_summary as summary
from folio.vmem.prefix.prefix_summary import PrefixSummary

NUM_SLOTS = 3
# Two prompts that share their first three units.
SHARED, LENGTH = 3, 9
PROMPTS = [[(min(p, i >= SHARED) * 16 + i + 1).to_bytes(KEY_BYTES, "big") for i in range(LENGTH)] for p in range(2)]

slots = st.integers(0, NUM_SLOTS - 1)
prefixes = st.lists(st.integers(0, LENGTH), min_size=2, max_size=2)  # units of either prompt


versions = itertools.count(1)


def report(directory: PrefixDirectory, slot: int, keys: bytes, stride: int = 1, version: int | None = None) -> None:
    """All keys of a replica anew."""
    directory.apply_keys(slot, keys, b"", stride, version or next(versions))


def match(directory: PrefixDirectory, keys: list[bytes], slots: int) -> dict[int, int]:
    """Of each replica that has any, how many."""
    found = [(s, units) for units, bits in directory.match(keys, slots) for s in range(NUM_SLOTS) if bits >> s & 1]
    assert len(found) == len(dict(found))
    return dict(found)


def keys_of(units: list[int]) -> set[bytes]:
    return {key for prompt, n in zip(PROMPTS, units, strict=True) for key in prompt[:n]}


@pytest.mark.parametrize("stride", [1, 2, 4])
@settings(deadline=None)
@given(st.data())
def test_agrees_with_sets(stride: int, data: st.DataObject) -> None:
    """Of what replicas report, and of what they are expected to have, multiples of the stride are known. A key may
    occur twice in a report. Another replica in a slot has versions of its own."""
    directory = PrefixDirectory()
    expected: dict[int, list[tuple[int, object]]] = {slot: [] for slot in range(NUM_SLOTS)}
    grid = {key for prompt in PROMPTS for key in prompt[stride - 1 :: stride]}
    reported: dict[int, set[bytes]] = {}
    num_reports = [0] * NUM_SLOTS

    def report_some(slot: int) -> None:
        num_reports[slot] += 1
        reported[slot] = keys_of(data.draw(prefixes)) & grid
        report(directory, slot, b"".join(reported[slot]) * data.draw(st.integers(1, 2)), stride, num_reports[slot])

    for slot in range(NUM_SLOTS):
        report_some(slot)
    for _ in range(data.draw(st.integers(0, 20))):
        slot = data.draw(slots)
        match data.draw(st.sampled_from(["report", "expect", "forget", "gone"])):
            case "report":
                report_some(slot)
            case "expect":
                prompt, units = data.draw(st.integers(0, 1)), data.draw(st.integers(0, LENGTH))
                noted = directory.add_expected(slot, PROMPTS[prompt][:units])
                assert list(noted) == PROMPTS[prompt][:units][stride - 1 :: stride]
                expected[slot].append((prompt, noted))
            case "forget" if expected[slot]:
                directory.undo_expected(slot, expected[slot].pop()[1])  # type: ignore[arg-type]
            case "gone":
                directory.remove_replica(slot)
                num_reports[slot], expected[slot] = 0, []
                report_some(slot)
        known = {s: reported[s] | {k for _, noted in expected[s] for k in noted} for s in range(NUM_SLOTS)}  # type: ignore[attr-defined]
        asked = data.draw(st.integers(0, 0b111))
        for prompt_keys in (*PROMPTS, []):
            best = {s: max((i + 1 for i, k in enumerate(prompt_keys) if k in known[s]), default=0) for s in known}
            assert match(directory, prompt_keys, asked) == {s: n for s, n in best.items() if n and asked >> s & 1}
        assert len(directory) == len(set().union(*known.values()))


def test_keys_between_strides_do_not_matter() -> None:
    """With a stride of 2, only every second prefix is reported; a replica with fewer prefixes reports all."""
    directory = PrefixDirectory()
    report(directory, 0, b"".join(PROMPTS[0][1::2]), 2)
    report(directory, 1, b"".join(PROMPTS[0][:3]))
    assert match(directory, PROMPTS[0][:5], 0b11) == {0: 4, 1: 3}
    assert match(directory, PROMPTS[0][:1], 0b11) == {1: 1}
    assert match(directory, PROMPTS[1], 0b11) == {0: 2, 1: 3}


MOST_KEYS = 10
# Digests that are cached at some depth; the last two have the key of the first.
CACHED = [
    (bytes([i]) * KEY_BYTES + b"rest", depth) for i, depth in enumerate([1, 2, 3, 4, 4, 6, 8, 8, 8, 12, 16, 20, 24])
]
CACHED += [(CACHED[0][0] + b"other", 1), (CACHED[0][0] + b"another", 8)]


@settings(deadline=None)
@given(st.data())
def test_lost_repeated_and_late_reports(data: st.DataObject) -> None:
    """After any report the directory has exactly what the replica had when that was made, whichever came before."""
    replica, last, since, directory = PrefixSummary(), NO_KEYS, -1, PrefixDirectory()
    cached: set[tuple[bytes, int]] = set()
    reports: list[tuple[CachedKeys, set[bytes]]] = []
    with patch.object(summary, "MOST_CHANGES", 4), patch.object(summary, "_MOST_REMEMBERED", 12):
        replica = PrefixSummary()
        for _ in range(data.draw(st.integers(1, 12))):
            for prefix in data.draw(st.lists(st.sampled_from(CACHED), max_size=8)):
                (replica.remove if prefix in cached else replica.add)(*prefix)
                cached ^= {prefix}
            last, since = replica.keys(MOST_KEYS, last, since), replica.num_changes
            assert len(last.changes) <= 4 * 7
            reports.append((last, {key_of(digest) for digest, depth in cached if depth % last.stride == 0}))
            if data.draw(st.booleans()):
                heard, keys = data.draw(st.sampled_from(reports[-3:]))
                directory.apply_keys(0, heard.keys, heard.changes, heard.stride, heard.version)
                found = {key for key in map(key_of, dict(CACHED)) if directory.match([key] * heard.stride, 1)}
                assert found == keys
                assert len(directory) == len(keys)


def test_only_changed_keys_are_processed() -> None:
    """Regression: every report was compared as a whole, which took a router's loop 0.9 ms."""
    replica, directory, keys = PrefixSummary(), PrefixDirectory(), [bytes([i]) * KEY_BYTES for i in range(100)]
    for key in keys:
        replica.add(key, 1)
    first = replica.keys(1000, NO_KEYS, -1)
    directory.apply_keys(0, first.keys, first.changes, 1, first.version)
    replica.remove(keys[0], 1)
    second = replica.keys(1000, first, 100)
    replica.add(b"other!", 1)
    third = replica.keys(1000, second, 101)
    assert (len(second.changes), len(third.changes), third.keys) == (7, 14, first.keys)
    directory.apply_keys(0, b"not looked at", third.changes, 1, third.version)
    assert len(directory) == 100
    assert directory.match([b"other!"], 1)
    assert not directory.match([keys[0]], 1)


def test_a_removed_replica_leaves_no_stride() -> None:
    """Only multiples of the longest stride of all replicas are expected of them."""
    directory = PrefixDirectory()
    for slot, stride in ((0, 1), (1, 4)):
        report(directory, slot, b"", stride)
    assert len(directory.add_expected(0, PROMPTS[0][:3])) == 0
    directory.remove_replica(1)
    assert len(directory.add_expected(0, PROMPTS[0][:3])) == 3
