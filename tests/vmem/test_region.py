"""Runs of mapped places in a region."""

from __future__ import annotations

import pytest

from folio.vmem.mapping.region import HOLE, Region


@pytest.mark.parametrize(
    ("mapped", "first", "last"),
    [
        ([7, 3, 9, 4], (0, 2), (2, 4)),
        ([7, HOLE, 9, 4], (0, 1), (2, 4)),
        ([7, 3, 9, HOLE, 4], (0, 2), (4, 5)),
        ([HOLE, HOLE, 9], (2, 3), (2, 3)),
        ([], None, None),
    ],
)
def test_runs_are_bounded_and_end_at_holes(
    mapped: list[int], first: tuple[int, int] | None, last: tuple[int, int] | None
) -> None:
    region = Region(0, mapped, num_mapped=sum(block_id != HOLE for block_id in mapped))
    assert (region.first_run(len(mapped), 2), region.last_run(0, 2)) == (first, last)
    assert region.last_run(len(mapped), 2) is None
