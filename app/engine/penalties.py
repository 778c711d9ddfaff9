"""Repetition, presence and frequency: tokens that have occurred become less likely, or more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch

from app.engine.params import SamplingParams

_FIRST_ROOM = 64


class TokenCounts:
    """The distinct tokens of a prompt and its output, and how often each is in the output.

    A row is penalised at these tokens only: nothing here is as large as the vocabulary.
    """

    def __init__(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
        distinct = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        self._num = len(distinct)
        self._ids = np.concatenate([distinct, np.zeros(_FIRST_ROOM, np.int64)])
        self._counts = np.zeros(len(self._ids), np.float32)
        self._place = dict(zip(distinct.tolist(), range(self._num), strict=True))
        for token_id in output_token_ids:
            self.add(token_id)

    @property
    def token_ids(self) -> np.ndarray:
        """`[num]` int64, a view that the next `add` may replace."""
        return self._ids[: self._num]

    @property
    def in_output(self) -> np.ndarray:
        """`[num]` float32: how often each of `token_ids` is in the output; 0 for tokens of the prompt alone."""
        return self._counts[: self._num]

    def add(self, token_id: int) -> None:
        """Count a token of the output."""
        place = self._place.setdefault(token_id, self._num)
        if place == self._num:
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token_id
            self._num += 1
        self._counts[place] += 1

    def fork(self) -> Self:
        """The same counts, to go on differently."""
        other = type(self)((), ())
        other._num, other._place = self._num, self._place.copy()
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        return other


def penalise(
    logits: torch.Tensor, rows: Sequence[int], params: Sequence[SamplingParams], counts: Sequence[TokenCounts]
) -> None:
    """Change `logits [num_rows, vocab_size]` (float32) of some rows in place: first repetition, as in CTRL §4.1, then
    frequency and presence.

    Args:
        rows: which; `params` and `counts` have one for each.
    """
    lengths = [len(c.token_ids) for c in counts]
    where = torch.from_numpy(np.repeat(rows, lengths)), torch.from_numpy(np.concatenate([c.token_ids for c in counts]))
    times = torch.from_numpy(np.concatenate([c.in_output for c in counts]))

    def each(name: str) -> torch.Tensor:
        return torch.from_numpy(np.repeat([getattr(p, name) for p in params], lengths).astype(np.float32))

    penalty = each("repetition_penalty")
    values = logits[where]
    values = torch.where(values < 0, values * penalty, values / penalty)
    values -= each("frequency_penalty") * times
    values -= each("presence_penalty") * (times > 0)
    logits[where] = values
