"""The budget ledger with members that are slow, silent or dead: all members together never hold more than the capacity,
and in the end each has a budget."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from folio.app.fleet.ledger import (
    REBALANCE_S,
    BudgetLedger,
    BudgetOrder,
    Claim,
    MemberUsage,
    ProcessId,
    fair_shares,
)
from tests.nightly import examples

CAPACITY = 1000
LEASTS = st.sampled_from([50, 100, 200, 400])
SHARE = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])
CHOICE = st.integers(0, 7)
PROCESS = ProcessId(1, 1)


@dataclass(eq=False)
class Replica:
    """A member without an engine: its budget, and memory that may exceed a lowered budget for a while."""

    name: str
    least_bytes: int
    held_bytes: int = 0
    demand_bytes: int = 0
    budget_bytes: int = 0
    num_orders: int = 0  # that changed the budget
    built: bool = False
    order: BudgetOrder | None = None  # not carried out yet
    refused: bool = False

    @property
    def may_hold_bytes(self) -> int:
        return max(self.budget_bytes, self.held_bytes)

    @property
    def settled(self) -> bool:
        return self.built and self.budget_bytes >= self.least_bytes

    def exchange(self, ledger: BudgetLedger, now: float) -> BudgetOrder:
        self.obey()
        known = (self.least_bytes, CAPACITY) if self.built else (0, 0)
        usage = MemberUsage(self.budget_bytes, self.held_bytes, *known, self.demand_bytes)
        self.order = ledger.exchange(self.name, PROCESS, CAPACITY, usage, now)
        return self.order

    def obey(self) -> None:
        order, self.order = self.order, None
        if order is None:
            return
        self.refused |= order.refusal is not None  # the replica will end
        if order.budget_bytes == self.budget_bytes or (self.built and order.budget_bytes < self.least_bytes):
            return  # pinned prefixes have grown since, and the engine refuses
        self.budget_bytes = order.budget_bytes
        self.num_orders += 1


class LedgerMachine(RuleBasedStateMachine):
    """Members die with orders that they have not carried out, between any two exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ledger = BudgetLedger()
        self.replicas: list[Replica] = []
        self.num_joined = 0

    def some(self, choice: int) -> Replica | None:
        return self.replicas[choice % len(self.replicas)] if self.replicas else None

    @rule(least_bytes=LEASTS)
    def join(self, least_bytes: int) -> None:
        if len(self.replicas) < 6:
            self.replicas.append(Replica(f"r{self.num_joined}", least_bytes))
            self.num_joined += 1

    @rule(choice=CHOICE)
    def exchange(self, choice: int) -> None:
        if replica := self.some(choice):
            replica.exchange(self.ledger, self.now)

    @rule(choice=CHOICE)
    def obey(self, choice: int) -> None:
        if replica := self.some(choice):
            replica.obey()

    @rule()
    def round(self) -> None:
        """A second in which all members are in time."""
        self.advance(1.0)
        for replica in self.replicas:
            replica.exchange(self.ledger, self.now)
            replica.obey()
            replica.built |= replica.budget_bytes > 0

    @rule()
    def fill(self) -> None:
        for i in range(len(self.replicas)):
            self.use(i, 1.0)

    @rule(choice=CHOICE, share=SHARE)
    def use(self, choice: int, share: float) -> None:
        if (replica := self.some(choice)) and replica.settled:
            replica.held_bytes = max(replica.held_bytes, int(share * replica.budget_bytes))

    @rule(choice=CHOICE, share=SHARE)
    def give_back(self, choice: int, share: float) -> None:
        if replica := self.some(choice):
            replica.held_bytes = int(replica.held_bytes * share)

    @rule(choice=CHOICE, share=st.sampled_from([0.0, 0.2, 0.8, 2.0]))
    def want(self, choice: int, share: float) -> None:
        if replica := self.some(choice):
            replica.demand_bytes = int(share * CAPACITY)

    @rule(choice=CHOICE)
    def build(self, choice: int) -> None:
        if (replica := self.some(choice)) and replica.budget_bytes:
            replica.built = True

    @rule(choice=CHOICE, share=SHARE)
    def pin(self, choice: int, share: float) -> None:
        if (replica := self.some(choice)) and replica.settled:
            replica.least_bytes = max(replica.least_bytes, int(share * 0.25 * replica.budget_bytes))

    @rule(choice=CHOICE)
    def end(self, choice: int) -> None:
        """The member leaves, or its process has ended: the next exchange is without it."""
        if replica := self.some(choice):
            self.replicas.remove(replica)
            self.ledger.members.pop(replica.name, None)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, REBALANCE_S]))
    def advance(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def never_more_than_there_is(self) -> None:
        held = {replica.name: replica.may_hold_bytes for replica in self.replicas}
        assert sum(held.values()) <= CAPACITY, held

    @invariant()
    def the_ledger_counts_what_members_hold_or_may_take(self) -> None:
        for replica in self.replicas:
            granted = replica.order.budget_bytes if replica.order else 0
            if member := self.ledger.members.get(replica.name):
                assert member.counted_bytes >= max(replica.may_hold_bytes, granted), replica
            else:
                assert not replica.may_hold_bytes, replica

    def teardown(self) -> None:
        """When all members are in time each soon has a budget that it can work with, and nothing is left over."""
        self.replicas.reverse()  # newcomers first
        for _ in range(60):
            self.round()
            for replica in list(self.replicas):
                replica.held_bytes = min(replica.held_bytes, replica.budget_bytes)
                if replica.refused:
                    self.end(self.replicas.index(replica))
            self.never_more_than_there_is()
            self.the_ledger_counts_what_members_hold_or_may_take()
        assert all(replica.settled for replica in self.replicas), self.replicas
        if self.replicas:
            assert sum(replica.budget_bytes for replica in self.replicas) > 0.9 * CAPACITY, self.replicas


LedgerMachine.TestCase.settings = settings(
    max_examples=examples(130, nightly=5000),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestLedgerMachine = LedgerMachine.TestCase


# ---- how memory is shared ----


class Talk:
    """A ledger and its members, each with an exchange a second."""

    def __init__(self, *leasts: int) -> None:
        self.ledger, self.now = BudgetLedger(), 0.0
        self.replicas: list[Replica] = []
        for least_bytes in leasts:
            self.join(least_bytes)

    def join(self, least_bytes: int = 100) -> Replica:
        replica = Replica(f"r{len(self.replicas)}", least_bytes)
        self.replicas.append(replica)
        return replica

    def leave(self, replica: Replica) -> None:
        self.replicas.remove(replica)
        del self.ledger.members[replica.name]

    def say(self, replica: Replica) -> BudgetOrder:
        order = replica.exchange(self.ledger, self.now)
        replica.obey()
        replica.built |= replica.budget_bytes > 0
        return order

    def round(self, times: int = 1) -> list[int]:
        """Budgets after some seconds."""
        for _ in range(times):
            self.now += 1.0
            for replica in self.replicas:
                self.say(replica)
        return [replica.budget_bytes for replica in self.replicas]


def test_memory_is_shared_equally_by_those_who_are_there() -> None:
    talk = Talk(100)
    assert talk.round() == [1000]
    talk.join()
    assert talk.round(3) == [500, 500]
    talk.join()
    assert talk.round(6) == [333, 333, 333]
    talk.leave(talk.replicas[0])
    assert talk.round(math.ceil(REBALANCE_S) + 1) == [500, 500]


def test_a_newcomer_waits_until_pages_have_been_given_back() -> None:
    talk = Talk(100)
    talk.round(2)
    first, _ = talk.replicas[0], talk.join()
    first.held_bytes = 950
    assert talk.round(5) == [500, 0]  # deferred: 950 bytes are still there
    first.held_bytes = 900
    assert talk.round(2) == [500, 100]  # enough to begin with
    first.held_bytes = 0
    assert talk.round(2) == [500, 500]


def test_memory_follows_the_demand_without_oscillation() -> None:
    talk = Talk(100, 100)
    busy, idle = talk.replicas
    talk.round(4)
    busy.demand_bytes = 700
    before = talk.round(10)
    assert before[0] >= 875
    assert before[1] >= idle.least_bytes
    busy.demand_bytes = 650  # not short: nothing moves
    assert talk.round(20) == before
    num_orders = busy.num_orders + idle.num_orders
    for demand in [870, 880] * 10:
        busy.demand_bytes = demand
        talk.round(math.ceil(REBALANCE_S))
    assert busy.num_orders + idle.num_orders <= num_orders + 2
    busy.demand_bytes = idle.demand_bytes = 2000
    assert talk.round(20) == [500, 500]


def test_members_that_have_just_what_they_need_are_left_alone() -> None:
    talk = Talk(500, 500)
    talk.round(6)
    shared_at = talk.ledger.shared_at
    talk.round(20)
    assert talk.ledger.shared_at == shared_at


def test_a_gain_of_a_twentieth_moves_memory() -> None:
    ledger = BudgetLedger()

    def budget_of(name: str, now: float) -> int:
        return ledger.exchange(name, PROCESS, CAPACITY, MemberUsage(475, 0, 100, CAPACITY, 0), now).budget_bytes

    assert [budget_of(name, 0.0) for name in "ab"] == [475, 475]
    assert budget_of("a", REBALANCE_S) == 500


def test_small_gains_move_no_memory() -> None:
    """Under pressure too: the fair share, 539 bytes, is less than a twentieth of the capacity more than 500."""
    talk = Talk(100, 100)
    busy, other = talk.replicas
    talk.round(4)
    busy.demand_bytes, other.demand_bytes = 470, 400
    assert talk.round(20) == [500, 500]
    busy.demand_bytes = 600
    assert talk.round(20)[0] > 550


def test_members_of_a_removed_ledger_keep_their_shares() -> None:
    """A system cleans its folder of temporary files. Equal demand would give other shares, but nobody is short."""
    talk = Talk(100, 100)
    busy = talk.replicas[0]
    busy.demand_bytes = 700
    before, busy.demand_bytes = talk.round(10), 0
    assert before[0] > before[1]
    talk.ledger = BudgetLedger()
    assert talk.round(3) == before


@pytest.mark.parametrize(("demands", "least", "most"), [([200, 400], 300, 400), ([300], 500, 500)])
def test_a_new_replica_is_expected_to_need_the_mean_of_the_others(demands: list[int], least: int, most: int) -> None:
    """The mean, not the sum."""
    talk = Talk()
    for demand_bytes in demands:
        talk.join().demand_bytes = demand_bytes
        talk.round(2)
    talk.round(math.ceil(REBALANCE_S))
    talk.join()
    assert least <= talk.round(3)[-1] <= most


# ---- who is refused ----


def test_one_replica_too_many_is_refused_before_it_loads_its_model() -> None:
    talk = Talk(400, 400)
    talk.round(6)
    assert all(replica.settled for replica in talk.replicas)
    refusal = talk.say(talk.join(400)).refusal
    assert refusal is not None
    assert "3 replicas that share a device need at least 1200 bytes" in refusal
    assert "shared_kv_memory_bytes is 1000: raise it" in refusal
    talk.leave(talk.replicas[-1])
    assert sum(talk.round(2)) == CAPACITY


def test_the_later_of_two_that_start_together_is_refused() -> None:
    """Both know their need only after loading the model."""
    talk = Talk(600, 600)
    talk.round(6)
    assert [replica.refused for replica in talk.replicas] == [False, True]
    talk.leave(talk.replicas[1])
    assert talk.round(math.ceil(REBALANCE_S) + 1) == [CAPACITY]


@pytest.mark.parametrize(("device_bytes", "most"), [(1599, 1), (1600, 2), (1899, 2), (1900, 3), (1200, 0), (0, 3)])
def test_no_more_processes_than_the_device_holds_beside_the_shared_memory(device_bytes: int, most: int) -> None:
    """Regression: what a replica takes beside its KV memory was never counted: together they ran out of memory under
    load. Each takes 300 here; the one that has come too late is refused, as soon as any has told what it takes."""
    ledger, refusals = BudgetLedger(), []
    for usage in (MemberUsage(), MemberUsage(device_bytes=device_bytes, beside_bytes=300)):
        refusals = [ledger.exchange(name, PROCESS, CAPACITY, usage, 0.0).refusal for name in "abc"]
    assert [refusal is None for refusal in refusals] == [True] * most + [False] * (3 - most)
    for refusal in refusals[most:]:
        left = max(device_bytes - (most + 1) * 300, 0)
        assert refusal is not None
        assert "shared_kv_memory_bytes is 1000; " in refusal
        assert ("a replica takes 300" if not most else f"{most + 1} replicas take 300") in refusal
        assert f"leaves {left} of the device's {device_bytes}: lower it, or run fewer replicas" in refusal
    late = ledger.exchange("d", PROCESS, CAPACITY, MemberUsage(), 0.0)
    assert (late.refusal is None) == (not device_bytes or not most)  # a refused one tells nothing


def test_a_member_with_just_its_least_budget_is_never_refused() -> None:
    talk = Talk(500, 500)
    talk.round(6)
    talk.replicas[0].least_bytes = 600  # a pinned prefix
    assert talk.round(6) == [500, 500]
    assert not talk.replicas[1].refused


@pytest.mark.parametrize(
    ("claims", "shares"),
    [
        ([], []),
        ([(100, 1000, 0)], [1000]),
        ([(100, 1000, 0), (100, 1000, 0)], [500, 500]),
        ([(100, 1000, 600), (100, 1000, 0)], [750, 250]),
        ([(100, 1000, 900), (100, 1000, 500)], [633, 366]),
        ([(100, 300, 900), (100, 1000, 0)], [300, 400]),
        ([(500, 1000, 0), (500, 1000, 9000)], [500, 500]),
    ],
)
def test_fair_shares(claims: list[tuple[int, int, int]], shares: list[int]) -> None:
    assert fair_shares(1000, [Claim(*claim) for claim in claims]) == shares
