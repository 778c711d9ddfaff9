from __future__ import annotations

import pytest

from app.fleet.overload import Refusals


def test_a_replica_that_refused_is_asked_last_for_a_while() -> None:
    refusals = Refusals()
    refusals.note("a", 60.0, 8, 10.0)
    refusals.note("b", 0.2, 8, 10.2)
    assert refusals.lately(10.24) == ("a", "b")
    assert refusals.lately(10.26) == ("b",)
    assert refusals.refuse(10.26) is None  # nobody has said that all refuse


def test_when_all_refuse_the_first_to_have_room_is_named() -> None:
    refusals = Refusals()
    refusals.note("a", 8.0, 8, 10.0)
    refusals.note("b", 3.0, 8, 10.1)
    assert refusals.all_refused(10.1) == pytest.approx(3.0)
    assert refusals.refuse(10.1) == pytest.approx(3.0)
    assert refusals.refuse(10.11) == pytest.approx(2.99)
    assert refusals.refuse(12.2) is None  # nobody has refused since


def test_while_it_is_crowded_twice_as_many_come_in_as_begin() -> None:
    """However many ask: so queues do not run dry, and few calls are in vain."""
    refusals = Refusals()
    admitted = 0
    for ms in range(10_000, 15_000):  # 1,000 requests a second for five seconds
        now = ms / 1000
        if ms % 100 == 0:
            refusals.note("a", 2.0, 40, now)  # ten a second
            refusals.note("b", 1.0, 10, now)  # five
            refusals.all_refused(now)
        admitted += refusals.refuse(now) is None
    assert admitted == pytest.approx(5 * 2 * (10 + 5), rel=0.05)


def test_after_a_pause_there_is_no_rush() -> None:
    refusals = Refusals()
    refusals.note("a", 1.0, 80, 10.0)  # 40 a second
    refusals.all_refused(10.0)
    assert sum(refusals.refuse(11.9) is None for _ in range(1000)) == 2 * 40 // 4


def test_a_replica_that_knows_nothing_of_its_pace_is_asked_sometimes() -> None:
    refusals = Refusals()
    refusals.note("a", 60.0, 1, 10.0)
    refusals.all_refused(10.0)
    assert refusals.refuse(10.0) is not None
    assert refusals.refuse(10.2) is None


def test_what_was_refused_long_ago_counts_no_more() -> None:
    refusals = Refusals()
    refusals.note("a", 2.0, 8, 10.0)
    assert refusals.all_refused(20.0) == 0.0
    assert refusals.lately(20.0) == ()
