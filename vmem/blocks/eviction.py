"""Eviction: the order in which cached blocks are evicted.

`ReturnOrder` evicts what is least likely to be used soon (`return_times`); segments that clients asked to keep
(`retention`) go last. Every call takes constant time, apart from the number of classes and of a prompt's segments.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from folio.vmem.blocks.return_times import BAND_ENDS, ReturnTimes
from folio.vmem.blocks.segments import CachedUnit, PrefixClass, PrefixUse, Segment, SegmentIndex
from folio.vmem.errors import IntegrityError
from folio.vmem.prefix.retention import Retention

# Ages are brought up to date, and scores computed, at most so often.
_PERIOD_S = 0.25
_SCORES_PERIOD_S = 5.0

Place = tuple[PrefixClass, int]
Places = dict[Place, OrderedDict[Segment, None]]  # those used first first


class EvictionQueue(Protocol):
    """The cached blocks of one pool."""

    def add(self, block_id: int, node: CachedUnit) -> None: ...

    def remove(self, block_id: int) -> None: ...

    def first(self) -> int | None:
        """The block to evict next."""

    def oldest(self) -> int | None:
        """The block unused for longest, of those whose pages may go back to the machine."""

    def last_first(self) -> Iterator[int]:
        """All blocks, the last to be evicted first. Valid until the next change."""

    def is_first_choice(self, block_id: int) -> bool:
        """Whether nothing else should be evicted before this block."""

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless the queue's parts agree."""

    def __contains__(self, block_id: object) -> bool: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...


class EvictionOrder(Protocol):
    """The order of eviction in one memory. Only called with the memory's lock held."""

    def new_queue(self) -> EvictionQueue: ...

    def begin(self, digests: Sequence[bytes], nodes: Sequence[CachedUnit], use: PrefixUse) -> list[Segment]:
        """The segments of a sequence that begins with a prompt of these units, the first ones cached in `nodes`."""

    def end(self, segments: Sequence[Segment], num_units: int, use: PrefixUse) -> None:
        """Note that a sequence of so many cached units is about to free its blocks."""

    def next_retention_end(self) -> float | None: ...


class ReturnOrder:
    """Evict first what is least likely to be used soon.

    Args:
        most_retained: pages that may be retained now.
        pages_of_units: pages that so many units take.
    """

    def __init__(
        self,
        most_retained: Callable[[], int],
        pages_of_units: Callable[[int], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most_retained = most_retained
        self._pages_of_units = pages_of_units
        self._clock = clock
        self.times = ReturnTimes()
        self.retention = Retention()
        self._segments = SegmentIndex(self._use)
        self._queues: list[SegmentQueue] = []
        self._idle: Places = {}  # cached or not
        self._due = self._scores_due = -math.inf
        self.scores: dict[PrefixClass, list[float]] = {}

    def new_queue(self) -> SegmentQueue:
        self._queues.append(SegmentQueue(self))
        return self._queues[-1]

    def begin(self, digests: Sequence[bytes], nodes: Sequence[CachedUnit], use: PrefixUse) -> list[Segment]:
        self.advance()
        now = self._clock()
        path, returning = self._segments.trace(digests, nodes, use)
        for segment in returning:
            if segment.is_idle:
                self.times.note_returned(*segment.place)
        for segment in path:
            self._use(segment)
            segment.used_at = now
        return path

    def end(self, segments: Sequence[Segment], num_units: int, use: PrefixUse) -> None:
        now = self._clock()
        for segment in reversed(segments):  # the end of a prefix is evicted first
            if segment.start >= num_units and segment.part == "output":
                continue
            segment.kind = use.kind
            segment.used_at = now
            was_idle, segment.is_idle = segment.is_idle, True
            self._move(segment, (segment.prefix_class, 0))
            self._segments.note_idle(segment)
            if not was_idle:  # else another sequence has used it, too
                self.times.note_reached(*segment.place)
        if use.retain_s > 0:
            self._retain(segments, num_units, use, now)

    def next_retention_end(self) -> float | None:
        return self.retention.next_end()

    def advance(self) -> None:
        """Bring ages and scores up to date."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + _PERIOD_S
        for segment in self.retention.expired(now):
            self._move(segment, segment.place)
        for place in sorted(self._idle, reverse=True):  # the oldest first: places are in order of use
            self._age(place, now)
        if now >= self._scores_due:
            self._scores_due = now + _SCORES_PERIOD_S
            self._score()

    def _age(self, place: Place, now: float) -> None:
        """Move the segments that have become too old for a place."""
        of, band = place
        while place in self._idle:
            segment, reached = next(iter(self._idle[place])), band
            while reached < len(BAND_ENDS) and segment.used_at + BAND_ENDS[reached] <= now:
                reached += 1
                self.times.note_reached(of, reached)
            if reached == band:
                break
            self._move(segment, (of, reached))

    def score_of(self, place: Place) -> float:
        of, band = place
        if of not in self.scores:
            self.times.add_class(of)
            self._score()
        return self.scores[of][band]

    def release_retained(self, segment: Segment) -> None:
        """Give up a retained segment, because memory is needed."""
        self.retention.drop(segment)
        self._move(segment, segment.place)

    def _score(self) -> None:
        self.scores = dict(self.times.scores())
        for queue in self._queues:
            queue.forget_worst()

    def _retain(self, segments: Sequence[Segment], num_units: int, use: PrefixUse, now: float) -> None:
        for segment in reversed(segments):  # what exceeds the quota is the end of the prefix
            if segment.part == "output" and not use.retains_output:
                continue
            num_own = int(min(segment.end, num_units)) - segment.start
            if num_own > 0:
                pages = self._pages_of_units(num_own)
                dropped = self.retention.retain(segment, now + use.retain_s, use.owner, pages, self._most_retained())
                for other in {*dropped, segment}:
                    self._move(other, other.place)

    def _use(self, segment: Segment) -> None:
        """Take a segment out of the idle ones; its cached blocks keep their place."""
        if segment.is_idle:
            segment.is_idle = False
            take_segment(self._idle, segment)
            self._segments.note_used(segment)

    def _move(self, segment: Segment, place: Place) -> None:
        """Move a segment to a place, behind all others there."""
        if segment.is_idle and segment in self._idle.get(segment.place, ()):
            take_segment(self._idle, segment)
        for queue in self._queues:
            queue.take(segment)
        segment.place = place
        for queue in self._queues:
            queue.put(segment)
        if segment.is_idle:
            put_segment(self._idle, segment)


def put_segment(places: Places, segment: Segment) -> None:
    places.setdefault(segment.place, OrderedDict())[segment] = None


def take_segment(places: Places, segment: Segment) -> None:
    segments = places[segment.place]
    del segments[segment]
    if not segments:
        del places[segment.place]


class SegmentQueue:
    """The cached blocks of one pool by segment, these by class and age."""

    def __init__(self, order: ReturnOrder) -> None:
        self._order = order
        self._segment_of: dict[int, Segment] = {}
        self._blocks: dict[Segment, OrderedDict[int, None]] = {}  # those freed first first
        self._places: Places = {}
        self._worst: Segment | None = None  # `None`: not known
        self._retained: OrderedDict[Segment, None] = OrderedDict()

    def add(self, block_id: int, node: CachedUnit) -> None:
        segment = node.segment
        blocks = self._blocks.get(segment)
        if blocks is None:
            blocks = self._blocks[segment] = OrderedDict()
            self.put(segment)
        blocks[block_id] = None
        self._segment_of[block_id] = segment

    def remove(self, block_id: int) -> None:
        segment = self._segment_of.pop(block_id)
        blocks = self._blocks[segment]
        del blocks[block_id]
        if not blocks:
            self.take(segment)
            del self._blocks[segment]

    def first(self) -> int | None:
        if not self._blocks:
            return None
        self._order.advance()
        if not self._places:
            self._order.release_retained(next(iter(self._retained)))
        return next(iter(self._blocks[self._find_worst()]))

    def oldest(self) -> int | None:
        self._order.advance()
        heads = map(next, map(iter, self._places.values()))
        longest = min(heads, key=lambda segment: segment.used_at, default=None)
        return None if longest is None else next(iter(self._blocks[longest]))

    def last_first(self) -> Iterator[int]:
        self._order.advance()
        ranks = {s: (s.retained_until > 0, self._order.score_of(s.place), s.used_at) for s in self._blocks}
        ranked = sorted(self._blocks, key=ranks.__getitem__, reverse=True)
        return (block_id for segment in ranked for block_id in reversed(self._blocks[segment]))

    def is_first_choice(self, block_id: int) -> bool:
        segment = self._segment_of[block_id]
        self._order.advance()
        if segment.retained_until:
            return not self._places
        return self._order.score_of(segment.place) <= self._order.score_of(self._find_worst().place)

    def put(self, segment: Segment) -> None:
        """Queue a segment, if it has blocks here, at its place or among the retained ones."""
        if segment not in self._blocks:
            return
        self.forget_worst()
        if segment.retained_until:
            self._retained[segment] = None
        else:
            put_segment(self._places, segment)

    def take(self, segment: Segment) -> None:
        """Undo `put`, before the segment's place or retention changes, or after its retention has."""
        if segment not in self._blocks:
            return
        self.forget_worst()
        if segment in self._retained:
            del self._retained[segment]
        else:
            take_segment(self._places, segment)

    def forget_worst(self) -> None:
        """Places or scores have changed."""
        self._worst = None

    def _find_worst(self) -> Segment:
        """The segment unused for longest, of those with the lowest score."""
        if self._worst is None:
            heads = map(next, map(iter, self._places.values()))
            self._worst = min(heads, key=lambda segment: (self._order.score_of(segment.place), segment.used_at))
        return self._worst

    def check_integrity(self) -> None:
        held = {block_id: segment for segment, blocks in self._blocks.items() for block_id in blocks}
        queued = [s for segments in self._places.values() for s in segments] + list(self._retained)
        if held != self._segment_of or Counter(queued) != Counter(list(self._blocks)):
            raise IntegrityError(
                f"{len(self._segment_of)} blocks are cached, {len(held)} queued in {len(queued)} places"
            )
        for place, segments in self._places.items():
            if not segments or any(s.place != place or s.retained_until for s in segments):
                raise IntegrityError(f"segments at {place} belong elsewhere")
        if not all(segment.retained_until for segment in self._retained):
            raise IntegrityError("a segment counts as retained whose time is up")

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._segment_of

    def __len__(self) -> int:
        return len(self._segment_of)

    def __iter__(self) -> Iterator[int]:
        return iter(self._segment_of)
