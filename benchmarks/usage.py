"""What the processes of a server use: processor time and memory, by what they are."""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from dataclasses import dataclass, field

import psutil

_MIB = 1 << 20
# Beginnings of titles that Ray gives its workers, and what we call them.
_TITLES = {
    "ray::ServeReplica:": "",  # by the deployment's name, which is the title's last part
    "ray::ProxyActor": "proxy",
    "ray::ServeController": "controller",
}


@dataclass(frozen=True, slots=True)
class Usage:
    """Of all processes below this one, by kind: "EngineReplica", "Ingress", "proxy", "controller", or "ray" for others.

    Attributes:
        cpu_s: processor time so far.
        private_mib: memory that is theirs alone: neither files nor pages that others may map, as those of a KV cache.
    """

    at_s: float
    cpu_s: dict[str, float]
    private_mib: dict[str, float]

    @staticmethod
    def now(skip: int | None = None) -> Usage:
        """Args: skip: a process that is no part of the server, with its children."""
        cpu_s: dict[str, float] = defaultdict(float)
        private_mib: dict[str, float] = defaultdict(float)
        for process in psutil.Process(os.getpid()).children(recursive=True):
            try:
                if process.pid == skip or (skip is not None and skip in (p.pid for p in process.parents())):
                    continue
                kind = _kind((process.cmdline() or [""])[0])
                times, memory = process.cpu_times(), process.memory_info()
            except psutil.NoSuchProcess:  # it has ended meanwhile
                continue
            cpu_s[kind] += times.user + times.system
            private_mib[kind] += (memory.rss - memory.shared) / _MIB
        return Usage(time.perf_counter(), dict(cpu_s), dict(private_mib))

    def cpu_since(self, earlier: Usage) -> dict[str, float]:
        """Seconds of processor time since then."""
        return {kind: cpu_s - earlier.cpu_s.get(kind, 0.0) for kind, cpu_s in self.cpu_s.items()}


@dataclass(slots=True)
class Watch:
    """Notes the usage again and again while something else runs."""

    period_s: float
    skip: int | None = None
    seen: list[Usage] = field(default_factory=list)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            self.seen.append(await asyncio.to_thread(Usage.now, self.skip))
            await asyncio.sleep(self.period_s)


def _kind(title: str) -> str:
    for beginning, kind in _TITLES.items():
        if title.startswith(beginning):
            return kind or title.split(":")[-1].split("#")[0].strip()
    return "ray"
