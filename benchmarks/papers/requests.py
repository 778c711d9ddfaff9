"""The requests of PagedAttention's evaluation: Poisson arrivals with lengths of ShareGPT and of Alpaca (§6.1)."""

from __future__ import annotations

import csv
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from benchmarks import harness, workloads
from benchmarks.engine.sharing import ENTROPY_NATS, beam_steps, discount_for
from benchmarks.simulator.traffic import Arrival, arrival_of
from benchmarks.workloads import Lengths

# §6.4: tokens of the translations' common prefix, with one example and with five; of their own: prompt and output.
PREFIX_TOKENS = {"one_example": 80, "five_examples": 341}
_SENTENCE, _TRANSLATION = (20, 60), (20, 60)
# §6.5: the last tokens of a conversation are the prompt, and as many may be generated.
CHAT_WINDOW = 1024
# Most turns before the one that is asked: ShareGPT's conversations are long.
_TURNS = 6
# Lengths of production traffic: ServeGen's published clients (arXiv 2505.09999), requests that OPT can take.
TRACE, TRACE_LONGEST = harness.ROOT.parent / "shared" / "traces" / "servegen_models.csv", 2048

DATASETS: Mapping[str, Callable[[int, int], Lengths]] = {"sharegpt": workloads.sharegpt, "alpaca": workloads.alpaca}


@dataclass(frozen=True, slots=True)
class Kind:
    """What is asked for.

    Attributes:
        dataset: of the lengths: "sharegpt", "alpaca", "chat", "servegen", or a key of `PREFIX_TOKENS`.
        num_sequences: samples, or beams.
        model: a key of `simulated.MODELS` that answers instead of the smallest one.
    """

    dataset: str
    num_sequences: int = 1
    beams: bool = False
    model: str = ""

    @property
    def name(self) -> str:
        several = f"_{'beam' if self.beams else 'parallel'}_{self.num_sequences}" if self.num_sequences > 1 else ""
        return self.dataset + several + (f"_{self.model}" if self.model else "")


def lengths(dataset: str, count: int, seed: int) -> Lengths:
    """(prompt, output) in tokens, common prefixes included."""
    if dataset in DATASETS:
        return DATASETS[dataset](count, seed)
    if dataset == "servegen":
        return list(itertools.islice(itertools.cycle(_traced()), count))
    rng = random.Random(f"{dataset} {seed}")
    if dataset == "chat":
        return _chat(count, seed, rng)
    prefix = PREFIX_TOKENS[dataset]
    return [(prefix + rng.randint(*_SENTENCE), rng.randint(*_TRANSLATION)) for _ in range(count)]


@cache
def _traced() -> Lengths:
    with TRACE.open() as file:
        rows = [(int(row["input_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
    return [(prompt, output) for prompt, output in rows if prompt and output and prompt + output <= TRACE_LONGEST]


def _chat(count: int, seed: int, rng: random.Random) -> Lengths:
    """Turns of conversations: all earlier questions and answers, and the new question, cut to the window."""
    turns = iter(workloads.sharegpt((_TURNS + 2) * count, seed))
    chats = []
    for _ in range(count):
        before = list(itertools.islice(turns, rng.randrange(_TURNS)))
        question, answer = next(turns)
        prompt = question + sum(map(sum, before))
        chats.append((min(prompt, CHAT_WINDOW), min(answer, CHAT_WINDOW)))
    return chats


def arrivals(kind: Kind, rate: float, duration_s: float, unit_tokens: int, seed: int) -> list[Arrival]:
    """Requests of the simulator. No two share a prefix but for those of `PREFIX_TOKENS`; of these only whole units are
    shared."""
    rng = random.Random(f"{kind.name} {seed}")
    times = []
    at = rng.expovariate(rate)
    while at < duration_s:
        times.append(at)
        at += rng.expovariate(rate)
    blocks = range(1, 1 + PREFIX_TOKENS.get(kind.dataset, 0) // unit_tokens)
    made = [
        arrival_of(i, at, prompt, output, blocks, i + 1)
        for i, (at, (prompt, output)) in enumerate(zip(times, lengths(kind.dataset, len(times), seed), strict=True))
    ]
    if kind.num_sequences == 1:
        return made
    made = [replace(arrival, num_sequences=kind.num_sequences) for arrival in made]
    return list(_with_beams(made, seed)) if kind.beams else made


def _with_beams(made: Sequence[Arrival], seed: int) -> list[Arrival]:
    """With simulated descents of beams, see `benchmarks.sharing`."""
    draws, discount = np.random.default_rng(seed), discount_for(ENTROPY_NATS)
    return [replace(a, beams=beam_steps(draws, a.num_sequences, a.num_output_tokens, discount, 0.0)) for a in made]
