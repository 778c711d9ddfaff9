"""Page budget: how many physical pages there may be, and the spare handles; what a memory counts from its start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from folio.vmem.errors import BudgetError, IntegrityError

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
    in_flight_us: float = 0.0
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
        budget_bytes: at first, and the most there may ever be.
        longest: pages of the longest sequence. The budget at the start holds them; prefixes are pinned beside them.
        fewest: pages the budget may be lowered to when nothing is pinned.
        handle_pages: pages of a handle.
        extent_pages: the budget is a multiple of so many pages.

    Raises:
        BudgetError: the budget is below `longest`.

    Attributes:
        most: pages there may ever be.
        attainable: pages that a single sequence can ever have: at most `most`, less where other owners of the device's
            memory leave less for good.
        budget: pages there may be now. After it was lowered, more may exist until some are destroyed.
        revision: of the last order that changed the budget.
        num_pinned: pages that pinned prefixes own.
        num_created: pages that exist.
        spare: handles whose pages belong to no block.
    """

    def __init__(
        self,
        page_bytes: int,
        budget_bytes: int,
        longest: int,
        fewest: int,
        *,
        handle_pages: int = 1,
        extent_pages: int = 1,
    ) -> None:
        self.page_bytes, self.handle_pages, self._extent_pages = page_bytes, handle_pages, extent_pages
        self.num_pinned = 0
        self.longest, self.fewest = longest, fewest
        self.most = self._pages_in(budget_bytes)
        self._check_budget(budget_bytes, self._whole(longest))
        self.budget = self.attainable = self.most
        self.revision = 0
        self.spare: list[int] = []
        self.num_created = 0
        self._num_promised = 0  # claimed and not created yet

    @property
    def handle_bytes(self) -> int:
        return self.handle_pages * self.page_bytes

    def set_budget(self, budget_bytes: int, revision: int) -> BudgetAnswer:
        """Change the budget.

        Args:
            revision: increases with every order, so that an older one that arrives late is ignored.

        Returns:
            "applied" when physical memory is within the budget now, "deferred" when it will be, "stale" for a revision
            that is not newer than the last.

        Raises:
            BudgetError: the budget is below `least`, or above the budget at the start.
        """
        if revision <= self.revision:
            return "stale"
        self._check_budget(budget_bytes, self.least)
        self.revision = revision
        self.budget = self._pages_in(budget_bytes)
        return "applied" if self.num_committed <= self.budget else "deferred"

    def _check_budget(self, budget_bytes: int, least: int) -> None:
        if not least <= self._pages_in(budget_bytes) <= self.most:
            raise BudgetError(
                f"a budget of {budget_bytes} bytes must be between {least * self.page_bytes}, which the longest "
                f"sequence, the floor and pinned prefixes take, and {self.most * self.page_bytes}"
            )

    def set_attainable(self, num_bytes: int) -> None:
        """Set `attainable`, from any thread."""
        self.attainable = min(self._pages_in(num_bytes), self.most)

    @property
    def nominal(self) -> int:
        """The budget that decides whether requests and pins can ever fit: `budget`; or `most` where `budget` may be
        lowered below `longest`, which lasts for a while only."""
        return self.budget if self.fewest >= self.longest else self.most

    @property
    def least(self) -> int:
        """The fewest pages that the budget may be lowered to now."""
        return self._whole(self.fewest + self.num_pinned)

    def _whole(self, num_pages: int) -> int:
        """In whole extents, rounded up."""
        return -(-num_pages // self._extent_pages) * self._extent_pages

    def _pages_in(self, num_bytes: int) -> int:
        return num_bytes // self.page_bytes // self._extent_pages * self._extent_pages

    @property
    def num_committed(self) -> int:
        """Pages that exist or are being created."""
        return self.num_created + self._num_promised

    @property
    def num_claimable(self) -> int:
        """Pages that could be claimed now: spare ones, and those that may still be created."""
        return self.num_spare + self.budget - self.num_committed

    @property
    def num_spare(self) -> int:
        return len(self.spare) * self.handle_pages

    def claim(self, count: int) -> tuple[list[int], int]:
        """Claim `count` handles: returns spare ones, and the number that the caller creates. End with `settle`."""
        if count * self.handle_pages > self.num_claimable:
            raise IntegrityError(
                f"claim of {count} handles of {self.handle_pages} pages where {self.num_claimable} can be claimed"
            )
        kept = max(len(self.spare) - count, 0)
        self.spare, handles = self.spare[:kept], self.spare[kept:]
        self._num_promised += (count - len(handles)) * self.handle_pages
        return handles, count - len(handles)

    def settle(self, promised: int, created: int) -> None:
        """End a claim: `created` of the `promised` handles exist now."""
        self._num_promised -= promised * self.handle_pages
        self.num_created += created * self.handle_pages

    def check_integrity(self, num_attached: int) -> None:
        """Raise `IntegrityError` unless every page is attached to a block or spare. No claim may be open."""
        if self._num_promised or num_attached + self.num_spare != self.num_created:
            raise IntegrityError(
                f"{self.num_created} pages exist, {num_attached} belong to blocks, {self.num_spare} are spare, "
                f"{self._num_promised} are promised"
            )
