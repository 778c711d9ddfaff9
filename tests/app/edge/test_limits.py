"""Limits over several ingresses, on a virtual clock: one ingress would grant the same, however requests are spread."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextlib import suppress

import pytest

from folio.app.config.http import RateLimits
from folio.app.edge.limit_ledger import DEAD_S, LimitLedger
from folio.app.edge.limits import IngressLimits, LimitAnswer, LimitGrant, LimitUsage
from folio.app.edge.quota import AddressQuotas, Quota
from folio.app.errors import RateLimitError
from tests.app.edge.limit_cluster import Clock, Cluster

# From (seconds so far, random number, number of requests so far, number of ingresses) to an ingress.
SPREADS: dict[str, Callable[[float, float, int, int], int]] = {
    "equal": lambda _, chance, __, n: int(chance * n),
    "hot": lambda _, chance, __, n: 0 if chance < 0.9 else int((chance - 0.9) * 10 * n),
    "moving": lambda seconds, _, __, n: int(seconds / 2) % n,
    "in turn": lambda _, __, number, n: number % n,
}
NUMBERS = itertools.count()  # of reports
TOKENS = 500  # mean length of a prompt


def quotas_of(cluster: Cluster, **limits: int) -> list[Quota]:
    return [Quota(RateLimits(**limits), ingress, "key:a") for ingress in cluster.ingresses]


def begins(quota: Quota) -> bool:
    with suppress(RateLimitError):
        quota.begin()
        return True
    return False


class Caller:
    """Sends requests as a Poisson process, from the start on. `used`: requests, or tokens, that were granted."""

    def __init__(self, cluster: Cluster, per_s: float, spread: str, **limits: int) -> None:
        self.quotas = quotas_of(cluster, **limits)
        self.used = self.num_sent = 0
        self._cluster, self._per_s, self._spread = cluster, per_s, SPREADS[spread]
        self._rng, self._where = random.Random(1), random.Random(2)
        self._counts_tokens = "tokens_per_minute" in limits
        self._plan()

    def _plan(self) -> None:
        self._cluster.at(self._cluster.clock.now + self._rng.expovariate(self._per_s), self._send)

    def _send(self) -> None:
        num_tokens = self._rng.randrange(TOKENS // 2, 3 * TOKENS // 2)
        seconds = self._cluster.clock.now - 100.0
        where = self._spread(seconds, self._where.random(), self.num_sent, len(self.quotas))
        self.num_sent += 1
        self._plan()
        quota = self.quotas[where]
        if not begins(quota):
            return
        with suppress(RateLimitError):
            if self._counts_tokens:
                quota.take_prompt(num_tokens)
            self.used += num_tokens if self._counts_tokens else 1
        quota.end()


def used_in_two_minutes(num_ingresses: int, per_s: float, spread: str, limits: dict[str, int]) -> tuple[int, int]:
    cluster = Cluster(num_ingresses)
    caller = Caller(cluster, per_s, spread, **limits)
    cluster.run_for(60.0)
    first = caller.used
    cluster.run_for(60.0)
    return first, caller.used - first


@pytest.mark.thirds
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("num_ingresses", [4, 16])
@pytest.mark.parametrize("load", [0.9, 4.0])
@pytest.mark.parametrize(
    ("limits", "per_s"), [({"requests_per_minute": 300}, 5), ({"tokens_per_minute": 100 * TOKENS}, 100 / 60)]
)
def test_several_ingresses_grant_as_much_as_one(
    num_ingresses: int, spread: str, load: float, limits: dict[str, int], per_s: float
) -> None:
    """Regression: each ingress granted the whole limit, 16 ingresses 16 times as much."""
    alone = used_in_two_minutes(1, load * per_s, spread, limits)
    together = used_in_two_minutes(num_ingresses, load * per_s, spread, limits)
    assert together == pytest.approx(alone, rel=0.05)


@pytest.mark.parametrize("num_ingresses", [4, 16])
def test_a_caller_that_begins_everywhere_at_once_gets_no_more(num_ingresses: int) -> None:
    """Before the first report: a share at each ingress, and one more request at each."""
    cluster = Cluster(num_ingresses)
    quotas = quotas_of(cluster, requests_per_minute=600)
    used = sum(begins(quota) for _ in range(1000) for quota in quotas)
    assert 600 - num_ingresses <= used <= 600 + num_ingresses
    cluster.run_for(1.0)
    for quota in quotas:
        remaining = int(dict(quota.headers())[b"x-ratelimit-remaining-requests"])
        assert remaining == pytest.approx(610 - used, abs=2)  # 10 were refilled


@pytest.mark.parametrize("has_ledger", [True, False])
@pytest.mark.parametrize("seconds", [0.0, 1.0, 10.0])
def test_a_prompt_larger_than_a_share_is_granted(seconds: float, has_ledger: bool) -> None:
    cluster = Cluster(16)
    quotas = quotas_of(cluster, tokens_per_minute=10_000)
    if not has_ledger:
        cluster.ledger = None
    cluster.run_for(seconds)
    quotas[0].take_prompt(9_000)


@pytest.mark.parametrize("spread", SPREADS)
def test_without_a_ledger_each_ingress_grants_its_share(spread: str) -> None:
    """Uneven demand gets less than the limit."""
    cluster = Cluster(4)
    caller = Caller(cluster, 40.0, spread, requests_per_minute=600)
    cluster.run_for(60.0)
    cluster.ledger = None
    cluster.run_for(5.0)  # leases have ended
    first = caller.used
    cluster.run_for(60.0)
    assert (140 if spread == "hot" else 450) <= caller.used - first <= 1.05 * 600


def test_a_new_ledger_learns_earlier_usage() -> None:
    """A caller would get the full limit again whenever the actor dies."""
    cluster = Cluster(4)
    caller = Caller(cluster, 40.0, "equal", requests_per_minute=600)
    cluster.run_for(60.0)
    first = caller.used
    for second in range(60):
        if second % 20 == 0:
            cluster.ledger = None
        elif second % 20 == 1:
            cluster.ledger = cluster.new_ledger()
        cluster.run_for(1.0)
    assert caller.used - first == pytest.approx(600, rel=0.1)


def test_concurrent_requests_are_counted_over_all_ingresses() -> None:
    """Regression: each of 4 ingresses granted 8. The limit is also used well: 20 requests end a second, 100 begin."""
    cluster = Cluster(4)
    quotas = quotas_of(cluster, concurrent_requests=8)
    rng = random.Random(0)
    running: list[Quota] = []
    counts: list[int] = []

    def step() -> None:
        cluster.at(cluster.clock.now + 0.01, step)
        if running and rng.random() < 0.2:
            running.pop(rng.randrange(len(running))).end()
        quota = quotas[0] if cluster.clock.now < 120.0 else rng.choice(quotas)  # at first one ingress is hot
        if begins(quota):
            running.append(quota)
        counts.append(len(running))

    cluster.at(101.0, step)
    cluster.run(160.0)
    assert max(counts) <= 8
    assert sum(counts) / 5900 >= 7


def begin_slowly(cluster: Cluster, quota: Quota) -> int:
    begun = 0
    while begins(quota):
        begun += 1
        cluster.run_for(0.5)
    return begun


@pytest.mark.parametrize("dies", [True, False])
def test_a_dead_ingress_gives_its_requests_back_and_one_taken_for_dead_does_not(dies: bool) -> None:
    """Two ingresses; the first one runs as many requests as may run. If it lives, it reports everything again."""
    cluster = Cluster(2)
    first, second = quotas_of(cluster, concurrent_requests=4)
    cluster.run_for(1.0)
    assert begin_slowly(cluster, first) == 4
    assert begin_slowly(cluster, second) == 0
    if dies:
        cluster.alive.remove(0)
        cluster.run_for(DEAD_S + 1.0)
    else:
        assert cluster.ledger is not None
        cluster.ledger.remove_ingress("0")
        cluster.run_for(5.0)
    assert begin_slowly(cluster, second) == (4 if dies else 0)


def test_the_number_of_accounts_is_bounded() -> None:
    """100,000 addresses must not fill the memory. Fresh accounts are forgotten for others."""
    clock = Clock()
    ledger = LimitLedger(max_accounts=1000, clock=clock)
    usage = LimitUsage(60, True, 1.0, 0.0, 1.0, 1.0, 59.0, 0.0)
    for i in range(100_000):
        assert bool(ledger.settle_usage("a", next(NUMBERS), {f"address:{i}/requests": usage}).grants) == (i < 1000)
    clock.now += 60.0
    for i in range(1000):
        assert ledger.settle_usage("a", next(NUMBERS), {f"key:{i}/requests": usage}).grants


def test_announced_addresses_are_bounded_in_each_ingress() -> None:
    cluster = Cluster(2)
    limits = RateLimits(requests_per_minute=4)
    first, second = (
        AddressQuotas(limits, most, ingress) for most, ingress in zip((50, 20), cluster.ingresses, strict=True)
    )
    for i in range(100):
        for _ in range(3):
            begins(first.quota_of(str(i)))
            cluster.run_for(0.01)
    cluster.run_for(1.0)
    for quotas, most in ((first, 50), (second, 20)):
        known = {quotas.quota_of(str(i)) for i in range(100)}
        assert len(known) == most + 1  # the others share one
    assert sum(int(dict(quota.headers())[b"x-ratelimit-remaining-requests"]) for quota in known) < 20 * 2


def test_messages_are_few() -> None:
    """A busy caller costs an ingress 4 messages a second, and 20 when leases are short."""
    cluster = Cluster(4)
    Caller(cluster, 400.0, "equal", requests_per_minute=6000)
    cluster.run_for(10.0)
    assert cluster.num_messages <= 10 * 4 * 20
    assert all(len(ingress.take_reports()) <= 1 for ingress in cluster.ingresses)


def settle(ledger: LimitLedger, ingress: str, **changes: float) -> LimitGrant:
    """Report one request a second, of which nothing has been used yet, but for `changes`."""
    usage = LimitUsage(60, True, 0.0, 0.0, 0.0, 1.0, 60.0, 0.0)._replace(**changes)
    return ledger.settle_usage(ingress, next(NUMBERS), {"key": usage}).grants["key"]


def test_a_report_has_the_demand_since_the_last_report() -> None:
    limit = IngressLimits(Clock()).add_limit("key:a/tokens", 60)
    for amount in (20.0, 10.0, 90.0):
        assert (limit.try_take(amount) > 0) == (amount == 90.0)
    report = limit.report()
    assert (report.used, report.asked, report.unit, report.level) == (30.0, 120.0, 90.0, 30.0)
    assert limit.try_take(4.0) == limit.try_take(2.0) == 0
    report = limit.report()
    assert (report.used, report.asked, report.unit, report.level) == (6.0, 6.0, 3.0, 24.0)
    report = limit.report()
    assert (report.used, report.asked, report.unit) == (0.0, 0.0, 0.0)


def test_a_limit_is_fresh_when_the_ledger_knows_of_its_use() -> None:
    clock = Clock()
    ingress = IngressLimits(clock)
    ingress.num_ingresses = 2
    limit = ingress.add_limit("key:a/requests", 60)
    assert limit.is_fresh
    limit.charge_usage(30.0)
    assert not limit.is_fresh
    clock.now += 60.0
    assert not limit.is_fresh
    limit.report()
    assert limit.is_fresh


@pytest.mark.parametrize("num_ingresses", [1, 2])
def test_a_refused_request_is_reported_early_unless_there_is_one_ingress(num_ingresses: int) -> None:
    early: list[int] = []
    ingress = IngressLimits(Clock())
    ingress.num_ingresses, ingress.on_early_report = num_ingresses, lambda: early.append(1)
    limit = ingress.add_limit("key", 60)
    limit.charge_usage(59.5)
    assert not early
    assert limit.try_take(1.0) > 0
    assert len(early) == num_ingresses - 1


def test_a_half_used_lease_is_reported_early() -> None:
    early: list[int] = []
    ingress = IngressLimits(Clock())
    ingress.num_ingresses, ingress.on_early_report = 2, lambda: early.append(1)
    limit = ingress.add_limit("key", 60)
    limit.apply_grant(LimitGrant(60.0, 20.0, 0.0))
    for amount, num_early in ((10.0, 0), (1.0, 1)):
        assert limit.try_take(amount) == 0
        assert len(early) == num_early


def test_a_removed_limit_is_unknown() -> None:
    ingress, unknown = IngressLimits(Clock()), list[str]()
    quota = Quota(RateLimits(requests_per_minute=4), ingress, "key:a")
    ingress.on_unknown = unknown.append
    for limits in (RateLimits(requests_per_minute=5), RateLimits()):
        quota.set_limits(limits)
        ingress.apply_answer(LimitAnswer(2, 0.5, {"key:a/requests": LimitGrant(1.0, 0.0, 0.0)}, is_new=False))
    assert unknown == ["key:a/requests"]


def test_a_ledger_that_does_not_know_the_ingress_gets_the_limits_in_use() -> None:
    ingress = IngressLimits(Clock())
    used, _ = (ingress.add_limit(name, 60) for name in ("used", "unused"))
    used.charge_usage(10.0)
    ingress.take_reports()
    ingress.apply_answer(LimitAnswer(2, 0.5, {}, is_new=True))
    assert list(ingress.take_reports()) == ["used"]


def test_a_changed_limit_keeps_the_part_that_is_left() -> None:
    ledger = LimitLedger(clock=Clock())
    settle(ledger, "a", level=30.0)
    settle(ledger, "a", limit=120, level=120.0)
    assert ledger.level("key") == 60.0


def test_spare_is_the_level_without_leases_and_demand() -> None:
    """The demand of other ingresses counts for two report periods."""
    ledger = LimitLedger(clock=Clock())
    assert settle(ledger, "a").lease == 0
    alone = settle(ledger, "a", asked=1.0)
    assert alone.lease > 0
    assert alone.spare == pytest.approx(alone.level - alone.lease)
    beside = settle(ledger, "b", asked=1.0)
    assert beside.spare < beside.level - alone.lease - beside.lease
    ledger.remove_ingress("a")
    alone = settle(ledger, "b", asked=1.0)
    assert alone.spare == pytest.approx(alone.level - alone.lease)


def test_a_new_ledger_trusts_reported_levels_for_five_seconds() -> None:
    clock = Clock()
    ledger = LimitLedger(clock=clock)
    settle(ledger, "a")
    clock.now += 4.5
    settle(ledger, "b", level=20.0)
    assert ledger.level("key") == 20.0
    clock.now += 1.0
    settle(ledger, "b", level=5.0)
    assert ledger.level("key") == 21.0


@pytest.mark.parametrize(("level", "announced"), [(30.0, False), (29.0, True)])
def test_a_limit_of_which_less_than_half_is_left_is_announced(level: float, announced: bool) -> None:
    ledger = LimitLedger(clock=Clock())
    settle(ledger, "a", level=level)
    told = ledger.settle_usage("b", next(NUMBERS), {}).grants
    assert told == ({"key": LimitGrant(level, 0.0, level)} if announced else {})
    assert ledger.settle_usage("b", next(NUMBERS), {}).grants == {}  # nothing has changed since


def test_nothing_is_spare_where_all_is_asked_for() -> None:
    clock = Clock()
    ledger = LimitLedger(clock=clock)
    for _ in range(3):
        settle(ledger, "a", level=20.0, asked=1000.0)
        clock.now += 0.25
    assert ledger.settle_usage("b", next(NUMBERS), {}).grants["key"].spare == 0.0


def test_an_ingress_learns_its_share_of_all_requests() -> None:
    """A tenth of all shares is the same for every ingress."""
    clock = Clock()
    ledger = LimitLedger(clock=clock)
    for i in range(20):
        shares = [ledger.settle_usage(name, i, {}, i * rate).arrival_share for name, rate in (("a", 3), ("b", 1))]
        clock.now += 0.25
    assert shares == pytest.approx([0.9 * 0.75 + 0.1 / 2, 0.9 * 0.25 + 0.1 / 2], rel=0.01)
