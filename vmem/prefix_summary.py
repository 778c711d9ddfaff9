"""The cached prefixes in short, for routers that look for where a prompt is cached: a few bytes of each one's hash.

Kept up to date block by block, because going through a hundred thousand prefixes would hold up a step. An answer has
the latest changes, for readers that have followed so far, and beside them all keys as they were a little earlier, for
readers that begin or have missed too much.

Which cached prefixes are wanted most: what another memory that begins empty should have first.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

import numpy as np

from vmem.errors import IntegrityError

# With a million prefixes known, one in 300 million is taken for one that is cached and is not.
KEY_BYTES = 6
# A key, and before it 1 if there is such a prefix now, 0 if there is none any more.
CHANGE_BYTES = 1 + KEY_BYTES
# Changes in an answer at most. Then the keys are put together anew, and the latest half of the changes stays, for
# readers that have missed an answer.
MOST_CHANGES = 2048
# Changes of prefixes of any depth that are remembered until the next answer, which has only keys if there are more.
_MOST_REMEMBERED = 16 * MOST_CHANGES
# Prefixes whose depth is no multiple of 2^0, 2^1, … are left out first; this many times at most.
_MOST_HALVINGS = 8
# Prefixes left out come back when, with them, there are this share of the most keys: not as soon as one other is gone.
_ROOMY = 0.75


def key_of(digest: bytes) -> bytes:
    """What a summary says of a prefix with this digest (`TokenChain.digests`)."""
    return digest[:KEY_BYTES]


def split_keys(keys: bytes) -> list[bytes]:
    """One by one."""
    split: list[bytes] = np.frombuffer(keys, dtype=f"V{KEY_BYTES}").tolist()
    return split


@dataclass(frozen=True, slots=True)
class CachedKeys:
    """Keys of cached prefixes: of those whose number of units is a multiple of `stride`.

    Attributes:
        keys: all at some version before the last changes, side by side in no order.
        changes: `CHANGE_BYTES` each, in order. Each made a version that is 1 higher, the last one `version`; without
            one, all of `keys` is new. Who has the keys of a version among these needs the changes after it; who has
            none gets them from `keys` and all changes, because each says what is true of its key since.
    """

    keys: bytes
    changes: bytes
    stride: int
    version: int


NO_KEYS = CachedKeys(b"", b"", 1, 0)


class PrefixSummary:
    """Keys of the prefixes that layers without a window have blocks of, by how far their depth can be halved: with a
    prefix all shorter ones are there. What else a hit needs, a window's last blocks or a state, a summary does not say.
    Only called under the memory's lock.

    Attributes:
        num_changes: increases when any prefix is cached or forgotten.
    """

    def __init__(self) -> None:
        self._by_halvings: list[dict[bytes, int]] = [{} for _ in range(_MOST_HALVINGS + 1)]
        self._changed: deque[tuple[int, bytes]] = deque(maxlen=_MOST_REMEMBERED)
        self.num_changes = 0

    def __len__(self) -> int:
        return sum(map(len, self._by_halvings))

    def add(self, digest: bytes, depth: int) -> None:
        halvings, key = _halvings(depth), key_of(digest)
        keys = self._by_halvings[halvings]
        keys[key] = keys.get(key, 0) + 1
        self._changed.append((halvings, key))
        self.num_changes += 1

    def remove(self, digest: bytes, depth: int) -> None:
        halvings, key = _halvings(depth), key_of(digest)
        keys = self._by_halvings[halvings]
        if keys[key] == 1:
            del keys[key]
        else:
            keys[key] -= 1
        self._changed.append((halvings, key))
        self.num_changes += 1

    def keys(self, most: int, last: CachedKeys, since: int) -> CachedKeys:
        """At most `most` keys, and what has changed; the stride is the least power of two with which there are so few,
        or the last one until there are clearly fewer. Should even the greatest leave more, some are left out.

        Args:
            last: what was returned last for the same `most`; `NO_KEYS` before.
            since: `num_changes` then; -1 before.
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
            # Two prefixes may have one key: it is there as long as either is.
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
        """How often depths are to be halved for so few keys; `last`: how often they were."""
        for halvings in range(_MOST_HALVINGS):
            if sum(map(len, self._by_halvings[halvings:])) <= most * (_ROOMY if halvings < last else 1):
                return halvings
        return _MOST_HALVINGS


def _joined(by_halvings: Sequence[Mapping[bytes, int]], most: int) -> bytes:
    return b"".join(itertools.chain.from_iterable(by_halvings))[-most * KEY_BYTES :]


def _halvings(depth: int) -> int:
    """How often the depth can be halved, up to the most that counts."""
    return min((depth & -depth).bit_length() - 1, _MOST_HALVINGS)


# Prefixes that were found so many other ones ago are not hot.
_REMEMBERED = 4096

Node = TypeVar("Node")


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Tokens that are cached, whole units.

    Attributes:
        keys: what else must be equal (`TokenChain`).
        hits: sequences that began with exactly these units.
        pin_name: the name it is pinned under, if it is.
    """

    token_ids: tuple[int, ...]
    keys: tuple[str, ...]
    hits: int
    pin_name: str | None = None


class HotNodes(Generic[Node]):
    """Counts hits of nodes, those of the latest ones. Every call takes the same time but `best`."""

    def __init__(self) -> None:
        self._hits: OrderedDict[Node, int] = OrderedDict()  # the latest hit last

    def note(self, node: Node) -> None:
        """A sequence has begun with what ends here."""
        self._hits[node] = self._hits.get(node, 0) + 1
        self._hits.move_to_end(node)
        if len(self._hits) > _REMEMBERED:
            self._hits.popitem(last=False)

    def forget(self, node: Node) -> None:
        self._hits.pop(node, None)

    def best(
        self, most_units: int, units_of: Callable[[Node], Iterable[Node]], usable: Callable[[Node], bool]
    ) -> list[tuple[Node, int]]:
        """Nodes with their hits, those with most first, among equals the latest; as many as have no more than
        `most_units` units together. What they have in common counts once, and one that another one begins with is left
        out.

        Args:
            units_of: a node, its parent, and so on to the beginning.
            usable: whether what ends at a node can be found now.
        """
        latest_first = [(node, hits) for node, hits in reversed(self._hits.items()) if usable(node)]
        taken: set[Node] = set()
        best: list[tuple[Node, int]] = []
        # How many units would have been left with a node that did not fit, below 0 for itself. It never grows: whatever
        # else is taken fills the room by as much as it may spare the node. So long chains are not walked again.
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
        begun: set[Node] = set()
        for node, _ in best:
            for unit in islice(units_of(node), 1, None):
                if unit in begun:  # and so are all before it
                    break
                begun.add(unit)
        return [(node, hits) for node, hits in best if node not in begun]

    def __iter__(self) -> Iterator[Node]:
        return iter(self._hits)
