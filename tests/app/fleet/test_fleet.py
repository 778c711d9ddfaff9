"""A router's state: load reports, and requests sent since."""

from __future__ import annotations

import math

import pytest

from folio.app.engine.report import StepTimes
from folio.app.fleet.fleet import Fleet, RoutedRequest, SentRequest
from tests.app.fleet.reports import STEP, UNIT, fleet_with, keys_of, report

LATER = math.inf  # no report is fresh then: a fleet counts its own requests


def request(document: int = 1, num_units: int = 10, request_id: str = "r") -> RoutedRequest:
    return RoutedRequest(request_id, num_units * UNIT + 1, keys_of(document, num_units))


def send(fleet: Fleet, replica_id: str, now: float) -> SentRequest:
    sent = fleet.note_sent(request(), replica_id, 0, now)
    assert sent is not None
    return sent


def cached(fleet: Fleet, names: str) -> list[float]:
    """Units of the request's prompt at each replica. A name is one letter."""
    return [tokens / UNIT for tokens in fleet.cached_tokens(request(), [*names])]


def num_requests(fleet: Fleet, names: str, now: float) -> list[float]:
    found: list[float] = fleet.loads([*names], now).num_requests.tolist()
    return found


def test_reported_prefixes_count() -> None:
    """An older report is ignored."""
    fleet = fleet_with("a", "b")
    for made_at, num_units, found in ((2.0, 4, 4), (1.0, 0, 4), (3.0, 0, 0)):
        fleet.apply_report("b", report(made_at, keys_of(1, num_units)), made_at)
        assert cached(fleet, "ab") == [0, found]


def test_a_prompts_last_token_is_never_cached() -> None:
    fleet = fleet_with("a")
    fleet.apply_report("a", report(1.0, keys_of(1, 10)), 1.0)
    whole = RoutedRequest("r", 10 * UNIT, keys_of(1, 10))
    assert fleet.cached_tokens(whole, ["a"]).tolist() == [9 * UNIT]
    assert fleet.cached_tokens(RoutedRequest("r", 0), ["a"]).tolist() == [0]


def test_sent_requests_count_until_reports_include_them() -> None:
    fleet = fleet_with("a", "b")
    sent = send(fleet, "a", 1.0)
    assert cached(fleet, "ab") == [10, 0]
    loads = fleet.loads(["a", "b"], 1.0)
    seconds = STEP.prefill_s(10 * UNIT + 1, 0, 1000)
    assert loads.queued_tokens.tolist() == [10 * UNIT + 1, 0]
    assert loads.queued_s.tolist() == pytest.approx([seconds, 0])
    assert loads.num_requests.tolist() == [1, 0]

    fleet.apply_report("a", report(2.0, num_running=1, queued_tokens=7, queued_s=0.5), 2.0)  # it is in there
    loads = fleet.loads(["a", "b"], 2.0)
    assert (loads.queued_tokens[0], loads.queued_s[0], loads.num_requests[0]) == (7, 0.5, 1)
    assert cached(fleet, "ab") == [10, 0]  # it is still at work on it

    fleet.note_ended(sent, now=3.0)
    assert num_requests(fleet, "a", 3.0) == [0]
    assert cached(fleet, "a") == [10]
    fleet.apply_report("a", report(4.0, keys_of(1, 6)), 4.0)  # what is left of it now
    assert cached(fleet, "a") == [6]
    assert num_requests(fleet, "a", 4.0) == [0]


def test_a_withdrawn_request_leaves_nothing() -> None:
    fleet = fleet_with("a", "b")
    for i in range(50):
        fleet.withdraw(send(fleet, "a", 1.0 + i / 100), 1.0 + i / 100)
    sent = send(fleet, "b", 1.1)
    assert cached(fleet, "ab") == [0, 10]
    loads = fleet.loads(["a", "b"], 1.5)
    assert loads.num_requests.tolist() == [0, 1]
    assert loads.queued_tokens.tolist() == [0, 10 * UNIT + 1]
    assert loads.assigned_share[0] == pytest.approx(0)
    assert loads.assigned_share[1] > 0
    fleet.withdraw(sent, 1.6)
    assert cached(fleet, "ab") == [0, 0]
    assert fleet.num_requests(["a", "b"], LATER) == [0, 0]


def test_nothing_accumulates_without_reports() -> None:
    """Regression: what had ended was kept until the next report, which may never come."""
    fleet = fleet_with("a")
    for i in range(100):
        fleet.note_ended(send(fleet, "a", 100.0 + i), 100.5 + i)
    assert fleet.num_known_prefixes == 0
    assert fleet.num_requests(["a"], 250.0) == [0]  # its own, since the report is old
    fleet.apply_report("a", report(300.0), 300.0)
    assert num_requests(fleet, "a", 300.0) == [0]


@pytest.mark.parametrize("ahead_s", [-3600.0, -1.5, 0.0, 1.5, 3600.0])
def test_clocks_that_differ(ahead_s: float) -> None:
    """Regression: of a replica whose clock was 1.5 s ahead, requests of the last 1.5 s were taken for reported ones;
    of one an hour behind, those that were sent while a report was late."""
    fleet = Fleet()
    fleet.update(["a"])
    for made_at, heard_at in ((10.0, 11.2), (11.0, 11.1), (12.0, 12.1)):  # the first one had been lying there
        fleet.apply_report("a", report(made_at + ahead_s, keys_of(1, 4)), heard_at)
    sent = send(fleet, "a", 12.5)
    fleet.apply_report("a", report(12.4 + ahead_s), 13.3)  # late: made before the request was sent
    assert num_requests(fleet, "a", 13.3) == [1]
    fleet.apply_report("a", report(12.6 + ahead_s, num_running=1), 13.4)
    assert num_requests(fleet, "a", 13.4) == [1]
    fleet.note_ended(sent, 13.5)
    fleet.apply_report("a", report(12.7 + ahead_s, num_running=1), 13.6)  # made before it ended: still expected
    assert cached(fleet, "a") == [10]
    fleet.apply_report("a", report(14.0 + ahead_s), 14.1)
    assert cached(fleet, "a") == [0]
    assert fleet.fresh(["a"], 18.9)
    assert not fleet.fresh(["a"], 19.1)


@pytest.mark.parametrize(("late_s", "num_unreported"), [(1.9, 1), (2.1, 0)])
def test_a_report_more_than_two_seconds_late_means_a_clock_that_stood_still(late_s: float, num_unreported: int) -> None:
    fleet = Fleet()
    fleet.update(["a"])
    fleet.apply_report("a", report(10.0), 10.1)
    send(fleet, "a", 11.5)
    fleet.apply_report("a", report(11.0), 11.1 + late_s)
    assert num_requests(fleet, "a", 14.0) == [num_unreported]


def test_clocks_that_drift_or_stand_still() -> None:
    """For hours one clock loses half a millisecond each second; and a machine was suspended for an hour."""
    fleet, apart_s = Fleet(), 0.0
    fleet.update(["a"])
    for i in range(2000):
        apart_s += 5e-4 * 5
        fleet.apply_report("a", report(5.0 * i - apart_s), 5.0 * i + 0.1)
    assert fleet.fresh(["a"], 5.0 * i + 4.0)
    now = 5.0 * i + 3600
    for i in range(1, 3):
        fleet.apply_report("a", report(now - 3595 + i - apart_s), now + i)
        assert fleet.fresh(["a"], now + i)


def test_a_replica_that_vanishes() -> None:
    fleet = fleet_with("a", "b")
    fleet.apply_report("a", report(1.0, keys_of(1, 4)), 1.0)
    ended, withdrawn = send(fleet, "a", 2.0), send(fleet, "a", 2.0)
    fleet.update(["b", "c"])
    fleet.note_ended(ended, 3.0)
    fleet.withdraw(withdrawn, 3.0)
    assert fleet.note_sent(request(), "a", 0, now=3.0) is None  # chosen before it vanished
    fleet.apply_report("a", report(3.0, keys_of(1, 4)), 3.0)
    assert fleet.num_known_prefixes == 0
    assert cached(fleet, "bc") == [0, 0]  # "c" has the slot that was "a"'s
    assert num_requests(fleet, "bc", 3.0) == [0, 0]
    assert not fleet.fresh(["a"], 3.0)


def test_many_replicas_come_and_go() -> None:
    fleet = Fleet()
    for generation in range(5):
        names = [f"{generation}-{i}" for i in range(37 * (generation + 1))]
        fleet.update(names)
        for i, name in enumerate(names):
            fleet.apply_report(name, report(1.0, keys_of(i % 200, 3)), 1.0)
        assert fleet.cached_tokens(request(5), names).tolist() == [3 * UNIT * (i % 200 == 5) for i in range(len(names))]
    fleet.update([])
    assert fleet.num_known_prefixes == 0


def test_a_resync_drops_expectations() -> None:
    """The replica found much less cached than this router had expected: what was expected there is forgotten."""
    fleet = fleet_with("a")
    sent = send(fleet, "a", 1.0)
    much_less = {"expected_cached_tokens": 10_000, "cached_tokens": 5900, "missed_tokens": 4100}
    a_little_less = {"expected_cached_tokens": 5000, "cached_tokens": 4900, "missed_tokens": 100}
    for now, audit, num_resyncs, units in ((2.0, a_little_less, 0, 10), (3.0, much_less, 1, 0)):
        fleet.apply_report("a", report(now, **audit), now)
        assert (fleet.num_resyncs, cached(fleet, "a")) == (num_resyncs, [units])
    fleet.note_ended(sent, 4.0)
    fleet.apply_report("a", report(5.0, keys_of(1, 2), **much_less), 5.0)
    assert (fleet.num_resyncs, cached(fleet, "a")) == (1, [2])
    fleet.update([])
    assert fleet.num_resyncs == 1, "a counter never falls"


def test_step_times_are_the_median() -> None:
    """A replica that has computed nothing yet reports no times; it must not look as if it were infinitely fast."""
    fleet = fleet_with("a", "b", "c")
    for name, step in (("a", StepTimes()), ("b", StepTimes(0.02, 0.002, 0.0)), ("c", StepTimes(0.04, 0.004, 0.0))):
        fleet.apply_report(name, report(1.0, step=step), 1.0)
    assert fleet.loads([*"abc"], 1.0).token_s.tolist() == pytest.approx([0.003] * 3)
    new = fleet_with("a")
    new.apply_report("a", report(1.0, step=StepTimes()), 1.0)
    assert new.loads(["a"], 1.0).token_s[0] > 0
