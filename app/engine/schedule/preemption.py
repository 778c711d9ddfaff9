"""Preemption cost model: swap or recompute, from swaps measured at the start and steps measured as they run."""

from __future__ import annotations

import logging
import statistics
import time
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch

from folio.app.engine.report import StepTimes, attended_tokens
from folio.app.engine.request.request import Request, Sequence
from folio.vmem import KVMemory, OutOfPages, OutOfSwap, SequenceMemory, StepDemand, ViewPolicy

logger = logging.getLogger(__name__)

PreemptionMode = Literal["swap", "recompute"]
# Where a prefix is read from that is not cached.
ReadFrom = Literal["memory", "disk", "process", "machine"]

# An observation counts half after this many more.
_HALF_LIFE = 200
# Numbers of blocks to swap at the start, repetitions (the first one warms up), and a bound that keeps the start quick.
_TRIED_BLOCKS, _TRIALS, _MOST_TRIED_BYTES = (1, 8, 64, 512), 5, 64 << 20
# Keeps the equations solvable before there are as many different steps as unknowns; far below any measured step.
_RIDGE = 1e-9
# Typical step: one overhead, 100 tokens, 100,000 attended tokens, one verification of draft tokens.
_STEP_SCALES = 1.0, 1e2, 1e5, 1.0


class LinearCost:
    """Seconds as a linear function of quantities, fitted to observations with exponential decay.

    Args:
        scales: typical size of each quantity, so that the equations are well conditioned.
    """

    def __init__(self, scales: tuple[float, ...]) -> None:
        self._scales = np.array(scales)
        self._products = np.zeros((len(scales), len(scales)))
        self._targets = np.zeros(len(scales))
        self._weights: np.ndarray[tuple[int], np.dtype[np.float64]] | None = None

    def observe(self, quantities: tuple[float, ...], seconds: float) -> None:
        row = np.array(quantities) / self._scales
        keep = 0.5 ** (1 / _HALF_LIFE)
        # Relative errors: otherwise the longest steps would dominate the fit.
        weight = 1 / max(seconds, 1e-6)
        self._products = keep * self._products + np.outer(row, row) * weight**2
        self._targets = keep * self._targets + row * seconds * weight**2
        self._weights = None

    def seconds(self, quantities: tuple[float, ...]) -> float:
        """The expected time; no quantity has a negative cost."""
        return float(np.array(quantities) @ self.per_unit())

    def per_unit(self) -> tuple[float, ...]:
        """Expected seconds per unit of each quantity."""
        weights = self._weights  # another thread may observe meanwhile
        if weights is None:
            weights = self._weights = self._fit()
        return tuple((weights / self._scales).tolist())

    def _fit(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Least squares; quantities with a negative weight are left out, the lowest first."""
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
    """Expected seconds of both modes."""

    swap_s: float
    recompute_s: float

    @property
    def better(self) -> PreemptionMode:
        return "swap" if self.swap_s <= self.recompute_s else "recompute"


class PreemptionCostModel:
    """Expected cost of preempting sequences and bringing them back.

    Args:
        step_tokens: most tokens of a step.
    """

    def __init__(self, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._step = LinearCost(_STEP_SCALES)
        self._swap = LinearCost((1.0, 1e6))
        self._reads = {source: LinearCost((1.0, 1e6)) for source in get_args(ReadFrom)}

    def observe_step(self, num_tokens: int, num_attended: int, seconds: float, *, verifies: bool = False) -> None:
        """Note the time of a step; `verifies`: it had draft tokens."""
        self._step.observe((1.0, num_tokens, num_attended, float(verifies)), seconds)

    def forget_steps(self) -> None:
        """Forget the steps so far: warm-up steps are unlike others."""
        self._step = LinearCost(_STEP_SCALES)

    def observe_swap(self, num_bytes: int, seconds: float) -> None:
        """Note the time to copy blocks out and in and to map them again."""
        self._swap.observe((1.0, num_bytes), seconds)

    def observe_read(self, source: ReadFrom, num_bytes: int, seconds: float) -> None:
        """Note the time to read blocks and to install them."""
        self._reads[source].observe((1.0, num_bytes), seconds)

    def read_s(self, source: ReadFrom, num_bytes: int) -> float:
        """Expected time to read blocks and to install them; 0 before the first time."""
        return self._reads[source].seconds((1.0, num_bytes))

    @property
    def step_times(self) -> StepTimes:
        return StepTimes(*self._step.per_unit())

    def cost(self, sequences: list[tuple[int, int]], num_bytes: int) -> PreemptionCost:
        """
        Args:
            sequences: (tokens to recompute, tokens that stay cached before them) of each.
            num_bytes: bytes of all their blocks.
        """
        recompute_s = sum(self.compute_s(num_tokens, num_before) for num_tokens, num_before in sequences)
        return PreemptionCost(self._swap.seconds((1.0, num_bytes)), recompute_s)

    def is_worth_swap(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether copying the blocks of cached tokens out and in takes less time than computing them again."""
        return self.cost([(num_tokens, 0)], num_bytes).better == "swap"

    def compute_s(self, num_tokens: int, num_before: int) -> float:
        """Expected time to compute tokens after `num_before` others."""
        num_steps = -(-num_tokens // self._step_tokens)
        return self._step.seconds((num_steps, num_tokens, attended_tokens(num_tokens, num_before), 0.0))

    def choose_mode(self, memory: KVMemory, sequences: list[Sequence]) -> PreemptionMode:
        """The cheaper mode for these sequences. Shared tokens stay in the prefix cache and are not recomputed; those
        that the sequences share with each other are recomputed once."""
        memories = [sequence.memory for sequence in sequences if sequence.memory is not None]
        tokens = []
        for sequence, shared in zip(sequences, memory.prefixes.shared_tokens(memories), strict=True):
            num_before = min(shared, sequence.num_computed)
            tokens.append((sequence.num_computed - num_before, num_before))
        return self.cost(tokens, memory.swapping.num_bytes(memories)).better

    def try_swaps(self, memory: KVMemory, view: ViewPolicy, device: torch.device) -> None:
        """Measure swaps of a few lengths, on a memory without sequences."""
        most = min(memory.report().swap_budget_bytes, _MOST_TRIED_BYTES)
        for num_blocks in _TRIED_BLOCKS:
            num_tokens = min(num_blocks * memory.prefixes.unit_tokens, memory.max_tokens)
            tried: list[tuple[int, float]] = []
            while len(tried) < _TRIALS and (swap := _try_swap(memory, view, device, num_tokens, most)):
                tried.append(swap)
            if len(tried) > 1:
                self.observe_swap(tried[0][0], statistics.median(seconds for _, seconds in tried[1:]))


def swap_out(memory: KVMemory, request: Request, sequences: list[Sequence]) -> bool:
    """Copy the blocks of a request's sequences to host memory; false if there is no room, and nothing is changed."""
    try:
        request.swapped = memory.swap_out([sequence.memory for sequence in sequences if sequence.memory is not None])
    except (OutOfSwap, RuntimeError, MemoryError) as error:  # torch raises RuntimeError without host memory
        logger.warning("recomputing instead of swapping: %s", error)
        return False
    request.swapped_sequences = sequences
    return True


def _try_swap(
    memory: KVMemory, view: ViewPolicy, device: torch.device, num_tokens: int, most_bytes: int
) -> tuple[int, float] | None:
    """Bytes and seconds of swapping a sequence out and in. In between another one takes its blocks, as when memory has
    run out. `None` without room for both: other models may have the device's memory, or the swap space."""
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
    try:
        swapped = memory.swap_out([sequence])
    except OutOfSwap:  # other models have the swap space
        memory.free(sequence)
        return None
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
