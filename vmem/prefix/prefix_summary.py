"""Prefix summary: a few bytes of each cached prefix's hash for routers, and the prefixes with the most hits.

The summary is updated block by block, because a walk over a hundred thousand prefixes would delay a step. An answer has
the latest changes, for readers that follow, and all keys of a moment before, for readers that start or have missed too
much.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

import numpy as np

from folio.vmem.errors import IntegrityError

# With a million cached prefixes, one prefix in 300 million is falsely taken for cached.
KEY_BYTES = 6
# A byte, 1 for a cached and 0 for an evicted prefix, and the key.
CHANGE_BYTES = 1 + KEY_BYTES
# Changes in an answer at most. Beyond them all keys are collected again, and the latest half of the changes stays for
# readers that have missed an answer.
MOST_CHANGES = 2048
# Changes remembered until the next answer, which has only keys if there are more.
_MOST_REMEMBERED = 16 * MOST_CHANGES
# When there are too many keys, those whose depth is not a multiple of 2, 4, … are left out: most such doublings.
_MOST_HALVINGS = 8
# Keys left out return when all fit into this share of the most keys, so that the stride does not flap.
_ROOMY = 0.75
# Nodes whose hits are counted.
_MOST_HOT = 4096


def key_of(digest: bytes) -> bytes:
    """The key of a prefix with this digest (`TokenChain.digests`)."""
    return digest[:KEY_BYTES]


def split_keys(keys: bytes) -> list[bytes]:
    split: list[bytes] = np.frombuffer(keys, dtype=f"V{KEY_BYTES}").tolist()
    return split


@dataclass(frozen=True, slots=True)
class CachedKeys:
    """Keys of cached prefixes whose number of units is a multiple of `stride`.

    Attributes:
        keys: all keys at a version before the last changes, concatenated in no order.
        changes: `CHANGE_BYTES` each, in order. Each made the next version, the last one `version`; without changes all
            of `keys` is new. A reader with the keys of one of these versions needs the changes after it; any other
            reader takes `keys` and all changes.
    """

    keys: bytes
    changes: bytes
    stride: int
    version: int


NO_KEYS = CachedKeys(b"", b"", 1, 0)


class PrefixSummary:
    """Keys of the prefixes cached by layers without a window, by how often their depth can be halved. The last blocks
    of a window, or a state, which a hit needs as well, are not considered. Only called with the memory's lock held.

    Attributes:
        num_changes: increases when a prefix is cached or evicted.
    """

    def __init__(self) -> None:
        self._by_halvings: list[dict[bytes, int]] = [{} for _ in range(_MOST_HALVINGS + 1)]
        self._changed: deque[tuple[int, bytes]] = deque(maxlen=_MOST_REMEMBERED)
        self.num_changes = 0

    def __len__(self) -> int:
        return sum(map(len, self._by_halvings))

    def add(self, digest: bytes, depth: int) -> None:
        self._count(digest, depth, 1)

    def remove(self, digest: bytes, depth: int) -> None:
        self._count(digest, depth, -1)

    def _count(self, digest: bytes, depth: int, more: int) -> None:
        halvings, key = _halvings(depth), key_of(digest)
        keys = self._by_halvings[halvings]
        count = keys.get(key, 0) + more  # prefixes may share a key
        if count < 0:
            raise IntegrityError(f"prefix {key.hex()} was not in the summary")
        if count:
            keys[key] = count
        else:
            del keys[key]
        self._changed.append((halvings, key))
        self.num_changes += 1

    def keys(self, most: int, last: CachedKeys, since: int) -> CachedKeys:
        """At most `most` keys, and their changes. The stride is the least power of two that leaves so few, or the last
        one until there are clearly fewer; if the greatest leaves more, some keys are left out.

        Args:
            last: the last result for the same `most`, at first `NO_KEYS`.
            since: `num_changes` at that time, at first -1.
        """
        if not most:
            return NO_KEYS
        halvings = self._fitting(most, last.stride.bit_length() - 1)
        reported = self._by_halvings[halvings:]
        num_new = self.num_changes - since
        if 1 << halvings == last.stride and num_new <= len(self._changed):
            new = itertools.islice(reversed(self._changed), num_new)
            changed = {key for of, key in new if of >= halvings}
            if len(changed) > MOST_CHANGES:
                return CachedKeys(_joined(reported, most), b"", last.stride, last.version + len(changed))
            added = b"".join(bytes([any(key in keys for keys in reported)]) + key for key in changed)
            changes, version = last.changes + added, last.version + len(changed)
            if len(changes) <= MOST_CHANGES * CHANGE_BYTES:
                return CachedKeys(last.keys, changes, last.stride, version)
            kept = changes[-max(MOST_CHANGES // 2, len(changed)) * CHANGE_BYTES :]
            return CachedKeys(_joined(reported, most), kept, last.stride, version)
        return CachedKeys(_joined(reported, most), b"", 1 << halvings, last.version + 1)

    def check_integrity(self, expected: Collection[tuple[bytes, int]]) -> None:
        """Raise `IntegrityError` unless there is a key for exactly these (key, depth)."""
        by_halvings: list[set[bytes]] = [set() for _ in self._by_halvings]
        for key, depth in expected:
            by_halvings[_halvings(depth)].add(key)
        if [set(keys) for keys in self._by_halvings] != by_halvings:
            raise IntegrityError(f"the summary has {len(self)} prefixes, {len(expected)} are cached")

    def _fitting(self, most: int, last: int) -> int:
        """How often to halve depths for `most` keys; `last`: how often they were halved."""
        for halvings in range(_MOST_HALVINGS):
            if sum(map(len, self._by_halvings[halvings:])) <= most * (_ROOMY if halvings < last else 1):
                return halvings
        return _MOST_HALVINGS


def _joined(by_halvings: Sequence[Mapping[bytes, int]], most: int) -> bytes:
    return b"".join(itertools.chain.from_iterable(by_halvings))[-most * KEY_BYTES :]


def _halvings(depth: int) -> int:
    return min((depth & -depth).bit_length() - 1, _MOST_HALVINGS)


Node = TypeVar("Node")


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """A cached prefix in whole units.

    Attributes:
        keys: see `TokenChain`.
        hits: sequences that began with exactly these units.
        pin_name: the name of the pin, if the prefix is pinned.
        held_at: where another process gives its blocks (`folio.vmem.prefix.store.handover`); empty: nowhere.
    """

    token_ids: tuple[int, ...]
    keys: tuple[str, ...]
    hits: int
    pin_name: str | None = None
    held_at: str = ""


class HotNodes(Generic[Node]):
    """Hit counts of the nodes hit last. Every call but `best` takes constant time. Args: `most`: counted nodes."""

    def __init__(self, most: int = _MOST_HOT) -> None:
        self._most = most
        self._hits: OrderedDict[Node, int] = OrderedDict()  # the latest hit last

    def note(self, node: Node) -> None:
        """Count a hit."""
        self._hits[node] = self._hits.get(node, 0) + 1
        self._hits.move_to_end(node)
        if len(self._hits) > self._most:
            self._hits.popitem(last=False)

    def forget(self, node: Node) -> None:
        self._hits.pop(node, None)

    def best(
        self, most_units: int, units_of: Callable[[Node], Iterable[Node]], usable: Callable[[Node], bool]
    ) -> list[tuple[Node, int]]:
        """Nodes with the most hits, of equals the latest, with no more than `most_units` units together. Common units
        count once; a node that another one begins with is left out.

        Args:
            units_of: a node, its parent, and so on to the beginning.
            usable: whether the prefix that ends at a node is cached.
        """
        latest_first = [(node, hits) for node, hits in reversed(self._hits.items()) if usable(node)]
        taken: set[Node] = set()
        best: list[tuple[Node, int]] = []
        # Node that did not fit → units that would have been left, below 0. The number never grows, because a node taken
        # later fills at least as much room as it shares with this one. So long chains are not walked again.
        spare_with: dict[Node, int] = {}
        for node, hits in sorted(latest_first, key=lambda entry: -entry[1]):
            more: list[Node] = []
            known = None
            for unit in units_of(node):
                if unit in taken:
                    break
                known = spare_with.get(unit)
                if known is not None and known < len(more):
                    break
                known = None
                more.append(unit)
            spare = (most_units - len(taken) if known is None else known) - len(more)
            if spare < 0:
                spare_with.update((unit, spare + i) for i, unit in enumerate(more))
            elif more:
                taken.update(more)
                best.append((node, hits))
        begun = _begun([node for node, _ in best], units_of)
        return [(node, hits) for node, hits in best if node not in begun]

    def __iter__(self) -> Iterator[Node]:
        return iter(self._hits)


def _begun(nodes: Iterable[Node], units_of: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """All units that come before a node."""
    begun: set[Node] = set()
    for node in nodes:
        for unit in islice(units_of(node), 1, None):
            if unit in begun:  # with all before it
                break
            begun.add(unit)
    return begun
