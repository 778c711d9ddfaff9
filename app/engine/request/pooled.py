"""Pooled prompts: parameters of a request for a vector, and the sum of its prompt's hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Array = np.ndarray[Any, Any]
PoolingMethod = Literal["last", "mean"]
PooledKind = Literal["embedding", "score"]


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """A request for a vector of the prompt in place of an output.

    Attributes:
        kind: the model's embedding of the prompt, or its classifier's score.
        dimensions: return this many first components of the embedding, normalised anew; `None`: all.
    """

    kind: PooledKind = "embedding"
    dimensions: int | None = None


@dataclass(slots=True, eq=False)
class PooledPrompt:
    """Sum of the hidden states of a prompt's tokens.

    Attributes:
        method: the tokens that count: the last one, or all.
        num_tokens: prompt tokens that are in `total`, or skipped. They are not added again when a preempted prompt is
            recomputed.
        total: `[hidden_size]` float64.
    """

    params: PoolingParams
    method: PoolingMethod
    num_tokens: int = 0
    total: Array | float = 0.0

    def span(self, start: int, end: int, length: int) -> tuple[int, int]:
        """Half-open range of the positions to add, of a step that computes `start … end - 1` of `length`."""
        return max(start, length - 1 if self.method == "last" else self.num_tokens), end

    def add(self, total: Array, end: int) -> None:
        """Add the sum of a span that ends before position `end`."""
        self.total, self.num_tokens = self.total + total.astype(np.float64), end

    def pooled(self) -> Array:
        """`[hidden_size]` float64, once the prompt is computed."""
        assert isinstance(self.total, np.ndarray)
        return self.total if self.method == "last" else self.total / self.num_tokens
