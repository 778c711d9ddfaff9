"""Arrival histories see bursts, periods and silence."""

from __future__ import annotations

import math
import random

import pytest

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

from folio.app.shelf.arrivals import ArrivalHistory
from tests.nightly import examples


def history(times: list[float]) -> ArrivalHistory:
    arrivals = ArrivalHistory()
    for at in times:
        arrivals.note(at)
    return arrivals


def test_before_the_first_request_nothing_is_expected() -> None:
    arrivals = ArrivalHistory()
    assert arrivals.probability(1e6, 60) == 0
    assert arrivals.silence_s(1e6) == math.inf


def test_periodic_requests_are_expected_at_their_time() -> None:
    arrivals = history([60.0 * i for i in range(50)])
    last = 60.0 * 49
    assert arrivals.probability(last + 5, 30) < 0.02
    assert arrivals.probability(last + 50, 15) > 0.9
    assert arrivals.probability(last + 75, 30) < 0.3, "the request did not come"


def test_after_a_burst_the_next_one_is_expected() -> None:
    """A burst of a thousand gaps must not replace what is known about the pauses between bursts."""
    times = [600.0 * burst + 0.05 * i for burst in range(10) for i in range(1000)]
    arrivals = history(times)
    assert arrivals.probability(times[-1], 0.1) > 0.9
    assert arrivals.probability(times[-1] + 60, 60) < 0.05
    assert arrivals.probability(times[-1] + 500, 120) > 0.7


@pytest.mark.parametrize("rate", [10.0, 1.0, 0.1, 0.001])
def test_poisson_arrivals_have_their_rate_whatever_the_silence(rate: float) -> None:
    rng, now, errors = random.Random(1), 0.0, []
    arrivals = ArrivalHistory()
    for i in range(2000):
        now += rng.expovariate(rate)
        arrivals.note(now)
        if i > 200:
            errors.append(arrivals.probability(now + 0.5 / rate, 1 / rate) - (1 - math.exp(-1)))
    assert abs(sum(errors) / len(errors)) < 0.05
    assert sorted(map(abs, errors))[len(errors) * 9 // 10] < 0.2


def test_a_long_silence_lasts_twice_as_long_with_probability_one_half() -> None:
    arrivals = history([0.0, 1.0])
    assert arrivals.probability(1e4, 1e4) == pytest.approx(0.5, abs=0.05)
    assert arrivals.probability(1e7, 1e7) == pytest.approx(0.5, abs=0.05)


def test_old_habits_are_forgotten() -> None:
    arrivals = history([1.0 * i for i in range(1000)])
    for i in range(200):
        arrivals.note(1000 + 100.0 * i)
    assert arrivals.probability(1000 + 100.0 * 199, 10) < 0.05


@settings(deadline=None, max_examples=examples(100, nightly=2000))
@given(
    gaps=st.lists(st.floats(-1, 1e6) | st.floats(0, 1), max_size=60),
    silence=st.floats(0, 1e7),
    horizons=st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)),
)
def test_probabilities_are_probabilities(gaps: list[float], silence: float, horizons: tuple[float, float]) -> None:
    now = 0.0
    arrivals = history([now])
    for gap in gaps:
        now += gap
        arrivals.note(now)
    short, long = sorted(horizons)
    at = now + silence
    assert 0 <= arrivals.probability(at, short) <= arrivals.probability(at, long) <= 1
