"""Waiting queue: requests within priority, in the order in which they are due (`Scheduler.add`), or by tenants' turns.

**Deficit round robin** (Shreedhar and Varghese, 1995), charged afterwards, because the length of an output is not known
in advance. Within each priority the tenants stand in a ring:

    turn:   a ──> b ──> c ──> a …       each turn adds `quantum` tokens to the tenant's credit;
    credit: 700  -20   -3000            while the credit is above 0 the tenant's requests may begin, as they are due

A tenant is charged for what is computed: the uncached tokens of a prompt when the request begins, and each generated
token. Recomputation after a preemption costs nothing. Credit may fall far below 0, and takes rounds to come back.

**Bound.** While two tenants of one priority both have waiting requests, their charges differ by at most
`3 · quantum + 2 · (L + M)` tokens: L is the longest request, M the most tokens that running sequences may generate,
because a request that has begun is not stopped (as in Sheng et al., OSDI 2024). Until it is due, its prompt may still
be passed by others. No tenant starves, and a request begins whenever one waits.

**Lifetime of credit.** Credit is not saved: a tenant that returns begins with none. Debt remains until enough rounds
have passed, or until no request of the priority waits.
"""

from __future__ import annotations

import bisect
from collections import Counter, OrderedDict
from collections.abc import Iterator
from operator import attrgetter

from folio.app.engine.request.request import Request

Tenant = str | None
_due_order = attrgetter("prefill_key")


class WaitingQueue:
    """Requests that wait. Iteration, `len`, `lengths` and `expected_order` are for any thread, all else for the
    engine's.

    The request that `peek` has returned stays the head until it is removed, or until a request with a lower priority
    number, or one of its tenant that is due earlier, arrives: nothing else overtakes a large request.

    Args:
        quantum: tokens of a tenant's turn; `None`: tenants make no difference.
    """

    def __init__(self, quantum: int | None = None) -> None:
        self._quantum = quantum
        self._tokens: dict[Request, int] = {}  # prompt tokens, in order of arrival
        self._levels: dict[int, _Level] = {}  # only levels with waiting requests
        self._next: Request | None = None

    @property
    def is_fair(self) -> bool:
        return self._quantum is not None

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._tokens))

    def lengths(self) -> list[int]:
        """Prompt tokens of each request."""
        return list(self._tokens.values())

    def expected_order(self) -> list[Request]:
        """The requests in the order in which they begin, as far as is known: with tenants, one of each per turn."""
        requests = sorted(self, key=_due_order)
        if not self.is_fair:
            return requests
        turns: Counter[tuple[int, Tenant]] = Counter()
        keys: dict[Request, tuple[int, int]] = {}
        for request in requests:
            keys[request] = request.priority, turns[request.priority, request.tenant]
            turns[request.priority, request.tenant] += 1
        return sorted(requests, key=keys.__getitem__)

    def __contains__(self, request: Request) -> bool:
        return request in self._tokens

    def add(self, request: Request) -> None:
        assert request not in self._tokens, "the request waits already"
        self._tokens[request] = sum(sequence.num_uncomputed for sequence in request.sequences)
        if request.priority not in self._levels:
            self._levels[request.priority] = _Level(self._quantum)
        self._levels[request.priority].add(request)
        head = self._next
        if head is None or request.prefill_key > head.prefill_key:
            return
        if request.priority < head.priority:
            self._next = None
        elif not self.is_fair or request.tenant == head.tenant:
            self._next = request

    def remove(self, request: Request) -> None:
        """Remove a request that begins or is cancelled. Raises `KeyError` if it does not wait."""
        del self._tokens[request]
        level = self._levels[request.priority]
        level.remove(request)
        if not level.num_waiting:
            del self._levels[request.priority]
        if request is self._next:
            self._next = None

    def peek(self) -> Request | None:
        """The request that begins next, if any waits."""
        if self._next is None and self._levels:
            self._next = self._levels[min(self._levels)].next()
        return self._next

    def charge(self, request: Request, num_tokens: int) -> None:
        """Charge the tenant of a request that has begun for computed tokens."""
        if self._quantum is not None and num_tokens and (level := self._levels.get(request.priority)) is not None:
            level.tenant_credit(request.tenant).credit -= num_tokens


class _TenantCredit:
    """A tenant within a priority.

    Attributes:
        requests: its waiting requests, in the order in which they are due.
        credit: tokens left in its turn; below 0, its debt.
    """

    __slots__ = ("credit", "requests")

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.credit = 0


class _Level:
    """Waiting requests of one priority."""

    def __init__(self, quantum: int | None) -> None:
        self._by_turns = quantum is not None
        self._quantum = quantum or 1  # without turns all requests are one tenant's, which is never charged
        self._ring: OrderedDict[Tenant, _TenantCredit] = OrderedDict()  # the first one has the turn
        self._turn_begun = False
        self.num_waiting = 0

    def tenant_credit(self, tenant: Tenant) -> _TenantCredit:
        """The tenant's credit; a new tenant joins the end of the ring."""
        key = tenant if self._by_turns else None
        if key not in self._ring:
            self._ring[key] = _TenantCredit()
        return self._ring[key]

    def add(self, request: Request) -> None:
        bisect.insort(self.tenant_credit(request.tenant).requests, request, key=_due_order)
        self.num_waiting += 1

    def remove(self, request: Request) -> None:
        requests = self.tenant_credit(request.tenant).requests
        del requests[requests.index(request, bisect.bisect_left(requests, _due_order(request), key=_due_order))]
        self.num_waiting -= 1

    def next(self) -> Request:
        """The first request of the first tenant with credit. A request must wait.

        Amortised cost: each turn in which no request begins pays off a quantum of debt, or drops a tenant.
        """
        while True:
            tenant, state = next(iter(self._ring.items()))
            if not self._turn_begun:
                state.credit += self._quantum
                self._turn_begun = True
            if state.requests and state.credit > 0:
                return state.requests[0]
            self._turn_begun = False
            if state.requests or state.credit < 0:
                self._ring.move_to_end(tenant)
            else:
                del self._ring[tenant]
