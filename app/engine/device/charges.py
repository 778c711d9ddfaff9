"""Device charges: memory that adapters or graphs of one model take on a device that other models share."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from folio.vmem import DevicePages, KVMemory, OutOfPages


def promised_bytes(memory: KVMemory) -> int:
    """KV memory within the budget that does not exist yet. Does not block."""
    pages = memory.pages
    return max(pages.budget - pages.num_created, 0) * pages.page_bytes


class DeviceCharges:
    """Memory that is not in pages, deducted from the pages that a device can hold. From any thread.

    Args:
        promised_bytes: returns the bytes kept for the model's KV cache: within its budget, not yet in pages.

    Attributes:
        charged_bytes: bytes charged now.
        room_bytes: most bytes that adapters and KV cache can ever take together, beside the model's weights.
    """

    def __init__(self, pages: DevicePages, promised_bytes: Callable[[], int] = lambda: 0) -> None:
        self._pages, self._promised_bytes = pages, promised_bytes
        self._lock = threading.Lock()
        self.charged_bytes = 0
        self.room_bytes: float = math.inf

    def take(self, num_bytes: int) -> bool:
        """Charge bytes, if the device has them now; returns whether it has."""
        if num_bytes > self._pages.available_bytes - self._promised_bytes():
            return False
        try:
            self._pages.charge(num_bytes)
        except OutOfPages:
            return False
        with self._lock:
            self.charged_bytes += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        with self._lock:
            self.charged_bytes -= num_bytes
        self._pages.discharge(num_bytes)
