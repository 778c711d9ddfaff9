"""How often streams send what has been generated.

An item of a stream costs its way through the replica, the ingress and HAProxy, however many tokens it has. So the
first token of a request leaves at once, and those after it as often as a budget of items a second allows that all
streams of a replica share: few streams send every step, many send several tokens at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from app.engine.async_engine import Pace

# At 0.14 ms of all processes' time an item through HAProxy, and 0.5 ms through Serve's proxy, as measured on a machine
# of 2 cores with 32 streams (`benchmarks.streaming`), that is up to 1.5 percent of the machine.
_ITEMS_PER_CORE_S = 30.0


class StreamPace:
    """The pace of one replica's streams.

    Args:
        items_per_s: of all streams together; by default `_ITEMS_PER_CORE_S` for each core of the machine.
        min_interval_s, max_interval_s: between two items of a stream, whatever the budget says. A reader notices
            pauses of more than a quarter of a second.
    """

    def __init__(self, items_per_s: float | None = None, *, min_interval_s: float, max_interval_s: float) -> None:
        self._items_per_s = items_per_s
        self._min_interval_s, self._max_interval_s = min_interval_s, max_interval_s
        self._num_streams = 0

    @contextmanager
    def stream(self) -> Iterator[Pace]:
        """Counts as a stream while it is open; yields how long it shall wait from one item to the next."""
        self._num_streams += 1
        try:
            yield self.interval_s
        finally:
            self._num_streams -= 1

    def interval_s(self) -> float:
        """With as many streams as there are now."""
        items_per_s = self._items_per_s or _ITEMS_PER_CORE_S * (os.cpu_count() or 1)  # of the machine that it runs on
        return min(max(self._num_streams / items_per_s, self._min_interval_s), self._max_interval_s)
