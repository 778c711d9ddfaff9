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
        "mapped_blocks",
        "num_mapped",
        "slot",
        "touched",
        "wanted",
    )

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.mapped_blocks: list[int] = []
        self.num_mapped = 0
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
        return self.mapped_blocks[place] if place < len(self.mapped_blocks) else HOLE

    def put(self, start: int, block_ids: Sequence[int]) -> None:
        """Places from `start` on, holes so far, now show these blocks."""
        end = start + len(block_ids)
        self.mapped_blocks += [HOLE] * (end - len(self.mapped_blocks))
        assert self.mapped_blocks[start:end] == [HOLE] * len(block_ids)
        self.mapped_blocks[start:end] = block_ids
        self.num_mapped += len(block_ids)
        self._first_shown = min(self._first_shown, start)

    def clear(self, start: int, end: int) -> list[int]:
        """Places `start … end - 1` are holes from now on; returns what they showed."""
        block_ids = self.mapped_blocks[start:end]
        assert HOLE not in block_ids
        self.mapped_blocks[start:end] = [HOLE] * len(block_ids)
        self.num_mapped -= len(block_ids)
        while self.mapped_blocks and self.mapped_blocks[-1] == HOLE:
            self.mapped_blocks.pop()
        return block_ids

    def last_run(self, start: int, limit: int) -> tuple[int, int] | None:
        """The last run of up to `limit` places from `start` on that show a block: (begin, end)."""
        end = len(self.mapped_blocks)  # never a hole at the end
        if end <= start:
            return None
        begin = end
        while begin > start and end - begin < limit and self.mapped_blocks[begin - 1] != HOLE:
            begin -= 1
        return begin, end

    def first_run(self, end: int, limit: int) -> tuple[int, int] | None:
        """The first run of up to `limit` places before `end` that show a block: (begin, end)."""
        end = min(end, len(self.mapped_blocks))
        begin = self._first_shown
        while begin < end and self.mapped_blocks[begin] == HOLE:
            begin += 1
        self._first_shown = begin
        if begin >= end:
            return None
        stop = begin
        while stop < end and stop - begin < limit and self.mapped_blocks[stop] != HOLE:
            stop += 1
        return begin, stop

    def matching(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks it shows in this order from the first place on."""
        for i, (shown, wanted) in enumerate(zip(self.mapped_blocks, block_ids, strict=False)):
            if shown != wanted:
                return i
        return min(len(self.mapped_blocks), len(block_ids))

    def stale(self, end: int) -> Iterator[int]:
        """Places from `checked` to `end` that do not show what the holder's table says."""
        assert self.blocks is not None
        return (p for p in range(self.checked, end) if self.at(p) != self.blocks[p])
