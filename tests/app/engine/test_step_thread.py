"""Turns of several engines in one thread."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from folio.app.engine.step.step_thread import DeficitRoundRobin, StepThread


class Worker:
    """A member with a given number of steps, each of which takes a while on a clock of its own."""

    def __init__(self, clock: list[float], seconds: float, share: float = 1.0, num_steps: int = 1 << 30) -> None:
        self.share, self._clock, self.seconds, self.left, self.taken = share, clock, seconds, num_steps, 0.0
        self.stops = False

    def take_commands(self) -> bool:
        return not self.stops

    @property
    def is_ready(self) -> bool:
        return self.left > 0

    def step(self) -> None:
        self._clock[0] += self.seconds
        self.taken += self.seconds
        self.left -= 1


def play(turns: DeficitRoundRobin, workers: list[Worker], num_steps: int) -> None:
    for _ in range(num_steps):
        worker = turns.next([w for w in workers if w.is_ready])
        worker.step()
        turns.charge(worker, worker.seconds)


@pytest.mark.parametrize("seconds", [(0.001, 0.001, 0.001), (0.5, 0.001, 0.05), (3.0, 0.02, 0.02)])
def test_members_get_time_in_proportion_to_their_shares(seconds: tuple[float, ...]) -> None:
    workers = [Worker([0.0], s, share) for s, share in zip(seconds, (1.0, 2.0, 0.5), strict=True)]
    play(DeficitRoundRobin(), workers, 40_000)
    per_share = [w.taken / w.share for w in workers]
    assert max(per_share) - min(per_share) <= 4 * max(seconds) + 0.2, per_share


def test_a_member_that_was_idle_claims_no_arrears() -> None:
    turns, first, second = DeficitRoundRobin(), Worker([0.0], 0.01), Worker([0.0], 0.01, num_steps=0)
    play(turns, [first, second], 1000)
    second.left = 1 << 30
    before = first.taken
    play(turns, [first, second], 200)
    assert first.taken - before == pytest.approx(second.taken, abs=0.1)


def test_time_alone_is_no_debt() -> None:
    """Regression: an engine that had computed alone for a while got no step until another one had had as much."""
    turns, first, second = DeficitRoundRobin(), Worker([0.0], 0.02), Worker([0.0], 0.02)
    play(turns, [first, second], 4)
    play(turns, [first], 5000)
    before = first.taken
    play(turns, [first, second], 100)
    assert first.taken - before == pytest.approx(1.0, abs=0.05)


def test_one_member_waits_for_no_other_round() -> None:
    """The order within a round is that of the members, whoever was first before."""
    turns, workers = DeficitRoundRobin(), [Worker([0.0], 0.02) for _ in range(5)]
    order = []
    for _ in range(50):
        worker = turns.next(workers)
        worker.step()
        turns.charge(worker, 0.02)
        order.append(workers.index(worker))
    assert Counter(order) == dict.fromkeys(range(5), 10)
    assert max(abs(order[i] - order[i - 1]) for i in range(1, 50)) in (1, 4)


def test_the_thread_ends_with_its_last_member() -> None:
    thread = StepThread()
    worker = Worker([0.0], 0.0, num_steps=5)
    thread.add(worker)
    deadline = time.monotonic() + 10
    while worker.left and time.monotonic() < deadline:
        time.sleep(0.001)
    assert worker.left == 0
    assert thread.call(threading.get_ident).result(10) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0).result(10)
    worker.stops = True
    thread.close(10)
    assert not thread.is_alive


def test_control_is_called_although_no_member_has_work() -> None:
    calls = threading.Semaphore(0)

    def control() -> float:
        calls.release()
        return 0.001

    thread = StepThread(control)
    for _ in range(5):
        assert calls.acquire(timeout=10)
    thread.close(10)
    assert not thread.is_alive


def test_a_call_that_may_take_long_is_no_hang() -> None:
    """Regression: a shelf on CUDA whose model took two minutes to load was replaced, with all its models."""
    thread, begun, ends = StepThread(), threading.Event(), threading.Event()

    def load() -> None:
        begun.set()
        ends.wait(30)

    try:
        call = thread.call(load, most_s=500.0)
        assert begun.wait(30)
        assert thread.progress_at > time.monotonic() + 400
        ends.set()
        call.result(30)
        thread.call(lambda: None).result(30)
        assert thread.progress_at <= time.monotonic()
    finally:
        ends.set()
        thread.close()
