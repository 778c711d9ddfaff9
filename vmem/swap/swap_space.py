"""Swap space: host memory for preempted sequences and kept prefixes, of one KV memory or of several."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from typing import Protocol

from folio.vmem.errors import IntegrityError, OutOfSwap


class KeptCopy(Protocol):
    """Host memory that is given up when swapped sequences, or a copy of more worth, need it."""

    @property
    def num_bytes(self) -> int: ...

    def forget(self) -> None:
        """Drop the memory. Called from any thread, with the lock of the swap space held."""


class SwapSpace:
    """A count of host memory, at most `most_bytes` at any time. From any thread.

    Args:
        within: the space of several memories, if this one is one memory's part of it.

    Attributes:
        used_bytes: what is taken now, kept copies included.
        kept_bytes: what copies take that are given up for others.
    """

    def __init__(self, most_bytes: float = math.inf, within: SwapSpace | None = None) -> None:
        self.most_bytes = most_bytes
        self.used_bytes = self.kept_bytes = 0
        self._spaces = [self] if within is None else [self, within]
        self._lock: threading.Lock = threading.Lock() if within is None else within._lock
        self._copies: OrderedDict[KeptCopy, SwapSpace] = OrderedDict()  # the least worth first; of which memory

    def take(self, num_bytes: int) -> None:
        """Take host memory, from kept copies if no other is left. Raises `OutOfSwap`; then nothing is taken."""
        with self._lock:
            for space in self._spaces:
                free_bytes = space.most_bytes - space.used_bytes + space.kept_bytes
                if num_bytes > free_bytes:
                    bound = "swap_bytes" if len(space._spaces) > 1 else "swap_bytes of all models together"
                    raise OutOfSwap(
                        f"{num_bytes} bytes to swap out, {free_bytes} of {space.most_bytes} ({bound}) are free"
                    )
            for space in self._spaces:
                while space.used_bytes + num_bytes > space.most_bytes:
                    copy, owner = next(iter(space._copies.items()))
                    copy.forget()
                    owner._remove(copy)
                    owner._count(-copy.num_bytes)
            self._count(num_bytes)

    def give_back(self, num_bytes: int) -> None:
        with self._lock:
            if not 0 <= num_bytes <= self.used_bytes - self.kept_bytes:
                raise IntegrityError(
                    f"{num_bytes} bytes of swap space given back, {self.used_bytes - self.kept_bytes} are taken"
                )
            self._count(-num_bytes)

    def offer(self, copy: KeptCopy) -> None:
        """Let others have the memory that was taken for a copy. The last copy offered is the last to be given up."""
        with self._lock:
            for space in self._spaces:
                space._copies[copy] = self
                space.kept_bytes += copy.num_bytes

    def withdraw(self, copy: KeptCopy) -> bool:
        """Undo `offer`; false if the copy has been given up meanwhile."""
        with self._lock:
            if is_there := copy in self._copies:
                self._remove(copy)
            return is_there

    def _remove(self, copy: KeptCopy) -> None:
        for space in self._spaces:
            del space._copies[copy]
            space.kept_bytes -= copy.num_bytes

    def _count(self, num_bytes: int) -> None:
        for space in self._spaces:
            space.used_bytes += num_bytes
