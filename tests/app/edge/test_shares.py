"""Limits over several ingresses, on a virtual clock: as one ingress would grant them, however requests are spread."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import pytest

from app.config.http import RateLimits
from app.edge.quota import AddressQuotas, Quota
from app.edge.shares import DEAD_S, IngressLimits, LimitLedger, LimitUsage
from app.errors import RateLimitError
from tests.app.edge.limited import Clock, Cluster

# From (how far in the test, random number, number of requests so far, number of ingresses) to an ingress.
SPREADS: dict[str, Callable[[float, float, int, int], int]] = {
    "equal": lambda _, chance, __, n: int(chance * n),
    "hot": lambda _, chance, __, n: 0 if chance < 0.9 else int((chance - 0.9) * 10 * n),
    "moving": lambda seconds, _, __, n: int(seconds / 2) % n,
    "in turn": lambda _, __, number, n: number % n,
}
TOKENS = 500  # of a prompt, in the mean


class Caller:
    """Sends requests as a Poisson process, from 100 s on."""

    def __init__(self, cluster: Cluster, limits: RateLimits, per_s: float, spread: str, seed: int = 1) -> None:
        self.quotas = [Quota(limits, shares, "key:a") for shares in cluster.shares]
        self.used = self.num_sent = 0
        self._cluster, self._per_s, self._spread = cluster, per_s, SPREADS[spread]
        self._rng, self._where = random.Random(seed), random.Random(seed + 1)
        self._counts_tokens = limits.tokens_per_minute is not None
        self._next()

    def _next(self) -> None:
        self._cluster.at(self._cluster.clock.now + self._rng.expovariate(self._per_s), self._send)

    def _send(self) -> None:
        num_tokens = self._rng.randrange(TOKENS // 2, 3 * TOKENS // 2)
        where = self._spread(
            self._cluster.clock.now - 100.0, self._where.random(), self.num_sent, len(self._cluster.shares)
        )
        self.num_sent += 1
        self._next()
        if where not in self._cluster.alive:
            return
        quota = self.quotas[where]
        try:
            quota.begin()
        except RateLimitError:
            return
        try:
            if self._counts_tokens:
                quota.take_prompt(num_tokens)
            self.used += num_tokens if self._counts_tokens else 1
        except RateLimitError:
            pass
        finally:
            quota.end()


def used_in_two_minutes(num_ingresses: int, limits: RateLimits, per_s: float, spread: str) -> tuple[int, int]:
    cluster = Cluster(num_ingresses, Clock())
    caller = Caller(cluster, limits, per_s, spread)
    cluster.run(160.0)
    first = caller.used
    cluster.run(220.0)
    return first, caller.used - first


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("num_ingresses", [4, 16])
@pytest.mark.parametrize("load", [0.9, 4.0])
@pytest.mark.parametrize("what", ["requests", "tokens"])
def test_several_ingresses_grant_what_one_would(num_ingresses: int, spread: str, load: float, what: str) -> None:
    """Each granted the whole limit: 4 times as much, 16 times as much."""
    if what == "requests":
        limits, per_s = RateLimits(requests_per_minute=300), load * 5
    else:
        limits, per_s = RateLimits(tokens_per_minute=100 * TOKENS), load * 100 / 60
    alone = used_in_two_minutes(1, limits, per_s, spread)
    together = used_in_two_minutes(num_ingresses, limits, per_s, spread)
    assert together == pytest.approx(alone, rel=0.05)


@pytest.mark.parametrize("num_ingresses", [4, 16])
def test_a_caller_that_begins_everywhere_at_once_gets_no_more(num_ingresses: int) -> None:
    """In the milliseconds before anybody hears of anybody: a share of each, and one request of each besides."""
    cluster = Cluster(num_ingresses, Clock())
    limits = RateLimits(requests_per_minute=600)
    quotas = [Quota(limits, shares, "key:a") for shares in cluster.shares]
    used = 0
    for _ in range(1000):
        for quota in quotas:
            try:
                quota.begin()
                used += 1
            except RateLimitError:
                pass
    assert 600 - num_ingresses <= used <= 600 + num_ingresses
    cluster.run(101.0)
    for quota in quotas:
        remaining = int(dict(quota.headers())[b"x-ratelimit-remaining-requests"])
        assert remaining == pytest.approx(610 - used, abs=2)  # with what has come since


def test_a_prompt_larger_than_a_share_is_let_in() -> None:
    """One ingress would have let it in; and with the books lost, some share must be good for it."""
    for seconds in (0.0, 1.0, 10.0):
        for has_books in (True, False):
            cluster = Cluster(16, Clock())
            quotas = [Quota(RateLimits(tokens_per_minute=10_000), shares, "key:a") for shares in cluster.shares]
            if not has_books:
                cluster.books = None
            cluster.run(100.0 + seconds)
            quotas[0].take_prompt(9_000)


@pytest.mark.parametrize("spread", SPREADS)
def test_without_books_each_ingress_grants_its_share(spread: str) -> None:
    """Neither nothing nor everything. Demand that is not spread evenly gets less than it would."""
    cluster = Cluster(4, Clock())
    caller = Caller(cluster, RateLimits(requests_per_minute=600), 40.0, spread)
    cluster.run(160.0)
    cluster.books = None
    cluster.run(165.0)  # leases have ended
    first = caller.used
    cluster.run(225.0)
    assert (140 if spread == "hot" else 450) <= caller.used - first <= 1.05 * 600


def test_new_books_learn_what_has_been_used() -> None:
    """A caller would get a full limit once more whenever the actor dies."""
    cluster = Cluster(4, Clock())
    caller = Caller(cluster, RateLimits(requests_per_minute=600), 40.0, "equal")
    cluster.run(160.0)
    first = caller.used
    for second in range(60):
        if second % 20 == 0:
            cluster.books = None
        elif second % 20 == 1:
            cluster.books = LimitLedger(clock=cluster.clock, rng=cluster.rng)
        cluster.run(161.0 + second)
    assert caller.used - first == pytest.approx(600, rel=0.1)


def test_requests_at_once_are_counted_over_all_ingresses() -> None:
    """Each of 4 let 8 in. At most one more is let in by each, and only by those that had not heard of the caller."""
    cluster = Cluster(4, Clock())
    quotas = [Quota(RateLimits(concurrent_requests=8), shares, "key:a") for shares in cluster.shares]
    rng = random.Random(0)
    running: list[Quota] = []
    most = total = 0

    def step() -> None:
        nonlocal most, total
        cluster.at(cluster.clock.now + 0.01, step)
        if running and rng.random() < 0.2:
            running.pop(rng.randrange(len(running))).end()
        quota = quotas[0] if cluster.clock.now < 120.0 else rng.choice(quotas)  # one is hot at first
        with contextlib.suppress(RateLimitError):
            quota.begin()
            running.append(quota)
        most = max(most, len(running))
        total += len(running)

    cluster.at(101.0, step)
    cluster.run(160.0)
    assert most <= 8
    assert total / 5900 >= 7  # 20 a second end, and 100 want to begin


def test_an_ingress_that_dies_gives_its_requests_back() -> None:
    cluster = Cluster(2, Clock())
    first, second = (Quota(RateLimits(concurrent_requests=4), shares, "key:a") for shares in cluster.shares)
    cluster.run(101.0)
    for _ in range(4):
        first.begin()
        cluster.run(cluster.clock.now + 0.5)
    with pytest.raises(RateLimitError):
        second.begin()
    cluster.alive.remove(0)
    cluster.run(cluster.clock.now + DEAD_S + 1.0)
    for _ in range(4):
        second.begin()
        cluster.run(cluster.clock.now + 0.5)
    with pytest.raises(RateLimitError):
        second.begin()


def test_an_ingress_that_was_taken_for_dead_says_again_what_it_answers() -> None:
    """Its requests run on, and would not be counted any more."""
    cluster = Cluster(2, Clock())
    first, second = (Quota(RateLimits(concurrent_requests=4), shares, "key:a") for shares in cluster.shares)
    cluster.run(101.0)
    for _ in range(4):
        first.begin()
        cluster.run(cluster.clock.now + 0.5)
    assert cluster.books is not None
    cluster.books.remove_ingress("0")
    cluster.run(cluster.clock.now + 5.0)
    with pytest.raises(RateLimitError):
        second.begin()


def test_the_books_are_bounded() -> None:
    """100,000 addresses must not fill the memory. Of those without an account each ingress grants its share."""
    clock = Clock()
    books = LimitLedger(max_accounts=1000, clock=clock)
    for i in range(100_000):
        answer = books.settle_usage("a", {f"address:{i}/requests": LimitUsage(60, True, 1.0, 0.0, 1.0, 1.0, 59.0, 0.0)})
        assert bool(answer.grants) == (i < 1000)
    clock.now += 60.0  # nobody has anything to pay back, and may be forgotten
    for i in range(1000):
        assert books.settle_usage(
            "a", {f"key:{i}/requests": LimitUsage(60, True, 1.0, 0.0, 1.0, 1.0, 59.0, 0.0)}
        ).grants


def test_ingresses_are_told_of_addresses_within_their_bounds() -> None:
    cluster = Cluster(2, Clock())
    limits = RateLimits(requests_per_minute=4)
    first = AddressQuotas(limits, 50, cluster.shares[0])
    second = AddressQuotas(limits, 20, cluster.shares[1])
    for i in range(100):
        for _ in range(3):
            with contextlib.suppress(RateLimitError):  # further ones share one's limits
                first.quota_of(str(i)).begin()
            cluster.run(cluster.clock.now + 0.01)
    cluster.run(cluster.clock.now + 1.0)
    assert (len(first._quotas), len(second._quotas)) == (50, 20)
    assert sum(limit.level for quota in second._quotas.values() for limit in quota._limits()) < 20 * 2


def test_an_ingress_alone_shares_nothing() -> None:
    """Nor does it hurry to say anything."""
    shares = IngressLimits(Clock())
    shares.on_hurry = lambda: pytest.fail("there is nobody to tell")
    quota = Quota(RateLimits(requests_per_minute=100), shares, "key:a")
    for _ in range(100):
        quota.begin()
    with pytest.raises(RateLimitError):
        quota.begin()


def test_messages_are_few() -> None:
    """A busy caller costs an ingress 4 messages a second, and 20 when leases are short; a quiet one none besides."""
    cluster = Cluster(4, Clock())
    Caller(cluster, RateLimits(requests_per_minute=6000), 400.0, "equal")
    cluster.run(110.0)
    assert cluster.num_messages <= 10 * 4 * 20
    assert all(len(shares.reports()) <= 1 for shares in cluster.shares)
