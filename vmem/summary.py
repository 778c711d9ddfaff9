"""The cached prefixes in short, for those who want to know where a prompt is cached: a few bytes of each one's hash.

Kept up to date block by block, because going through a hundred thousand prefixes would hold up a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass

from vmem.errors import IntegrityError

# With a million prefixes known, one in 300 million is taken for one that is cached and is not.
KEY_BYTES = 6
# Prefixes whose depth is no multiple of 2^0, 2^1, … are left out first; this many times at most.
_MOST_HALVINGS = 8


def key_of(digest: bytes) -> bytes:
    """What a summary says of a prefix with this digest (`TokenChain.digests`)."""
    return digest[:KEY_BYTES]


@dataclass(frozen=True, slots=True)
class CachedKeys:
    """Keys of cached prefixes, side by side in no order: of those whose number of units is a multiple of `stride`.
    `version` changes when any prefix is cached or forgotten."""

    keys: bytes
    stride: int
    version: int


class PrefixSummary:
    """Keys of the prefixes that layers without a window have blocks of, by how far their depth can be halved: with a
    prefix all shorter ones are there. What else a hit needs, a window's last blocks or a state, a summary does not say.
    Only called under the memory's lock.

    Attributes:
        version: increases when any prefix is cached or forgotten.
    """

    def __init__(self) -> None:
        self._by_halvings: list[dict[bytes, int]] = [{} for _ in range(_MOST_HALVINGS + 1)]
        self.version = 0

    def __len__(self) -> int:
        return sum(map(len, self._by_halvings))

    def add(self, digest: bytes, depth: int) -> None:
        keys, key = self._by_halvings[_halvings(depth)], key_of(digest)
        keys[key] = keys.get(key, 0) + 1
        self.version += 1

    def remove(self, digest: bytes, depth: int) -> None:
        keys, key = self._by_halvings[_halvings(depth)], key_of(digest)
        if keys[key] == 1:
            del keys[key]
        else:
            keys[key] -= 1
        self.version += 1

    def keys(self, most: int) -> CachedKeys:
        """At most `most` keys; the stride is the least power of two with which there are so few. Should even the
        greatest leave more, some are left out."""
        if not most:
            return CachedKeys(b"", 1, self.version)
        halvings = 0
        while halvings < _MOST_HALVINGS and sum(map(len, self._by_halvings[halvings:])) > most:
            halvings += 1
        keys = b"".join(itertools.chain.from_iterable(self._by_halvings[halvings:]))
        return CachedKeys(keys[-most * KEY_BYTES :], 1 << halvings, self.version)

    def check_integrity(self, expected: Collection[tuple[bytes, int]]) -> None:
        """Raise `IntegrityError` unless there is a key for exactly these (key, depth)."""
        by_halvings: list[set[bytes]] = [set() for _ in self._by_halvings]
        for key, depth in expected:
            by_halvings[_halvings(depth)].add(key)
        if [set(keys) for keys in self._by_halvings] != by_halvings:
            raise IntegrityError(f"the summary has {len(self)} prefixes, {len(expected)} are cached")


def _halvings(depth: int) -> int:
    """How often the depth can be halved, up to the most that counts."""
    return min((depth & -depth).bit_length() - 1, _MOST_HALVINGS)
