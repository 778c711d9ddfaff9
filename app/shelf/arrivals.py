"""Arrival history: the probability that a model is asked for soon, from the gaps between its own requests.

The time since the last request is divided into bins, four in each octave. A bin's hazard is the share of gaps that
ended in it, of those that reached it; each bin averages over about the last `_MEMORY` gaps that reached it, so a burst
of short gaps does not replace what is known about long ones:

    silence:   |....|.....|......|.......|........|.........|...........|
    hazard:      .6    .2    .01    .01      .02      .9         .5          a burst, then every minute

The probability is conditional on the silence so far: bins that have passed do not count. A bin that no gap has reached
has the hazard of a gap of unknown scale, whose silence lasts twice as long again with probability one half.
"""

from __future__ import annotations

import itertools
import math

_BINS_PER_OCTAVE = 4
# End of the first bin, and number of bins: up to three days.
_FIRST_S, _NUM_BINS = 1 / 16, 88
# Gaps that reach a bin count for 1/e after this many others.
_MEMORY = 32.0
# Gaps that the prior counts for, and its median.
_PRIOR_GAPS, _PRIOR_S = 1.0, 60.0

_EDGES_S = [0.0, *(_FIRST_S * 2 ** (i / _BINS_PER_OCTAVE) for i in range(_NUM_BINS))]
_PRIOR = [1 - (_PRIOR_S + begin) / (_PRIOR_S + end) for begin, end in itertools.pairwise(_EDGES_S)]


def _bin_of(silence_s: float) -> int:
    if silence_s < _FIRST_S:
        return 0
    return min(1 + int(_BINS_PER_OCTAVE * math.log2(silence_s / _FIRST_S)), _NUM_BINS - 1)


class ArrivalHistory:
    """The gaps between a model's requests, in constant memory. Times are seconds of any one clock.

    `note` takes about 10 µs, the other methods 1 µs. A clock that goes back counts as one that stands still.
    """

    def __init__(self) -> None:
        self._last_at: float | None = None
        self._reached = [0.0] * _NUM_BINS  # gaps that reached each bin
        self._ended = [0.0] * _NUM_BINS  # of them, those that ended in it
        self._cumulative: list[float] = []  # hazard until the beginning of each bin, and the end of the last
        self._sum_hazards()

    def note(self, now: float) -> None:
        """Count a request that arrives now."""
        if self._last_at is not None:
            last, keep = _bin_of(max(now - self._last_at, 0.0)), 1 - 1 / _MEMORY
            for i in range(last + 1):
                self._reached[i] = self._reached[i] * keep + 1
                self._ended[i] *= keep
            self._ended[last] += 1
            self._sum_hazards()
        self._last_at = now if self._last_at is None else max(now, self._last_at)

    def silence_s(self, now: float) -> float:
        """Time since the last request; infinite before the first."""
        return math.inf if self._last_at is None else max(now - self._last_at, 0.0)

    def probability(self, now: float, horizon_s: float) -> float:
        """The probability that a request arrives within the horizon; 0 before the first request."""
        if self._last_at is None:
            return 0.0
        silence_s = self.silence_s(now)
        return -math.expm1(self._hazard_until(silence_s) - self._hazard_until(silence_s + horizon_s))

    def _hazard_until(self, silence_s: float) -> float:
        if silence_s >= _EDGES_S[-1]:
            return self._cumulative[-1] + math.log(silence_s / _EDGES_S[-1])
        i = _bin_of(silence_s)
        part = (silence_s - _EDGES_S[i]) / (_EDGES_S[i + 1] - _EDGES_S[i])
        return self._cumulative[i] + (self._cumulative[i + 1] - self._cumulative[i]) * part

    def _sum_hazards(self) -> None:
        hazards = (
            -math.log1p(-(ended + _PRIOR_GAPS * prior) / (reached + _PRIOR_GAPS))
            for ended, reached, prior in zip(self._ended, self._reached, _PRIOR, strict=True)
        )
        self._cumulative = [0.0, *itertools.accumulate(hazards)]
