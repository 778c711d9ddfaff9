"""Ledger of callers' limits: what each caller has left over all ingresses, and the leases of it."""

from __future__ import annotations

import math
import random
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from folio.app.edge.limits import (
    EARLY_REPORT_S,
    LEDGER_LEASE_S,
    REPORT_PERIOD_S,
    Clock,
    LimitAnswer,
    LimitGrant,
    LimitUsage,
)

# An ingress that has reported nothing for this long is dead, and its requests have ended.
DEAD_S = 3.0
# Demand is a mean over about this time, and a lease lasts for as much of it at most.
_DEMAND_S = 1.0
# The part of the arrival shares that is the same for all ingresses; the rest follows a mean over about this time.
_EVEN_SHARE, _ARRIVALS_S = 0.1, 0.5
# Announcements in one answer; the next answer has the others.
_MAX_ANNOUNCED = 1000
# For this long a new ledger adopts the levels that ingresses report.
_LEARNING_S = 5.0


@dataclass(slots=True)
class _Lease:
    """`rate`: demand a second; `unit`: likely amount of one request."""

    amount: float = 0.0
    rate: float = 0.0
    unit: float = 0.0
    at: float = -math.inf

    def booked(self, now: float) -> float:
        return self.amount if now - self.at < LEDGER_LEASE_S else 0.0

    def demand(self, now: float) -> float:
        return self.rate * math.exp((self.at - now) / _DEMAND_S)


@dataclass(slots=True)
class _LimitAccount:
    """One limit of one caller over all ingresses. `change`: number of the account's last change."""

    limit: int
    refills: bool
    level: float
    filled_at: float
    change: int = 0
    leases: dict[str, _Lease] = field(default_factory=dict)
    held: dict[str, float] = field(default_factory=dict)

    def fill(self, now: float) -> None:
        if self.refills:
            self.level = min(self.level + (now - self.filled_at) * self.limit / 60, self.limit)
        else:
            self.level = self.limit - sum(self.held.values())
        self.filled_at = now

    def free(self, now: float) -> float:
        """The part of the level that is leased to no ingress."""
        return self.level - sum(lease.booked(now) for lease in self.leases.values())

    def demand(self, now: float) -> float:
        return sum(lease.demand(now) for lease in self.leases.values())

    def is_fresh(self, now: float) -> bool:
        """Whether a new account would be the same."""
        self.fill(now)
        return self.level >= self.limit and not any(lease.booked(now) for lease in self.leases.values())


@dataclass(slots=True)
class _Ingress:
    """`change`: the last change that the ingress knows of. `number`: of its last report."""

    seen_at: float
    num_arrived: int
    arrivals_per_s: float = 0.0
    change: int = 0
    number: int = 0

    def note_arrivals(self, num_arrived: int, now: float) -> None:
        passed_s = now - self.seen_at
        if passed_s > 0:
            rate = (num_arrived - self.num_arrived) / passed_s
            self.arrivals_per_s += (rate - self.arrivals_per_s) * (1 - math.exp(-passed_s / _ARRIVALS_S))
        self.seen_at, self.num_arrived = now, num_arrived


class LimitLedger:
    """Accounts of callers' limits. One thread at a time.

    Args:
        max_accounts: most limits with an account. Each ingress grants its share of any others.
        clock: in seconds; independent of the ingresses' clocks.
    """

    def __init__(
        self, max_accounts: int = 50_000, clock: Clock = time.monotonic, rng: random.Random | None = None
    ) -> None:
        self._max_accounts = max_accounts
        self._clock = clock
        self._rng = rng or random.Random()
        self._started_at = clock()
        self._accounts: OrderedDict[str, _LimitAccount] = OrderedDict()  # by last change, the latest last
        self._num_changes = 0
        self._ingresses: dict[str, _Ingress] = {}

    def level(self, name: str) -> float:
        """The amount that the caller has left of a limit. Raises `KeyError` when it has no account."""
        self._accounts[name].fill(self._clock())
        return self._accounts[name].level

    def settle_usage(
        self, ingress: str, number: int, usages: Mapping[str, LimitUsage], num_arrived: int = 0
    ) -> LimitAnswer:
        """Enter an ingress's usage and lease to it what it may grant next.

        Args:
            number: of the report. One that comes again because its answer was lost counts once.
            num_arrived: requests that have arrived at the ingress so far.
        """
        now = self._clock()
        is_new = ingress not in self._ingresses
        known = self._ingresses.setdefault(ingress, _Ingress(now, num_arrived))
        known.note_arrivals(num_arrived, now)
        for dead in [name for name, other in self._ingresses.items() if now - other.seen_at > DEAD_S]:
            self.remove_ingress(dead)
        grants = {}
        for name, usage in usages.items():
            if number == known.number:
                usage = usage._replace(used=0.0, asked=0.0)
            account = self._enter(name, usage, ingress, now)
            if account is not None:
                grants[name] = self._lease(account, ingress, usage, now)
        grants |= dict(self._announced(ingress, known.change, grants, now))
        known.change, known.number = self._num_changes, number
        num_ingresses, per_s = len(self._ingresses), sum(other.arrivals_per_s for other in self._ingresses.values())
        share = known.arrivals_per_s / per_s if per_s > 0 else 1 / num_ingresses
        # Never zero: requests may arrive at any moment.
        return LimitAnswer(num_ingresses, (1 - _EVEN_SHARE) * share + _EVEN_SHARE / num_ingresses, grants, is_new)

    def remove_ingress(self, ingress: str) -> None:
        """Drop an ingress whose requests have ended."""
        del self._ingresses[ingress]
        for name, account in list(self._accounts.items()):
            account.leases.pop(ingress, None)
            if account.held.pop(ingress, None) is not None:
                self._note_change(name, account)

    def _enter(self, name: str, usage: LimitUsage, ingress: str, now: float) -> _LimitAccount | None:
        """The account with the usage entered; `None` when there is no room for it."""
        account = self._accounts.get(name)
        if account is None or account.refills != usage.refills:
            while self._accounts and next(iter(self._accounts.values())).is_fresh(now):
                self._accounts.popitem(last=False)
            if len(self._accounts) >= self._max_accounts:
                return None
            account = self._accounts[name] = _LimitAccount(usage.limit, usage.refills, usage.level, now)
        else:
            account.fill(now)
            if account.limit != usage.limit:
                account.level, account.limit = account.level * usage.limit / account.limit, usage.limit
            account.level = min(account.level - usage.used, usage.limit)
            if now - self._started_at < _LEARNING_S:
                account.level = min(account.level, usage.level)
        if not usage.refills:
            if usage.held:
                account.held[ingress] = usage.held
            else:
                account.held.pop(ingress, None)
            account.fill(now)
        self._note_change(name, account)
        return account

    def _note_change(self, name: str, account: _LimitAccount) -> None:
        """Make the account the next to be announced to other ingresses."""
        self._num_changes += 1
        account.change = self._num_changes
        self._accounts.move_to_end(name)

    def _lease(self, account: _LimitAccount, ingress: str, usage: LimitUsage, now: float) -> LimitGrant:
        lease = account.leases.setdefault(ingress, _Lease(at=now - REPORT_PERIOD_S))
        passed_s = max(now - lease.at, EARLY_REPORT_S)
        lease.rate += (usage.asked / passed_s - lease.rate) * (1 - math.exp(-passed_s / _DEMAND_S))
        unused = 0.0 if usage.asked else lease.amount - usage.used
        lease.unit = usage.unit or (lease.unit if lease.rate * 2 * _DEMAND_S >= lease.unit else 0.0)
        lease.at, lease.amount = now, 0.0
        free, demand = account.free(now), account.demand(now)
        due = account.level * lease.rate / demand if demand > 0 else 0.0
        amount = min(max(lease.unit, lease.rate * _DEMAND_S), max(due, unused), free)
        if amount < lease.unit:  # too little for one request: lease a unit or nothing, in the mean what is due
            amount = lease.unit if lease.unit <= free and self._rng.random() * lease.unit < due else 0.0
        amount = lease.amount = amount if amount >= 1 else 0.0
        if not account.refills:  # the old lease may be used until the answer arrives, and no rate pays that back
            lease.amount = max(amount, usage.leased)
        spare = free - lease.amount - 2 * REPORT_PERIOD_S * (demand - lease.rate)
        if not lease.amount and lease.demand(now) < 1e-3:
            del account.leases[ingress]
        return LimitGrant(account.level, amount, max(spare, 0.0))

    def _announced(
        self, ingress: str, since: int, known: Mapping[str, LimitGrant], now: float
    ) -> Iterator[tuple[str, LimitGrant]]:
        """Callers that have used much of a limit elsewhere since a change, the latest first."""
        for number, (name, account) in enumerate(reversed(self._accounts.items())):
            if account.change <= since or number >= _MAX_ANNOUNCED:
                return
            if name in known or (ingress in account.leases and account.leases[ingress].booked(now)):
                continue
            account.fill(now)
            if not account.refills or account.level < account.limit / 2:
                spare = account.free(now) - 2 * REPORT_PERIOD_S * account.demand(now)
                yield name, LimitGrant(account.level, 0.0, max(spare, 0.0))
