"""Who may hold how much of a device's KV memory: the books of replicas that share one. Pure, no Ray.

Members say every second what they hold, in a *beat*; the answer is an *order* that sets their budget:

    member ── beat k: budget, held ──> ledger     counts for the member max(budget, held) of its last beat,
    member <── order k: budget ─────── ledger     and from now on the order's budget, if that is more

A member obeys the order that answers its last beat and no other. So a beat tells all: whatever was lost, late, out of
order, or said by a ledger that is gone, the member will not obey it any more. At every moment the sum of what is
counted is within the capacity, and no member holds more than is counted for it:

- A budget is raised only into what nobody is counted for. One that is lowered counts as before until a beat says that
  pages have been given back.
- Who is silent is counted for all the same. Its memory is free when it says so or when its process has ended (`leave`),
  and not before.
- A ledger that begins anew is told whom the last one counted, and grants nothing before it has heard from all of them,
  or of their end.

Shares: everybody gets the least it can work with, then what it has use for, and all an equal part of the rest. They are
set anew when members come and go, and while all stay only when one is short of memory that another has to spare.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from app.errors import ConfigError

# Shares of members that stay are moved so often at most, ...
REBALANCE_S = 5.0
# ... when one has use for more than this share of its budget, ...
PRESSURE = 0.9
# ... and would get at least this share of the capacity more. Less is not worth the blocks that others lose.
LEAST_MOVE = 0.05
# What a member has use for is this much more than what it uses: sequences grow.
_HEADROOM = 1.25


@dataclass(frozen=True, slots=True)
class MemberUsage:
    """What a member has, and could use, in bytes.

    Attributes:
        budget_bytes: what it may hold; 0 before its first grant.
        held_bytes: what it does hold, or may at any moment although it is above the budget.
        least_bytes, most_bytes: bounds of its budget. 0: not known yet.
        demand_bytes: what its requests take, those that wait included.
        revision: of the budget; orders have the next one.
    """

    budget_bytes: int = 0
    held_bytes: int = 0
    least_bytes: int = 0
    most_bytes: int = 0
    demand_bytes: int = 0
    revision: int = 0


@dataclass(frozen=True, slots=True)
class LedgerHeartbeat:
    """What a member says. `number` increases; `capacity_bytes` is what it thinks that all may hold together."""

    member: str
    number: int
    capacity_bytes: int
    holding: MemberUsage


@dataclass(frozen=True, slots=True)
class BudgetOrder:
    """The answer to beat `number`: the budget from now on, 0 to wait for one. With the revision of the beat it changes
    nothing. `refusal` says why there will never be one."""

    number: int
    budget_bytes: int
    revision: int
    refusal: str | None = None


class Membership:
    """A member's side: numbers its beats and knows which order to obey."""

    def __init__(self, member: str, capacity_bytes: int) -> None:
        self.member, self.capacity_bytes = member, capacity_bytes
        self._number = 0
        self._awaits_order = False

    def next_heartbeat(self, holding: MemberUsage) -> LedgerHeartbeat:
        """The next beat. Orders that answer former ones are void from now on."""
        self._number += 1
        self._awaits_order = True
        return LedgerHeartbeat(self.member, self._number, self.capacity_bytes, holding)

    def obeys(self, order: BudgetOrder) -> bool:
        """Whether to carry out an order; once."""
        if order.number != self._number or not self._awaits_order:
            return False
        self._awaits_order = False
        return True


@dataclass(slots=True, eq=False)
class _Member:
    """`counted_bytes`: it holds no more. `target_bytes`: where its budget is going. `settled`: it has had a budget that
    it can work with, and is never refused any more."""

    number: int
    holding: MemberUsage
    counted_bytes: int
    target_bytes: int = 0
    settled: bool = False
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """A member's bounds and what it has use for, in bytes."""

    least_bytes: int
    most_bytes: int
    wanted_bytes: int


def fair_shares(capacity_bytes: int, claims: Sequence[Claim]) -> list[int]:
    """Budgets that add up to the capacity at most: the least each, then in proportion to what is wanted beyond it, then
    equal parts of the rest.

    Raises:
        ConfigError: the capacity does not hold the least of all.
    """
    least = sum(claim.least_bytes for claim in claims)
    if least > capacity_bytes:
        raise ConfigError(f"{len(claims)} members need at least {least} bytes, there are {capacity_bytes}")
    wanted = [min(max(claim.wanted_bytes, claim.least_bytes), claim.most_bytes) for claim in claims]
    more, spare = sum(wanted) - least, capacity_bytes - least
    if more > spare:
        return [
            claim.least_bytes + (want - claim.least_bytes) * spare // more
            for claim, want in zip(claims, wanted, strict=True)
        ]
    rest = (spare - more) // len(claims) if claims else 0
    return [min(want + rest, claim.most_bytes) for claim, want in zip(claims, wanted, strict=True)]


class BudgetLedger:
    """The books of one device. Not thread-safe.

    Args:
        now: seconds; all times are of this clock, which never goes back.
        awaits: members that a former ledger has counted and that may be alive.

    Attributes:
        capacity_bytes: what all members may hold together, as the last one that joined has said.
    """

    def __init__(self, now: float, awaits: Iterable[str] = ()) -> None:
        self.capacity_bytes = 0
        self._awaited = set(awaits)
        self._members: dict[str, _Member] = {}  # in the order in which they joined
        self._gone: set[str] = set()
        self._shared_at = now

    @property
    def counted_bytes(self) -> int:
        """What members hold at most."""
        return sum(member.counted_bytes for member in self._members.values())

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(self._members)

    def handle_heartbeat(self, beat: LedgerHeartbeat, now: float) -> BudgetOrder:
        """Enter what a member says; the answer is what it shall do."""
        holding, known = beat.holding, self._members.get(beat.member)
        unchanged = BudgetOrder(beat.number, holding.budget_bytes, holding.revision)
        if beat.member in self._gone or (known is not None and beat.number <= known.number):
            return unchanged  # it came late: the member has left, or waits for the answer to another one
        member = self._entered(beat, known)
        if refusal := self._refusal(beat.member):
            member.refused = True  # and counted until it has gone
            return BudgetOrder(beat.number, holding.budget_bytes, holding.revision, refusal)
        if (known is None and not holding.budget_bytes) or self._must_share(now):
            self._share(now)
        budget_bytes = self._next_budget(member, now)
        if budget_bytes == holding.budget_bytes:
            return unchanged
        member.counted_bytes = max(member.counted_bytes, budget_bytes)
        return BudgetOrder(beat.number, budget_bytes, holding.revision + 1)

    def remove_member(self, member: str) -> None:
        """A member holds nothing any more, and never will again."""
        self._gone.add(member)
        self._awaited.discard(member)
        self._members.pop(member, None)

    def _entered(self, beat: LedgerHeartbeat, member: _Member | None) -> _Member:
        holding = beat.holding
        self._awaited.discard(beat.member)
        counted_bytes = max(holding.budget_bytes, holding.held_bytes)
        if member is None:
            self.capacity_bytes = beat.capacity_bytes
            # Of one that a former ledger has known the share stays as it is.
            member = _Member(beat.number, holding, counted_bytes, target_bytes=holding.budget_bytes)
            self._members[beat.member] = member
        else:
            member.number, member.holding, member.counted_bytes = beat.number, holding, counted_bytes
        member.settled |= 0 < holding.least_bytes <= holding.budget_bytes
        return member

    @property
    def _sharing(self) -> list[_Member]:
        return [member for member in self._members.values() if not member.refused]

    def _least_bytes(self, member: _Member) -> int:
        """Of a member that does not know yet, as much as of another one: they are replicas of one deployment."""
        return member.holding.least_bytes or max(other.holding.least_bytes for other in self._members.values())

    def _refusal(self, name: str) -> str | None:
        """Why there is no room for a member that has not settled, beside those that have and those before it."""
        newcomer = self._members[name]
        if newcomer.settled:
            return None
        names = list(self._members)
        before = names[: names.index(name)]
        others = [m for n, m in self._members.items() if m.settled or (n in before and not m.refused)]
        least_bytes = sum(map(self._least_bytes, [*others, newcomer]))
        if least_bytes <= self.capacity_bytes:
            return None
        return (
            f"{len(others) + 1} replicas that share a device need at least {least_bytes} bytes of KV memory, for a "
            f"sequence of max_model_len each and what is pinned, and shared_kv_memory_bytes is {self.capacity_bytes}: "
            "raise it, lower max_model_len, or run fewer replicas on a device"
        )

    def _must_share(self, now: float) -> bool:
        """Whether the targets will not do: a member cannot work with its own, they exceed the capacity, or somebody is
        short of memory that others, or nobody, can use."""
        members = self._sharing
        if sum(member.target_bytes for member in members) > self.capacity_bytes or any(
            self._least_bytes(member) > member.target_bytes for member in members
        ):
            return True
        if now - self._shared_at < REBALANCE_S:
            return False
        move_bytes, shares = LEAST_MOVE * self.capacity_bytes, self._fair_shares(members)
        if sum(shares) - sum(member.target_bytes for member in members) >= move_bytes:
            return True
        return any(
            member.holding.demand_bytes > PRESSURE * member.target_bytes and share - member.target_bytes >= move_bytes
            for member, share in zip(members, shares, strict=True)
        )

    def _share(self, now: float) -> None:
        self._shared_at, members = now, self._sharing
        for member, share in zip(members, self._fair_shares(members), strict=True):
            member.target_bytes = share

    def _fair_shares(self, members: Sequence[_Member]) -> list[int]:
        settled = [member.holding.demand_bytes for member in members if member.settled]
        usual_bytes = sum(settled) // len(settled) if settled else 0  # a newcomer will be given as much to do
        claims = [
            Claim(
                least_bytes=self._least_bytes(member),
                most_bytes=member.holding.most_bytes or self.capacity_bytes,
                wanted_bytes=int(_HEADROOM * (member.holding.demand_bytes if member.settled else usual_bytes)),
            )
            for member in members
        ]
        # What they need exceeds the capacity when that has been lowered.
        return fair_shares(max(self.capacity_bytes, sum(claim.least_bytes for claim in claims)), claims)

    def _next_budget(self, member: _Member, now: float) -> int:
        """What the member may have now, on the way to its target."""
        budget_bytes, target_bytes = member.holding.budget_bytes, member.target_bytes
        if target_bytes <= budget_bytes:
            return target_bytes
        if self._awaited:
            return budget_bytes
        free_bytes = self.capacity_bytes - (self.counted_bytes - member.counted_bytes)
        possible_bytes = min(target_bytes, free_bytes)
        if not budget_bytes:
            enough_bytes = self._least_bytes(member) or target_bytes
            return possible_bytes if possible_bytes >= enough_bytes else 0
        # Not every few bytes that somebody gives back.
        step_bytes = min(target_bytes - budget_bytes, int(LEAST_MOVE * self.capacity_bytes))
        return possible_bytes if possible_bytes - budget_bytes >= step_bytes else budget_bytes
