from __future__ import annotations

import pytest

from app.fleet.overload import MOST_PAUSE_S, Refusals


def test_a_replica_that_refused_is_asked_last_for_a_while() -> None:
    refusals = Refusals()
    refusals.note("a", 60.0, 10.0)
    refusals.note("b", 0.2, 10.0)
    assert refusals.lately(10.09) == ("a", "b")
    assert refusals.lately(10.11) == ("a",)  # half of what it said
    assert refusals.lately(10.0 + MOST_PAUSE_S) == ()
    assert refusals.retry_after_s(10.0) is None  # nobody has said that all refuse


def test_the_door_opens_when_the_first_is_worth_asking() -> None:
    refusals = Refusals()
    refusals.note("a", 8.0, 10.0)
    refusals.note("b", 3.0, 10.1)
    assert refusals.close(10.1) == pytest.approx(3.0)
    assert refusals.retry_after_s(10.2) == pytest.approx(2.9)
    assert refusals.retry_after_s(10.249) is not None
    assert refusals.retry_after_s(10.25) is None
    assert refusals.lately(10.3) == ("b",)  # which is asked when `a` refuses once more


def test_a_short_queue_closes_it_for_a_short_time() -> None:
    """So that it does not run empty meanwhile: after half of the time a quarter of it has begun."""
    refusals = Refusals()
    refusals.note("a", 0.1, 10.0)
    refusals.close(10.0)
    assert refusals.retry_after_s(10.04) is not None
    assert refusals.retry_after_s(10.06) is None


def test_what_was_refused_long_ago_closes_nothing() -> None:
    refusals = Refusals()
    refusals.note("a", 2.0, 10.0)
    assert refusals.close(11.0) == pytest.approx(0.0)
    assert refusals.retry_after_s(11.0) is None
