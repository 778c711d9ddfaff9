"""Requests that have not begun: first come first served within priority, or by turns of their tenants.

**Turns** are deficit round robin (Shreedhar and Varghese, 1995), paid afterwards, because nobody knows how long an
output will be. Within each priority the tenants stand in a ring:

    turn:   a ──> b ──> c ──> a …       each turn adds `quantum` tokens to the tenant's credit;
    credit: 700  -20   -3000            while it is above 0 its requests may begin, in their order

A tenant is charged for what is computed for it: the tokens of a prompt that were not cached, when the request begins,
and each generated token when it has been computed. What a preemption computes again costs nothing. Credit may fall far
below 0 that way, and takes as many rounds to come back.

**What holds.** While two tenants both have requests waiting, all the time and in one priority, what is charged to them
differs by at most `3 · quantum + 2 · (L + M)` tokens, L being the longest request, and M what the sequences that run
together may generate at most. It takes an M: whoever has begun is not stopped for others (it is so for every such
order: Sheng et al., OSDI 2024). Nobody starves, and there is somebody to begin as long as anybody waits.

**What is forgotten.** Credit is not saved up: a tenant that comes back begins with none. It comes back with its debt,
until enough rounds have passed. When nobody waits any more in a priority all is forgotten: what nobody else wanted is
free. So what is kept is about those who wait, and those who lately overdrew.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterator
from itertools import takewhile

from app.engine.request import SequenceGroup

Tenant = str | None


class WaitingQueue:
    """Groups that wait, and whose turn it is. All but iteration and `len` belongs to one thread.

    Whoever `peek` has named stays next until it is taken, unless a lower priority number comes: a large request that
    waits for room is not passed by.

    Args:
        quantum: tokens that a turn of a tenant is worth; `None`: tenants make no difference.
    """

    def __init__(self, quantum: int | None = None) -> None:
        self._quantum = quantum
        self._tokens: dict[SequenceGroup, int] = {}  # of all groups, in the order they came
        self._levels: dict[int, _Level] = {}  # those in which somebody waits
        self._priorities: list[int] = []  # of the same, in order
        self._next: SequenceGroup | None = None

    @property
    def is_fair(self) -> bool:
        return self._quantum is not None

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[SequenceGroup]:
        """In the order they came. From any thread."""
        return iter(tuple(self._tokens))

    def lengths(self) -> list[int]:
        """Tokens of each group's prompt. From any thread."""
        return list(self._tokens.values())

    def __contains__(self, group: SequenceGroup) -> bool:
        return group in self._tokens

    def add(self, group: SequenceGroup) -> None:
        """Let a group wait; the members it has by now count for `lengths`."""
        assert group not in self._tokens, "it waits already"
        self._tokens[group] = sum(request.num_uncomputed for request in group.members)
        if group.priority not in self._levels:
            self._levels[group.priority] = _Level(self._quantum)
            bisect.insort(self._priorities, group.priority)
        self._levels[group.priority].add(group)
        if self._next is not None and group.priority < self._next.priority:
            self._next = None

    def remove(self, group: SequenceGroup) -> None:
        """Take a group out, to begin it or to forget it. Raises `KeyError` if it does not wait."""
        del self._tokens[group]
        level = self._levels[group.priority]
        level.remove(group)
        if not level.num_waiting:
            del self._levels[group.priority]
            del self._priorities[bisect.bisect_left(self._priorities, group.priority)]
        if group is self._next:
            self._next = None

    def peek(self) -> SequenceGroup | None:
        """Who begins next; `None` when nobody waits."""
        if self._next is None and self._priorities:
            self._next = self._levels[self._priorities[0]].next()
        return self._next

    def pop(self) -> SequenceGroup:
        """Take out who begins next."""
        group = self.peek()
        assert group is not None, "nobody waits"
        self.remove(group)
        return group

    def charge(self, group: SequenceGroup, num_tokens: int) -> None:
        """So many tokens are computed for a group that waits no more."""
        if self._quantum is not None and num_tokens and (level := self._levels.get(group.priority)) is not None:
            level.account(group.tenant).credit -= num_tokens


class _TenantCredit:
    """A tenant within a priority.

    Attributes:
        groups: that wait, in order.
        credit: tokens it may still have computed in its turn; below 0, what it owes.
    """

    __slots__ = ("credit", "groups")

    def __init__(self) -> None:
        self.groups: OrderedDict[SequenceGroup, None] = OrderedDict()
        self.credit = 0


class _Level:
    """Those of one priority, as long as somebody waits."""

    def __init__(self, quantum: int | None) -> None:
        self._by_turns = quantum is not None
        self._quantum = quantum or 1  # without turns all are one tenant, who is never charged
        self._ring: OrderedDict[Tenant, _TenantCredit] = OrderedDict()  # it is the first one's turn
        self._turn_begun = False
        self.num_waiting = 0

    def account(self, tenant: Tenant) -> _TenantCredit:
        """The tenant's account; a new one has its turn last."""
        key = tenant if self._by_turns else None
        if key not in self._ring:
            self._ring[key] = _TenantCredit()
        return self._ring[key]

    def add(self, group: SequenceGroup) -> None:
        groups = self.account(group.tenant).groups
        later = list(takewhile(lambda other: other.arrival > group.arrival, reversed(groups)))
        groups[group] = None
        for other in reversed(later):  # seldom: groups are added as they arrive
            groups.move_to_end(other)
        self.num_waiting += 1

    def remove(self, group: SequenceGroup) -> None:
        del self.account(group.tenant).groups[group]
        self.num_waiting -= 1

    def next(self) -> SequenceGroup:
        """The first group of the first tenant in the ring that has credit. Somebody must wait.

        A round costs as much as there are accounts, and a turn that lets nobody begin pays off a quantum that was
        computed before, or forgets the account: over time there are no more of them than steps' worth of tokens.
        """
        while True:
            tenant, account = next(iter(self._ring.items()))
            if not self._turn_begun:
                account.credit += self._quantum
                self._turn_begun = True
            if account.groups and account.credit > 0:
                return next(iter(account.groups))
            self._turn_begun = False
            if account.groups or account.credit < 0:
                self._ring.move_to_end(tenant)
            else:
                del self._ring[tenant]
