from __future__ import annotations

import math
from collections import Counter

import pytest

from vmem.block_pool import BlockPool
from vmem.errors import IntegrityError


def warm(num_blocks: int) -> BlockPool:
    """A pool whose blocks all have pages."""
    pool = BlockPool(range(num_blocks))
    pool.end_attach(pool.begin_attach(num_blocks), now=0.0)
    return pool


def free(pool: BlockPool, *block_ids: int, now: float = 1.0, fence: int = 0) -> None:
    pool.free(block_ids, fence=fence, now=now)


def test_references_keep_a_block_alive() -> None:
    pool = warm(4)
    blocks = pool.take_loose(2)
    pool.share(blocks)
    free(pool, *blocks)
    assert (pool.num_loose, pool.num_owned) == (2, 2)
    pool.check_integrity(Counter(blocks), Counter())
    free(pool, *blocks)
    assert pool.num_loose == 4
    pool.check_integrity(Counter(), Counter())


def test_low_neighbours_first() -> None:
    pool = warm(6)
    assert pool.take_loose(4) == [0, 1, 2, 3]
    free(pool, 2, 0, 1)
    pool.take(1)
    assert pool.take_loose(9) == [0, 2, 4, 5]


def test_what_a_region_shows_is_tied_until_it_is_hidden() -> None:
    pool = warm(3)
    pool.take_loose(2)
    pool.shown([0, 1, 0])
    free(pool, 0, 1)
    assert (pool.num_loose, pool.num_tied) == (1, 2)
    assert pool.is_free(0)
    pool.hidden([0, 1])
    assert (pool.num_loose, pool.num_tied) == (2, 1)
    pool.check_integrity(Counter(), Counter([0]))
    assert pool.take_tied(5) == [0]
    with pytest.raises(IntegrityError, match="hidden where it was not shown"):
        pool.hidden([1])


def test_the_longest_free_are_detached_first() -> None:
    pool = warm(4)
    pool.take_loose(4)
    for moment, block_id in enumerate((3, 1, 0, 2)):
        free(pool, block_id, now=float(moment), fence=10 + moment)
    assert pool.oldest_loose() == 0.0
    assert pool.detachable(9, freed_before=1.0) == ([1, 3], 11)
    pool.begin_detach([1, 3])
    pool.end_move([1, 3], has_pages=False)
    assert (pool.num_cold, pool.num_loose) == (2, 2)
    assert pool.detachable(1, freed_before=math.inf) == ([0], 12)
    assert pool.begin_attach(9) == [1, 3]
    pool.end_move([1, 3], has_pages=False)
    pool.check_integrity(Counter(), Counter())


def test_eager_blocks_are_counted_until_somebody_takes_them() -> None:
    pool = warm(3)
    block_ids = pool.begin_show(2)
    assert (block_ids, pool.num_owned, pool.num_loose) == ([0, 1], 0, 1)
    pool.end_show(block_ids, 1.0, failed=False)
    assert (pool.num_eager, pool.num_tied) == (2, 2)
    pool.end_show(pool.begin_show(1), 1.0, failed=True)
    assert pool.num_loose == 1
    pool.take(0)
    pool.hidden([1])
    assert (pool.num_eager, pool.num_tied) == (0, 0)


def test_double_free_is_an_error() -> None:
    pool = warm(2)
    [block_id] = pool.take_loose(1)
    free(pool, block_id)
    with pytest.raises(IntegrityError, match="free already"):
        free(pool, block_id)
    with pytest.raises(IntegrityError, match="nobody owns"):
        pool.share([block_id])
    pool.take(block_id)
    with pytest.raises(IntegrityError, match="not free"):
        pool.take(block_id)


def test_check_finds_a_leak() -> None:
    pool = warm(2)
    pool.take_loose(1)
    with pytest.raises(IntegrityError, match="too many"):
        pool.check_integrity(Counter(), Counter())
