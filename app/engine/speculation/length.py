"""Draft length: the number of draft tokens for each sequence of a step that maximises tokens per second."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from typing import Any

import numpy as np

from folio.app.engine.report import StepTimes
from folio.app.engine.request.request import Sequence

Floats = np.ndarray[Any, np.dtype[np.float64]]

# Acceptance rate before any verification. The engine's rate weighs as much for a sequence as this many of its own draft
# tokens.
_FIRST_RATE, _PRIOR_WEIGHT = 0.6, 4.0
# Number of further draft tokens after which one counts half: of one sequence, and of all.
_REQUEST_HALF_LIFE, _ENGINE_HALF_LIFE = 32, 2048
# Sequences for which drafting does not pay probe it with this many tokens in every 16th step, or while most are
# rejected in every 32nd, … 256th (powers of 2). They probe in the same steps, so that a draft model runs for all of
# them at once.
_PROBE_TOKENS, _LEAST_REST, _MOST_REST = 4, 4, 8
# Steps between updates of the measured times, which change slowly and are costly to fit.
_UPDATE_INTERVAL = 16
# Lower bounds, so that the number of tokens decides before anything is measured.
_LEAST_STEP_S, _LEAST_DRAFT_S = 1e-6, 1e-12


class Acceptance:
    """Recent acceptance rate of draft tokens, given that the preceding ones in the step were accepted.

    Args:
        half_life: number of further draft tokens after which one counts half.
    """

    def __init__(self, half_life: int) -> None:
        self._keep = 0.5 ** (1 / half_life)
        self._accepted = 0.0
        self._verified = 0.0

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """Record that the first `num_accepted` of a step's draft tokens were accepted."""
        for accepted in [1.0] * num_accepted + [0.0] * (num_accepted < num_drafts):
            self._accepted = self._keep * self._accepted + accepted
            self._verified = self._keep * self._verified + 1

    def rate(self, prior: float) -> float:
        """Estimated probability of acceptance; `prior` before any verification."""
        return (self._accepted + _PRIOR_WEIGHT * prior) / (self._verified + _PRIOR_WEIGHT)


def choose_lengths(
    rates: abc.Sequence[float],
    most: abc.Sequence[int],
    num_cached: abc.Sequence[int],
    *,
    step: StepTimes,
    draft: StepTimes,
    budget: int,
) -> list[int]:
    """The number of draft tokens for each sequence that maximises the step's tokens per second.

    With an acceptance rate p, k draft tokens give p + p² + … + pᵏ further tokens. A draft token costs the step and the
    draft model one token each; the step's first one also costs a verification, and the largest number as many forwards
    of the draft model. For each number of forwards, draft tokens are added by gain per time (for one sequence that is
    their order) until a further one would lower the speed. Where `budget` ends that earlier, the choice may be a few
    percent slower than the best one.

    Args:
        rates: acceptance rates.
        most: most draft tokens of each sequence.
        num_cached: tokens that each sequence's queries see.
        step, draft: times of the model's steps and of the draft model's.
        budget: most draft tokens of the step.
    """
    lengths = np.zeros(len(rates), dtype=np.int64)
    limit = max(most, default=0)
    if limit < 1 or budget < 1:
        return lengths.tolist()
    attended = np.array(num_cached, dtype=np.float64)
    token_s = step.token_s + step.attended_s * attended
    draft_s = np.maximum(token_s + draft.token_s + draft.attended_s * attended, _LEAST_DRAFT_S)
    bounds = np.array(most)
    gains: Floats = np.array(rates, dtype=np.float64)[:, None] ** np.arange(1, limit + 1)  # [sequences, limit]
    worth = gains / draft_s[:, None]
    seconds = max(step.fixed_s + float(token_s.sum()), _LEAST_STEP_S)
    best = len(rates) / seconds
    for num_forwards in range(1, limit + 1) if draft.fixed_s else (limit,):
        allowed = np.arange(limit) < np.minimum(bounds, num_forwards)[:, None]
        rows = np.nonzero(allowed)[0]
        order = np.argsort(-worth[allowed], kind="stable")[:budget]
        tokens = len(rates) + gains[allowed][order].cumsum()
        speed = tokens / (seconds + step.verify_s + num_forwards * draft.fixed_s + draft_s[rows[order]].cumsum())
        if len(speed) and speed.max() > best:
            best = float(speed.max())
            lengths = np.bincount(rows[order][: int(speed.argmax()) + 1], minlength=len(rates))
    return lengths.tolist()


class _Record:
    """Acceptance of one sequence."""

    def __init__(self) -> None:
        self.acceptance = Acceptance(_REQUEST_HALF_LIFE)
        self.rest = _LEAST_REST
        self.probed = False


class LengthControl:
    """Chooses draft lengths by acceptance rates and measured times, and probes where drafting does not pay.

    Args:
        max_draft_tokens: most draft tokens of a sequence.
        step_times, draft_times: measured times of the model and of the proposer.
    """

    def __init__(
        self, max_draft_tokens: int, step_times: Callable[[], StepTimes], draft_times: Callable[[], StepTimes]
    ) -> None:
        self._most = max_draft_tokens
        self._step_times, self._draft_times = step_times, draft_times
        self._step, self._draft = StepTimes(), StepTimes()
        self._num_steps = 0
        self._all = Acceptance(_ENGINE_HALF_LIFE)
        self._records: dict[Sequence, _Record] = {}
        self._chosen: list[int] | None = None  # without probes; `None` after a verification and after new times
        self._chosen_for: tuple[list[Sequence], list[int], int] = [], [], 0

    @property
    def num_requests(self) -> int:
        """Sequences with a record."""
        return len(self._records)

    def choose(self, sequences: abc.Sequence[Sequence], budget: int) -> list[int]:
        """Draft lengths of the sequences in the next step, at most `budget` together."""
        if self._num_steps % _UPDATE_INTERVAL == 0:
            self._step, self._draft = self._step_times(), self._draft_times()
            self._chosen = None
        self._num_steps += 1
        records = [self._records.setdefault(sequence, _Record()) for sequence in sequences]
        # The last token of an output always comes from the model.
        most = [max(min(self._most, r.max_tokens - r.num_output_tokens - 1), 0) for r in sequences]
        given = list(sequences), most, budget
        if self._chosen is None or given != self._chosen_for:  # texts longer by a few tokens change no choice
            prior = self._all.rate(_FIRST_RATE)
            self._chosen, self._chosen_for = None, given
            self._chosen = choose_lengths(
                [record.acceptance.rate(prior) for record in records],
                most,
                [len(sequence.token_ids) for sequence in sequences],
                step=self._step,
                draft=self._draft,
                budget=budget,
            )
        lengths = self._chosen.copy()
        budget -= sum(lengths)
        for i, record in enumerate(records):
            record.probed = not lengths[i] and self._num_steps % 2**record.rest == 0
            if record.probed:
                lengths[i] = min(_PROBE_TOKENS, most[i], budget)
                budget -= lengths[i]
        return lengths

    def note(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Record that the first `num_accepted` of a sequence's draft tokens were accepted."""
        self._chosen = None
        self._all.note(num_drafts, num_accepted)
        record = self._records.setdefault(sequence, _Record())
        record.acceptance.note(num_drafts, num_accepted)
        if 2 * num_accepted > num_drafts:
            record.rest = _LEAST_REST
        elif record.probed:
            record.rest = min(record.rest + 1, _MOST_REST)
        record.probed = False

    def forget_sequence(self, sequence: Sequence) -> None:
        self._records.pop(sequence, None)
        self._chosen, self._chosen_for = None, ([], [], 0)
