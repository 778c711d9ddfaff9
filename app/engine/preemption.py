"""Swap or recompute? What a preempted request's way back costs: swaps are tried at the start, steps learnt from."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from app.engine.report import StepTimes
from vmem import KVMemory, OutOfPages, SequenceMemory, StepDemand, ViewPolicy

PreemptionMode = Literal["swap", "recompute"]

# An observation counts half after so many more.
_HALF_LIFE = 200
# Swaps of so many blocks are tried so often, the first time to warm up; not of more bytes, so that starting is quick.
_TRIED_BLOCKS, _TRIALS, _MOST_TRIED_BYTES = (1, 8, 64), 5, 64 << 20
# Keeps the equations solvable before there are as many different steps as unknowns; far below any real step.
_RIDGE = 1e-9
# A step has one overhead, hundreds of tokens, and a hundred thousand cached tokens that they see.
_STEP_SCALES = 1.0, 1e2, 1e5


class LinearCost:
    """Seconds as a linear function of what there was to do, fitted to what has been seen, older sights counting less.

    Args:
        scales: typical size of each quantity; they are counted in these, so that no weight is much larger than another.
    """

    def __init__(self, scales: tuple[float, ...]) -> None:
        self._scales = np.array(scales)
        self._products = np.zeros((len(scales), len(scales)))
        self._targets = np.zeros(len(scales))
        self._weights: np.ndarray[tuple[int], np.dtype[np.float64]] | None = None

    def observe(self, quantities: tuple[float, ...], seconds: float) -> None:
        row = np.array(quantities) / self._scales
        keep = 0.5 ** (1 / _HALF_LIFE)
        # Relative errors count, or the longest steps would decide alone.
        weight = 1 / max(seconds, 1e-6)
        self._products = keep * self._products + np.outer(row, row) * weight**2
        self._targets = keep * self._targets + row * seconds * weight**2
        self._weights = None

    def seconds(self, quantities: tuple[float, ...]) -> float:
        """The expected time; no quantity costs less than nothing."""
        if self._weights is None:
            self._weights = self._fit()
        return float(np.array(quantities) / self._scales @ self._weights)

    def per_unit(self) -> tuple[float, ...]:
        """Expected seconds of one of each quantity."""
        weights = self._weights  # another thread may observe meanwhile
        if weights is None:
            weights = self._weights = self._fit()
        return tuple((weights / self._scales).tolist())

    def _fit(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Least squares; quantities that would get a negative weight are left out, the worst first."""
        size = len(self._scales)
        used = list(range(size))
        weights = np.zeros(size)
        while used:
            products = self._products[np.ix_(used, used)]
            ridge = _RIDGE * max(float(np.trace(products)), 1e-30) * np.eye(len(used))
            found = np.linalg.solve(products + ridge, self._targets[used])
            if (found >= 0).all():
                weights[used] = found
                break
            del used[int(found.argmin())]
        return weights


@dataclass(frozen=True, slots=True)
class PreemptionCost:
    """Expected seconds of both ways."""

    swap_s: float
    recompute_s: float

    @property
    def better(self) -> PreemptionMode:
        return "swap" if self.swap_s <= self.recompute_s else "recompute"


class PreemptionCostModel:
    """Expected cost of both ways back, from measured rates.

    Args:
        step_tokens: the most tokens of a step.
    """

    def __init__(self, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._step = LinearCost(_STEP_SCALES)
        self._swap = LinearCost((1.0, 1e6))

    def observe_step(self, num_tokens: int, num_attended: int, seconds: float) -> None:
        """A step of so many tokens, which attended to so many cached ones in all, took that long."""
        self._step.observe((1.0, num_tokens, num_attended), seconds)

    def forget_steps(self) -> None:
        """The steps so far were unlike those to come."""
        self._step = LinearCost(_STEP_SCALES)

    def observe_swap(self, num_bytes: int, seconds: float) -> None:
        """Blocks of so many bytes were copied out and in and mapped again."""
        self._swap.observe((1.0, num_bytes), seconds)

    @property
    def step_times(self) -> StepTimes:
        return StepTimes(*self._step.per_unit())

    def cost(self, sequences: list[tuple[int, int]], num_bytes: int) -> PreemptionCost:
        """
        Args:
            sequences: (tokens to compute again, tokens that are there before them) of each.
            num_bytes: of all their blocks.
        """
        recompute_s = 0.0
        for num_tokens, num_before in sequences:
            attended = num_tokens * num_before + num_tokens * (num_tokens + 1) // 2
            num_steps = -(-num_tokens // self._step_tokens)
            recompute_s += self._step.seconds((num_steps, num_tokens, attended))
        return PreemptionCost(self._swap.seconds((1.0, num_bytes)), recompute_s)

    def try_swaps(self, memory: KVMemory, view: ViewPolicy, device: torch.device) -> None:
        """Swap sequences of a few lengths out and in, on a memory that nobody uses yet."""
        most = min(memory.report().swap_budget_bytes, _MOST_TRIED_BYTES)
        for num_blocks in _TRIED_BLOCKS:
            num_tokens = min(num_blocks * memory.prefixes.unit_tokens, memory.max_tokens)
            tried = [swap for _ in range(_TRIALS) if (swap := _try_swap(memory, view, device, num_tokens, most))]
            if len(tried) > 1:
                self.observe_swap(tried[0][0], statistics.median(seconds for _, seconds in tried[1:]))


def _try_swap(
    memory: KVMemory, view: ViewPolicy, device: torch.device, num_tokens: int, most_bytes: int
) -> tuple[int, float] | None:
    """Bytes and seconds of a sequence out and in. In between another one takes its blocks, as happens when memory has
    run out. `None` if there is no room for both: the device may have less than the budget says."""
    if 4 * memory.pages_for(num_tokens) > memory.num_free_pages:
        return None
    try:
        sequence = _filled(memory, view, num_tokens)
    except OutOfPages:
        return None
    num_bytes = memory.swapping.num_bytes([sequence])
    if num_bytes > most_bytes:
        memory.free(sequence)
        return None
    start = _now(device)
    swapped = memory.swap_out([sequence])
    elapsed = _now(device) - start
    filled: list[SequenceMemory] = []
    try:
        filled.append(_filled(memory, view, num_tokens))
        start = _now(device)
        filled += memory.swap_in(swapped)
        memory.ensure([StepDemand(filled[-1], 0, num_tokens)])
        elapsed += _now(device) - start
    except OutOfPages:
        memory.swapping.discard_swapped(swapped)
        return None
    finally:
        for sequence in filled:
            memory.free(sequence)
    return num_bytes, elapsed


def _filled(memory: KVMemory, view: ViewPolicy, num_tokens: int) -> SequenceMemory:
    sequence = memory.create_sequence(view)
    try:
        memory.append(sequence, num_tokens)
        memory.ensure([StepDemand(sequence, 0, num_tokens)])
    except BaseException:
        memory.free(sequence)
        raise
    return sequence


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
