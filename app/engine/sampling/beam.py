"""Beam search, as transformers does it: the same candidates, scores and ends, so that the same outputs come out.

The search knows numbers only. Which blocks a beam has, and how a beam that goes on twice is forked, is the engine's
business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from app.engine.sampling.params import EarlyStopping


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A beam that has ended: the output of the beam it was, its last token, and its score."""

    token_ids: tuple[int, ...]
    score: float


@dataclass(frozen=True, slots=True)
class BeamStep:
    """How the beams go on, the best first: `(beam, token)`, the beam being an index among those before."""

    continuations: tuple[tuple[int, int], ...]


class BeamSearch:
    """The beams of one request.

    Each step's candidates are the likeliest continuations of all beams together, twice as many as there are beams, or
    more if there are several tokens that end an output, so that enough of them go on. Of the first `width` those that
    end become hypotheses; the best `width` of these are kept.

    Args:
        width: beams, and hypotheses that are kept.
        max_tokens: output tokens at most; a beam that has them ends.
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
        self._scores = np.zeros(1, dtype=np.float32)  # of the beams that go on: at first only the prompt
        self._hypotheses: list[Hypothesis] = []  # the best first
        self._can_improve = True

    @property
    def num_candidates(self) -> int:
        """Continuations to look at in each step."""
        return max(2, 1 + len(self._stop_token_ids)) * self.width

    @property
    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """The beams that have ended, the best first."""
        return tuple(self._hypotheses)

    def advance(self, outputs: Sequence[Sequence[int]], logprobs: np.ndarray, token_ids: np.ndarray) -> BeamStep:
        """Extend all beams by a token.

        Args:
            outputs: what each beam has generated so far, in the order of the last step's continuations.
            logprobs, token_ids: `[beams, num_candidates]` float32 and int, each beam's likeliest next tokens, the best
                first; fewer if there are not as many tokens.
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
        going = [candidate for candidate, ended in zip(candidates, ends, strict=True) if not ended][: self.width]
        self._scores = np.array([score for _, _, score in going], dtype=np.float32)
        if going and self._is_full:
            self._can_improve &= bool(self._best_possible(length) > self._hypotheses[-1].score)
        self.done = not going or not self._can_improve or (self._early_stopping is True and self._is_full)
        return BeamStep(tuple((beam, token) for beam, token, _ in going))

    @property
    def _is_full(self) -> bool:
        return len(self._hypotheses) == self.width

    def _best_possible(self, length: int) -> float:
        """Score that the best beam might end with. With `early_stopping` False it is taken for as long as it is, which
        longer ones with a positive penalty may beat."""
        if self._early_stopping == "never" and self._length_penalty > 0:
            length = self._max_tokens
        return self._normalised(self._scores[0], length)

    def _normalised(self, score: np.float32, length: int) -> float:
        return float(score) / float(length) ** self._length_penalty


def likeliest(logits: torch.Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Log probabilities (float32) and ids of each row's `count` likeliest tokens, the best first: `[rows, count]`."""
    logprobs, token_ids = logits.float().log_softmax(dim=-1).topk(min(count, logits.shape[-1]), dim=-1)
    return logprobs.numpy(), token_ids.numpy()
