"""Routing policies."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from folio.app.errors import ConfigError
from folio.app.fleet.cost import CostWeights
from folio.app.fleet.fleet import Fleet, RoutedRequest, SentRequest
from folio.app.fleet.policies import ConsistentHash, LeastLoaded, Policy, PrefixAware, RoundRobin, make_policy
from tests.app.fleet.reports import UNIT, fleet_with, keys_of, report

NAMES = ["a", "b", "c"]
EVERY = ["prefix_aware", "least_loaded", "round_robin", "consistent_hash"]


def fleet_of(names: list[str] = NAMES, *, reported: bool = True) -> Fleet:
    return fleet_with(*names, reported=reported)


def request(
    number: int = 0, document: int = 1, num_units: int = 10, session: str | None = None, tail: int = 1
) -> RoutedRequest:
    return RoutedRequest(f"r{number}", num_units * UNIT + tail, keys_of(document, num_units), session)


def place(
    fleet: Fleet, policy: Policy, request: RoutedRequest, names: list[str] = NAMES, now: float = 0.5
) -> tuple[str, SentRequest]:
    chosen = policy.rank_replicas(request, names, now)[0]
    sent = fleet.note_sent(request, chosen, int(fleet.cached_tokens(request, [chosen])[0]), now)
    assert sent is not None
    return chosen, sent


def send(fleet: Fleet, policy: Policy, request: RoutedRequest, names: list[str] = NAMES, now: float = 0.5) -> str:
    return place(fleet, policy, request, names, now)[0]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("reported", [True, False])
def test_all_replicas_are_ranked(name: str, reported: bool) -> None:
    fleet = fleet_of(reported=reported)
    policy = make_policy(name, fleet)
    assert sorted(policy.rank_replicas(request(), NAMES, 0.5)) == NAMES
    assert sorted(policy.rank_replicas(RoutedRequest("empty", 0), NAMES, 0.5)) == NAMES
    assert policy.rank_replicas(request(), ["b"], 0.5) == ["b"]
    assert policy.rank_replicas(request(), [], 0.5) == []
    for _ in range(2):  # new, and known
        assert sorted(policy.rank_replicas(request(session="s"), NAMES, 0.5)) == NAMES


@pytest.mark.parametrize("name", EVERY)
def test_many_equal_requests_are_spread(name: str) -> None:
    fleet = fleet_of()
    policy = make_policy(name, fleet)
    chosen = Counter(send(fleet, policy, request(i, document=i % 250, num_units=4)) for i in range(240))
    assert min(chosen[n] for n in NAMES) >= 50


def test_unknown_policy() -> None:
    with pytest.raises(ConfigError, match="prefix_aware, least_loaded"):
        make_policy("best", fleet_of())


def test_round_robin_takes_turns() -> None:
    policy = RoundRobin(fleet_of())
    assert [policy.rank_replicas(request(), ["c", "a", "b"], 0.0)[0] for _ in range(6)] == ["a", "b", "c"] * 2


def test_least_loaded_counts_what_was_sent_since_the_report() -> None:
    fleet = fleet_of()
    fleet.apply_report("a", report(0.1, num_running=2), 0.1)
    policy = LeastLoaded(fleet)
    assert Counter(send(fleet, policy, request(i)) for i in range(4)) == {"b": 2, "c": 2}
    fleet.apply_report("a", report(0.6), 0.6)
    assert send(fleet, policy, request(9)) == "a"


def test_consistent_hash_keeps_beginnings_together() -> None:
    fleet = fleet_of()
    policy = ConsistentHash(fleet)
    first = {d: policy.rank_replicas(request(d, d, num_units=9 + d % 3), NAMES, 0.0)[0] for d in range(60)}
    assert {d: policy.rank_replicas(request(d, d, num_units=30), NAMES, 0.0)[0] for d in range(60)} == first
    assert len(set(first.values())) == 3
    moved = {d for d, r in first.items() if policy.rank_replicas(request(d, d), ["a", "b"], 0.0)[0] != r}
    assert moved == {d for d, r in first.items() if r == "c"}


def test_consistent_hash_skips_overloaded_replicas() -> None:
    fleet = fleet_of()
    policy = ConsistentHash(fleet)
    chosen = Counter(send(fleet, policy, request(i, session="one")) for i in range(30))
    assert max(chosen.values()) <= 14


CACHED = keys_of(1, 10)


@pytest.mark.parametrize(
    ("reports", "weights", "num_units", "chosen"),
    [
        ({"b": {"keys": CACHED}}, None, 10, {"b"}),
        # A long queue outweighs a prefix.
        ({"b": {"keys": CACHED, "queued_s": 60.0, "queued_tokens": 60_000}}, None, 10, {"a", "c"}),
        # Where it is a little longer than what the prefix saves, it depends on what work is worth to the others.
        ({"b": {"keys": CACHED, "queued_s": 0.3, "queued_tokens": 300}}, None, 10, {"b"}),
        ({"b": {"keys": CACHED, "queued_s": 0.3, "queued_tokens": 300}}, CostWeights(work=0), 10, {"a"}),
        # Noise is at most a tenth of the harm: replica b computes 3, 6 or 12 percent less.
        ({"b": {"keys": keys_of(1, 3)}}, None, 100, {"a", "b", "c"}),
        ({"b": {"keys": keys_of(1, 6)}}, None, 100, {"a", "b", "c"}),
        ({"b": {"keys": keys_of(1, 12)}}, None, 100, {"b"}),
        # Regression: noise on the whole cost made a queue of 10.5 s look shorter than one of 10 s.
        ({"a": {"queued_s": 10.5}, "b": {"queued_s": 10.0}, "c": {"queued_s": 10.5}}, None, 1, {"b"}),
    ],
)
def test_prefixes_attract_and_queues_repel(
    reports: dict[str, dict[str, Any]], weights: CostWeights | None, num_units: int, chosen: set[str]
) -> None:
    fleet = fleet_of()
    for name, changes in reports.items():
        fleet.apply_report(name, report(0.1, **changes), 0.1)
    policy = PrefixAware(fleet, weights) if weights else PrefixAware(fleet)
    assert {policy.rank_replicas(request(num_units=num_units), NAMES, 0.5)[0] for _ in range(200)} == chosen


def test_the_next_turn_follows_its_prefix_before_any_report() -> None:
    fleet = fleet_of()
    policy = PrefixAware(fleet)
    first, sent = place(fleet, policy, request(0))
    fleet.note_ended(sent, 0.6)
    assert [send(fleet, policy, request(1, num_units=12)), send(fleet, policy, request(2, num_units=14))] == [first] * 2


def test_without_reports_it_is_least_loaded() -> None:
    fleet = fleet_of(reported=False)
    policy = PrefixAware(fleet)
    placed = [place(fleet, policy, request(i)) for i in range(9)]
    assert Counter(chosen for chosen, _ in placed) == {"a": 3, "b": 3, "c": 3}
    fleet.note_ended(next(sent for chosen, sent in placed if chosen == "a"), 0.6)
    assert send(fleet, policy, request(10)) == "a"


@pytest.mark.parametrize("name", ["least_loaded", "consistent_hash"])
def test_a_silent_replica_does_not_look_empty(name: str) -> None:
    """Others report what all routers have sent them, and of this one only our own is known."""
    fleet = fleet_of()
    for reporting in "ab":
        fleet.apply_report(reporting, report(100.0, num_running=20), 100.0)
    policy = make_policy(name, fleet)
    chosen = Counter(send(fleet, policy, request(i, i), now=100.1) for i in range(60))
    assert max(chosen.values()) <= 32


def test_empty_replicas_get_equal_work() -> None:
    """Regression: all reported that they had nothing to do, and chance decided among them. Long and short prompts came
    out uneven: of three replicas one got 1.3 times the mean."""
    fleet, names = fleet_of(), NAMES
    policy = PrefixAware(fleet)
    work: Counter[str] = Counter()
    for i in range(60):
        prompt, now = request(i, document=i, num_units=5 + 45 * (i % 4 == 0)), 1.0 + i
        work[send(fleet, policy, prompt, names, now)] += prompt.num_tokens
        for name in names:
            fleet.apply_report(name, report(now + 0.5), now + 0.5)
    assert max(work.values()) < 1.2 * sum(work.values()) / len(names), work


def test_a_lone_session_stays_where_its_prefix_is() -> None:
    """Its home has all of the work that there is, many times the mean."""
    names = [f"r{i}" for i in range(64)]
    fleet = fleet_of(names)
    policy = PrefixAware(fleet)
    chosen = set()
    for turn in range(1, 20):
        now = float(turn)
        chosen.add(send(fleet, policy, request(turn, num_units=10 * turn), names, now))
        for name in names:
            fleet.apply_report(name, report(now + 0.5), now + 0.5)
    assert len(chosen) == 1


def test_stale_reports_are_ignored() -> None:
    fleet = fleet_of()
    fleet.apply_report("b", report(0.1, keys_of(1, 10)), 0.1)
    policy = PrefixAware(fleet)
    assert Counter(policy.rank_replicas(request(), NAMES, 1000.0)[0] for _ in range(9)) == {"a": 3, "b": 3, "c": 3}


def test_replicas_without_a_report_come_last() -> None:
    fleet = fleet_of(["a", "b"])
    fleet.update(NAMES)
    fleet.apply_report("a", report(0.1, queued_s=5.0), 0.1)
    assert PrefixAware(fleet).rank_replicas(request(), NAMES, 0.5) == ["b", "a", "c"]


def test_a_full_fleet_is_ranked_by_the_wait() -> None:
    fleet = fleet_of()
    full = {"num_running": 64, "free_tokens": 0, "freed_tokens_per_s": 100.0}
    for name, waiting in zip(NAMES, (30, 10, 20), strict=True):
        fleet.apply_report(name, report(0.1, num_waiting=waiting, **full), 0.1)
    assert PrefixAware(fleet).rank_replicas(request(), NAMES, 0.5) == ["b", "c", "a"]


def test_sessions_stay_where_it_costs_little() -> None:
    fleet = fleet_of()
    policy = PrefixAware(fleet)
    home = policy.rank_replicas(request(session="s"), NAMES, 0.5)[0]
    others = [n for n in NAMES if n != home]
    fleet.apply_report(home, report(0.6, queued_s=0.08), 0.6)  # a little more than elsewhere
    assert {policy.rank_replicas(request(session="s", document=7), NAMES, 0.7)[0] for _ in range(20)} == {home}
    assert {policy.rank_replicas(request(document=7), NAMES, 0.7)[0] for _ in range(20)} >= set(others)
    fleet.apply_report(home, report(0.8, queued_s=50.0), 0.8)  # much more
    moved = policy.rank_replicas(request(session="s"), NAMES, 0.9)[0]
    assert moved in others
    fleet.apply_report(home, report(1.0), 1.0)
    assert policy.rank_replicas(request(session="s"), NAMES, 1.1)[0] == moved  # where it went last
    fleet.update(others)
    assert policy.rank_replicas(request(session="s"), others, 1.2)[0] == moved


def test_the_oldest_session_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forgotten session goes where it costs least; a remembered one stays where it costs a little more."""
    monkeypatch.setattr("folio.app.fleet.policies._SESSIONS_REMEMBERED", 2)
    for later, stays in ((["t"], True), (["t", "u"], False)):
        fleet = fleet_of()
        policy = PrefixAware(fleet)
        home = policy.rank_replicas(request(session="s"), NAMES, 0.5)[0]
        for session in later:
            policy.rank_replicas(request(session=session), NAMES, 0.5)
        fleet.apply_report(home, report(0.6, queued_s=0.08), 0.6)
        assert (policy.rank_replicas(request(session="s"), NAMES, 0.7)[0] == home) == stays


def test_two_routers_learn_of_each_other_by_reports() -> None:
    """Both see the prefix in the report and send it there; after the next report, both see the load."""
    fleets = [fleet_of(), fleet_of()]
    policies = [PrefixAware(fleet) for fleet in fleets]
    for fleet in fleets:
        fleet.apply_report("c", report(0.1, keys_of(1, 10)), 0.1)
    assert [send(f, p, request(1)) for f, p in zip(fleets, policies, strict=True)] == ["c", "c"]
    for fleet in fleets:
        fleet.apply_report("c", report(0.9, keys_of(1, 10), queued_s=60.0), 0.9)
    assert all(p.rank_replicas(request(2), NAMES, 1.0)[0] != "c" for p in policies)
