"""Region: the virtual range of one sequence, and the block that each place maps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

HOLE = -1  # in place of a block id: nothing is mapped


@dataclass(slots=True, eq=False)
class Region:
    """Places 0, 1, 2 … of one slot. A place maps a block, or is a hole.

        mapped   | 7 | 3 | 9 | 4 | 8 | . | .
                 | -- used --| tail  |            used = 3, wanted = 5: two places mapped ahead

    Used places map the holder's blocks, in the order of its block table. The tail maps blocks of an earlier sequence,
    or was mapped ahead. A sequence that finds these blocks free allocates them, and nothing has to be mapped.

    Attributes:
        mapped_blocks: by place, the mapped block or `HOLE`; never a hole at the end.
        blocks: the block table of the holder, `None` while the region is parked.
        first: places before it have left the holder's window.
        checked: places `first … checked - 1` are known to map the holder's blocks.
        wanted: places that the holder's next step needs.
        fence: of the last step that may still read places no longer used.
        touched: when the region was last adopted, parked or mapped into, in seconds of a monotonic clock.
        busy: the mapper's thread is changing the region.
    """

    slot: int
    mapped_blocks: list[int] = field(default_factory=list)
    num_mapped: int = 0
    blocks: list[int] | None = None
    first: int = 0
    checked: int = 0
    wanted: int = 0
    fence: int = 0
    touched: float = 0.0
    busy: bool = False
    _first_mapped: int = 0  # every place before it is a hole

    @property
    def used(self) -> int:
        return len(self.blocks) if self.blocks is not None else 0

    def at(self, place: int) -> int:
        return self.mapped_blocks[place] if place < len(self.mapped_blocks) else HOLE

    def put(self, start: int, block_ids: Sequence[int]) -> None:
        """Note that the places from `start` on, which were holes, map these blocks."""
        end = start + len(block_ids)
        self.mapped_blocks += [HOLE] * (end - len(self.mapped_blocks))
        assert self.mapped_blocks[start:end] == [HOLE] * len(block_ids)
        self.mapped_blocks[start:end] = block_ids
        self.num_mapped += len(block_ids)
        self._first_mapped = min(self._first_mapped, start)

    def clear(self, start: int, end: int) -> list[int]:
        """Note that places `start … end - 1` are holes; returns the blocks they mapped."""
        block_ids = self.mapped_blocks[start:end]
        assert HOLE not in block_ids
        self.mapped_blocks[start:end] = [HOLE] * len(block_ids)
        self.num_mapped -= len(block_ids)
        while self.mapped_blocks and self.mapped_blocks[-1] == HOLE:
            self.mapped_blocks.pop()
        return block_ids

    def last_run(self, start: int, limit: int) -> tuple[int, int] | None:
        """(begin, end) of the last run of up to `limit` mapped places from `start` on."""
        end = len(self.mapped_blocks)
        if end <= start:
            return None
        begin = end
        while begin > start and end - begin < limit and self.mapped_blocks[begin - 1] != HOLE:
            begin -= 1
        return begin, end

    def first_run(self, end: int, limit: int) -> tuple[int, int] | None:
        """(begin, end) of the first run of up to `limit` mapped places before `end`."""
        end = min(end, len(self.mapped_blocks))
        begin = self._first_mapped
        while begin < end and self.mapped_blocks[begin] == HOLE:
            begin += 1
        self._first_mapped = begin
        if begin >= end:
            return None
        stop = begin
        while stop < end and stop - begin < limit and self.mapped_blocks[stop] != HOLE:
            stop += 1
        return begin, stop

    def matching(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks the first places map, in this order."""
        for i, (mapped, block_id) in enumerate(zip(self.mapped_blocks, block_ids, strict=False)):
            if mapped != block_id:
                return i
        return min(len(self.mapped_blocks), len(block_ids))

    def stale(self, end: int) -> Iterator[int]:
        """Places from `checked` to `end` that do not map the holder's block."""
        assert self.blocks is not None
        return (p for p in range(self.checked, end) if self.at(p) != self.blocks[p])
