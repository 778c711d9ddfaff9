from __future__ import annotations

import random

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


@pytest.mark.parametrize("said", [0.3, 0.7, 1.0, 1.5], ids=lambda said: f"says {said} of what begin")
@pytest.mark.parametrize("num_doors", [1, 4])
@pytest.mark.parametrize("begin_per_s", [2, 20, 200])
def test_queues_do_not_run_dry_and_not_too_many_calls_are_in_vain(
    begin_per_s: int, num_doors: int, said: float
) -> None:
    """One replica, and four times as many requests as begin there, spread over the doors."""
    most_queued, seconds, rng = 24, 60, random.Random(0)
    doors = [Refusals() for _ in range(num_doors)]
    queued = most_queued
    begun = dry = vain = 0
    for ms in range(10_000, 10_000 + 1000 * seconds):
        now = ms / 1000
        if rng.random() < begin_per_s / 1000:
            begun += 1
            dry += queued == 0
            queued -= queued > 0
        if rng.random() < 4 * begin_per_s / 1000:
            door = rng.choice(doors)
            if door.refuse(now) is not None:
                continue
            if queued < most_queued:
                queued += 1
            else:
                vain += 1
                door.note("a", most_queued / 2 / (begin_per_s * said), most_queued, now)
                door.all_refused(now)
    assert dry <= (0.005 if said > 0.5 else 0.05) * begun
    most_vain = 6 if begin_per_s == 2 else (0.5 if num_doors == 1 else 1.3) * begin_per_s  # of three times as many
    assert vain / seconds <= most_vain


def test_after_a_pause_there_is_no_rush() -> None:
    refusals = Refusals()
    refusals.note("a", 1.0, 80, 10.0)  # 40 a second
    refusals.all_refused(10.0)
    assert 10 <= sum(refusals.refuse(11.9) is None for _ in range(1000)) <= 25  # what a quarter of a second brings


def test_a_replica_that_knows_nothing_of_its_pace_is_asked_sometimes() -> None:
    refusals = Refusals()
    refusals.note("a", 60.0, 1, 10.0)
    refusals.all_refused(10.0)
    assert refusals.refuse(10.0) is not None
    assert refusals.refuse(11.0) is None


def test_what_was_refused_long_ago_counts_no_more() -> None:
    refusals = Refusals()
    refusals.note("a", 2.0, 8, 10.0)
    assert refusals.all_refused(20.0) == 0.0
    assert refusals.lately(20.0) == ()
