"""How many physical pages there may be, and which of them hold no block at the moment."""

from __future__ import annotations

from typing import Literal

from vmem.errors import BudgetError, IntegrityError

BudgetAnswer = Literal["applied", "deferred", "stale"]


class PagePool:
    """The page budget that all layer groups share. Only called under its memory's lock.

    Args:
        budget: pages at first, and the most there may ever be.
        fewest: pages the budget may be lowered to when nothing is pinned.

    Raises:
        BudgetError: the budget is below `fewest`.

    Attributes:
        most: pages there may ever be.
        budget: pages there may be now; lowered and raised at run time. More may exist until some are destroyed.
        revision: of the last order that changed the budget.
        num_pinned: pages that pinned prefixes own.
        spare: handles of pages that belong to no block.
    """

    def __init__(self, page_bytes: int, budget: int, fewest: int) -> None:
        self.page_bytes = page_bytes
        self.num_pinned = 0
        self.fewest, self.most = fewest, budget
        self._check_budget(budget * page_bytes)
        self.budget = budget
        self.revision = 0
        self.spare: list[int] = []
        self._num_created = 0
        self._num_promised = 0

    def set_budget(self, budget_bytes: int, revision: int) -> BudgetAnswer:
        """Change the budget, unless a newer order has; "deferred" while more pages exist than it allows."""
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
    def num_created(self) -> int:
        return self._num_created

    @property
    def num_committed(self) -> int:
        """Pages that exist or are being created."""
        return self._num_created + self._num_promised

    @property
    def num_claimable(self) -> int:
        """Pages that could be claimed now: the spare ones, and those the budget still allows to create."""
        return len(self.spare) + self.budget - self.num_committed

    def claim(self, count: int) -> tuple[list[int], int]:
        """Claim `count` pages: handles of spare ones, and how many the caller is to create. Settle with `settle`."""
        if count > self.num_claimable:
            raise IntegrityError(f"claim of {count} pages where there is room for {self.num_claimable}")
        kept = max(len(self.spare) - count, 0)
        self.spare, handles = self.spare[:kept], self.spare[kept:]
        self._num_promised += count - len(handles)
        return handles, count - len(handles)

    def settle(self, promised: int, created: int) -> None:
        """Of a claim, `promised` pages were to be created and `created` were."""
        self._num_promised -= promised
        self._num_created += created

    def destroyed(self, count: int) -> None:
        self._num_created -= count

    def check_integrity(self, num_attached: int) -> None:
        """Raise `IntegrityError` unless every page is either attached to a block or spare. Nothing may be under way."""
        if self._num_promised or num_attached + len(self.spare) != self._num_created:
            raise IntegrityError(
                f"{self._num_created} pages exist, {num_attached} belong to blocks, {len(self.spare)} are spare, "
                f"{self._num_promised} are promised"
            )
