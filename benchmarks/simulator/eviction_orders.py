"""Eviction orders to compare with Folio's: least recently used, and the optimal one, which knows the future."""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from folio.vmem import EvictionQueue
from folio.vmem.blocks.segments import CachedUnit, PrefixUse, Segment

NextUse = Callable[[bytes], float]


class _Blocks:
    """What both queues have in common: nothing is retained, and no clock decides."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def add(self, block_id: int, node: CachedUnit) -> None:
        self._blocks[block_id] = None

    def remove(self, block_id: int) -> None:
        del self._blocks[block_id]

    def first(self) -> int | None:
        return self.oldest()

    def oldest(self) -> int | None:
        return next(iter(self._blocks), None)

    def last_first(self) -> Iterator[int]:
        return reversed(self._blocks)

    def is_first_choice(self, block_id: int) -> bool:
        return True

    def check_integrity(self) -> None:
        pass

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)


class LeastRecentlyUsed:
    """Evicts the blocks freed first."""

    def new_queue(self) -> EvictionQueue:
        return _Blocks()

    def begin(self, digests: Sequence[bytes], nodes: Sequence[CachedUnit], use: PrefixUse) -> list[Segment]:
        return []

    def end(self, segments: Sequence[Segment], num_units: int, use: PrefixUse) -> None:
        pass

    def next_retention_end(self) -> float | None:
        return None


class _Furthest(_Blocks):
    def __init__(self, next_use: NextUse) -> None:
        super().__init__()
        self._next_use = next_use
        self._numbers = itertools.count()
        self._heap: list[tuple[float, int, int, int]] = []  # (-next use, -depth, number, block)
        self._number_of: dict[int, int] = {}

    def add(self, block_id: int, node: CachedUnit) -> None:
        super().add(block_id, node)
        number = self._number_of[block_id] = next(self._numbers)
        heapq.heappush(self._heap, (-self._next_use(node.digest), -node.depth, number, block_id))

    def first(self) -> int | None:
        while self._heap:
            *_, number, block_id = self._heap[0]
            if block_id in self and self._number_of[block_id] == number:
                return block_id
            heapq.heappop(self._heap)
        return None


class Optimal(LeastRecentlyUsed):
    """Evicts the blocks used again last, of equals the deepest (Belady 1966).

    Args:
        next_use: of the prefix with this digest, when it is used next; infinite: never. Must hold until then.
    """

    def __init__(self, next_use: NextUse) -> None:
        self._next_use = next_use

    def new_queue(self) -> EvictionQueue:
        return _Furthest(self._next_use)


class Uses:
    """The uses of every prefix in a list of prompts, by the prompts' numbers.

    Attributes:
        now: number of the prompt in progress.
    """

    def __init__(self, prompts: Sequence[Sequence[bytes]]) -> None:
        self.now = -1
        self._uses: dict[bytes, list[int]] = {}
        for number, digests in enumerate(prompts):
            for digest in digests:
                self._uses.setdefault(digest, []).append(number)

    def next_use(self, digest: bytes) -> float:
        uses = self._uses.get(digest, ())
        i = bisect.bisect_right(uses, self.now)
        return uses[i] if i < len(uses) else math.inf
