"""Tiles of products with quantised weights: what a program computes, by the number of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class CodeTile:
    """Work of a program.

    Attributes:
        outputs: of a program.
        rows: of a program; 1: no tensor cores.
        slabs: of an output that are read at once, 1 with tensor cores.
        num_stages: tiles in flight, and one in use.
    """

    outputs: int
    rows: int
    slabs: int
    num_warps: int
    num_stages: int


# By the most rows; those that read the least first, as in `product`.
Tiles = Mapping[int, Sequence[CodeTile]]
ONE_ROW = CodeTile(8, 1, 8, 2, 3)
TILES: Tiles = {
    1: (ONE_ROW,),
    16: (CodeTile(64, 16, 1, 4, 5), CodeTile(32, 16, 1, 2, 6), CodeTile(16, 16, 1, 1, 8)),
    64: (CodeTile(64, 64, 1, 4, 4), CodeTile(32, 64, 1, 2, 4)),
    128: (CodeTile(128, 128, 1, 8, 2), CodeTile(64, 128, 1, 4, 2), CodeTile(64, 64, 1, 4, 4)),
}
# Of products of 8-bit rows. Four warps and 64 outputs are the least of a Hopper tensor core's own instructions.
EIGHT_BIT_TILES: Tiles = {
    32: (CodeTile(64, 32, 1, 4, 6), CodeTile(32, 32, 1, 2, 6)),
    64: (CodeTile(64, 64, 1, 4, 5), CodeTile(32, 64, 1, 2, 5)),
    128: (CodeTile(128, 128, 1, 8, 3), CodeTile(64, 128, 1, 4, 4), CodeTile(64, 64, 1, 4, 5)),
}
# For any number of rows, whose sums then have one order.
BATCH_INVARIANT_TILE = TILES[64][1]
_FULL_WAVE = 0.9  # of the processors
_LONE_ROWS = 0.25  # for each expert, at most


def tiles_of(num_rows: int, tiles: Tiles = TILES) -> Sequence[CodeTile]:
    """The tiles for so many rows."""
    return tiles[next((rows for rows in tiles if rows >= num_rows), max(tiles))]


def choose_tile(num_rows: int, num_outputs: int, num_processors: float, tiles: Tiles = TILES) -> CodeTile:
    """The first tile for so many rows of which one wave fills the processors."""
    found, wanted = tiles_of(num_rows, tiles), _FULL_WAVE * num_processors
    filling = (t for t in found if triton.cdiv(num_outputs, t.outputs) * triton.cdiv(num_rows, t.rows) >= wanted)
    return next(filling, found[-1])


def choose_expert_tile(
    num_rows: int, num_experts: int, num_outputs: int, num_processors: int, tiles: Tiles = TILES
) -> CodeTile:
    """The tile for rows of experts: of one row while few are likely to have the same expert, else for the mean of an
    expert's rows."""
    mean = 1 if num_rows <= _LONE_ROWS * num_experts else max(2, num_rows // num_experts)
    return choose_tile(mean, num_outputs, num_processors / min(num_rows, num_experts), tiles)


def most_tiles(num_rows: int, num_experts: int, tile: CodeTile) -> int:
    """Tiles that hold the rows of each expert, however many it has."""
    return min(num_rows, (num_rows + num_experts * (tile.rows - 1)) // tile.rows)


@triton.jit
def expert_rows(
    ends_ptr: tl.tensor,  # [EXPERTS] int64
    tile: tl.tensor,
    EXPERTS: tl.constexpr,  # noqa: N803
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The expert of a tile, the first of its rows, and their number; 0 beyond the last tile."""
    experts = tl.arange(0, triton.next_power_of_2(EXPERTS))
    ends = tl.load(ends_ptr + experts, mask=experts < EXPERTS, other=0).to(tl.int32)
    starts = tl.load(ends_ptr + experts - 1, mask=(experts > 0) & (experts < EXPERTS), other=0).to(tl.int32)
    tiles = tl.cdiv(ends - starts, BLOCK_ROWS)
    behind = tl.cumsum(tiles)
    first = starts + (tile - behind + tiles) * BLOCK_ROWS
    own = (behind > tile) & (behind - tiles <= tile)  # of one expert at most
    rows = tl.minimum(ends - first, BLOCK_ROWS)
    return tl.sum(tl.where(own, experts, 0)), tl.sum(tl.where(own, first, 0)), tl.sum(tl.where(own, rows, 0))
