"""Return times: how soon prefixes of a class are used again, learned from the traffic.

For each class a life table counts how many prefixes became as old as a band of ages without use, and how many of them
returned within the band. Bands double: up to 0.5 s, 1 s, 2 s, …

A prefix's score is the highest rate of returns that any holding time gives it (the Gittins index): the chance that it
returns within that time, over the seconds for which it occupies memory until it returns or the time is up.

    class: a turn that ends with a tool call        class: a turn that ends with an answer
    band   0   0.5   1    2    4    8 s             band   0   0.5   1    2    4    8 s
    p      .1   .3   .5   .3   .2  .0               p      0    0   .01  .02  .03  .05
    score  .48  .55  .44  .17  .05  …               score  .01  .01  .01  .01  .01   …    evicted first
"""

from __future__ import annotations

from collections.abc import Iterator

from folio.vmem.blocks.segments import PrefixClass

NUM_BANDS = 14
# Seconds until the end of each band; the last one has none.
BAND_ENDS = tuple(0.5 * 2**band for band in range(NUM_BANDS - 1))
_WIDTHS = (0.5, *(end / 2 for end in BAND_ENDS[1:]), BAND_ENDS[-1])
# Chance to return within a band before anything is known. Equal chances in bands that double are a rate that falls with
# age, for all classes alike: least recently used is evicted first.
_PRIOR = 0.1
# Prefixes that the prior counts for in the table of all classes; and those that a class's prior counts for, which is
# that of the class with fewer returns, or the table of all classes.
_PRIOR_WEIGHT, _CLASS_WEIGHT = 8.0, 8.0
# A class that has seen so many prefixes forgets half of each count, so that it follows the traffic.
_MOST_COUNTED = 4096.0


class _LifeTable:
    __slots__ = ("reached", "returned")

    def __init__(self) -> None:
        self.reached = [0.0] * NUM_BANDS
        self.returned = [0.0] * NUM_BANDS

    def chances(self, prior: list[float], weight: float) -> list[float]:
        """Chance of return within each band, for a prefix that has reached it."""
        return [
            (returned + weight * p) / (reached + weight)
            for reached, returned, p in zip(self.reached, self.returned, prior, strict=True)
        ]

    def forget(self) -> None:
        if self.reached[0] >= _MOST_COUNTED:
            self.reached = [count / 2 for count in self.reached]
            self.returned = [count / 2 for count in self.returned]


class ReturnTimes:
    """Life tables by class."""

    def __init__(self) -> None:
        self._all = _LifeTable()
        self._tables: dict[PrefixClass, _LifeTable] = {}

    def add_class(self, of: PrefixClass) -> _LifeTable:
        """The table of a class, which may be new."""
        return self._tables.setdefault(of, _LifeTable())

    def note_reached(self, of: PrefixClass, band: int) -> None:
        """Count a prefix that has become so old without use. Band 0: its use has just ended."""
        for table in (self.add_class(of), self._all):
            table.reached[band] += 1
            if not band:
                table.forget()

    def note_returned(self, of: PrefixClass, band: int) -> None:
        """Count a prefix that is used again."""
        for table in (self.add_class(of), self._all):
            table.returned[band] += 1

    def scores(self) -> Iterator[tuple[PrefixClass, list[float]]]:
        """The scores of each class, by band. A class inherits from the one with fewer returns."""
        fewer: dict[tuple[str, str], list[float]] = {}
        prior = self._all.chances([_PRIOR] * NUM_BANDS, _PRIOR_WEIGHT)
        for of, table in sorted(self._tables.items(), key=lambda entry: entry[0]):
            chances = table.chances(fewer.get(of[:2], prior), _CLASS_WEIGHT)
            fewer[of[:2]] = chances
            yield of, _gittins(chances)


def _gittins(chances: list[float]) -> list[float]:
    """For each band, the most returns a second that holding on from its beginning gives."""
    scores = []
    for band in range(NUM_BANDS):
        best, left, returned, held_s = 0.0, 1.0, 0.0, 0.0
        for p, width in zip(chances[band:], _WIDTHS[band:], strict=True):
            held_s += left * (1 - p / 2) * width  # returns are spread evenly over the band
            returned += left * p
            left *= 1 - p
            best = max(best, returned / held_s)
        scores.append(best)
    return scores
