"""What records of `benchmarks.serving` come to."""

from __future__ import annotations

import math

import pytest

from benchmarks.harness import percentile
from benchmarks.serving.latency import Summary, Targets, slope_per_minute, tokens_per_s
from folio.app.cli.bench.load import Record


def completed(due_s: float, first_s: float, last_s: float, num_tokens: int) -> Record:
    return Record(
        due_s,
        num_tokens,
        sent_s=due_s + 0.001,
        status=200,
        ended_s=last_s,
        events=[(first_s, 1), (last_s, num_tokens - 1)],
        num_tokens=num_tokens,
        done=True,
    )


def refused(due_s: float) -> Record:
    return Record(due_s, 4, sent_s=due_s, status=429, ended_s=due_s + 0.01, error="full")


def test_percentiles_are_values_that_occur() -> None:
    values = [float(i) for i in range(1, 101)]
    assert [percentile(values, p) for p in (0, 50, 99, 100)] == [1, 50, 99, 100]
    assert percentile([3.0, 1.0], 50) == 1.0
    assert math.isnan(percentile([], 50))


def test_a_summary_of_a_run() -> None:
    slow, quick = completed(0.0, 3.0, 4.0, 11), completed(1.0, 1.5, 2.5, 5)
    lost = Record(2.0, 4, sent_s=2.0, ended_s=3.0)
    summary = Summary.of([slow, quick, refused(1.5), lost], 4.0, Targets(ttft_s=1.0, tpot_s=0.25))
    assert (summary.rate, summary.completed, summary.refused, summary.failed, summary.lost) == (1.0, 2, 1, 0, 1)
    assert summary.tokens_per_s == pytest.approx(16 / 4)
    assert (summary.ttft_ms_p50, summary.ttft_ms_p99) == pytest.approx((500, 3000))
    assert (summary.tpot_ms_p50, summary.tpot_ms_p99) == pytest.approx((100, 250))
    assert summary.normalised_ms == pytest.approx(1e3 * (4.0 / 11 + 1.5 / 5) / 2)
    assert (summary.good_share, summary.good_per_s) == (0.25, 0.25)  # requests without an answer count


def test_a_run_in_which_nothing_completes_has_no_latencies() -> None:
    summary = Summary.of([refused(0.0)], 1.0, Targets(1.0, 1.0)).as_dict()
    assert summary["ttft_ms_p50"] is None
    assert (summary["tokens_per_s"], summary["good_share"]) == (0, 0)


def test_tokens_are_counted_when_they_come() -> None:
    records = [completed(0.0, 1.0, 5.0, 4), refused(0.0)]
    assert tokens_per_s(records, 0.0, 2.0) == pytest.approx(1 / 2)
    assert tokens_per_s(records, 2.0, 6.0) == pytest.approx(3 / 4)


def test_the_slope_of_memory() -> None:
    assert slope_per_minute([(0.0, 100.0), (30.0, 101.0), (60.0, 102.0)]) == pytest.approx(2.0)
