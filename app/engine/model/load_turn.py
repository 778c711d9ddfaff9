"""Load turn: transformers makes one module at a time, because it changes settings of the process meanwhile.

These are torch's default dtype, the initialisers of `torch.nn.init`, methods of `PreTrainedModel`, and torch's random
state. A module that another thread made meanwhile would get them. transformers reads the weights in the same call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from folio.app.errors import UnavailableError

# Below the time after which the shelf gives up a load that hangs, which is not what a load does that waits for another.
_MOST_S = 240.0


class LoadTurn:
    """The turn of one load.

    Args:
        most_s: the longest time that a load waits for it.
    """

    def __init__(self, most_s: float = _MOST_S) -> None:
        self._most_s = most_s
        self._lock = threading.Lock()
        self._holder, self._since = "", 0.0

    @contextmanager
    def of(self, model: str) -> Iterator[None]:
        """Wait for the turn, and have it within the context.

        Raises:
            UnavailableError: another load does not end it, as on a file system that does not answer.
        """
        if not self._lock.acquire(timeout=self._most_s):
            raise UnavailableError(
                f"the load of {model!r} has waited {self._most_s:.0f} s for that of {self._holder!r}, which has taken "
                f"{time.monotonic() - self._since:.0f} s; if the files of {self._holder!r} do not answer, restart the "
                "server without it"
            )
        self._holder, self._since = model, time.monotonic()
        try:
            yield
        finally:
            self._lock.release()
