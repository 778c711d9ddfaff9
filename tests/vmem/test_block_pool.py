from __future__ import annotations

from collections import Counter

import pytest

from vmem import BlockPool, IntegrityError, OutOfPages


def test_references_keep_a_block_alive() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.share(blocks)
    pool.free(blocks)
    assert pool.num_free == 2
    pool.check_integrity(Counter(blocks))
    pool.free(blocks)
    assert pool.num_free == 4
    pool.check_integrity(Counter())


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(OutOfPages, match="2 blocks needed, 1 free"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_low_neighbours_first() -> None:
    pool = BlockPool(6)
    assert pool.allocate(4) == [0, 1, 2, 3]
    pool.free([2, 0, 1])
    assert pool.allocate(3) == [0, 1, 2]


def test_double_free_is_an_error() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(IntegrityError, match="free already"):
        pool.free(blocks)
    with pytest.raises(IntegrityError, match="which is free"):
        pool.share(blocks)


def test_check_finds_a_leak() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(IntegrityError, match="too many"):
        pool.check_integrity(Counter())
