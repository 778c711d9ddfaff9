"""When requests of `benchmarks.serving` come."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path

import pytest

from benchmarks.serving import arrivals


def test_a_poisson_process_has_its_rate_and_exponential_gaps() -> None:
    times = arrivals.poisson(5.0, 2000.0, seed=1)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert len(times) == pytest.approx(10_000, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.05)
    assert times == sorted(times)
    assert times[-1] < 2000.0


def test_requests_have_prompts_of_their_own() -> None:
    some = arrivals.asks([(8, 3), (16, 4)] * 2, 1000, seed=1, at_s=[0.0, 0.5, 1.0, 1.5])
    assert [(len(ask.prompt), ask.max_tokens, ask.at_s) for ask in some[1:3]] == [(16, 4, 0.5), (8, 3, 1.0)]
    assert len({tuple(ask.prompt) for ask in some}) == 4


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:59.9799600,4808,10\n"
        "2023-11-16 18:18:00.9799600,3,900\n"
        "2023-11-16 18:18:03.9799600,50,0\n"
        "2023-11-16 19:18:03.9799600,50,5\n"
    )
    return path


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    path = tmp_path / "mooncake.jsonl"
    rows = [(27000, 4808, 10), (28000, 3, 900), (31000, 50, 0), (99000, 50, 5)]
    path.write_text("\n".join(json.dumps({"timestamp": t, "input_length": i, "output_length": o}) for t, i, o in rows))
    return path


@pytest.mark.parametrize("name", ["azure", "mooncake"])
def test_a_trace_is_stretched_in_time_and_clipped(name: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(name)
    rows, source = arrivals.replay(path, rate=0.3, duration_s=10.0, longest=100, seed=1)
    assert path.name in source
    assert [at for at, _, _ in rows] == pytest.approx([0.0, 2.5, 10.0])
    assert [row[1:] for row in rows] == [(90, 10), (3, 50), (50, 1)]


def test_without_a_trace_the_lengths_are_synthetic_and_named_so() -> None:
    rows, source = arrivals.replay(None, rate=20.0, duration_s=20.0, longest=4096, seed=1)
    assert "synthetic" in source
    assert len(rows) == pytest.approx(400, rel=0.2)
    assert statistics.mean(output for _, _, output in rows) == pytest.approx(28, rel=0.1)
    assert all(prompt + output <= 4096 for _, prompt, output in rows)
