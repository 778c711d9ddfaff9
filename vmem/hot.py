"""Which cached prefixes are wanted most: what another memory that begins empty should have first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

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
