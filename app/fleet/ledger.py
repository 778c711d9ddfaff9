"""Budget ledger: the account of one device's KV memory over the replicas that share it. No Ray.

Members report every second what they hold, and are told their budget. Both happen in one exchange, in which no other
member takes part (`app/fleet/ledger_file.py`). At every moment the counted bytes are within the capacity, and no member
holds more than is counted for it:

- A member counts max(budget, held) of its last report; if it was granted more than that, the grant.
- A budget is raised only into bytes that are counted for no member. A lowered budget counts as before until a report
  tells that pages have been given back.
- A silent member stays counted. Its memory is free when it leaves or its process has ended.

Shares: each member gets the least that it can work with, then its demand, then an equal part of the rest. Shares change
when members come and go; otherwise only when one is short of memory that another can spare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# Shares of the same members change at most this often, ...
REBALANCE_S = 5.0
# ... when a member's demand exceeds this share of its budget, ...
PRESSURE = 0.9
# ... and it would gain at least this share of the capacity. Less is not worth the blocks that others lose.
LEAST_MOVE = 0.05
# Sequences grow: a member is given this multiple of its demand.
_HEADROOM = 1.25


class ProcessId(NamedTuple):
    """A process of this machine. `started`: in the machine's clock ticks; ids of ended processes are used again."""

    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class MemberUsage:
    """A member's memory in bytes.

    Attributes:
        budget_bytes: bound of the member's memory; 0 before its first grant.
        held_bytes: memory held, possibly above the budget.
        least_bytes, most_bytes: bounds of the budget. 0: not known yet.
        demand_bytes: memory for all requests, waiting ones included.
        device_bytes: of the device, for everything. 0: not known yet, or CPUs.
        beside_bytes: of it, what the member's process takes beside this memory.
    """

    budget_bytes: int = 0
    held_bytes: int = 0
    least_bytes: int = 0
    most_bytes: int = 0
    demand_bytes: int = 0
    device_bytes: int = 0
    beside_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BudgetOrder:
    """The answer to a report: the budget from now on, or 0 to wait for one. `refusal`: why there will never be one."""

    budget_bytes: int
    refusal: str | None = None


@dataclass(slots=True)
class LedgerMember:
    """A member in the ledger.

    Attributes:
        counted_bytes: upper bound of the memory held.
        target_bytes: the budget that it is to get, step by step.
        settled: it has had a budget that it can work with, and is never refused.
    """

    process: ProcessId
    usage: MemberUsage
    counted_bytes: int = 0
    target_bytes: int = 0
    settled: bool = False
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """Bounds and demand of a member, in bytes."""

    least_bytes: int
    most_bytes: int
    wanted_bytes: int


def fair_shares(capacity_bytes: int, claims: Sequence[Claim]) -> list[int]:
    """Budgets within the capacity, which holds the least of all claims: the least of each, then in proportion to the
    demand beyond it, then equal parts of the rest."""
    least = sum(claim.least_bytes for claim in claims)
    wanted = [min(max(claim.wanted_bytes, claim.least_bytes), claim.most_bytes) for claim in claims]
    more, spare = sum(wanted) - least, capacity_bytes - least
    if more > spare:
        return [
            claim.least_bytes + (want - claim.least_bytes) * spare // more
            for claim, want in zip(claims, wanted, strict=True)
        ]
    rest = (spare - more) // len(claims) if claims else 0
    return [min(want + rest, claim.most_bytes) for claim, want in zip(claims, wanted, strict=True)]


@dataclass(slots=True)
class BudgetLedger:
    """The ledger of one device. One exchange at a time.

    Attributes:
        capacity_bytes: bound of all members' memory, as configured at the member that joined last.
        shared_at: when the targets were set. Seconds of a clock that never goes back, the same in all processes.
        members: by name, in the order in which they joined.
    """

    capacity_bytes: int = 0
    shared_at: float = 0.0
    members: dict[str, LedgerMember] = field(default_factory=dict)

    @property
    def counted_bytes(self) -> int:
        """Upper bound of the memory that members hold."""
        return sum(member.counted_bytes for member in self.members.values())

    def exchange(
        self, name: str, process: ProcessId, capacity_bytes: int, usage: MemberUsage, now: float
    ) -> BudgetOrder:
        """Enter a member's usage; returns its budget.

        Args:
            process: the one that holds the member's memory.
            capacity_bytes: the configured memory of all members together.
        """
        member = self.members.get(name)
        joins = member is None and not usage.budget_bytes
        if member is None:
            member = self.members[name] = LedgerMember(process, usage, target_bytes=usage.budget_bytes)
            self.capacity_bytes = capacity_bytes
            if usage.budget_bytes:  # the file was removed: until the other members report, all keep their shares
                self.shared_at = now
        member.usage, member.counted_bytes = usage, max(usage.budget_bytes, usage.held_bytes)
        member.settled |= 0 < usage.least_bytes <= usage.budget_bytes
        if refusal := self._refusal(name):
            member.refused = True  # counted until it has left
            return BudgetOrder(usage.budget_bytes, refusal)
        if joins or self._must_share(now):
            self._share(now)
        budget_bytes = self._next_budget(member)
        member.counted_bytes = max(member.counted_bytes, budget_bytes)
        return BudgetOrder(budget_bytes)

    @property
    def _sharing(self) -> list[LedgerMember]:
        return [member for member in self.members.values() if not member.refused]

    def _least_bytes(self, member: LedgerMember) -> int:
        """The member's least budget; while unknown, another member's: they are replicas of one deployment."""
        return member.usage.least_bytes or max(other.usage.least_bytes for other in self.members.values())

    def _refusal(self, name: str) -> str | None:
        """Why an unsettled member does not fit beside the settled ones and those that joined before it, if so."""
        newcomer = self.members[name]
        if newcomer.settled:
            return None
        names = list(self.members)
        before = names[: names.index(name)]
        others = [m for n, m in self.members.items() if m.settled or (n in before and not m.refused)]
        least_bytes = sum(map(self._least_bytes, [*others, newcomer]))
        if least_bytes <= self.capacity_bytes:
            return self._excess([newcomer, *others])
        return (
            f"{len(others) + 1} replicas that share a device need at least {least_bytes} bytes of KV memory (each one "
            f"sequence of max_model_len, and pinned prefixes); shared_kv_memory_bytes is {self.capacity_bytes}: raise "
            "it, lower max_model_len, or run fewer replicas on the device"
        )

    def _excess(self, members: Sequence[LedgerMember]) -> str | None:
        """Why the device cannot hold these members' processes beside the capacity, if so. They are replicas of one
        deployment: what is not known of a member is another one's."""
        usage = next((member.usage for member in members if member.usage.device_bytes), None)
        if usage is None:
            return None
        most_bytes = usage.device_bytes - len(members) * usage.beside_bytes
        if self.capacity_bytes <= most_bytes:
            return None
        replicas = f"{len(members)} replicas take" if len(members) > 1 else "a replica takes"
        return (
            f"shared_kv_memory_bytes is {self.capacity_bytes}; {replicas} {usage.beside_bytes} bytes each for weights, "
            f"activations, graphs and headroom, which leaves {max(most_bytes, 0)} of the device's "
            f"{usage.device_bytes}: lower it, or run fewer replicas on the device"
        )

    def _must_share(self, now: float) -> bool:
        """Whether the targets must change: one is below the member's least budget, they exceed the capacity, or a
        member is short of memory that is spare."""
        members = self._sharing
        if sum(member.target_bytes for member in members) > self.capacity_bytes or any(
            self._least_bytes(member) > member.target_bytes for member in members
        ):
            return True
        if now - self.shared_at < REBALANCE_S:
            return False
        move_bytes, shares = LEAST_MOVE * self.capacity_bytes, self._fair_shares(members)
        if sum(shares) - sum(member.target_bytes for member in members) >= move_bytes:
            return True
        return any(
            member.usage.demand_bytes > PRESSURE * member.target_bytes and share - member.target_bytes >= move_bytes
            for member, share in zip(members, shares, strict=True)
        )

    def _share(self, now: float) -> None:
        self.shared_at, members = now, self._sharing
        for member, share in zip(members, self._fair_shares(members), strict=True):
            member.target_bytes = share

    def _fair_shares(self, members: Sequence[LedgerMember]) -> list[int]:
        settled = [member.usage.demand_bytes for member in members if member.settled]
        usual_bytes = sum(settled) // max(len(settled), 1)  # a newcomer will have as much work
        claims = [
            Claim(
                least_bytes=self._least_bytes(member),
                most_bytes=member.usage.most_bytes or self.capacity_bytes,
                wanted_bytes=int(_HEADROOM * (member.usage.demand_bytes if member.settled else usual_bytes)),
            )
            for member in members
        ]
        # A lowered capacity may be below the sum of the least budgets.
        return fair_shares(max(self.capacity_bytes, sum(claim.least_bytes for claim in claims)), claims)

    def _next_budget(self, member: LedgerMember) -> int:
        budget_bytes, target_bytes = member.usage.budget_bytes, member.target_bytes
        if target_bytes <= budget_bytes:
            return target_bytes
        free_bytes = self.capacity_bytes - (self.counted_bytes - member.counted_bytes)
        possible_bytes = min(target_bytes, free_bytes)
        if not budget_bytes:
            enough_bytes = self._least_bytes(member) or target_bytes
            return possible_bytes if possible_bytes >= enough_bytes else 0
        # Raise the budget in steps, not for every few bytes that other members give back.
        step_bytes = min(target_bytes - budget_bytes, int(LEAST_MOVE * self.capacity_bytes))
        return possible_bytes if possible_bytes - budget_bytes >= step_bytes else budget_bytes
