"""Adapter memory: what the adapters of one model take of a device that other models share."""

from __future__ import annotations

import math
import threading

from vmem import DevicePages, OutOfPages


class AdapterMemory:
    """Charges adapters to the pages of a device. From any thread.

    Attributes:
        charged_bytes: what is taken now.
        room_bytes: what adapters and KV cache can ever take together, beside the model's weights.
    """

    def __init__(self, pages: DevicePages) -> None:
        self._pages = pages
        self._lock = threading.Lock()
        self.charged_bytes = 0
        self.room_bytes: float = math.inf

    def take(self, num_bytes: int) -> bool:
        """Whether the device has so much now; then it is charged."""
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
