from __future__ import annotations

import math
from collections import Counter

import pytest

from folio.vmem.blocks.block_pool import BlockPool
from folio.vmem.blocks.eviction import ReturnOrder
from folio.vmem.errors import IntegrityError


def warm(num_blocks: int) -> BlockPool:
    """A pool whose blocks all have pages."""
    pool = BlockPool(range(num_blocks), ReturnOrder(lambda: 0, lambda num_units: num_units).new_queue())
    pool.end_move(pool.begin_attach(num_blocks), has_pages=True, freed_at=0.0)
    return pool


def free(pool: BlockPool, *block_ids: int, now: float = 1.0, fence: int = 0) -> None:
    pool.free(block_ids, fence=fence, now=now)


def test_references_keep_a_block_alive() -> None:
    pool = warm(4)
    blocks = pool.allocate_free(2)
    pool.add_references(blocks)
    free(pool, *blocks)
    assert (pool.num_free, pool.num_owned) == (2, 2)
    pool.check_integrity(Counter(blocks), Counter())
    free(pool, *blocks)
    assert pool.num_free == 4
    pool.check_integrity(Counter(), Counter())


def test_low_neighbours_first() -> None:
    pool = warm(6)
    assert pool.allocate_free(4) == [0, 1, 2, 3]
    free(pool, 2, 0, 1)
    pool.allocate_block(1)
    assert pool.allocate_free(9) == [0, 2, 4, 5]


def test_a_freed_block_is_free_mapped_until_no_region_maps_it() -> None:
    pool = warm(3)
    pool.allocate_free(2)
    pool.note_region_mapped([0, 1, 0])
    free(pool, 0, 1)
    assert (pool.num_free, pool.num_free_mapped) == (1, 2)
    assert pool.is_allocatable(0)
    pool.note_region_unmapped([0, 1])
    assert (pool.num_free, pool.num_free_mapped) == (2, 1)
    pool.check_integrity(Counter(), Counter([0]))
    assert pool.allocate_free_mapped(5) == [0]
    with pytest.raises(IntegrityError, match="no region maps it"):
        pool.note_region_unmapped([1])


def test_blocks_freed_first_are_detached_first() -> None:
    pool = warm(4)
    pool.allocate_free(4)
    for moment, block_id in enumerate((3, 1, 0, 2)):
        free(pool, block_id, now=float(moment), fence=10 + moment)
    assert pool.oldest_free_since() == 0.0
    assert pool.detachable(9, freed_before=1.0) == ([1, 3], 11)
    pool.begin_detach([1, 3])
    pool.end_move([1, 3], has_pages=False)
    assert (pool.num_unbacked, pool.num_free) == (2, 2)
    assert pool.detachable(1, freed_before=math.inf) == ([0], 12)
    assert pool.begin_attach(9) == [1, 3]
    pool.end_move([1, 3], has_pages=False)
    pool.check_integrity(Counter(), Counter())


def test_eager_blocks_are_counted_until_allocated() -> None:
    pool = warm(3)
    block_ids = pool.begin_map_ahead(2)
    assert (block_ids, pool.num_owned, pool.num_free) == ([0, 1], 0, 1)
    pool.end_map_ahead(block_ids, 1.0, failed=False)
    assert (pool.num_eager, pool.num_free_mapped) == (2, 2)
    pool.end_map_ahead(pool.begin_map_ahead(1), 1.0, failed=True)
    assert pool.num_free == 1
    assert pool.begin_map_ahead(3, steals=True) == [2]  # not what was mapped ahead itself
    pool.end_map_ahead([2], 1.0, failed=True)
    pool.allocate_block(0)
    pool.note_region_unmapped([1])
    assert (pool.num_eager, pool.num_free_mapped) == (0, 0)


def test_double_free_is_an_error() -> None:
    pool = warm(2)
    [block_id] = pool.allocate_free(1)
    free(pool, block_id)
    with pytest.raises(IntegrityError, match="free already"):
        free(pool, block_id)
    with pytest.raises(IntegrityError, match="has no owner"):
        pool.add_references([block_id])
    pool.allocate_block(block_id)
    with pytest.raises(IntegrityError, match="not free"):
        pool.allocate_block(block_id)


def test_check_finds_a_leak() -> None:
    pool = warm(2)
    pool.allocate_free(1)
    with pytest.raises(IntegrityError, match="too many"):
        pool.check_integrity(Counter(), Counter())


def test_extents_get_and_lose_their_pages_together() -> None:
    pool = BlockPool(range(4, 16), ReturnOrder(lambda: 0, lambda num_units: num_units).new_queue(), 4)
    blocks = pool.begin_attach(1)
    assert blocks == [4, 5, 6, 7]
    pool.end_move(blocks, has_pages=True, freed_at=0.0)
    assert (pool.num_free, pool.num_detachable, pool.num_unbacked) == (4, 4, 8)
    pool.end_move(pool.begin_attach(5), has_pages=True, freed_at=0.0)
    assert pool.allocate_free(6) == [4, 5, 6, 7, 8, 9]
    assert pool.detachable(9, freed_before=math.inf) == ([12, 13, 14, 15], 0)
    free(pool, 4, 5, 6, now=1.0, fence=3)
    assert pool.num_detachable == 4
    free(pool, 7, now=2.0, fence=5)
    assert pool.num_detachable == 8
    assert pool.detachable(9, freed_before=1.5) == ([12, 13, 14, 15], 0)
    assert pool.detachable(5, freed_before=2.0) == ([*range(4, 8), *range(12, 16)], 5)
    assert pool.oldest_free_since() == 0.0
    pool.check_integrity(Counter([8, 9]), Counter())
