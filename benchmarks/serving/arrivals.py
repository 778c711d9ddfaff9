"""Arrival times and lengths of requests: Poisson processes, and traces of real traffic."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks import workloads
from benchmarks.workloads import Lengths, Row
from folio.app.cli.bench.load import Ask
from folio.app.cli.bench.load import poisson as poisson


def asks(lengths: Lengths, vocabulary: int, seed: int, at_s: Sequence[float] | None = None) -> list[Ask]:
    """Requests of these lengths, with random prompts that share no prefix."""
    rng = np.random.default_rng(seed)
    times = [0.0] * len(lengths) if at_s is None else at_s
    return [
        Ask(rng.integers(vocabulary, size=prompt).tolist(), output, at)
        for (prompt, output), at in zip(lengths, times, strict=True)
    ]


def replay(path: Path | None, rate: float, duration_s: float, longest: int, seed: int) -> tuple[list[Row], str]:
    """The first requests of a trace, in time scaled to a mean rate of `rate` requests a second.

    Args:
        path: an Azure LLM inference trace (CSV) or a Mooncake trace (JSONL); `benchmarks.workloads` and
            `benchmarks.simulator.traffic` name their origins. Without such a file, arrivals are Poisson and lengths are
            synthetic, with the Azure code trace's means.
        longest: bound of prompt and output together, in tokens; outputs are clipped to half of it.

    Returns:
        the requests, and the name of their source.
    """
    count = max(2, round(rate * duration_s))
    if path is None or not path.is_file():
        times = poisson(rate, duration_s, seed)
        lengths, source = workloads.azure(None, len(times), seed)
        rows = [(at, prompt, output) for at, (prompt, output) in zip(times, lengths, strict=True)]
        source += ", Poisson arrivals"
    else:
        source = f"the first {count} requests of {path.name}"
        read = _mooncake(path) if path.suffix == ".jsonl" else workloads.read_azure(path)
        rows = [row for row, _ in zip(read, range(count), strict=False)]
        stretch = duration_s / (rows[-1][0] - rows[0][0])
        rows = [((at - rows[0][0]) * stretch, prompt, output) for at, prompt, output in rows]
    clipped = [(at, prompt, max(1, min(output, longest // 2))) for at, prompt, output in rows]
    return [(at, max(1, min(prompt, longest - output)), output) for at, prompt, output in clipped], source


def _mooncake(path: Path) -> Iterator[Row]:
    with path.open() as file:
        for line in file:
            row = json.loads(line)
            yield row["timestamp"] / 1000, row["input_length"], row["output_length"]
