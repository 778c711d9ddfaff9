"""Pooler: turns a step's hidden states into embeddings and scores."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

import numpy as np
import torch

from folio.app.engine.model.pooling import Pooling
from folio.app.engine.request.delta import Delta
from folio.app.engine.request.faults import failure_of
from folio.app.engine.request.pooled import Array, PooledPrompt
from folio.app.engine.request.request import Sequence
from folio.app.engine.schedule.scheduled import Scheduled
from folio.app.engine.step.decoding import NOT_FINITE, Decoder
from folio.app.errors import EngineError


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Rows of a packed step whose hidden states are added to one prompt's sum.

    Attributes:
        end: the prompt position after the last row.
        is_last: whether the prompt is complete with these rows.
    """

    sequence: Sequence
    rows: slice
    end: int
    is_last: bool


class Pooler:
    """Add hidden states to the prompts that pool them, and end the prompts that are complete.

    Args:
        pooling: the model's pooling.
        decoder: ends requests.
    """

    def __init__(self, pooling: Pooling, decoder: Decoder) -> None:
        self._pooling = pooling
        self._decoder = decoder

    def select(self, scheduled: abc.Sequence[Scheduled]) -> list[PooledRows]:
        """The rows of a step that are pooled; its tokens are packed in this order."""
        selected = []
        first = 0
        for s in scheduled:
            if (pooled := s.sequence.pooled) is not None:
                start, end = pooled.span(s.start, s.start + s.num_tokens, len(s.sequence.token_ids))
                if start < end:
                    rows = slice(first + start - s.start, first + end - s.start)
                    selected.append(PooledRows(s.sequence, rows, end, s.ends_prompt))
            first += s.num_tokens
        return selected

    def apply(self, selected: abc.Sequence[PooledRows], sums: torch.Tensor) -> list[Delta]:
        """Add the sums `[len(selected), hidden_size]` of a committed step; returns the deltas of complete prompts."""
        deltas = []
        for part, total in zip(selected, sums.numpy(), strict=True):
            sequence = part.sequence
            if sequence.is_ended:
                continue
            assert sequence.pooled is not None
            sequence.pooled.add(total, part.end)
            if not part.is_last:
                continue
            try:
                deltas.append(self._end(sequence, sequence.pooled))
            except BaseException as error:  # noqa: BLE001 - raised again unless the request caused it
                failure = failure_of(sequence.request_id, error)
                deltas.append(self._decoder.fail(sequence.request, failure))
        return deltas

    def _end(self, sequence: Sequence, pooled: PooledPrompt) -> Delta:
        vector = self._pooling.finish(pooled.pooled(), pooled.params)
        if not np.isfinite(vector).all():
            return self._decoder.fail(sequence.request, EngineError(NOT_FINITE))
        data = to_bytes(vector)
        self._decoder.end_sequence(sequence)
        return Delta(
            sequence.request_id,
            (),
            "",
            "stop",
            num_cached_tokens=sequence.num_cached_tokens or 0,
            queue_s=sequence.queue_s,
            pooled=data,
        )


def to_bytes(vector: Array) -> bytes:
    """The vector as little-endian float32, as in OpenAI's base64."""
    return vector.astype("<f4").tobytes()
