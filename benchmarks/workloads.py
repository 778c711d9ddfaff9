"""Request lengths: lists of (prompt, output) tokens, determined by count and seed.

`sharegpt` and `alpaca` are synthetic: log-normal, for long tails, with the means that PagedAttention §6.1 states for
these two datasets; the length of the tails is a guess, except for ShareGPT's outputs. `azure` is a real trace,
`AzureLLMInferenceTrace_code.csv` of github.com/Azure/AzurePublicDataset (CC-BY-4.0; Patel et al., "Splitwise", ISCA
2024); without this file, lengths are synthetic with the same means.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from benchmarks import harness

Lengths = list[tuple[int, int]]
Row = tuple[float, int, int]  # seconds, prompt tokens, output tokens

AZURE_TRACE = harness.ROOT.parent / "shared" / "traces" / "azure_code_2023.csv"
# Longest request, prompt and output together, of PagedAttention's evaluation and of the Azure trace.
LONGEST, AZURE_LONGEST = 2048, 8192


def sharegpt(count: int, seed: int) -> Lengths:
    """Conversations like ShareGPT's: means 161.31 and 337.99 within 1 % from a hundred requests on.

    The paper does not state the spread of outputs. Here the standard deviation is 0.6 of the mean, as in the ShareGPT
    lengths of Sarathi-Serve, which end at 1,024 tokens and have other means.
    """
    return _synthetic(count, seed, (161.31, 1.2), (337.99, 0.555), LONGEST)


def alpaca(count: int, seed: int) -> Lengths:
    """Instructions like Alpaca's: means 19.31 and 58.45 within 1 % from a hundred requests on."""
    return _synthetic(count, seed, (19.31, 0.6), (58.45, 0.9), LONGEST)


def azure(path: Path | None, count: int, seed: int) -> tuple[Lengths, str]:
    """Code completions: the first `count` requests of the trace, and the name of their source.

    Args:
        path: a CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens; without such a file the lengths are
            synthetic.
    """
    if path is None or not path.is_file():
        means = "synthetic, means 2048 and 28 tokens, because there is no trace"
        return _synthetic(count, seed, (2048, 0.8), (28, 0.8), AZURE_LONGEST), means
    rows = [(prompt, max(output, 1)) for _, prompt, output in read_azure(path)]
    fitting = [(prompt, output) for prompt, output in rows if prompt > 0 and prompt + output <= AZURE_LONGEST]
    return fitting[:count], f"the first of {path.name}"


def read_azure(path: Path) -> Iterator[Row]:
    """All requests of the trace."""
    with path.open() as file:
        for row in csv.DictReader(file):
            # The trace has seven decimal places; Python parses six.
            at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            yield at, int(row["ContextTokens"]), int(row["GeneratedTokens"])


def _synthetic(
    count: int, seed: int, prompt: tuple[float, float], output: tuple[float, float], longest: int
) -> Lengths:
    """Log-normal lengths, (mean, sigma) each, with at most `longest` tokens together."""
    rng = random.Random(seed)
    prompts = _scaled([rng.lognormvariate(0, prompt[1]) for _ in range(count)], prompt[0], [longest - 1] * count)
    left = [longest - tokens for tokens in prompts]
    outputs = _scaled([rng.lognormvariate(0, output[1]) for _ in range(count)], output[0], left)
    return list(zip(prompts, outputs, strict=True))


def _scaled(draws: Sequence[float], mean: float, most: Sequence[int]) -> list[int]:
    """The draws times one factor, as integers between 1 and `most`. The factor is searched, because rounding and
    clipping move the mean."""

    def times(factor: float) -> list[int]:
        return [min(max(round(draw * factor), 1), limit) for draw, limit in zip(draws, most, strict=True)]

    low, high = 0.0, 100 * mean
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(times(middle)) < mean * len(draws) else (low, middle)
    return times(high)
