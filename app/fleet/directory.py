"""Which replica has which prefix cached, as far as a router knows: from reports, and from what it has sent since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class PrefixDirectory:
    """For each key the replicas that have that prefix, as one bit each of an integer: looking a prompt up costs a few
    dictionary look-ups, however many replicas there are.

    A replica is known by its *slot*, a small number.
    """

    def __init__(self) -> None:
        self._replicas: dict[bytes, int] = {}
        self._reported: dict[int, frozenset[bytes]] = {}
        self._expected: dict[int, Counter[bytes]] = {}

    def __len__(self) -> int:
        return len(self._replicas)

    def match(self, keys: Sequence[bytes], slots: int) -> dict[int, int]:
        """How many of these keys, one for each unit of a prompt from its beginning on, each replica has.

        A replica that has a prefix has all shorter ones: memory gives up the ends of prefixes first. So the longest
        known one counts, and the ones that were left out of a report do not matter.

        Args:
            slots: the bits of the replicas asked for.

        Returns:
            slot → units; replicas without any are left out.
        """
        found: dict[int, int] = {}
        known = [(i, replicas) for i, key in enumerate(keys) if (replicas := self._replicas.get(key))]
        for i, replicas in reversed(known):
            new = replicas & slots
            if not new:
                continue
            slots &= ~new
            while new:
                lowest = new & -new
                found[lowest.bit_length() - 1] = i + 1
                new ^= lowest
            if not slots:
                break
        return found

    def report(self, slot: int, keys: Iterable[bytes]) -> None:
        """These are the replica's keys now, beside the expected ones."""
        before, now = self._reported.get(slot, frozenset()), frozenset(keys)
        self._reported[slot] = now
        expected = self._expected.get(slot, Counter())
        for key in now - before:
            self._set(key, slot)
        for key in before - now:
            if key not in expected:
                self._clear(key, slot)

    def expect(self, slot: int, keys: Iterable[bytes]) -> None:
        """The replica is going to have these, too, until `forget` has been called as often."""
        expected = self._expected.setdefault(slot, Counter())
        for key in keys:
            expected[key] += 1
            self._set(key, slot)

    def forget(self, slot: int, keys: Iterable[bytes]) -> None:
        """Take an `expect` back."""
        expected, reported = self._expected[slot], self._reported.get(slot, frozenset())
        for key in keys:
            expected[key] -= 1
            if not expected[key]:
                del expected[key]
                if key not in reported:
                    self._clear(key, slot)

    def remove(self, slot: int) -> None:
        """The replica is gone."""
        for key in self._reported.pop(slot, frozenset()) | self._expected.pop(slot, Counter()).keys():
            self._clear(key, slot)

    def _set(self, key: bytes, slot: int) -> None:
        self._replicas[key] = self._replicas.get(key, 0) | 1 << slot

    def _clear(self, key: bytes, slot: int) -> None:
        left = self._replicas[key] & ~(1 << slot)
        if left:
            self._replicas[key] = left
        else:
            del self._replicas[key]
