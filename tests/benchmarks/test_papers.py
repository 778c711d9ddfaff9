"""The papers' evaluation: baselines that reserve, requests of several sequences, and the page of claims."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from benchmarks.papers import page, sweep
from benchmarks.papers.outcome import CAPACITY, FOLIO, Outcome, Run
from benchmarks.papers.requests import Kind, arrivals
from benchmarks.papers.reserved import BASELINES, BuddyAllocator
from benchmarks.papers.simulated import PaperReplica, simulate


def test_buddies_are_disjoint_aligned_and_join_again() -> None:
    buddies, rng = BuddyAllocator(CAPACITY), random.Random(0)
    held: list[tuple[int, int]] = []
    for _ in range(2000):
        wanted = rng.randint(1, 2048)
        if held and rng.random() < 0.5:
            buddies.give_back(*held.pop(rng.randrange(len(held))))
        elif (found := buddies.take(wanted)) is not None:
            start, size = found
            assert start % size == 0
            assert wanted <= size < max(2 * wanted, 17)
            assert start + size <= CAPACITY
            held.append(found)
            ends = sorted(held)
            assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(ends))
    for found in held:
        buddies.give_back(*found)
    assert [buddies.take(2048) is not None for _ in range(8)] == [True] * 7 + [False]


@pytest.mark.parametrize("system", [*BASELINES, FOLIO])
def test_a_baseline_runs_what_it_can_reserve(system: str) -> None:
    """More requests than Max can reserve for arrive within seconds; all memory is free afterwards (`simulate`)."""
    seen = simulate(Run(system, Kind("sharegpt"), 4.0, 20.0))
    assert seen.num_requests > 60
    if system in ("static", "max"):
        assert seen.batched <= CAPACITY // 2048
    else:
        assert seen.batched > CAPACITY // 2048
    if system != FOLIO:
        assert seen.preempted == 0


@pytest.mark.parametrize(
    ("kind", "least", "most"), [(Kind("alpaca", 4), 0.05, 0.2), (Kind("alpaca", 4, True), 0.4, 0.7)]
)
def test_samples_and_beams_share_blocks(kind: Kind, least: float, most: float) -> None:
    seen = simulate(Run(FOLIO, kind, 4.0, 10.0))
    assert least < seen.saved < most
    assert seen.num_late == 0


def test_nothing_is_left_of_a_run_that_is_cut() -> None:
    replica = PaperReplica(run := Run("oracle", Kind("alpaca", 2, True), 20.0, 2.0))
    for arrival in arrivals(run.kind, run.rate, run.duration_s, run.block_tokens, run.seed):
        replica.submit(arrival, 0, arrival.at)
    while replica.wakes_at is not None:
        list(replica.advance(replica.wakes_at))
    replica.close()


def test_a_held_rate_is_between_the_measured_ones_and_order_is_seen() -> None:
    def seen(mean_s: float) -> Outcome:
        return Outcome(mean_s, mean_s, 10, 0, 1.0, 1.0, 0.0, 0.0, None)

    assert sweep.held_rate([(1.0, seen(0.05)), (2.0, seen(5.0))], 0.5) == pytest.approx(1.5)
    assert sweep.held_rate([(1.0, seen(1.0))], 0.5) == pytest.approx(0.5)
    kind = Kind("alpaca")
    latencies = {"static": (1, 9, 9), "max": (1, 5, 5), "pow2": (1, 3, 7), "oracle": (1, 2, 2), FOLIO: (1, 1, 1)}
    outcomes = {
        Run(system, kind, rate, 1.0): seen(float(mean_s))
        for system, means in latencies.items()
        for rate, mean_s in zip((1.0, 2.0, 3.0), means, strict=True)
    }
    assert sweep.order_share(outcomes, kind, 1.03) == 0.5


def test_a_difference_needs_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "figure", lambda key: 3.0)
    page.Claim.of({"claim": "near", "paper": 2.5, "ours": "papers.x"}).check()
    with pytest.raises(ValueError, match="needs `why`"):
        page.Claim.of({"claim": "far", "paper": [1.0, 2.0], "ours": "papers.x"}).check()
    assert page.Claim.of({"claim": "far", "paper": 1.0, "ours": "papers.x", "holds": "≥ 2"}).cells()[0] == "✓ far"


def test_the_page_is_written_from_the_results() -> None:
    assert Path(page.PAGE).read_text() == page.page(), "python -m benchmarks.report --write"
