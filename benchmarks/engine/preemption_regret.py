"""Regret of the preemption cost model: the time of the chosen way of recovery over that of the better one.

Both ways are measured in turn, so every round of a cell has a ratio: of the chosen way's time to the other's. That a
cell's median ratio exceeds one can be noise alone, and the worst of 40 cells would always be the noisiest. A choice
therefore counts as wrong only as far as the cell's rounds prove it: by a lower bound of the median ratio that holds
with 95 % confidence (`least_median`). `model_regret` is the worst cell's bound, and 1 where no choice is proved wrong.
What small errors cost together is in `regret_overall`: the chosen ways' times, all cells added up, over those of the
better ways.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from folio.app.engine.schedule.preemption import PreemptionCost, PreemptionMode


@dataclass(frozen=True, slots=True)
class Round:
    """Both ways, one after the other, in seconds.

    Attributes:
        swap_s: copying out, copying in, and mapping.
        decode_s: the step after the swap.
        recompute_s: the steps until the next token.
    """

    swap_s: float
    decode_s: float
    recompute_s: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One sequence length at one block size.

    Attributes:
        picked, expected: of the cost model, before the measurement.
        swap_s, decode_s, recompute_s: medians of the rounds.
    """

    model: str
    block_tokens: int
    num_tokens: int
    picked: PreemptionMode
    expected: PreemptionCost
    swap_s: float
    decode_s: float
    recompute_s: float
    rounds: tuple[Round, ...]

    @property
    def better(self) -> PreemptionMode:
        return PreemptionCost(self.swap_s, self.recompute_s).better

    @property
    def picked_s(self) -> float:
        return self.swap_s if self.picked == "swap" else self.recompute_s

    def regret(self, *, to_next_token: bool = False) -> float:
        """Time of the picked way over that of the better one, as far as the rounds prove it; 1 if they do not."""
        ratios = [(r.swap_s + to_next_token * r.decode_s) / r.recompute_s for r in self.rounds]
        return max(1.0, least_median(ratios if self.picked == "swap" else [1 / ratio for ratio in ratios]))


def least_median(samples: Sequence[float]) -> float:
    """A lower bound of the median of the samples' distribution that holds with 95 % confidence, whatever the
    distribution. It is the highest sample `samples[k]`, in ascending order, for which no more than k samples are below
    the median in at most 5 % of all cases; each is below it with a probability of one half.

    Raises:
        ValueError: fewer than 5 samples, which prove nothing.
    """
    number = len(samples)
    if 0.5**number > 0.05:
        raise ValueError(f"{number} samples have no such bound; take at least 5")
    at_most = itertools.accumulate(math.comb(number, heads) / 2**number for heads in range(number))
    return sorted(samples)[sum(probability <= 0.05 for probability in at_most) - 1]


def regrets(cells: Sequence[Cell]) -> dict[str, float]:
    return {
        "model_regret": max(cell.regret() for cell in cells),
        "model_regret_to_next_token": max(cell.regret(to_next_token=True) for cell in cells),
        "regret_overall": sum(c.picked_s for c in cells) / sum(min(c.swap_s, c.recompute_s) for c in cells),
    }


def print_cells(cells: Sequence[Cell]) -> None:
    print("\n  block tokens   swap ms expected   recompute ms expected   decode ms   better     picked     regret")
    for i, c in enumerate(cells):
        if not i or cells[i - 1].model != c.model:
            print(c.model)
        print(
            f"  {c.block_tokens:5d}{c.num_tokens:7d}{c.swap_s * 1e3:10.2f}{c.expected.swap_s * 1e3:9.2f}"
            f"{c.recompute_s * 1e3:15.2f}{c.expected.recompute_s * 1e3:9.2f}{c.decode_s * 1e3:12.2f}   {c.better:11s}"
            f"{c.picked:11s}{c.regret():6.2f}"
        )
