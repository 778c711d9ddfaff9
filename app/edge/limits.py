"""Limits of callers in one ingress, granted from leases so that they hold over several ingresses.

A request never waits for the ledger (`folio.app.edge.limit_ledger`). An ingress grants requests from its leases and
reports usage and demand a few times a second; earlier when a lease is half used or was too small. The ledger knows the
usage of all ingresses and answers with new leases: in proportion to demand, and in total never more than is left.

    level    what the caller has left, over all ingresses    ┌─────────────────────────────────────────────┐
    lease    the part that one ingress may grant             │ ingress a │ b │  ingress c  │    spare       │
    spare    the part leased to no ingress                   └─────────────────────────────────────────────┘

An ingress may grant more than its lease in three cases:

- Once between two answers it may use the spare, less what other ingresses are likely to use in that time.
- A caller without a lease has used little lately: it gets one ingress's share, `limit / num_ingresses`, and one
  request more. The ledger announces callers who have used over half of a limit to every ingress.
- While the ledger is out of reach, each ingress grants its share, refilled at its share of the rate.

Usage can therefore exceed the limit by one request per ingress (the first of a caller, if the caller begins everywhere
within the milliseconds of an exchange), and by what a dead ingress had not reported. The level is then negative until
the rate has paid the excess back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

Clock = Callable[[], float]

# Period of reports while leases are used; least time between two reports when a lease is short.
REPORT_PERIOD_S, EARLY_REPORT_S = 0.25, 0.05
# A lease that is not renewed ends: after this time for the ingress, a little later for the ledger.
LEASE_S, LEDGER_LEASE_S = 2.0, 2.5
# Limits in one report; the next report has the others.
_MAX_REPORTED = 2000
# `Retry-After` for a request that another ingress may be able to grant.
_RETRY_ELSEWHERE_S = 1.0


class LimitUsage(NamedTuple):
    """An ingress's report of one limit of one caller.

    Attributes:
        limit: the bound.
        refills: within a minute; otherwise the bound is on what is held at the same time.
        used: since the last report; negative if more was given back.
        held: now, of a limit that does not refill.
        asked: since the last report, refused requests included.
        unit: the likely amount of the next request; a smaller lease is useless.
        level: as the ingress knows it.
        leased: what is left of the lease.
    """

    limit: int
    refills: bool
    used: float
    held: float
    asked: float
    unit: float
    level: float
    leased: float


class LimitGrant(NamedTuple):
    """The ledger's answer for one limit: the caller's level, the ingress's lease, and the spare."""

    level: float
    lease: float
    spare: float


class LimitAnswer(NamedTuple):
    """The ledger's answer to one ingress.

    Attributes:
        arrival_share: the share of all requests that arrive at this ingress.
        grants: by the limits' names.
        is_new: the ledger knew nothing of the ingress, which must report all that it holds.
    """

    num_ingresses: int
    arrival_share: float
    grants: dict[str, LimitGrant]
    is_new: bool


class LeasedLimit:
    """One limit of one caller in one ingress. Thread-safe.

    Args:
        name: unique among all limits, and the same in every ingress.
        limit: bound of the use within a minute, or at the same time.
        refills: evenly within a minute. The limit starts full.
    """

    def __init__(self, ingress: IngressLimits, name: str, limit: int, *, refills: bool = True) -> None:
        self.limit = limit
        self._ingress = ingress
        self._name = name
        self._refills = refills
        self._lock = threading.Lock()
        self._level = float(limit)
        self._held = 0.0
        self._lease = self._share
        self._spare = 0.0
        self._granted = 0.0  # the lease when it was last renewed
        self._leased_at: float | None = None
        self._filled_at = ingress.clock()
        self._used = self._asked = self._unit = 0.0  # since the last report
        self._reported_lease = 0.0  # what the last report said was left
        self._num_asked = 0

    def try_take(self, amount: float) -> float:
        """Take the amount if this ingress may grant it. Returns 0.0, or the seconds to wait."""
        with self._lock:
            self._fill()
            self._asked += amount
            self._num_asked += 1
            if amount > self._level:
                self._queue_report(amount)
                return self._wait_s(amount - self._level)
            if amount > self._lease and not self._may_overdraw(amount):
                self._queue_report(amount)
                if self._leased_at is not None or self._ingress.connected:
                    return _RETRY_ELSEWHERE_S
                return self._wait_s(amount - self._lease) * self._ingress.num_ingresses
            self._use(amount)
            if self._leased_at is not None and self._lease < self._granted / 2:
                self._ingress.report_early()
            return 0.0

    def charge_usage(self, amount: float) -> None:
        """Take the amount unconditionally; a negative amount is given back."""
        with self._lock:
            self._fill()
            self._use(amount)

    def resize(self, limit: int) -> None:
        """Change the bound. A rate keeps the fraction that is left; what is held stays held."""
        with self._lock:
            self._fill()
            if self._refills:
                self._level, self._lease = self._level * limit / self.limit, self._lease * limit / self.limit
            else:
                self._level, self._lease = self._level + limit - self.limit, min(self._lease, limit - self._held)
            self.limit = limit
            self._queue_report()

    @property
    def level(self) -> float:
        """The amount that the caller has left over all ingresses; negative while usage exceeds the limit."""
        with self._lock:
            self._fill()
            return self._level

    @property
    def is_fresh(self) -> bool:
        """Whether a new limit would be the same, also in the ledger."""
        return self.level >= self.limit and (self._ingress.num_ingresses == 1 or not self._used)

    def report(self) -> LimitUsage:
        """Usage and demand since the last report."""
        with self._lock:
            self._fill()
            unit = self._unit or self._asked / max(self._num_asked, 1)
            leased = self._reported_lease = max(self._lease, 0.0)
            usage = LimitUsage(
                self.limit, self._refills, self._used, self._held, self._asked, unit, self._level, leased
            )
            self._used = self._asked = self._unit = 0.0
            self._num_asked = 0
            return usage

    def apply_grant(self, grant: LimitGrant) -> None:
        """Apply the answer to the last report, or the announcement of usage elsewhere."""
        with self._lock:
            self._filled_at = self._leased_at = self._ingress.clock()
            self._level, self._lease = grant.level - self._used, grant.lease - self._used
            self._spare, self._granted = grant.spare - max(self._used, 0.0), grant.lease
            # A lease must be renewed or given back. A larger one, as reported, stays booked until then.
            if self._lease > 0 or self._used or self._reported_lease > grant.lease:
                self._queue_report()
            self._reported_lease = 0.0

    def reveal(self) -> None:
        """Queue a report of anything in use, for a ledger that has forgotten it."""
        with self._lock:
            self._fill()
            if self._held or self._level < self.limit:
                self._queue_report()

    def close(self) -> None:
        self._ingress.remove_limit(self._name)

    @property
    def _share(self) -> float:
        return self.limit / self._ingress.num_ingresses

    def _may_overdraw(self, amount: float) -> bool:
        """Whether this amount may exceed the lease, this time."""
        if amount <= self._spare:
            self._spare = 0.0
            return True
        # A full share grants any amount, or some requests would fit no share.
        return self._leased_at is None and self._lease >= self._share

    def _use(self, amount: float) -> None:
        self._level -= amount
        self._lease -= amount
        self._used += amount
        if not self._refills:
            self._held += amount
        self._queue_report()

    def _queue_report(self, refused: float = 0.0) -> None:
        self._unit = max(self._unit, refused)
        self._ingress.queue_report(self._name, self, early=refused > 0)

    def _wait_s(self, missing: float) -> float:
        return missing * 60 / self.limit if self._refills else _RETRY_ELSEWHERE_S

    def _fill(self) -> None:
        ingress, now = self._ingress, self._ingress.clock()
        filled = (now - self._filled_at) * self.limit / 60 if self._refills else 0.0
        self._filled_at = now
        if self._leased_at is not None and now - self._leased_at > LEASE_S:
            self._leased_at = None
            self._lease = self._level / ingress.num_ingresses
            self._spare = self._level if ingress.connected else 0.0
        self._level = min(self._level + filled, self.limit)
        if self._leased_at is None and self._refills:
            self._lease = min(self._lease + filled / ingress.num_ingresses, self._share)
        elif self._leased_at is None and not ingress.connected:
            self._level, self._lease = self.limit - self._held, self._share - self._held
        if ingress.num_ingresses == 1:
            self._lease = self._level


class IngressLimits:
    """All limits of one ingress, and the reports due to the ledger.

    Attributes:
        num_ingresses: the known number of ingresses.
        connected: the ledger answers. A single ingress needs no ledger.
        on_unknown: called with the name of a granted limit that does not exist here; may add it.
        on_early_report: called by any thread when the next report should not wait for its period.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.num_ingresses = 1
        self.connected = False
        self.on_unknown: Callable[[str], None] = lambda name: None
        self.on_early_report: Callable[[], object] = lambda: None
        self._limits: dict[str, LeasedLimit] = {}
        self._unreported: dict[str, LeasedLimit] = {}

    @property
    def has_reports(self) -> bool:
        return bool(self._unreported)

    def add_limit(self, name: str, limit: int, *, refills: bool = True) -> LeasedLimit:
        added = self._limits[name] = LeasedLimit(self, name, limit, refills=refills)
        return added

    def remove_limit(self, name: str) -> None:
        self._limits.pop(name, None)
        self._unreported.pop(name, None)

    def queue_report(self, name: str, limit: LeasedLimit, *, early: bool = False) -> None:
        self._unreported[name] = limit
        if early:
            self.report_early()

    def report_early(self) -> None:
        if self.num_ingresses > 1:
            self.on_early_report()

    def take_reports(self) -> dict[str, LimitUsage]:
        """The reports for the next message to the ledger."""
        names = list(self._unreported)[:_MAX_REPORTED]
        return {name: limit.report() for name in names if (limit := self._unreported.pop(name, None)) is not None}

    def apply_answer(self, answer: LimitAnswer) -> None:
        """Apply the ledger's answer to the last `take_reports`."""
        self.num_ingresses, self.connected = answer.num_ingresses, True
        for name, grant in answer.grants.items():
            if name not in self._limits:
                self.on_unknown(name)
            if (limit := self._limits.get(name)) is not None:
                limit.apply_grant(grant)
        if answer.is_new:
            for limit in list(self._limits.values()):
                limit.reveal()

    def note_disconnected(self, num_ingresses: int) -> None:
        """Leases last until they end; then each ingress grants its share."""
        self.connected, self.num_ingresses = False, num_ingresses
