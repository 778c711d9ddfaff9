"""How many tokens to guess for each request of a step: as many as make the most tokens a second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from app.engine.report import StepTimes
from app.engine.request import Request

Floats = np.ndarray[Any, np.dtype[np.float64]]

# What is thought of guesses before any was checked. So many checked guesses of its own weigh as much for a request as
# what all others have seen.
_FIRST_RATE, _PRIOR_WEIGHT = 0.6, 4.0
# A checked guess counts half after so many more: of one request, and of all.
_REQUEST_HALF_LIFE, _ENGINE_HALF_LIFE = 32, 2048
# Requests for which guessing does not pay guess all the same, so many tokens at once, in every 16th step, or as long as
# most of it is wrong in every 32nd, … 256th. All who do in the same steps: a draft model then runs for all of them.
_PROBE_TOKENS, _LEAST_REST, _MOST_REST = 4, 4, 8
# Steps between looks at the measured times, which change slowly and have to be fitted.
_LOOK_EVERY = 16
# Where nothing has been measured yet, so that the number of tokens decides.
_LEAST_STEP_S, _LEAST_GUESS_S = 1e-6, 1e-12


class Acceptance:
    """How often guesses have been right lately, each given that those before it in its step were.

    Args:
        half_life: a checked guess counts half after so many more.
    """

    def __init__(self, half_life: int) -> None:
        self._keep = 0.5 ** (1 / half_life)
        self._right = 0.0
        self._checked = 0.0

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """Of so many guesses for one step the first few were right."""
        for right in [1.0] * num_accepted + [0.0] * (num_accepted < num_drafts):
            self._right = self._keep * self._right + right
            self._checked = self._keep * self._checked + 1

    def rate(self, prior: float) -> float:
        """Probability that a guess is right; `prior` as long as there is nothing else to go by."""
        return (self._right + _PRIOR_WEIGHT * prior) / (self._checked + _PRIOR_WEIGHT)


def choose_lengths(
    rates: Sequence[float],
    most: Sequence[int],
    num_cached: Sequence[int],
    *,
    step: StepTimes,
    draft: StepTimes,
    budget: int,
) -> list[int]:
    """How many tokens to guess for each request, so that the step makes the most tokens a second.

    A request whose guesses are right with probability p gets p + p² + … + pᵏ more tokens from k of them. A guess costs
    the step a token, and the draft model one too; the first request that wants a further guess also costs the fixed
    time of one more forward of the draft model. With the number of those forwards given, the guesses that bring most
    for their time come first (which for each request is in their order), until another one would lower the rate.

    Args:
        rates: probabilities that a guess is right.
        most: guesses at most, of each.
        num_cached: tokens that each request's queries see.
        step, draft: times of the model's steps, and of the draft model's.
        budget: guesses at most, all together.
    """
    lengths = np.zeros(len(rates), dtype=np.int64)
    limit = max(most, default=0)
    if limit < 1 or budget < 1:
        return lengths.tolist()
    attended = np.array(num_cached, dtype=np.float64)
    token_s = step.token_s + step.attended_s * attended
    guess_s = np.maximum(token_s + draft.token_s + draft.attended_s * attended, _LEAST_GUESS_S)
    bounds = np.array(most)
    gains: Floats = np.array(rates, dtype=np.float64)[:, None] ** np.arange(1, limit + 1)  # [requests, limit]
    worth = gains / guess_s[:, None]
    seconds = max(step.fixed_s + float(token_s.sum()), _LEAST_STEP_S)
    best = len(rates) / seconds
    for num_forwards in range(1, limit + 1) if draft.fixed_s else (limit,):
        allowed = np.arange(limit) < np.minimum(bounds, num_forwards)[:, None]
        whose = np.nonzero(allowed)[0]
        order = np.argsort(-worth[allowed], kind="stable")[:budget]
        tokens = len(rates) + gains[allowed][order].cumsum()
        speed = tokens / (seconds + num_forwards * draft.fixed_s + guess_s[whose[order]].cumsum())
        if len(speed) and speed.max() > best:
            best = float(speed.max())
            lengths = np.bincount(whose[order][: int(speed.argmax()) + 1], minlength=len(rates))
    return lengths.tolist()


class _Record:
    """What is known of one request."""

    def __init__(self) -> None:
        self.acceptance = Acceptance(_REQUEST_HALF_LIFE)
        self.rest = _LEAST_REST
        self.probed = False


class LengthControl:
    """Chooses lengths by what has been accepted and by measured times, and tries again now and then where it does not
    pay.

    Args:
        max_draft_tokens: guesses for a request at most.
        step_times, draft_times: measured so far, of the model and of what makes the guesses.
    """

    def __init__(
        self,
        max_draft_tokens: int,
        step_times: Callable[[], StepTimes],
        draft_times: Callable[[], StepTimes],
    ) -> None:
        self._most = max_draft_tokens
        self._step_times, self._draft_times = step_times, draft_times
        self._step, self._draft = StepTimes(), StepTimes()
        self._num_steps = 0
        self._all = Acceptance(_ENGINE_HALF_LIFE)
        self._records: dict[Request, _Record] = {}

    @property
    def num_requests(self) -> int:
        """Requests that something is known of."""
        return len(self._records)

    def choose(self, requests: Sequence[Request], budget: int) -> list[int]:
        """Guesses for each request in the coming step, at most `budget` together."""
        if self._num_steps % _LOOK_EVERY == 0:
            self._step, self._draft = self._step_times(), self._draft_times()
        self._num_steps += 1
        records = [self._records.setdefault(request, _Record()) for request in requests]
        # The last token that it may have is always one that the model chooses.
        most = [max(min(self._most, r.max_tokens - r.num_output_tokens - 1), 0) for r in requests]
        prior = self._all.rate(_FIRST_RATE)
        lengths = choose_lengths(
            [record.acceptance.rate(prior) for record in records],
            most,
            [len(request.token_ids) for request in requests],
            step=self._step,
            draft=self._draft,
            budget=budget,
        )
        budget -= sum(lengths)
        for i, record in enumerate(records):
            record.probed = not lengths[i] and self._num_steps % 2**record.rest == 0
            if record.probed:
                lengths[i] = min(_PROBE_TOKENS, most[i], budget)
                budget -= lengths[i]
        return lengths

    def note(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """So many guesses for the request were checked, and the first few were right."""
        self._all.note(num_drafts, num_accepted)
        record = self._records.setdefault(request, _Record())
        record.acceptance.note(num_drafts, num_accepted)
        if 2 * num_accepted > num_drafts:
            record.rest = _LEAST_REST
        elif record.probed:
            record.rest = min(record.rest + 1, _MOST_REST)
        record.probed = False

    def forget_request(self, request: Request) -> None:
        self._records.pop(request, None)
