"""A rank's share of a weight, for readers that read no more than it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """Spans of one dimension, one after the other.

    Attributes:
        whole: shape of the weight.
    """

    whole: tuple[int, ...]
    dim: int
    spans: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        size = sum(end - start for start, end in self.spans)
        return (*self.whole[: self.dim], size, *self.whole[self.dim + 1 :])
