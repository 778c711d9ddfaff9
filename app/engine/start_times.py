"""How long an engine took until it could serve, and with what."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Seconds of each phase of a start, in their order.

    Attributes:
        model_s: making the model of the checkpoint's files, packed for its kernels; starting other ranks.
        memory_s: reserving the addresses of the KV cache.
        budget_s: waiting for room beside other replicas on the device.
        self_test_s: compiling kernels, and comparing the model with itself.
        pins_s: trying swaps, and computing the prompts that the settings pin.
        warm_up_s: running what the first requests would otherwise have waited for.
        prefixes_s: asking other replicas for their prefixes, and computing these.
        process_s: how old the process was before all of that: imports, but also time that it was kept waiting.
    """

    model_s: float = 0.0
    memory_s: float = 0.0
    budget_s: float = 0.0
    self_test_s: float = 0.0
    pins_s: float = 0.0
    warm_up_s: float = 0.0
    prefixes_s: float = 0.0
    process_s: float = 0.0

    @property
    def ready_s(self) -> float:
        """Of the engine's whole start, without `process_s`."""
        return sum(seconds for phase, seconds in self.phases().items() if phase != "process")

    def phases(self) -> dict[str, float]:
        """Name of each phase → its seconds."""
        return {field.name.removesuffix("_s"): getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        parts = ", ".join(
            f"{phase.replace('_', ' ')} {seconds:.2f}" for phase, seconds in self.phases().items() if seconds >= 0.005
        )
        return f"{self.ready_s:.2f} s ({parts})"


class StartClock:
    """Takes the times of a start's phases, one after the other."""

    def __init__(self) -> None:
        self._seconds = {"process_s": process_age_s()}
        self._at = time.perf_counter()

    def lap(self, phase: str) -> None:
        """This phase of `StartTimes` ends now."""
        now = time.perf_counter()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._at
        self._at = now

    @property
    def times(self) -> StartTimes:
        return StartTimes(**self._seconds)


def process_age_s() -> float:
    """Seconds since this process was started."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
