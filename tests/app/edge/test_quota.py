"""Limits and quotas of one ingress, with a clock of their own."""

from __future__ import annotations

import threading
import time

import pytest

from app.config.http import RateLimits
from app.edge.quota import AddressQuotas, Quota
from app.edge.shares import IngressLimits, LeasedLimit
from app.errors import RateLimitError, RequestError
from tests.app.edge.limited import Clock


def limit_of(most: int, clock: Clock) -> LeasedLimit:
    return IngressLimits(clock).limit("a", most)


def test_a_limit_says_how_long_to_wait_and_is_right() -> None:
    clock = Clock()
    limit = limit_of(60, clock)
    assert limit.try_take(60) == 0
    wait_s = limit.try_take(2)
    assert wait_s == pytest.approx(2)
    clock.now += wait_s - 0.01
    assert limit.try_take(2) > 0
    clock.now += 0.02
    assert limit.try_take(2) == 0


def test_a_limit_never_holds_more_than_a_minute() -> None:
    clock = Clock()
    limit = limit_of(60, clock)
    clock.now += 1e6
    assert limit.level == 60
    limit.charge_usage(-5)
    assert limit.level == 60


def test_what_is_owed_is_paid_back_first() -> None:
    clock = Clock()
    limit = limit_of(60, clock)
    limit.charge_usage(90)
    assert limit.level == -30
    assert limit.try_take(1) == pytest.approx(31)
    clock.now += 31
    assert limit.try_take(1) == 0


def test_a_resized_limit_keeps_its_share() -> None:
    clock = Clock()
    limit = limit_of(60, clock)
    limit.try_take(45)
    limit.resize(120)
    assert limit.level == pytest.approx(30)


def test_threads_lose_nothing() -> None:
    """Another thread gets its turn just when one has read the level, and has not written it yet."""

    class Amount(float):
        def __rsub__(self, level: float) -> float:
            time.sleep(0.001)
            return level - float(self)

    limit = limit_of(1_000_000, Clock())

    def take() -> None:
        for _ in range(20):
            limit.try_take(Amount(1))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert limit.level == 1_000_000 - 80


def test_requests_a_minute() -> None:
    clock = Clock()
    quota = Quota(RateLimits(requests_per_minute=2), IngressLimits(clock))
    for _ in range(2):
        quota.begin()
        quota.end()
    with pytest.raises(RateLimitError, match="2 requests a minute") as refused:
        quota.begin()
    assert refused.value.retry_after_s == pytest.approx(30)
    clock.now += 30
    quota.begin()


def test_requests_at_once() -> None:
    quota = Quota(RateLimits(concurrent_requests=1, requests_per_minute=10), IngressLimits(Clock()))
    quota.begin()
    with pytest.raises(RateLimitError, match="1 of your requests"):
        quota.begin()
    quota.end()
    quota.begin()
    assert dict(quota.headers())[b"x-ratelimit-remaining-requests"] == b"8"  # who was refused has not paid


def test_who_waits_for_a_request_to_end_hears_how_long_they_take() -> None:
    """It was one second, however long the answers."""
    clock = Clock()
    quota = Quota(RateLimits(concurrent_requests=2), IngressLimits(clock))
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
    assert refused.value.retry_after_s == pytest.approx(20.0, rel=0.3)  # one of two ends in about half of the time


def test_who_has_no_requests_left_takes_no_slot() -> None:
    quota = Quota(RateLimits(concurrent_requests=1, requests_per_minute=1), IngressLimits(clock := Clock()))
    quota.begin()
    quota.end()
    with pytest.raises(RateLimitError, match="a minute"):
        quota.begin()
    clock.now += 60
    quota.begin()


def test_prompts_and_outputs_are_tokens() -> None:
    clock = Clock()
    quota = Quota(RateLimits(tokens_per_minute=60), IngressLimits(clock))
    quota.begin()
    quota.take_prompt(50)
    with pytest.raises(RateLimitError, match="fewer are left than the 20") as refused:
        quota.take_prompt(20)
    assert refused.value.retry_after_s == pytest.approx(10)
    quota.owe_tokens(30)
    with pytest.raises(RateLimitError, match="have used them") as refused:
        quota.begin()
    clock.now += refused.value.retry_after_s or 0.0
    quota.begin()
    with pytest.raises(RequestError, match="61 tokens, and you may use 60"):
        quota.take_prompt(61)
    headers = dict(quota.headers())
    assert headers == {
        b"x-ratelimit-limit-tokens": b"60",
        b"x-ratelimit-remaining-tokens": b"1",
        b"x-ratelimit-reset-tokens": b"59.000s",
    }


def test_ending_what_never_began_is_a_defect() -> None:
    with pytest.raises(AssertionError):
        Quota(RateLimits()).end()


def test_the_number_of_addresses_is_bounded() -> None:
    clock = Clock()
    quotas = AddressQuotas(RateLimits(requests_per_minute=60), 2, IngressLimits(clock))
    first, second = quotas.quota_of("a"), quotas.quota_of("b")
    first.begin()
    second.begin()
    shared = quotas.quota_of("c")
    assert shared is quotas.quota_of("d")
    assert quotas.quota_of("a") is first
    first.end()
    second.end()
    clock.now += 60  # "b" has called longest ago, and may be forgotten now
    assert quotas.quota_of("c") is not shared
    assert quotas.quota_of("a") is first


def test_a_running_request_keeps_its_address() -> None:
    """Forgetting it would let the address run as many again."""
    quotas = AddressQuotas(RateLimits(concurrent_requests=1), 1, IngressLimits(Clock()))
    quotas.quota_of("a").begin()
    assert quotas.quota_of("b") is not quotas.quota_of("a")
    assert quotas.quota_of("b") is quotas.quota_of("c")


def test_ipv6_clients_count_by_network() -> None:
    quotas = AddressQuotas(RateLimits(requests_per_minute=1), 100, IngressLimits(Clock()))
    assert quotas.quota_of("2001:db8::1") is quotas.quota_of("2001:db8::ffff:2")
    assert quotas.quota_of("2001:db8:0:1::1") is not quotas.quota_of("2001:db8::1")
    assert quotas.quota_of("::ffff:10.0.0.1") is quotas.quota_of("10.0.0.1")
    assert quotas.quota_of("fe80::1%eth0") is quotas.quota_of("fe80::1")
    assert quotas.quota_of("10.0.0.1:80") is not quotas.quota_of("10.0.0.1:81")
