"""Requests of `benchmarks.serving`."""

from __future__ import annotations

import random
import statistics

from benchmarks import workloads
from benchmarks.serving import arrivals
from folio.app.cli.bench.load import Ask

# Prompts are of these tokens only, which the models of quick runs have, too.
VOCABULARY = 8192
# Of the closed loop: as in `benchmarks.throughput`.
SHORTEST, LONGEST = 32, 512
# Outputs are a fifth as long as ShareGPT's, so that enough requests end in a run.
OUTPUTS_SHORTENED = 5


def chat(count: int, seed: int) -> workloads.Lengths:
    """Lengths of conversations."""
    return [(prompt, max(1, output // OUTPUTS_SHORTENED)) for prompt, output in workloads.sharegpt(count, seed)]


CHAT = chat(500, seed=1)
CHAT_PROMPT = round(statistics.mean(prompt for prompt, _ in CHAT))
CHAT_OUTPUT = round(statistics.mean(output for _, output in CHAT))


def ordinary(count: int, seed: int) -> workloads.Lengths:
    """Conversations of about the mean length. With real lengths, tokens per second of some hundred requests, and the
    choice of refused ones, vary by more than the effects to be measured."""
    rng = random.Random(seed)
    return [(CHAT_PROMPT, rng.randint(CHAT_OUTPUT // 2, 3 * CHAT_OUTPUT // 2)) for _ in range(count)]


def mixed(count: int, new_tokens: int, seed: int) -> list[Ask]:
    """Prompts from the shortest to the longest, in an order in which neighbours differ."""
    spread = [SHORTEST + (LONGEST - SHORTEST) * (i * 7 % count) // count for i in range(count)]
    return arrivals.asks([(prompt, new_tokens) for prompt in spread], VOCABULARY, seed)
