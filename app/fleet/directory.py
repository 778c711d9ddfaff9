"""Which replica has which prefix cached, as far as a router knows: from reports, and from what it has sent since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from vmem import KEY_BYTES

# Keys as numbers, sorted: a report has thousands, of which few are new.
KeyArray = np.ndarray[Any, np.dtype[np.uint64]]


class PrefixDirectory:
    """For each key the replicas that have that prefix, as one bit each of an integer: looking a prompt up costs a few
    dictionary look-ups, however many replicas there are.

    A replica is known by its *slot*, a small number.
    """

    def __init__(self) -> None:
        self._replicas: dict[bytes, int] = {}
        self._reported: dict[int, KeyArray] = {}
        self._strides: dict[int, int] = {}
        self._stride = 1  # the greatest
        self._expected: dict[int, Counter[bytes]] = {}

    def __len__(self) -> int:
        return len(self._replicas)

    def match(self, keys: Sequence[bytes], slots: int) -> dict[int, int]:
        """How many of these keys, one for each unit of a prompt from its beginning on, each replica has.

        A replica that has a prefix has all shorter ones: memory gives up the ends of prefixes first. So who has the
        longest prefixes is searched for by bisection, among those that no report leaves out; only next to where
        somebody's prefix ends all are looked up.

        Args:
            slots: the bits of the replicas asked for.

        Returns:
            slot → units; replicas without any are left out.
        """
        found: dict[int, int] = {}
        get, stride = self._replicas.get, self._stride
        # In units: (from, who has that many, to, who has as many as that), the ends multiples of the stride.
        ranges = [(0, slots, (len(keys) // stride + 1) * stride, 0)]
        while ranges:
            low, at_low, high, at_high = ranges.pop()
            ending = at_low & ~at_high
            if not ending:
                continue
            if high - low > stride:
                middle = (low + high) // (2 * stride) * stride
                at_middle = get(keys[middle - 1], 0) & at_low if middle <= len(keys) else 0
                ranges += [(low, at_low, middle, at_middle), (middle, at_middle, high, at_high)]
                continue
            for units in range(min(high - 1, len(keys)), low, -1):
                here = get(keys[units - 1], 0) & ending
                ending &= ~here
                found |= dict.fromkeys(_bits(here), units)
            if low:
                found |= dict.fromkeys(_bits(ending), low)
        return found

    def report(self, slot: int, keys: bytes, stride: int = 1) -> None:
        """These are the replica's keys now, beside the expected ones.

        Args:
            keys: `KEY_BYTES` each, of prefixes whose length is a multiple of `stride` units.
        """
        before, now = self._reported.get(slot, _NO_KEYS), _as_array(keys)
        self._reported[slot], self._strides[slot] = now, stride
        self._stride = max(self._strides.values())
        expected = self._expected.get(slot, Counter())
        for key in _as_keys(now[~_contained(now, before)]):
            self._set(key, slot)
        for key in _as_keys(before[~_contained(before, now)]):
            if key not in expected:
                self._clear(key, slot)

    def expect(self, slot: int, keys: Sequence[bytes]) -> Sequence[bytes]:
        """The replica is going to have these prefixes of one prompt, too.

        Returns:
            which of them are noted, for `forget`: no more than its reports would have.
        """
        stride, expected = self._stride, self._expected.setdefault(slot, Counter())
        noted = keys[stride - 1 :: stride]
        for key in noted:
            expected[key] += 1
            self._set(key, slot)
        return noted

    def forget(self, slot: int, noted: Iterable[bytes]) -> None:
        """Take an `expect` back; it has returned `noted`."""
        expected, gone = self._expected[slot], []
        for key in noted:
            expected[key] -= 1
            if not expected[key]:
                del expected[key]
                gone.append(key)
        unexpected = _as_array(b"".join(gone))
        for key in _as_keys(unexpected[~_contained(unexpected, self._reported.get(slot, _NO_KEYS))]):
            self._clear(key, slot)

    def remove(self, slot: int) -> None:
        """The replica is gone."""
        self._strides.pop(slot, None)
        self._stride = max(self._strides.values(), default=1)
        for key in {*_as_keys(self._reported.pop(slot, _NO_KEYS)), *self._expected.pop(slot, Counter())}:
            self._clear(key, slot)

    def _set(self, key: bytes, slot: int) -> None:
        self._replicas[key] = self._replicas.get(key, 0) | 1 << slot

    def _clear(self, key: bytes, slot: int) -> None:
        left = self._replicas[key] & ~(1 << slot)
        if left:
            self._replicas[key] = left
        else:
            del self._replicas[key]


_NO_KEYS: KeyArray = np.zeros(0, dtype="<u8")


def _as_array(keys: bytes) -> KeyArray:
    """Sorted, each once."""
    parts = np.frombuffer(keys, dtype=np.uint8).reshape(-1, KEY_BYTES)
    padded = np.zeros((len(parts), 8), dtype=np.uint8)
    padded[:, :KEY_BYTES] = parts
    numbers = np.sort(padded.view("<u8").ravel())
    return numbers[np.append(True, numbers[1:] != numbers[:-1])[: len(numbers)]]


def _as_keys(keys: KeyArray) -> list[bytes]:
    content = np.ascontiguousarray(keys).view(np.uint8).reshape(-1, 8)[:, :KEY_BYTES].tobytes()
    return np.frombuffer(content, dtype=f"V{KEY_BYTES}").tolist()


def _contained(keys: KeyArray, others: KeyArray) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which of the keys are among the others."""
    if not len(others):
        return np.zeros(len(keys), dtype=bool)
    at = np.minimum(others.searchsorted(keys), len(others) - 1)
    return others[at] == keys


def _bits(number: int) -> Iterator[int]:
    """The places of the ones."""
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest
