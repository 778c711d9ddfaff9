"""Swap space: host memory for preempted sequences, of one KV memory or of several."""

from __future__ import annotations

import math
import threading

from folio.vmem.errors import IntegrityError, OutOfSwap


class SwapSpace:
    """A count of host memory, at most `most_bytes` at any time. From any thread.

    Attributes:
        used_bytes: what is taken now.
    """

    def __init__(self, most_bytes: float = math.inf) -> None:
        self.most_bytes = most_bytes
        self.used_bytes = 0
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> None:
        """Take host memory. Raises `OutOfSwap`; then nothing is taken."""
        with self._lock:
            if self.used_bytes + num_bytes > self.most_bytes:
                raise OutOfSwap(
                    f"{num_bytes} bytes to swap out, {self.most_bytes - self.used_bytes} of {self.most_bytes} "
                    "(swap_bytes of all models together) are free"
                )
            self.used_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        with self._lock:
            if not 0 <= num_bytes <= self.used_bytes:
                raise IntegrityError(f"{num_bytes} bytes of swap space given back, {self.used_bytes} are taken")
            self.used_bytes -= num_bytes
