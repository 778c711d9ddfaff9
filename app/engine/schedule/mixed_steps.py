"""Mixed steps: bounds the time of steps with prompts and decodes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from folio.app.engine.report import StepTimes, attended_tokens
from folio.app.engine.schedule.preemption import PreemptionCostModel
from folio.app.engine.schedule.scheduled import Scheduled

# A step with prompts may take this many times as long as its decodes alone.
STRETCH = 4
# A step computes at least this many tokens of one prompt, so that every prompt ends, however slow the device is.
LEAST_CHUNK = 16
# Most that one slow step counts for, as a multiple of the expected time; each step has half the weight of the next.
_MOST_SLOWER = 8.0


class MixedSteps:
    """Bound the prompt tokens of steps that also decode: each decoding sequence waits for the whole step.

    Such a step should take at most `longest_s`, or `STRETCH` times as long as its decodes alone if that is longer. The
    estimate is the cost model's, corrected by how much longer than expected the latest mixed steps took: the model
    averages over hundreds of steps, but a machine becomes busy suddenly.

    Args:
        longest_s: seconds; infinite: no bound.
    """

    def __init__(self, recovery: PreemptionCostModel, longest_s: float) -> None:
        self._recovery = recovery
        self._longest_s = longest_s
        self._slower = 1.0
        self._left_s = math.inf
        self._step = StepTimes()

    def begin(self, decodes: Sequence[Scheduled]) -> None:
        """Begin a step with these decodes."""
        self._left_s = math.inf
        if decodes and self._longest_s != math.inf:
            self._step = self._recovery.step_times
            alone_s = _seconds(self._step, decodes)
            self._left_s = max(STRETCH * alone_s, self._longest_s / self._slower) - alone_s

    def fitting_tokens(self, num_cached: int, num_tokens: int) -> int:
        """How many of a prompt's next tokens fit into the time that is left, at least `LEAST_CHUNK` or all.

        Args:
            num_cached: tokens of the sequence before them.
        """
        if self._left_s == math.inf or self._step.seconds(0, num_tokens, attended_tokens(num_tokens, num_cached)) <= (
            self._left_s
        ):
            return num_tokens
        # n (token_s + (num_cached + 1/2) attended_s) + n² attended_s / 2 = left_s, solved without cancellation
        linear = self._step.token_s + (num_cached + 0.5) * self._step.attended_s
        root = math.sqrt(linear**2 + 2 * self._step.attended_s * max(self._left_s, 0.0))
        return min(num_tokens, max(int(2 * self._left_s / (linear + root)), LEAST_CHUNK))

    def take(self, num_cached: int, num_tokens: int) -> bool:
        """Deduct the time of a chunk; returns whether the step has time for another one."""
        if self._left_s != math.inf:
            self._left_s -= self._step.seconds(0, num_tokens, attended_tokens(num_tokens, num_cached))
        return self._left_s > LEAST_CHUNK * self._step.token_s

    def note(self, scheduled: Sequence[Scheduled], seconds: float) -> None:
        """Note the time of a step with prompts."""
        if not any(s.samples and s.num_tokens == 1 + len(s.drafts) for s in scheduled):
            return
        if (expected := _seconds(self._recovery.step_times, scheduled)) > 0:
            self._slower = max((self._slower + min(seconds / expected, _MOST_SLOWER)) / 2, 1.0)


def _seconds(step: StepTimes, scheduled: Sequence[Scheduled]) -> float:
    """Expected time of a step with these tokens."""
    num_tokens, attended = sum(s.num_tokens for s in scheduled), sum(s.num_attended for s in scheduled)
    return step.seconds(1, num_tokens, attended) + step.verify_s * any(s.drafts for s in scheduled)
