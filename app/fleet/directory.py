"""Prefix directory: which replica has which prefix cached, from load reports and from requests sent since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from folio.vmem import CHANGE_BYTES, split_keys


class PrefixDirectory:
    """Maps each prefix key to the replicas that have it, one bit each of an integer. A match takes a few dictionary
    look-ups, regardless of the number of replicas. A replica's bit is its *slot*, a small number."""

    def __init__(self) -> None:
        self._replicas: dict[bytes, int] = {}
        self._reported: dict[int, set[bytes]] = {}
        self._versions: dict[int, int] = {}  # of `_reported`
        self._strides: dict[int, int] = {}
        self._stride = self._least_stride = 1
        self._expected: dict[int, Counter[bytes]] = {}

    def __len__(self) -> int:
        return len(self._replicas)

    def match(self, keys: Sequence[bytes], slots: int) -> list[tuple[int, int]]:
        """The length of the cached prefix at each replica, in keys; a prompt has one key for each of its units.

        A replica that has a prefix has all shorter ones, because eviction begins at the ends of prefixes. So the
        lengths are found by bisection over the keys that all reports contain (multiples of the largest stride); next
        to the end of a prefix, the keys of the smallest stride are looked up.

        Args:
            slots: bits of the replicas in question.

        Returns:
            pairs of a number of units and the bits of the replicas that have as many; replicas without any are left
            out.
        """
        found: list[tuple[int, int]] = []
        get, stride, step = self._replicas.get, self._stride, self._least_stride
        # (low, replicas with `low` units, high, replicas with `high` units); both are multiples of the stride.
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
            for units in range(high - step, low, -step):
                if units <= len(keys) and (here := get(keys[units - 1], 0) & ending):
                    ending &= ~here
                    found.append((units, here))
            if low and ending:
                found.append((low, ending))
        return found

    def apply_keys(self, slot: int, keys: bytes, changes: bytes, stride: int, version: int) -> None:
        """Take over a replica's reported keys (`folio.vmem.CachedKeys`); expected ones remain.

        Reports may be lost or repeated. If a report has all changes since the last one, they are applied; otherwise all
        keys are compared.
        """
        num_new = version - self._versions.get(slot, version + 1)
        if not num_new:
            return
        reported, expected = self._reported.setdefault(slot, set()), self._expected.get(slot, Counter())
        if 0 < num_new * CHANGE_BYTES <= len(changes):
            added, removed = _changed(changes[-num_new * CHANGE_BYTES :])
        else:
            added, removed = _changed(changes)
            now = (set(split_keys(keys)) - removed) | added
            added, removed = now - reported, reported - now
        self._versions[slot] = version
        if self._strides.get(slot) != stride:
            self._strides[slot] = stride
            self._note_strides()
        removed &= reported
        reported -= removed
        reported |= added
        self._set(added, slot)
        self._clear([key for key in removed if key not in expected], slot)

    def add_expected(self, slot: int, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Expect the prefixes of one prompt at a replica. Returns the noted ones, for `undo_expected`: those that the
        replica's reports would contain."""
        stride, expected = self._stride, self._expected.setdefault(slot, Counter())
        noted = keys[stride - 1 :: stride]
        for key in noted:
            expected[key] += 1
        self._set(noted, slot)
        return noted

    def undo_expected(self, slot: int, noted: Iterable[bytes]) -> None:
        """Undo an `add_expected`, which has returned `noted`."""
        expected, reported = self._expected[slot], self._reported.get(slot, ())
        gone = []
        for key in noted:
            expected[key] -= 1
            if not expected[key]:
                del expected[key]
                gone.append(key)
        self._clear([key for key in gone if key not in reported], slot)

    def remove_replica(self, slot: int) -> None:
        self._versions.pop(slot, None)
        self._strides.pop(slot, None)
        self._note_strides()
        self._clear({*self._reported.pop(slot, ()), *self._expected.pop(slot, ())}, slot)

    def _note_strides(self) -> None:
        self._stride = max(self._strides.values(), default=1)
        self._least_stride = min(self._strides.values(), default=1)

    def _set(self, keys: Iterable[bytes], slot: int) -> None:
        replicas, bit = self._replicas, 1 << slot  # one object, shared by the many keys that no other replica has
        for key in keys:
            others = replicas.get(key)
            replicas[key] = bit if others is None else others | bit

    def _clear(self, keys: Iterable[bytes], slot: int) -> None:
        replicas, bit = self._replicas, 1 << slot
        for key in keys:
            if left := replicas[key] & ~bit:
                replicas[key] = left
            else:
                del replicas[key]


def _changed(changes: bytes) -> tuple[set[bytes], set[bytes]]:
    """Keys that are present after these changes, and keys that are absent."""
    last = {changes[at + 1 : at + CHANGE_BYTES]: changes[at] for at in range(0, len(changes), CHANGE_BYTES)}
    there = {key for key, is_there in last.items() if is_there}
    return there, last.keys() - there
