"""Runs of neighbours within a list of numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def adjacent_runs(numbers: Sequence[int], step: int = 1) -> Iterator[tuple[int, int]]:
    """(start, end) of each longest slice of `numbers` in which every number is the last one plus `step`."""
    start = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + step:
            yield start, i
            start = i
