"""Which replica has which prefix, against a plain model of it."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from app.fleet.directory import PrefixDirectory

KEYS = [bytes([i]) for i in range(6)]
NUM_SLOTS = 3

slots = st.integers(0, NUM_SLOTS - 1)
some_keys = st.lists(st.sampled_from(KEYS), max_size=6)


@given(st.lists(st.tuples(st.sampled_from(["report", "expect", "forget", "remove"]), slots, some_keys), max_size=30))
def test_agrees_with_sets(calls: list[tuple[str, int, list[bytes]]]) -> None:
    directory = PrefixDirectory()
    reported: dict[int, set[bytes]] = {slot: set() for slot in range(NUM_SLOTS)}
    expected: dict[int, list[list[bytes]]] = {slot: [] for slot in range(NUM_SLOTS)}
    for call, slot, keys in calls:
        match call:
            case "report":
                directory.report(slot, keys)
                reported[slot] = set(keys)
            case "expect":
                directory.expect(slot, keys)
                expected[slot].append(keys)
            case "forget" if expected[slot]:
                directory.forget(slot, expected[slot].pop())
            case "remove":
                directory.remove(slot)
                reported[slot], expected[slot] = set(), []
        known = {s: reported[s] | set(Counter(k for ks in expected[s] for k in ks)) for s in range(NUM_SLOTS)}
        best = {s: max((i + 1 for i, key in enumerate(KEYS) if key in known[s]), default=0) for s in known}
        assert directory.match(KEYS, 0b111) == {s: units for s, units in best.items() if units}
        assert len(directory) == len(set().union(*known.values()))


def test_only_those_asked_for() -> None:
    directory = PrefixDirectory()
    for slot in range(3):
        directory.report(slot, KEYS[: slot + 1])
    assert directory.match(KEYS, 0b101) == {0: 1, 2: 3}
    assert directory.match(KEYS, 0) == {}
    assert directory.match([], 0b111) == {}


def test_what_was_left_out_of_a_report_does_not_matter() -> None:
    """With a stride of 2, only every second prefix is reported."""
    directory = PrefixDirectory()
    directory.report(0, KEYS[1::2])
    assert directory.match(KEYS[:5], 1) == {0: 4}
