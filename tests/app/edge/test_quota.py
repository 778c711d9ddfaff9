"""Limits and quotas of one ingress, on a virtual clock."""

from __future__ import annotations

import threading
import time

import pytest

from folio.app.config.http import RateLimits
from folio.app.edge.limits import IngressLimits, LeasedLimit
from folio.app.edge.quota import AddressQuotas, Quota
from folio.app.errors import RateLimitError, RequestError
from tests.app.edge.limit_cluster import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


def limit_of(limit: int, clock: Clock) -> LeasedLimit:
    return IngressLimits(clock).add_limit("a", limit)


def quota_of(clock: Clock, **limits: int) -> Quota:
    return Quota(RateLimits(**limits), IngressLimits(clock))


def test_a_limit_says_exactly_how_long_to_wait(clock: Clock) -> None:
    """A negative level is paid back first."""
    limit = limit_of(60, clock)
    assert limit.try_take(60) == 0
    for owed in (0, 30):
        limit.charge_usage(owed)
        wait_s = limit.try_take(2)
        assert wait_s == pytest.approx(2 + owed)
        clock.now += wait_s - 0.01
        assert limit.try_take(2) > 0
        clock.now += 0.01
        assert limit.try_take(2) == 0
        assert limit.level == pytest.approx(0, abs=1e-9)


def test_a_limit_never_holds_more_than_a_minute(clock: Clock) -> None:
    limit = limit_of(60, clock)
    clock.now += 1e6
    assert limit.level == 60
    limit.charge_usage(-5)
    assert limit.level == 60


def test_a_resized_limit_keeps_the_fraction_that_is_left(clock: Clock) -> None:
    limit = limit_of(60, clock)
    limit.try_take(45)
    limit.resize(120)
    assert limit.level == pytest.approx(30)


def test_threads_lose_no_usage(clock: Clock) -> None:
    """Threads are switched between the read of the level and its write."""

    class Amount(float):
        def __rsub__(self, level: float) -> float:
            time.sleep(0.001)
            return level - float(self)

    limit = limit_of(1_000_000, clock)
    threads = [
        threading.Thread(target=lambda: [limit.try_take(Amount(1)) for _ in range(20)])  # type: ignore[misc]
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert limit.level == 1_000_000 - 80


def test_requests_per_minute(clock: Clock) -> None:
    quota = quota_of(clock, requests_per_minute=2)
    for _ in range(2):
        quota.begin()
        quota.end()
    with pytest.raises(RateLimitError, match=r"\(requests_per_minute=2\); send the request again in 30 s") as refused:
        quota.begin()
    assert refused.value.retry_after_s == pytest.approx(30)
    clock.now += 30
    quota.begin()


def test_concurrent_requests(clock: Clock) -> None:
    """A refused request is not charged, and one over the rate does not count as running."""
    quota = quota_of(clock, concurrent_requests=1, requests_per_minute=2)
    quota.begin()
    with pytest.raises(RateLimitError, match=r"\(concurrent_requests=1\)"):
        quota.begin()
    quota.end()
    assert dict(quota.headers())[b"x-ratelimit-remaining-requests"] == b"1"
    quota.begin()
    quota.end()
    with pytest.raises(RateLimitError, match=r"\(requests_per_minute=2\)"):
        quota.begin()
    clock.now += 60
    quota.begin()


def test_retry_after_follows_how_long_the_callers_requests_run(clock: Clock) -> None:
    """Regression: it was one second, however long the answers."""
    quota = quota_of(clock, concurrent_requests=2)
    for _ in range(100):
        for _ in range(2):
            quota.begin()
        clock.now += 40.0
        for _ in range(2):
            quota.end()
    for _ in range(2):
        quota.begin()
    with pytest.raises(RateLimitError) as refused:
        quota.begin()
    assert refused.value.retry_after_s == pytest.approx(20.0, rel=0.3)  # one of two ends in about half the time


def test_prompts_and_outputs_are_charged_as_tokens(clock: Clock) -> None:
    quota = quota_of(clock, tokens_per_minute=60)
    quota.begin()
    quota.take_prompt(50)
    with pytest.raises(RateLimitError, match=r"20 tokens .*\(tokens_per_minute=60\).* 10 s") as refused:
        quota.take_prompt(20)
    assert refused.value.retry_after_s == pytest.approx(10)
    quota.owe_tokens(30)
    with pytest.raises(RateLimitError, match=r"\(tokens_per_minute=60\)") as refused:
        quota.begin()
    clock.now += refused.value.retry_after_s or 0.0
    quota.begin()
    with pytest.raises(RequestError, match=r"61 tokens, more than the limit \(tokens_per_minute=60\)"):
        quota.take_prompt(61)
    assert dict(quota.headers()) == {
        b"x-ratelimit-limit-tokens": b"60",
        b"x-ratelimit-remaining-tokens": b"1",
        b"x-ratelimit-reset-tokens": b"59.000s",
    }


def test_an_end_without_a_beginning_is_a_defect() -> None:
    with pytest.raises(AssertionError):
        Quota(RateLimits(), IngressLimits()).end()


def test_the_number_of_addresses_is_bounded(clock: Clock) -> None:
    quotas = AddressQuotas(RateLimits(requests_per_minute=60), 2, IngressLimits(clock))
    first, second = quotas.quota_of("a"), quotas.quota_of("b")
    first.begin()
    second.begin()
    shared = quotas.quota_of("c")
    assert shared is quotas.quota_of("d")
    assert quotas.quota_of("a") is first
    first.end()
    second.end()
    clock.now += 60  # "b" called longest ago, and is fresh again
    assert quotas.quota_of("c") is not shared
    assert quotas.quota_of("a") is first


def test_the_quota_of_a_running_request_is_not_forgotten(clock: Clock) -> None:
    """Otherwise the address could run as many again."""
    quotas = AddressQuotas(RateLimits(concurrent_requests=1), 1, IngressLimits(clock))
    quotas.quota_of("a").begin()
    assert quotas.quota_of("b") is not quotas.quota_of("a")
    assert quotas.quota_of("b") is quotas.quota_of("c")


@pytest.mark.parametrize(
    ("one", "other", "are_one"),
    [
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8:0:1::1", "2001:db8::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("fe80::1%eth0", "fe80::1", True),
        ("10.0.0.1:80", "10.0.0.1:81", False),
    ],
)
def test_ipv6_clients_count_by_network(clock: Clock, one: str, other: str, are_one: bool) -> None:
    quotas = AddressQuotas(RateLimits(requests_per_minute=1), 100, IngressLimits(clock))
    assert (quotas.quota_of(one) is quotas.quota_of(other)) is are_one
