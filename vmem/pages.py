"""How many physical pages there may be, and which of them hold no block at the moment."""

from __future__ import annotations

from vmem.errors import IntegrityError


class PagePool:
    """The page budget that all layer groups share. Only called under its memory's lock.

    Attributes:
        budget: pages there may be; lowered and raised at run time. More may exist until some are destroyed.
        spare: handles of pages that belong to no block.
    """

    def __init__(self, page_bytes: int, budget: int) -> None:
        self.page_bytes = page_bytes
        self.budget = budget
        self.spare: list[int] = []
        self._num_created = 0
        self._num_promised = 0

    @property
    def num_created(self) -> int:
        return self._num_created

    @property
    def num_coming(self) -> int:
        """Pages that exist or are being created."""
        return self._num_created + self._num_promised

    @property
    def room(self) -> int:
        """Pages that could be claimed now: the spare ones, and those the budget still allows to create."""
        return len(self.spare) + self.budget - self.num_coming

    def claim(self, count: int) -> tuple[list[int], int]:
        """Claim `count` pages: handles of spare ones, and how many the caller is to create. Settle with `settle`."""
        if count > self.room:
            raise IntegrityError(f"claim of {count} pages where there is room for {self.room}")
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
