"""Beam search with transformers' candidates, scores and stopping rules, and therefore its outputs.

The search handles token ids and scores only; the engine forks and frees the sequences of beams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from folio.app.engine.sampling.params import EarlyStopping


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam: its output, the last token included, and its score."""

    token_ids: tuple[int, ...]
    score: float


class BeamSearch:
    """The beams of one request.

    A step's candidates are the likeliest continuations of all beams together: twice as many as beams, or more with
    several stop tokens, so that enough of them continue. Of the first `width` candidates, finished ones become
    hypotheses; the best `width` hypotheses are kept.

    Args:
        width: number of beams, and most hypotheses.
        max_tokens: most output tokens of a beam.
        stop_token_ids: tokens that end a beam.
        length_penalty, early_stopping: see `SamplingParams`.

    Attributes:
        done: whether the search is over.
    """

    def __init__(
        self,
        width: int,
        max_tokens: int,
        stop_token_ids: frozenset[int],
        length_penalty: float,
        early_stopping: EarlyStopping,
    ) -> None:
        self.width = width
        self.done = False
        self._max_tokens = max_tokens
        self._stop_token_ids = stop_token_ids
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._scores = np.zeros(1, dtype=np.float32)  # of running beams; at first one, the prompt
        self._hypotheses: list[Hypothesis] = []  # the best first
        self._can_improve = True

    @property
    def num_candidates(self) -> int:
        """Candidates in each step."""
        return max(2, 1 + len(self._stop_token_ids)) * self.width

    @property
    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """The best finished beams, the best first."""
        return tuple(self._hypotheses)

    def advance(
        self, outputs: Sequence[Sequence[int]], logprobs: np.ndarray, token_ids: np.ndarray
    ) -> list[tuple[int, int]]:
        """Extend all beams by a token; return the beams that continue, the best first: (previous beam, token).

        Args:
            outputs: each beam's output, in the order of the last step's continuations.
            logprobs, token_ids: `[beams, num_candidates]` float32 and int, each beam's likeliest next tokens, the best
                first; fewer in a smaller vocabulary.
        """
        scores = (logprobs + self._scores[:, None]).astype(np.float32)
        order = np.argsort(-scores, axis=None, kind="stable")[: self.num_candidates]
        beams, places = np.divmod(order, scores.shape[1])
        candidates = list(zip(beams.tolist(), token_ids[beams, places].tolist(), scores[beams, places], strict=True))
        length = len(outputs[0]) + 1
        ends = [token in self._stop_token_ids or length >= self._max_tokens for _, token, _ in candidates]
        if self._can_improve and not (self._early_stopping is True and self._is_full):
            for (beam, token, score), ended in list(zip(candidates, ends, strict=True))[: self.width]:
                if ended:
                    self._hypotheses.append(Hypothesis((*outputs[beam], token), self._normalised(score, length)))
            self._hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
            del self._hypotheses[self.width :]
        running = [candidate for candidate, ended in zip(candidates, ends, strict=True) if not ended][: self.width]
        self._scores = np.array([score for _, _, score in running], dtype=np.float32)
        if running and self._is_full:
            self._can_improve &= bool(self._best_possible(length) > self._hypotheses[-1].score)
        self.done = not running or not self._can_improve or (self._early_stopping is True and self._is_full)
        return [(beam, token) for beam, token, _ in running]

    @property
    def _is_full(self) -> bool:
        return len(self._hypotheses) == self.width

    def _best_possible(self, length: int) -> float:
        """Estimate of the best beam's final score. With `early_stopping` False the current length counts, which a
        longer beam with a positive penalty may exceed."""
        if self._early_stopping == "never" and self._length_penalty > 0:
            length = self._max_tokens
        return self._normalised(self._scores[0], length)

    def _normalised(self, score: np.float32, length: int) -> float:
        return float(score) / float(length) ** self._length_penalty


def likeliest(logits: torch.Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Log probabilities (float32) and ids of each row's `count` likeliest tokens, the best first: `[rows, count]`."""
    logprobs, token_ids = logits.float().log_softmax(dim=-1).topk(min(count, logits.shape[-1]), dim=-1)
    return logprobs.cpu().numpy(), token_ids.cpu().numpy()
