"""Random requests at ingresses that share the limits of concurrent requests and of requests a minute, and that die,
are taken for dead, or find a new ledger: what the docstring of `folio.app.edge.limits` promises holds."""

from __future__ import annotations

from contextlib import suppress

import pytest

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from folio.app.config.http import RateLimits
from folio.app.edge.limit_ledger import DEAD_S
from folio.app.edge.quota import Quota
from folio.app.errors import RateLimitError
from tests.app.edge.limit_cluster import Cluster
from tests.nightly import examples

INGRESS = st.integers(0, 3)


def begins(quota: Quota) -> bool:
    with suppress(RateLimitError):
        quota.begin()
        return True
    return False


class LimitMachine(RuleBasedStateMachine):
    @initialize(num_ingresses=st.integers(2, 4), at_once=st.integers(1, 8), a_minute=st.sampled_from([6, 60, 600]))
    def start(self, num_ingresses: int, at_once: int, a_minute: int) -> None:
        self.cluster = Cluster(num_ingresses)
        self.at_once, self.a_minute = at_once, a_minute
        self.held = [Quota(RateLimits(concurrent_requests=at_once), i, "key:a") for i in self.cluster.ingresses]
        self.rated = [Quota(RateLimits(requests_per_minute=a_minute), i, "key:a") for i in self.cluster.ingresses]
        self.running = [0] * num_ingresses
        self.num_granted, self.num_lost = 0, 0  # `num_lost`: with ledgers and ingresses
        self.began_at = self.cluster.clock.now

    @property
    def alive(self) -> list[int]:
        return sorted(self.cluster.alive)

    @rule(i=INGRESS, number=st.integers(1, 40))
    def send(self, i: int, number: int) -> None:
        i = self.alive[i % len(self.alive)]
        for _ in range(number):
            self.running[i] += begins(self.held[i])
            self.num_granted += begins(self.rated[i])

    @rule(i=INGRESS, number=st.integers(1, 8))
    def end(self, i: int, number: int) -> None:
        i = self.alive[i % len(self.alive)]
        for _ in range(min(number, self.running[i])):
            self.running[i] -= 1
            self.held[i].end()

    @rule(seconds=st.sampled_from([0.01, 0.06, 0.3, 1.0, 2.2, 10.0]))
    def wait(self, seconds: float) -> None:
        self.cluster.run_for(seconds)

    @rule(i=INGRESS)
    def die(self, i: int) -> None:
        """Its requests end with it, which the ledger finds out later."""
        i = self.alive[i % len(self.alive)]
        if len(self.alive) > 1:
            self.cluster.alive.remove(i)
            self.running[i] = 0
            self.num_lost += self.a_minute
            self.cluster.run_for(DEAD_S + 0.5)

    @rule(i=INGRESS)
    def be_taken_for_dead(self, i: int) -> None:
        name = str(self.alive[i % len(self.alive)])
        if self.cluster.ledger is not None and name in self.cluster.ledger.ingresses:
            self.cluster.ledger.remove_ingress(name)
            self.cluster.run_for(1.0)

    @rule()
    def replace_the_ledger(self) -> None:
        self.cluster.ledger = self.cluster.new_ledger()
        self.cluster.run_for(1.0)

    @invariant()
    def bounded(self) -> None:
        number = len(self.running)
        excess = number + self.at_once * (number - 1) / number
        assert sum(self.running) <= self.at_once + excess, self.running
        due = self.a_minute * (1 + (self.cluster.clock.now - self.began_at) / 60)
        assert self.num_granted <= due + number + self.a_minute * (number - 1) / number + self.num_lost

    @rule(i=INGRESS)
    def told(self, i: int) -> None:
        """Once all have been told nothing more is granted than is left; and what is left is granted."""
        self.cluster.run_for(0.6)
        i = self.alive[i % len(self.alive)]
        for _ in range(8):
            was_full = sum(self.running) >= self.at_once
            is_granted = begins(self.held[i])
            self.running[i] += is_granted
            assert not (was_full and is_granted), self.running
            self.cluster.run_for(0.6)
        assert sum(self.running) >= self.at_once, self.running

    @rule()
    def contend(self) -> None:
        """All ask at once, and know of each other: one request each may be too many."""
        self.cluster.run_for(0.6)
        most = max(sum(self.running), self.at_once + len(self.alive))
        for _ in range(50):
            for i in self.alive:
                self.running[i] += begins(self.held[i])
            assert sum(self.running) <= most, self.running
            self.cluster.run_for(0.02)


LimitMachine.TestCase.settings = settings(
    max_examples=examples(60, nightly=2000),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestLimitMachine = LimitMachine.TestCase
