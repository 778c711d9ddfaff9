"""Processor time and memory of a server's processes, by role."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu_day.keeper import descendants

if TYPE_CHECKING:
    import psutil

_MIB = 1 << 20
_REPLICA = re.compile(r"ray::ServeReplica:[^:]*:(\w+)")
_ACTORS = {
    "ray::ProxyActor": "serve_proxy",
    "ray::HAProxyManager": "haproxy_manager",
    "ray::ServeController": "controller",
}
PROXY, OTHERS = "haproxy", "ray"


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage by kind of process: "EngineReplica", "Ingress", "haproxy", "haproxy_manager", "serve_proxy", "controller";
    "ray" for others.

    Attributes:
        cpu_s: processor time so far.
        private_mib: private memory, without files and pages that other processes may map, such as those of a KV cache.
    """

    at_s: float
    cpu_s: dict[str, float]
    private_mib: dict[str, float]

    def cpu_since(self, earlier: Usage) -> dict[str, float]:
        """Seconds of processor time since an earlier reading."""
        return {kind: cpu_s - earlier.cpu_s.get(kind, 0.0) for kind, cpu_s in self.cpu_s.items()}


class Meter:
    """Reads all descendants of this process.

    Args:
        skip: a process that is not part of the server.
    """

    def __init__(self, skip: int | None) -> None:
        self._skip = skip
        self._kinds: dict[int, str] = {}  # Ray changes titles while a method runs: a known kind is kept

    def read(self) -> Usage:
        import psutil

        cpu_s: dict[str, float] = defaultdict(float)
        private_mib: dict[str, float] = defaultdict(float)
        for process in psutil.Process(os.getpid()).children(recursive=True):
            if process.pid == self._skip:
                continue
            try:
                kind = self._kind_of(process)
                times, memory = process.cpu_times(), process.memory_info()
            except psutil.NoSuchProcess:  # ended meanwhile
                continue
            cpu_s[kind] += times.user + times.system
            private_mib[kind] += (memory.rss - memory.shared) / _MIB
        return Usage(time.perf_counter(), dict(cpu_s), dict(private_mib))

    async def watch(self, period_s: float, seen: list[Usage]) -> None:
        """Record the usage periodically, until cancelled."""
        while True:
            seen.append(await asyncio.to_thread(self.read))
            await asyncio.sleep(period_s)

    def _kind_of(self, process: psutil.Process) -> str:
        if process.pid not in self._kinds:
            kind = kind_of(" ".join(process.cmdline()))
            if kind == OTHERS:  # or its title is about to change
                return kind
            self._kinds[process.pid] = kind
        return self._kinds[process.pid]


def titles(pid: int) -> dict[int, str]:
    """Command lines of a process's descendants by id, Ray's titles included."""
    found = {}
    for child in descendants(pid):
        with suppress(OSError):  # ended meanwhile
            found[child] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def kind_of(title: str) -> str:
    """The kind of a process with this title."""
    if match := _REPLICA.match(title):
        return match[1]
    if "/haproxy -db " in title:
        return PROXY
    return next((kind for beginning, kind in _ACTORS.items() if title.startswith(beginning)), OTHERS)
