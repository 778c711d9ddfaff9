"""Page budget: how many physical pages there may be, and the spare ones; what a memory counts from its start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vmem.errors import BudgetError, IntegrityError

BudgetAnswer = Literal["applied", "deferred", "stale"]


@dataclass(slots=True)
class MemoryCounts:
    """Counts and times since the start."""

    map_calls: int = 0  # pages mapped
    unmap_calls: int = 0  # pages unmapped
    alias_calls: int = 0  # of the pages mapped, those that were mapped in a region already
    create_calls: int = 0  # pages taken from the device
    destroy_calls: int = 0  # pages given back to the device
    exposed_us: float = 0.0  # mapping time that steps waited for
    hidden_us: float = 0.0  # mapping time that passed beside steps
    num_exposed: int = 0  # units of mapping work that steps waited for
    num_hidden: int = 0  # units of mapping work beside steps
    mapper_failures: int = 0  # units of work that the device refused; the mapper retries
    adoptions: int = 0  # sequences that adopted a parked region
    adopted_blocks: int = 0  # blocks that they found mapped there
    demotions: int = 0  # sequences demoted to the home view, or that found every region taken
    queried_tokens: int = 0  # tokens of new sequences
    hit_tokens: int = 0  # of these, prefix hits
    evicted_blocks: int = 0  # cached blocks that were evicted
    copied_blocks: int = 0  # copies on write


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
