"""Retention: segments that clients asked to keep for a time, within a quota that tenants share fairly."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterator

from folio.vmem.blocks.segments import Segment


class Retention:
    """The retained segments. Running sequences take precedence: retained segments are evicted last, not never.

    While more is retained than the quota allows, the tenant with the most pages loses what it has retained for longest.
    """

    def __init__(self) -> None:
        self.num_pages = 0
        self._pages: Counter[str] = Counter()  # by owner
        self._of: dict[str, OrderedDict[Segment, None]] = {}  # owner → segments, the latest last
        self._num_segments = 0
        # Heap of (end, number, segment); entries of segments that end at another time by now are skipped.
        self._ends: list[tuple[float, int, Segment]] = []
        self._numbers = itertools.count()

    def retain(self, segment: Segment, until: float, owner: str, num_pages: int, most_pages: int) -> list[Segment]:
        """Retain a segment until then, or as before if that is longer; returns the segments that no longer are."""
        if until <= segment.retained_until or num_pages > most_pages:
            return []
        if segment.retained_until:
            self.drop(segment)
        segment.retained_until, segment.owner, segment.retained_pages = until, owner, num_pages
        self.num_pages += num_pages
        self._num_segments += 1
        self._pages[owner] += num_pages
        self._of.setdefault(owner, OrderedDict())[segment] = None
        heapq.heappush(self._ends, (until, next(self._numbers), segment))
        if len(self._ends) > 2 * self._num_segments + 64:
            self._ends = [entry for entry in self._ends if entry[2].retained_until == entry[0]]
            heapq.heapify(self._ends)
        dropped = []
        while self.num_pages > most_pages:
            largest = max(self._pages, key=self._pages.__getitem__)
            dropped.append(next(iter(self._of[largest])))
            self.drop(dropped[-1])
        return dropped

    def drop(self, segment: Segment) -> None:
        """End a segment's retention."""
        segment.retained_until = 0.0
        self.num_pages -= segment.retained_pages
        self._num_segments -= 1
        self._pages[segment.owner] -= segment.retained_pages
        del self._of[segment.owner][segment]
        if not self._of[segment.owner]:
            del self._pages[segment.owner], self._of[segment.owner]

    def expired(self, now: float) -> Iterator[Segment]:
        """End the retention of the segments whose time is up, and yield them."""
        while self._ends and self._ends[0][0] <= now:
            until, _, segment = heapq.heappop(self._ends)
            if segment.retained_until == until:
                self.drop(segment)
                yield segment

    def next_end(self) -> float | None:
        """When the time of the next segment is up, or may be."""
        return self._ends[0][0] if self._num_segments else None
