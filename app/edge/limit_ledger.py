"""Ledger of callers' limits: what each caller has left over all ingresses, and the leases of it."""

from __future__ import annotations

import math
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
# Announcements in one answer, of the latest changes.
_MAX_ANNOUNCED = 1000
# For this long a new ledger takes the ingresses' word for how much is left.
_LEARNING_S = 5.0


@dataclass(frozen=True, slots=True)
class _Lease:
    """An ingress's lease since a report. `rate`: its demand a second; `unit`: of its last requests."""

    amount: float = 0.0
    rate: float = 0.0
    unit: float = 0.0
    at: float = 0.0


@dataclass(slots=True)
class _LimitAccount:
    """One limit of one caller over all ingresses."""

    limit: int
    refills: bool
    level: float
    filled_at: float
    changed_at: float = -math.inf
    leases: dict[str, _Lease] = field(default_factory=dict)
    held: dict[str, float] = field(default_factory=dict)

    def fill(self, now: float) -> None:
        """Bring level and leases up to date."""
        if self.refills:
            self.level = min(self.level + (now - self.filled_at) * self.limit / 60, self.limit)
        else:
            self.level = self.limit - sum(self.held.values())
        self.filled_at = now
        self.leases = {name: lease for name, lease in self.leases.items() if now - lease.at < LEDGER_LEASE_S}

    @property
    def free(self) -> float:
        """The part of the level that is leased to no ingress."""
        return self.level - sum(lease.amount for lease in self.leases.values())

    @property
    def spare(self) -> float:
        """The free part, less what ingresses are likely to ask for until they report again."""
        return max(self.free - 2 * REPORT_PERIOD_S * sum(lease.rate for lease in self.leases.values()), 0.0)

    def is_fresh(self, now: float) -> bool:
        """Whether a new account would be the same."""
        self.fill(now)
        return self.level >= self.limit and not self.leases

    def lease(self, ingress: str, usage: LimitUsage, now: float) -> LimitGrant:
        """Lease what an ingress is likely to use next; nothing if a request would not fit."""
        last = self.leases.pop(ingress, None) or _Lease(at=now - REPORT_PERIOD_S)
        passed_s = max(now - last.at, EARLY_REPORT_S)
        rate = last.rate + (usage.asked / passed_s - last.rate) * (1 - math.exp(-passed_s / _DEMAND_S))
        demand = rate + sum(lease.rate for lease in self.leases.values())
        due = min(rate * _DEMAND_S, self.level * rate / demand) if demand > 0 else 0.0
        unit = usage.unit or last.unit
        amount = min(max(due, usage.unit), self.free)
        if amount < max(unit, 1.0):
            amount = 0.0
        spare = max(self.spare - amount, 0.0)
        # The old lease may be used until the answer arrives.
        self.leases[ingress] = _Lease(max(amount, usage.leased), rate, unit, now)
        return LimitGrant(self.level, amount, spare)


@dataclass(slots=True)
class _Ingress:
    """`first`, `number`: of its first and last report. `told_at`: time of the last answer that has surely arrived."""

    seen_at: float
    num_arrived: int
    first: int
    number: int
    told_at: float = -math.inf
    arrivals_per_s: float = 0.0

    def note_arrivals(self, num_arrived: int, now: float) -> None:
        passed_s = now - self.seen_at
        if passed_s > 0:
            rate = (num_arrived - self.num_arrived) / passed_s
            self.arrivals_per_s += (rate - self.arrivals_per_s) * (1 - math.exp(-passed_s / _ARRIVALS_S))
        self.seen_at, self.num_arrived = now, num_arrived


class LimitLedger:
    """Accounts of callers' limits. One thread at a time.

    Args:
        max_accounts: limits known at once. Of any others each ingress grants its share.
        clock: in seconds; independent of the ingresses' clocks.
    """

    def __init__(self, max_accounts: int = 50_000, clock: Clock = time.monotonic) -> None:
        self._max_accounts = max_accounts
        self._clock = clock
        self._started_at = clock()
        self._accounts: OrderedDict[str, _LimitAccount] = OrderedDict()  # by last change, the latest last
        self._ingresses: dict[str, _Ingress] = {}

    def level(self, name: str) -> float:
        """What the caller has left of a limit. Raises `KeyError` when it has no account."""
        self._accounts[name].fill(self._clock())
        return self._accounts[name].level

    @property
    def ingresses(self) -> frozenset[str]:
        """Those that are taken to be alive."""
        return frozenset(self._ingresses)

    def settle_usage(
        self, ingress: str, number: int, usages: Mapping[str, LimitUsage], num_arrived: int = 0
    ) -> LimitAnswer:
        """Enter an ingress's usage and lease to it what it may grant next.

        Args:
            number: of the report. One that comes again because its answer was lost counts once.
            num_arrived: requests that have arrived at the ingress so far.
        """
        now = self._clock()
        known = self._ingresses.setdefault(ingress, _Ingress(now, num_arrived, number, number - 1))
        is_repeated = number == known.number
        if not is_repeated and number != known.first:
            known.told_at = known.seen_at
        known.note_arrivals(num_arrived, now)
        for dead in [name for name, other in self._ingresses.items() if now - other.seen_at > DEAD_S]:
            self.remove_ingress(dead)
        grants = {}
        for name, usage in usages.items():
            if is_repeated:
                usage = usage._replace(used=0.0)
            account = self._enter(name, usage, ingress, now)
            if account is not None:
                grants[name] = account.lease(ingress, usage, now)
        known.number = number
        grants |= dict(self._announced(ingress, known.told_at, grants, now))
        num_ingresses, per_s = len(self._ingresses), sum(other.arrivals_per_s for other in self._ingresses.values())
        share = known.arrivals_per_s / per_s if per_s > 0 else 1 / num_ingresses
        # Never zero: requests may arrive at any moment.
        even = _EVEN_SHARE / num_ingresses
        return LimitAnswer(num_ingresses, (1 - _EVEN_SHARE) * share + even, grants, is_new=number == known.first)

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
            account.held[ingress] = usage.held
            account.fill(now)
        self._note_change(name, account)
        return account

    def _note_change(self, name: str, account: _LimitAccount) -> None:
        """Make the account the next to be announced to other ingresses."""
        account.changed_at = self._clock()
        self._accounts.move_to_end(name)

    def _announced(
        self, ingress: str, since: float, known: Mapping[str, LimitGrant], now: float
    ) -> Iterator[tuple[str, LimitGrant]]:
        """Callers that have used much of a limit elsewhere since a time, the latest first."""
        for number, (name, account) in enumerate(reversed(self._accounts.items())):
            if account.changed_at < since or number >= _MAX_ANNOUNCED:
                return
            account.fill(now)
            lease = account.leases.get(ingress)
            if name in known or (lease is not None and lease.amount > 0):
                continue
            if not account.refills or account.level < account.limit / 2:
                yield name, LimitGrant(account.level, 0.0, account.spare)
