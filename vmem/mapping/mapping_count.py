"""Mapping count: the mappings of all KV memories of a process, which share one limit."""

from __future__ import annotations

from collections.abc import Callable


class MappingCount:
    """Sum over the memories that share a limit, such as vm.max_map_count. From any thread.

    Each memory counts its mappings of now, and those of pages that may still come to be mapped at home.
    """

    def __init__(self) -> None:
        self._counts: list[Callable[[], int]] = []

    @property
    def total(self) -> int:
        return sum(count() for count in tuple(self._counts))

    def join(self, count: Callable[[], int]) -> None:
        self._counts.append(count)

    def leave(self, count: Callable[[], int]) -> None:
        self._counts.remove(count)
