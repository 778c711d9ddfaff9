"""Maps of blocks: every state is counted, and pictures stay small."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from folio.app.dashboard.state import COUNTED_CELLS, DETAIL_CELLS, OVERVIEW_CELLS, STATES, BlockMap, block_map, runs_of
from folio.vmem import BlockState


def map_of(states: np.ndarray, *, detailed: bool = True) -> BlockMap:
    return block_map(states, group=0, block_tokens=16, block_bytes=4096, swapped=3, detailed=detailed)


def random_states(num_blocks: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, len(STATES), num_blocks).astype(np.uint8)


def test_few_blocks_have_a_cell_each() -> None:
    states = random_states(1000)
    found = map_of(states)
    assert found.blocks_per_cell == 1
    assert found.states() == states.tobytes()
    assert found.cell_counts is None
    assert found.counts == {name: int((states == n).sum()) for n, name in enumerate(STATES)} | {"swapped": 3}


@pytest.mark.parametrize("num_blocks", [4097, 5000, 100_000, 1_000_003])
def test_many_blocks_are_counted_by_cell(num_blocks: int) -> None:
    states = random_states(num_blocks)
    found = map_of(states)
    cells = found.states()
    assert len(cells) == -(-num_blocks // found.blocks_per_cell) <= COUNTED_CELLS
    assert found.cell_counts is not None
    table = np.frombuffer(base64.b64decode(found.cell_counts), dtype="<u2").reshape(len(cells), len(STATES))
    assert table.sum(axis=0).tolist() == [found.counts[name] for name in STATES]
    assert table[0].tolist() == np.bincount(states[: found.blocks_per_cell], minlength=len(STATES)).tolist()


def test_a_replica_with_many_blocks_has_a_small_overview_and_a_bounded_detail() -> None:
    states = random_states(100_000)
    assert len(map_of(states, detailed=False).model_dump_json()) < 800
    assert len(map_of(states, detailed=False).states()) <= OVERVIEW_CELLS
    assert len(map_of(states).model_dump_json()) < 25_000
    assert len(map_of(random_states(DETAIL_CELLS)).model_dump_json()) < 8000


def test_blocks_without_pages_at_the_end_are_left_out() -> None:
    states = np.zeros(50_000, dtype=np.uint8)
    assert map_of(states).shown_blocks == 64
    states[99] = BlockState.ACTIVE
    found = map_of(states)
    assert found.shown_blocks == 128
    assert found.states().index(BlockState.ACTIVE) == 99
    assert found.counts["unbacked"] == 49_999


def test_a_cell_with_one_page_among_holes_shows_it() -> None:
    states = np.zeros(100_000, dtype=np.uint8)
    states[70_000] = BlockState.CACHED
    cells = map_of(states, detailed=False).states()
    assert sorted(set(cells)) == [BlockState.UNBACKED, BlockState.CACHED]


def test_runs_are_bounded() -> None:
    assert runs_of([7, 8, 9, 20, 3, 4], 8) == (7, 3, 20, 1, 3, 2)
    assert runs_of(range(0, 100, 2), 3) == (0, 1, 2, 1, 4, 1)
    assert runs_of([], 3) == ()
