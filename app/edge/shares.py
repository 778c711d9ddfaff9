"""Limits that hold over several ingresses: one set of books, and in each ingress leases of what callers have left.

A request never waits for the books. An ingress takes from its lease, and tells the books a few times a second what was
used and what was asked for; sooner when a lease is half used, or was too small. The books, which know what all have
used, answer with new leases: in proportion to what each ingress is asked for, and never more in all than is left.

    level    what the caller has left in all          ┌─────────────────────────────────────────────┐
    leases   who may take how much of it              │ ingress a │ b │  ingress c  │    spare       │
    spare    leased to nobody                         └─────────────────────────────────────────────┘

What an ingress does with more than its lease:

- Once between two answers it may take from what was spare, less what the others are likely to use meanwhile.
- A caller that it has not heard of has used nothing lately: it may have a share of the limit, `most / ingresses`, and
  one request more than that. Of callers who have used more than half of a limit every ingress hears.
- While the books cannot be reached, each ingress grants that share, filling at its share of the rate.

So more than the limit can be used by one request of each ingress (its first of a caller, while the caller begins
everywhere within the milliseconds of an exchange), and by what an ingress that died had used and not told. Rates pay
it back: the level is negative until it is made up for.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

Clock = Callable[[], float]

# How often an ingress reports while its leases are used; and how soon after the last report when it needs more.
BEAT_S, HURRY_S = 0.25, 0.05
# An ingress that has not been heard of for so long is dead: what it was answering has ended.
DEAD_S = 3.0
# A lease that is not renewed ends; a little earlier for the ingress than for the books.
_LEASE_S, _BOOKED_S = 2.0, 2.5
# Demand is a mean over about so long, and a lease is for as much time at most.
_DEMAND_S = 1.0
# So much of the doors' shares is the same for all; what comes to each is a mean over about so long.
_EVEN_SHARE, _ARRIVALS_S = 0.1, 0.5
# Limits in one message; the others are in the next one.
_MOST_USES, _MOST_NEWS = 2000, 1000
# New books take ingresses' word for how much is left.
_LEARNS_S = 5.0
# A request that another ingress could have let in should come again.
_ELSEWHERE_S = 1.0


class LimitUsage(NamedTuple):
    """What an ingress reports of one limit of one caller.

    Attributes:
        most: the limit.
        refills: within a minute; otherwise it is of what is used at the same time.
        used: since the last report; given back, if negative.
        held: now, of a limit that does not refill.
        asked: since the last report, with what was refused.
        unit: what the next request is likely to ask for; less is of no use.
        level: as the ingress believes.
        left: of its lease.
    """

    most: int
    refills: bool
    used: float
    held: float
    asked: float
    unit: float
    level: float
    left: float


class LimitGrant(NamedTuple):
    """The books' answer: what is left in all, what the ingress may take, and what was leased to nobody."""

    level: float
    lease: float
    spare: float


class LimitAnswer(NamedTuple):
    """`grants` by the limits' names. `is_new`: the books know nothing of this ingress and want to hear of all that it
    holds. `door_share`: of all requests, those that come to this ingress."""

    num_ingresses: int
    arrival_share: float
    grants: dict[str, LimitGrant]
    is_new: bool

    def without_leases(self) -> LimitAnswer:
        """It has come so late that they may have ended."""
        grants = {name: LimitGrant(grant.level, 0.0, 0.0) for name, grant in self.grants.items()}
        return self._replace(grants=grants)


class LeasedLimit:
    """One limit of one caller, as one ingress has it. Any thread may call it.

    Args:
        name: unique among all limits, and the same in every ingress.
        most: how much may be used within a minute, or at the same time.
        refills: evenly within a minute. Nothing is used of it at first.
    """

    def __init__(self, shares: IngressLimits, name: str, most: int, *, refills: bool = True) -> None:
        self.most = most
        self._shares = shares
        self._name = name
        self._refills = refills
        self._lock = threading.Lock()
        self._level = float(most)
        self._held = 0.0
        self._lease = self._share
        self._spare = 0.0
        self._granted = 0.0  # when it was last answered
        self._leased_at: float | None = None
        self._filled_at = shares.clock()
        self._used = self._asked = self._unit = 0.0  # since the last report
        self._left = 0.0  # of the lease, when it was made
        self._num_asked = 0

    def try_take(self, amount: float) -> float:
        """Take it if this ingress may. Returns 0.0, or for how many seconds to wait when it may not."""
        with self._lock:
            self._fill()
            self._asked += amount
            self._num_asked += 1
            if amount > self._level:
                self._tell(amount)
                return self._wait_s(amount - self._level)
            if amount > self._lease and not self._overdraws(amount):
                self._tell(amount)
                alone = self._leased_at is None and not self._shares.connected
                return self._wait_s(amount - self._lease) * self._shares.num_ingresses if alone else _ELSEWHERE_S
            self._use(amount)
            if self._leased_at is not None and self._lease < self._granted / 2:
                self._shares.hurry()
            return 0.0

    def charge_usage(self, amount: float) -> None:
        """Take it whether it is there or not; a negative amount is given back."""
        with self._lock:
            self._fill()
            self._use(amount)

    def resize(self, most: int) -> None:
        """From now on. What was left of a rate stays the same part of it; what is held stays held."""
        with self._lock:
            self._fill()
            if self._refills:
                self._level, self._lease = self._level * most / self.most, self._lease * most / self.most
            else:
                self._level, self._lease = self._level + most - self.most, min(self._lease, most - self._held)
            self.most = most
            self._tell()

    @property
    def level(self) -> float:
        """What the caller has left, in all ingresses; negative while there is something to pay back."""
        with self._lock:
            self._fill()
            return self._level

    @property
    def is_fresh(self) -> bool:
        """Whether a new one would be the same, and the books know."""
        return self.level >= self.most and (self._shares.num_ingresses == 1 or not self._used)

    def report(self) -> LimitUsage:
        """What has happened since the last report."""
        with self._lock:
            self._fill()
            unit = self._unit or self._asked / max(self._num_asked, 1)
            left = self._left = max(self._lease, 0.0)
            use = LimitUsage(self.most, self._refills, self._used, self._held, self._asked, unit, self._level, left)
            self._used = self._asked = self._unit = 0.0
            self._num_asked = 0
            return use

    def unreport(self, use: LimitUsage) -> None:
        """The report has not arrived."""
        with self._lock:
            self._used += use.used
            self._tell()

    def apply_grant(self, grant: LimitGrant) -> None:
        """The answer to the last report; or, when there was none, news of a caller who calls elsewhere."""
        with self._lock:
            self._filled_at = self._leased_at = self._shares.clock()
            self._level, self._lease = grant.level - self._used, grant.lease - self._used
            self._spare, self._granted = grant.spare - max(self._used, 0.0), grant.lease
            # To be renewed, or given back; and what others may not have before it is known to be given back.
            if self._lease > 0 or self._used or self._left > grant.lease:
                self._tell()
            self._left = 0.0

    def reveal(self) -> None:
        """Report at the next opportunity, if there is anything to say."""
        with self._lock:
            self._fill()
            if self._held or self._level < self.most:
                self._tell()

    def close(self) -> None:
        """Nobody uses it any more."""
        self._shares.remove_limit(self._name)

    @property
    def _share(self) -> float:
        return self.most / self._shares.num_ingresses

    def _overdraws(self, amount: float) -> bool:
        """Whether more than the lease may be taken, this time."""
        if amount <= self._spare:
            self._spare = 0.0
            return True
        # A whole share is good for anything, or there would be requests that no share is good for.
        return self._leased_at is None and self._lease >= self._share

    def _use(self, amount: float) -> None:
        self._level -= amount
        self._lease -= amount
        self._used += amount
        if not self._refills:
            self._held += amount
        self._tell()

    def _tell(self, refused: float = 0.0) -> None:
        self._unit = max(self._unit, refused)
        self._shares.queue_report(self._name, self, hurry=refused > 0)

    def _wait_s(self, missing: float) -> float:
        return missing * 60 / self.most if self._refills else _ELSEWHERE_S

    def _fill(self) -> None:
        now = self._shares.clock()
        per_s = self.most / 60 if self._refills else 0.0
        passed_s, self._filled_at = now - self._filled_at, now
        if self._leased_at is not None and now - self._leased_at > _LEASE_S:
            self._leased_at = None
            self._lease = self._level / self._shares.num_ingresses
            self._spare = self._level if self._shares.connected else 0.0
        self._level = min(self._level + passed_s * per_s, self.most)
        if self._leased_at is None and self._refills:
            self._lease = min(self._lease + passed_s * per_s / self._shares.num_ingresses, self._share)
        elif self._leased_at is None and not self._shares.connected:
            self._level, self._lease = self.most - self._held, self._share - self._held
        if self._shares.num_ingresses == 1:
            self._lease = self._level


class IngressLimits:
    """All limits of one ingress, and what is to be reported of them.

    Attributes:
        num_ingresses: as far as is known.
        connected: to the books. If there is one ingress, there need be none.
        unknown: what makes the limit of this name, if there should be one.
        on_hurry: called, by any thread, when a report should not wait for the next beat.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.num_ingresses = 1
        self.connected = False
        self.unknown: Callable[[str], None] = lambda name: None
        self.on_hurry: Callable[[], object] = lambda: None
        self._limits: dict[str, LeasedLimit] = {}
        self._dirty: dict[str, LeasedLimit] = {}

    @property
    def has_reports(self) -> bool:
        return bool(self._dirty)

    def limit(self, name: str, most: int, *, refills: bool = True) -> LeasedLimit:
        """A new one."""
        made = self._limits[name] = LeasedLimit(self, name, most, refills=refills)
        return made

    def remove_limit(self, name: str) -> None:
        self._limits.pop(name, None)
        self._dirty.pop(name, None)

    def queue_report(self, name: str, limit: LeasedLimit, *, hurry: bool = False) -> None:
        """It has something to report."""
        self._dirty[name] = limit
        if hurry:
            self.hurry()

    def hurry(self) -> None:
        if self.num_ingresses > 1:
            self.on_hurry()

    def reports(self) -> dict[str, LimitUsage]:
        """What the books are to be told now."""
        names = list(self._dirty)[:_MOST_USES]
        return {name: limit.report() for name in names if (limit := self._dirty.pop(name, None)) is not None}

    def apply_answer(self, answer: LimitAnswer) -> None:
        """The books' answer to the last `reports`."""
        self.num_ingresses, self.connected = answer.num_ingresses, True
        for name, grant in answer.grants.items():
            if name not in self._limits:
                self.unknown(name)
            if (limit := self._limits.get(name)) is not None:
                limit.apply_grant(grant)
        if answer.is_new:
            for limit in list(self._limits.values()):
                limit.reveal()

    def lost(self, uses: Mapping[str, LimitUsage], num_ingresses: int) -> None:
        """These reports have not arrived: leases go on until they end, and then each ingress grants its share."""
        self.connected, self.num_ingresses = False, num_ingresses
        for name, use in uses.items():
            if (limit := self._limits.get(name)) is not None:
                limit.unreport(use)


@dataclass(slots=True)
class _Lease:
    """`rate`: what the ingress is asked for, in a second; `unit`: at a time."""

    amount: float = 0.0
    rate: float = 0.0
    unit: float = 0.0
    at: float = -math.inf

    def booked(self, now: float) -> float:
        return self.amount if now - self.at < _BOOKED_S else 0.0

    def demand(self, now: float) -> float:
        return self.rate * math.exp((self.at - now) / _DEMAND_S)


@dataclass(slots=True)
class _LimitAccount:
    """One limit of one caller over all ingresses. `change`: the number of the last one."""

    most: int
    refills: bool
    level: float
    filled_at: float
    change: int = 0
    leases: dict[str, _Lease] = field(default_factory=dict)
    held: dict[str, float] = field(default_factory=dict)

    def fill(self, now: float) -> None:
        if self.refills:
            self.level = min(self.level + (now - self.filled_at) * self.most / 60, self.most)
        else:
            self.level = self.most - sum(self.held.values())
        self.filled_at = now

    def is_fresh(self, now: float) -> bool:
        """Whether a new one would be the same."""
        self.fill(now)
        return self.level >= self.most and not any(lease.booked(now) for lease in self.leases.values())


@dataclass(slots=True)
class _Ingress:
    """`change`: the last one that it has heard of."""

    heard_at: float
    num_arrived: int
    arrive_per_s: float = 0.0
    change: int = 0

    def hear(self, num_arrived: int, now: float) -> None:
        passed_s = now - self.heard_at
        if passed_s > 0:
            rate = (num_arrived - self.num_arrived) / passed_s
            self.arrive_per_s += (rate - self.arrive_per_s) * (1 - math.exp(-passed_s / _ARRIVALS_S))
        self.heard_at, self.num_arrived = now, num_arrived


class LimitLedger:
    """What callers have left over all ingresses, and the leases. One thread at a time.

    Args:
        max_accounts: as many limits are known at once. Of further ones each ingress grants its share.
        clock: in seconds; ingresses' own clocks do not matter.
    """

    def __init__(
        self, max_accounts: int = 50_000, clock: Clock = time.monotonic, rng: random.Random | None = None
    ) -> None:
        self._max_accounts = max_accounts
        self._clock = clock
        self._rng = rng or random.Random()
        self._began_at = clock()
        self._accounts: OrderedDict[str, _LimitAccount] = OrderedDict()  # the one that has changed last is last
        self._num_changes = 0
        self._ingresses: dict[str, _Ingress] = {}

    def settle_usage(self, ingress: str, uses: Mapping[str, LimitUsage], num_arrived: int = 0) -> LimitAnswer:
        """Enter what an ingress has used, and lease it what it may use next.

        Args:
            num_arrived: requests that have come to its door so far.
        """
        now = self._clock()
        is_new = ingress not in self._ingresses
        known = self._ingresses.setdefault(ingress, _Ingress(now, num_arrived))
        known.hear(num_arrived, now)
        self._forget_dead(now)
        grants = {}
        for name, use in uses.items():
            account = self._account(name, use, ingress, now)
            if account is not None:
                grants[name] = self._lease(account, ingress, use, now)
        grants |= dict(self._news(ingress, known.change, grants, now))
        known.change = self._num_changes
        number, arrive_per_s = len(self._ingresses), sum(each.arrive_per_s for each in self._ingresses.values())
        share = known.arrive_per_s / arrive_per_s if arrive_per_s > 0 else 1 / number
        # Never nothing: requests may come here any moment.
        return LimitAnswer(number, (1 - _EVEN_SHARE) * share + _EVEN_SHARE / number, grants, is_new)

    def remove_ingress(self, ingress: str) -> None:
        """It answers nothing any more."""
        del self._ingresses[ingress]
        for name, account in list(self._accounts.items()):
            account.leases.pop(ingress, None)
            if account.held.pop(ingress, None) is not None:
                self._note(name, account)

    def _account(self, name: str, use: LimitUsage, ingress: str, now: float) -> _LimitAccount | None:
        """With what was used entered; `None`: there is no room for it."""
        account = self._accounts.get(name)
        if account is None or account.refills != use.refills:
            while self._accounts and next(iter(self._accounts.values())).is_fresh(now):
                self._accounts.popitem(last=False)
            if len(self._accounts) >= self._max_accounts:
                return None
            account = self._accounts[name] = _LimitAccount(use.most, use.refills, use.level, now)
        else:
            account.fill(now)
            if account.most != use.most:
                account.level, account.most = account.level * use.most / account.most, use.most
            account.level = min(account.level - use.used, use.most)
            if now - self._began_at < _LEARNS_S:
                account.level = min(account.level, use.level)
        if not use.refills:
            account.held[ingress] = use.held
            if not use.held:
                del account.held[ingress]
            account.fill(now)
        self._note(name, account)
        return account

    def _note(self, name: str, account: _LimitAccount) -> None:
        """The others have to hear of it."""
        self._num_changes += 1
        account.change = self._num_changes
        self._accounts.move_to_end(name)

    def _lease(self, account: _LimitAccount, ingress: str, use: LimitUsage, now: float) -> LimitGrant:
        lease = account.leases.setdefault(ingress, _Lease(at=now - BEAT_S))
        passed_s = max(now - lease.at, HURRY_S)
        lease.rate += (use.asked / passed_s - lease.rate) * (1 - math.exp(-passed_s / _DEMAND_S))
        kept = 0.0 if use.asked else lease.amount - use.used  # nobody has come for it yet
        lease.unit = use.unit or (lease.unit if lease.rate * 2 * _DEMAND_S >= lease.unit else 0.0)
        lease.at, lease.amount = now, 0.0
        free = account.level - sum(other.booked(now) for other in account.leases.values())
        demand = sum(other.demand(now) for other in account.leases.values())
        others = demand - lease.rate
        due = account.level * lease.rate / demand if demand > 0 else 0.0
        amount = min(max(lease.unit, lease.rate * _DEMAND_S), max(due, kept), free)
        if amount < lease.unit:  # of no use: all of it or nothing, so that in the mean it is what is due
            amount = lease.unit if lease.unit <= free and self._rng.random() * lease.unit < due else 0.0
        amount = lease.amount = amount if amount >= 1 else 0.0
        if not account.refills:  # it may use what it had while the answer is on its way, and nobody pays that back
            lease.amount = max(amount, use.left)
        if not lease.amount and lease.demand(now) < 1e-3:
            del account.leases[ingress]
        return LimitGrant(account.level, amount, max(free - lease.amount - 2 * BEAT_S * others, 0.0))

    def _news(
        self, ingress: str, since: int, known: Mapping[str, LimitGrant], now: float
    ) -> Iterator[tuple[str, LimitGrant]]:
        """Of callers who have used much of a limit elsewhere since that change, the latest first."""
        num_looked_at = 0
        for name in reversed(self._accounts):
            account = self._accounts[name]
            num_looked_at += 1
            if account.change <= since or num_looked_at > _MOST_NEWS:
                return
            if name in known or (ingress in account.leases and account.leases[ingress].booked(now)):
                continue
            account.fill(now)
            if not account.refills or account.level < account.most / 2:
                free = account.level - sum(lease.booked(now) for lease in account.leases.values())
                others = sum(lease.demand(now) for lease in account.leases.values())
                yield name, LimitGrant(account.level, 0.0, max(free - 2 * BEAT_S * others, 0.0))

    def _forget_dead(self, now: float) -> None:
        for ingress in [ingress for ingress, known in self._ingresses.items() if now - known.heard_at > DEAD_S]:
            self.remove_ingress(ingress)
