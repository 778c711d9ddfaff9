"""One reserved virtual range, and which block each of its places shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

HOLE = -1  # a place behind which nothing is mapped


class Region:
    """Places 0, 1, 2 … of one slot. A place shows a block, or is a hole.

        shows    | 7 | 3 | 9 | 4 | 8 | . | .
                 | -- used ----- | tail  |        used = 3, wanted = 5: two places mapped ahead

    The places in use belong to the sequence that holds the region, in the order of its block table. What a place
    outside shows is left over from an earlier sequence, or was mapped ahead; whoever holds or adopts the region next
    may find that block free and take it, and then nothing has to be mapped.

    Attributes:
        blocks: the block table of the sequence that holds the region, `None` while it is parked.
        first: places before it have left the sequence's window.
        checked: places `first … checked - 1` are known to show the sequence's blocks.
        wanted: places the holder's next step needs.
        fence: the last step that may still read a place which is not in use any more.
        touched: when it was last taken, parked or mapped into, in seconds of a monotonic clock.
        busy: the mapper is changing it; nobody else may.
    """

    __slots__ = (
        "_first_shown",
        "blocks",
        "busy",
        "checked",
        "fence",
        "first",
        "num_shown",
        "shows",
        "slot",
        "touched",
        "wanted",
    )

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.shows: list[int] = []
        self.num_shown = 0
        self._first_shown = 0  # every place before it is a hole
        self.blocks: list[int] | None = None
        self.first = 0
        self.checked = 0
        self.wanted = 0
        self.fence = 0
        self.touched = 0.0
        self.busy = False

    @property
    def used(self) -> int:
        return len(self.blocks) if self.blocks is not None else 0

    def at(self, place: int) -> int:
        return self.shows[place] if place < len(self.shows) else HOLE

    def put(self, start: int, block_ids: Sequence[int]) -> None:
        """Places from `start` on, holes so far, now show these blocks."""
        end = start + len(block_ids)
        self.shows += [HOLE] * (end - len(self.shows))
        assert self.shows[start:end] == [HOLE] * len(block_ids)
        self.shows[start:end] = block_ids
        self.num_shown += len(block_ids)
        self._first_shown = min(self._first_shown, start)

    def clear(self, start: int, end: int) -> list[int]:
        """Places `start … end - 1` are holes from now on; returns what they showed."""
        block_ids = self.shows[start:end]
        assert HOLE not in block_ids
        self.shows[start:end] = [HOLE] * len(block_ids)
        self.num_shown -= len(block_ids)
        while self.shows and self.shows[-1] == HOLE:
            self.shows.pop()
        return block_ids

    def last_run(self, start: int, limit: int) -> tuple[int, int] | None:
        """The last run of up to `limit` places from `start` on that show a block: (begin, end)."""
        end = len(self.shows)  # never a hole at the end
        if end <= start:
            return None
        begin = end
        while begin > start and end - begin < limit and self.shows[begin - 1] != HOLE:
            begin -= 1
        return begin, end

    def first_run(self, end: int, limit: int) -> tuple[int, int] | None:
        """The first run of up to `limit` places before `end` that show a block: (begin, end)."""
        end = min(end, len(self.shows))
        begin = self._first_shown
        while begin < end and self.shows[begin] == HOLE:
            begin += 1
        self._first_shown = begin
        if begin >= end:
            return None
        stop = begin
        while stop < end and stop - begin < limit and self.shows[stop] != HOLE:
            stop += 1
        return begin, stop

    def matching(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks it shows in this order from the first place on."""
        for i, (shown, wanted) in enumerate(zip(self.shows, block_ids, strict=False)):
            if shown != wanted:
                return i
        return min(len(self.shows), len(block_ids))

    def stale(self, end: int) -> Iterator[int]:
        """Places from `checked` to `end` that do not show what the holder's table says."""
        assert self.blocks is not None
        return (p for p in range(self.checked, end) if self.at(p) != self.blocks[p])
