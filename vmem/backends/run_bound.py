"""Run bound: how many pages one driver call takes at most, from what the last calls took."""

from __future__ import annotations

import statistics
from collections import deque

# Launches wait while the driver changes mappings: no single call should take longer …
_LONGEST_CALL_S = 200e-6
# … by the median of so many calls, of which some are slow by chance.
_CALLS_REMEMBERED = 9


class RunBound:
    """Adapts to the measured time a page, the call's own share included: longer runs are cheaper a page, so the bound
    grows until a call takes as long as allowed. It at most doubles from one call to the next.

    Attributes:
        num_pages: the most pages of the next call.
    """

    def __init__(self) -> None:
        self.num_pages = 1
        self._seconds_a_page: deque[float] = deque(maxlen=_CALLS_REMEMBERED)

    def note(self, num_pages: int, seconds: float) -> None:
        """Note what a call of so many pages took."""
        self._seconds_a_page.append(seconds / num_pages)
        allowed = _LONGEST_CALL_S / max(statistics.median(self._seconds_a_page), 1e-9)
        self.num_pages = max(1, min(int(allowed), 2 * self.num_pages))
