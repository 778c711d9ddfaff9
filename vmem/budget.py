"""Page budget: how many physical pages there may be, and the spare ones; what a memory counts from its start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vmem.errors import BudgetError, IntegrityError

BudgetAnswer = Literal["applied", "deferred", "stale"]


@dataclass
class MemoryCounts:
    """Counts and times since the start, as described for `MemoryReport`. Without slots: reports copy them by `vars`."""

    map_calls: int = 0
    unmap_calls: int = 0
    alias_calls: int = 0
    create_calls: int = 0
    destroy_calls: int = 0
    exposed_us: float = 0.0
    hidden_us: float = 0.0
    num_exposed: int = 0
    num_hidden: int = 0
    mapper_failures: int = 0
    adoptions: int = 0
    adopted_blocks: int = 0
    demotions: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    evicted_blocks: int = 0
    copied_blocks: int = 0


class PagePool:
    """The page budget of all layer groups. Only called with the memory's lock held.

    Args:
        budget: pages at first, and the most there may ever be.
        fewest: pages the budget may be lowered to when nothing is pinned.

    Raises:
        BudgetError: the budget is below `fewest`.

    Attributes:
        most: pages there may ever be.
        budget: pages there may be now. After it was lowered, more may exist until some are destroyed.
        revision: of the last order that changed the budget.
        num_pinned: pages that pinned prefixes own.
        num_created: pages that exist.
        spare: handles of pages without a block.
    """

    def __init__(self, page_bytes: int, budget: int, fewest: int) -> None:
        self.page_bytes = page_bytes
        self.num_pinned = 0
        self.fewest, self.most = fewest, budget
        self._check_budget(budget * page_bytes)
        self.budget = budget
        self.revision = 0
        self.spare: list[int] = []
        self.num_created = 0
        self._num_promised = 0  # claimed and not created yet

    def set_budget(self, budget_bytes: int, revision: int) -> BudgetAnswer:
        """Change the budget.

        Args:
            revision: increases with every order, so that an older one that arrives late is ignored.

        Returns:
            "applied" when physical memory is within the budget now, "deferred" when it will be, "stale" for a revision
            that is not newer than the last.

        Raises:
            BudgetError: the budget is below what the longest sequence, the floor and pinned prefixes take, or above the
                budget at the start.
        """
        if revision <= self.revision:
            return "stale"
        self._check_budget(budget_bytes)
        self.revision = revision
        self.budget = budget_bytes // self.page_bytes
        return "applied" if self.num_committed <= self.budget else "deferred"

    def _check_budget(self, budget_bytes: int) -> None:
        fewest = self.fewest + self.num_pinned
        if not fewest <= budget_bytes // self.page_bytes <= self.most:
            raise BudgetError(
                f"a budget of {budget_bytes} bytes must be between {fewest * self.page_bytes}, which the longest "
                f"sequence, the floor and pinned prefixes take, and {self.most * self.page_bytes}"
            )

    @property
    def num_committed(self) -> int:
        """Pages that exist or are being created."""
        return self.num_created + self._num_promised

    @property
    def num_claimable(self) -> int:
        """Pages that could be claimed now: spare ones, and those that may still be created."""
        return len(self.spare) + self.budget - self.num_committed

    def claim(self, count: int) -> tuple[list[int], int]:
        """Claim `count` pages: returns handles of spare ones, and the number that the caller creates. End with
        `settle`."""
        if count > self.num_claimable:
            raise IntegrityError(f"claim of {count} pages where {self.num_claimable} can be claimed")
        kept = max(len(self.spare) - count, 0)
        self.spare, handles = self.spare[:kept], self.spare[kept:]
        self._num_promised += count - len(handles)
        return handles, count - len(handles)

    def settle(self, promised: int, created: int) -> None:
        """End a claim: `created` of the `promised` pages exist now."""
        self._num_promised -= promised
        self.num_created += created

    def check_integrity(self, num_attached: int) -> None:
        """Raise `IntegrityError` unless every page is attached to a block or spare. No claim may be open."""
        if self._num_promised or num_attached + len(self.spare) != self.num_created:
            raise IntegrityError(
                f"{self.num_created} pages exist, {num_attached} belong to blocks, {len(self.spare)} are spare, "
                f"{self._num_promised} are promised"
            )
