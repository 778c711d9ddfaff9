"""Free blocks: the lowest are allocated first, and only whole extents can give their pages back."""

from __future__ import annotations

import random

import pytest

from folio.vmem.blocks.free_blocks import FreeBlocks


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_against_a_plain_model(size: int, seed: int) -> None:
    pick, end = random.Random(seed), 6 * size
    blocks, free = FreeBlocks(end, size), list[int]()  # in the order in which they were freed
    whole: list[int] = []  # extents, in the order in which they became whole
    for _ in range(400):
        others = [block for block in range(end) if block not in free]
        if others and pick.random() < 0.55:
            block = pick.choice(others)
            blocks.add(block)
            free.append(block)
        elif free and pick.random() < 0.5:
            block = pick.choice(free)
            blocks.remove(block)
            free.remove(block)
        else:
            count = pick.randrange(4)
            lowest = sorted(free)[:count]
            assert blocks.take_lowest(count) == lowest
            free = [block for block in free if block not in lowest]
        full = [e for e in range(6) if all(b in free for b in range(e * size, (e + 1) * size))]
        whole = [e for e in whole if e in full] + [e for e in full if e not in whole]
        assert list(blocks) == free
        assert [extent[0] // size for extent in blocks.whole_extents()] == whole
        assert blocks.num_whole == len(whole) * size
        assert blocks.is_consistent()


def test_a_block_may_come_first() -> None:
    blocks = FreeBlocks(4, 1)
    for block in (3, 1):
        blocks.add(block)
    blocks.add(2, first=True)
    assert list(blocks) == [2, 3, 1]
    assert [list(extent) for extent in blocks.whole_extents()] == [[2], [3], [1]]
