"""Limits of callers over two ingresses and a real actor."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import ray

from folio.app.config.http import RateLimits
from folio.app.edge.limits import IngressLimits
from folio.app.edge.quota import Quota
from folio.app.errors import RateLimitError
from folio.app.fleet.overload import LoadShedder
from folio.app.serving.limits import LimitReporter
from folio.app.serving.shared_table import NAMESPACE
from tests.processes import DEADLINE_S, until_async

LIMITS = RateLimits(requests_per_minute=600, concurrent_requests=8)


class Edge:
    """The limits of one ingress."""

    def __init__(self, app_name: str, number: int) -> None:
        self.shares, self.shedder = IngressLimits(), LoadShedder()
        self.limits = LimitReporter(self.shares, self.shedder, app_name, f"ingress-{number}", lambda: 2)
        self.quota = Quota(LIMITS, self.shares, "key:a")

    def serves(self) -> bool:
        with suppress(RateLimitError):
            self.quota.begin()
            return True
        return False


@asynccontextmanager
async def edges(app_name: str) -> AsyncIterator[tuple[Edge, Edge]]:
    first, second = Edge(app_name, 0), Edge(app_name, 1)
    for edge in (first, second):
        edge.limits.start()
    try:
        await until_async(lambda: first.shares.connected and second.shares.connected)
        yield first, second
    finally:
        ray.kill(ray.get_actor(f"folio-limits:{app_name}", NAMESPACE))


@pytest.mark.usefixtures("cluster_url")
async def test_two_ingresses_grant_as_much_as_one() -> None:
    """Regression: together they granted twice the limit."""
    async with edges("limits-rate") as both:
        began_at, used, due = time.monotonic(), 0, 600.0
        while used < 0.95 * due or due < 660.0:
            for edge in both:
                if edge.serves():
                    used += 1
                    edge.quota.end()
            await asyncio.sleep(0.002)
            passed_s = time.monotonic() - began_at
            due = 600.0 + 10.0 * passed_s
            assert passed_s < DEADLINE_S, (used, due)
            assert used <= 1.05 * due


@pytest.mark.usefixtures("cluster_url")
async def test_requests_at_once_are_counted_over_both() -> None:
    async with edges("limits-at-once") as (first, second):
        for _ in range(8):  # one has all, and gets them without a wait
            await until_async(first.serves)
        assert not first.serves()
        # Asking would tell the ledger of a demand: look at the lease.
        await until_async(lambda: second.quota._running is not None and second.quota._running.level <= 0)
        assert not second.serves()
        first.quota.end()
        await until_async(second.serves)
        assert not first.serves()


@pytest.mark.usefixtures("cluster_url")
async def test_requests_do_not_wait_while_the_ledger_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """Each ingress grants its share and logs it once; then a new actor knows what was used."""
    caplog.set_level(logging.INFO, "folio.app.serving.shared_table")
    async with edges("limits-lost") as both:
        name = "folio-limits:limits-lost"

        def is_spent() -> bool:
            for edge in both * 20:
                if edge.serves():
                    edge.quota.end()
            return float(dict(both[0].quota.headers())[b"x-ratelimit-remaining-requests"]) <= 50

        await until_async(is_spent)
        killed_at = time.monotonic()
        ray.kill(ray.get_actor(name, NAMESPACE))
        await until_async(lambda: not any(edge.shares.connected for edge in both))
        began_at = time.monotonic()
        for edge in both:
            if edge.serves():
                edge.quota.end()
        assert time.monotonic() < began_at + 0.5  # no message in between
        await until_async(lambda: all(edge.shares.connected for edge in both))

        def know_what_was_used() -> bool:  # the first to report learns of the other's usage with its next answer
            most = 50 + 10 * (time.monotonic() - killed_at) + 20
            remaining = [dict(edge.quota.headers())[b"x-ratelimit-remaining-requests"] for edge in both]
            return all(int(left) < most for left in remaining)

        await until_async(know_what_was_used)
        assert time.monotonic() < killed_at + 30  # the rate alone fills up in a minute
    said = [record.message for record in caplog.records if record.name == "folio.app.serving.shared_table"]
    assert [line for line in said if "limits of callers are not shared" in line]
    assert len([line for line in said if "again" in line]) == len([line for line in said if "are not shared" in line])
