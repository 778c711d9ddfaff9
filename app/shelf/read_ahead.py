"""Read-ahead: files of the next models' weights are read into the page cache, beside the steps of the present ones."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol
from weakref import WeakKeyDictionary

logger = logging.getLogger(__name__)

# The rate beside steps that are computed by the processor, for each core: a disk's data cost time of its cores, too,
# above all where the disk is emulated by the machine's host. Twice this rate costs steps 3 % where that was measured.
STEPS_ON_CPU_BYTES_PER_S = 16e6
# Share of the disk's time while steps run; the rest is for logs, downloads and wakes.
_SHARE_BESIDE_STEPS = 0.25
# Models to read ahead: later ones in the order are too unlikely, and would evict the first ones from the page cache.
_MOST_MODELS = 2
# Pages may have been evicted since they were read: they are looked at again after this time.
_AGAIN_S = 30.0


class Readable(Protocol):
    """Weights of a model: `Footprint`."""

    @property
    def weight_bytes(self) -> int: ...

    def read_ahead(self) -> Iterator[int]:
        """Read the files of the weights; yields after each piece the bytes that were not in the page cache.
        Raises `OSError`, `VmemError`."""
        ...


class ReadAhead:
    """A thread that reads weights of models which sleep.

    Args:
        has_room: whether the machine has so many bytes to spare for the page cache.
        bytes_per_s: the highest rate while steps run.
        share: of the disk's time while steps run.
    """

    def __init__(
        self, has_room: Callable[[int], bool], bytes_per_s: float = math.inf, share: float = _SHARE_BESIDE_STEPS
    ) -> None:
        self._has_room, self._bytes_per_s = has_room, bytes_per_s
        self._pauses = 1 / share - 1  # times as long as a piece took
        self._wanted: Mapping[str, Readable] = {}
        self._beside_steps = False
        self._looked_at: WeakKeyDictionary[Readable, float] = WeakKeyDictionary()
        self._has_failed = False
        self._closing = threading.Event()
        self._event = threading.Event()
        self._thread = threading.Thread(target=self._run, name="folio-read-ahead", daemon=True)
        self._thread.start()

    def want(self, models: Mapping[str, Readable], *, beside_steps: bool) -> None:
        """Read these models' weights, the first ones first, and no others any more. Does not block.

        Args:
            beside_steps: at a part of the disk's rate.
        """
        self._wanted, self._beside_steps = models, beside_steps
        if models:
            self._event.set()

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread; one that hangs in a read is left to the end of the process."""
        self._wanted = {}
        self._closing.set()
        self._event.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        # Not at a low priority: starved while it holds the interpreter lock, it would stop the step thread.
        while not self._closing.is_set():
            self._event.wait()
            self._event.clear()
            for name, weights in list(self._wanted.items())[:_MOST_MODELS]:
                if time.monotonic() - self._looked_at.get(weights, -_AGAIN_S) < _AGAIN_S:
                    continue
                try:
                    self._read(name, weights)
                except Exception as error:  # a wake meets it again, and fails with it
                    if not self._has_failed:
                        logger.warning("the weights of %r cannot be read ahead: %s", name, error, exc_info=True)
                    self._has_failed = True
                    self._looked_at[weights] = time.monotonic()

    def _read(self, name: str, weights: Readable) -> None:
        if not self._has_room(weights.weight_bytes):
            return
        began, num_bytes = time.monotonic(), 0
        piece_at = began
        for piece_bytes in weights.read_ahead():
            num_bytes += piece_bytes
            if self._beside_steps and piece_bytes:
                took_s = time.monotonic() - piece_at
                self._closing.wait(max(self._pauses * took_s, piece_bytes / self._bytes_per_s - took_s))
            if self._wanted.get(name) is not weights:  # it wakes, is removed, or is not likely any more
                return
            piece_at = time.monotonic()
        self._looked_at[weights] = time.monotonic()
        if num_bytes:
            logger.info("read ahead the weights of %r: %.1f MiB in %.2f s", name, num_bytes / 2**20, piece_at - began)
