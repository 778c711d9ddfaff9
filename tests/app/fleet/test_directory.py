"""Which replica has which prefix, against a plain model of it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.fleet.directory import PrefixDirectory
from vmem import KEY_BYTES

NUM_SLOTS = 3
# Two prompts that share their first three units.
SHARED, LENGTH = 3, 9
PROMPTS = [[(min(p, i >= SHARED) * 16 + i + 1).to_bytes(KEY_BYTES, "big") for i in range(LENGTH)] for p in range(2)]

slots = st.integers(0, NUM_SLOTS - 1)
prefixes = st.lists(st.integers(0, LENGTH), min_size=2, max_size=2)  # units of either prompt


def keys_of(units: list[int]) -> set[bytes]:
    return {key for prompt, n in zip(PROMPTS, units, strict=True) for key in prompt[:n]}


@pytest.mark.parametrize("stride", [1, 2, 4])
@given(st.data())
def test_agrees_with_sets(stride: int, data: st.DataObject) -> None:
    """Of what replicas report, and of what they are expected to have, multiples of the stride are known."""
    directory = PrefixDirectory()
    reported: dict[int, set[bytes]] = {slot: set() for slot in range(NUM_SLOTS)}
    expected: dict[int, list[tuple[int, object]]] = {slot: [] for slot in range(NUM_SLOTS)}
    grid = {key for prompt in PROMPTS for key in prompt[stride - 1 :: stride]}
    for slot in range(NUM_SLOTS):
        directory.report(slot, b"", stride)
    for _ in range(data.draw(st.integers(0, 20))):
        slot = data.draw(slots)
        match data.draw(st.sampled_from(["report", "expect", "forget", "gone"])):
            case "report":
                reported[slot] = keys_of(data.draw(prefixes)) & grid
                directory.report(slot, b"".join(reported[slot]), stride)
            case "expect":
                prompt, units = data.draw(st.integers(0, 1)), data.draw(st.integers(0, LENGTH))
                noted = directory.expect(slot, PROMPTS[prompt][:units])
                assert list(noted) == PROMPTS[prompt][:units][stride - 1 :: stride]
                expected[slot].append((prompt, noted))
            case "forget" if expected[slot]:
                directory.forget(slot, expected[slot].pop()[1])  # type: ignore[arg-type]
            case "gone":
                directory.remove(slot)
                directory.report(slot, b"", stride)
                reported[slot], expected[slot] = set(), []
        known = {s: reported[s] | {k for _, noted in expected[s] for k in noted} for s in range(NUM_SLOTS)}  # type: ignore[attr-defined]
        for prompt_keys in PROMPTS:
            best = {s: max((i + 1 for i, k in enumerate(prompt_keys) if k in known[s]), default=0) for s in known}
            assert directory.match(prompt_keys, 0b111) == {s: units for s, units in best.items() if units}
        assert len(directory) == len(set().union(*known.values()))


def test_only_those_asked_for() -> None:
    directory = PrefixDirectory()
    for slot in range(3):
        directory.report(slot, b"".join(PROMPTS[0][: slot + 1]))
    assert directory.match(PROMPTS[0], 0b101) == {0: 1, 2: 3}
    assert directory.match(PROMPTS[0], 0) == {}
    assert directory.match([], 0b111) == {}


def test_what_was_left_out_of_a_report_does_not_matter() -> None:
    """With a stride of 2, only every second prefix is reported; a replica with fewer prefixes reports all."""
    directory = PrefixDirectory()
    directory.report(0, b"".join(PROMPTS[0][1::2]), 2)
    directory.report(1, b"".join(PROMPTS[0][:3]))
    assert directory.match(PROMPTS[0][:5], 0b11) == {0: 4, 1: 3}
    assert directory.match(PROMPTS[0][:1], 0b11) == {1: 1}
    assert directory.match(PROMPTS[1], 0b11) == {0: 2, 1: 3}


def test_twice_in_a_report() -> None:
    """Keys of two prefixes may be the same; they are given up once."""
    directory = PrefixDirectory()
    directory.report(0, 2 * PROMPTS[0][0])
    directory.report(0, b"")
    assert Counter(directory.match(PROMPTS[0], 1)) == Counter()
    assert not len(directory)
