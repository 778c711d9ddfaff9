"""Servers of rivals as processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import harness

# Where rivals are installed.
FOLDER = Path.home() / ".cache" / "folio" / "rivals"
START_TIMEOUT_S, END_TIMEOUT_S, POLL_S = 600.0, 30.0, 1.0


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers at `url` (without `/v1`); `pid` is its first process."""

    url: str
    pid: int


@contextmanager
def server(
    name: str, command: Sequence[str | Path], port: int, environment: Mapping[str, str] | None = None
) -> Iterator[Running]:
    """Start a server of the OpenAI API, yield it when it lists its models, and end its group of processes.

    Raises:
        RuntimeError: it does not start; with the end of its output.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it is ended then, too
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            cwd=harness.ROOT,
            env=os.environ | (environment or {}),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            begun = time.monotonic()
            if not _answers(url, process):
                log.seek(0)
                raise RuntimeError(f"{name} does not start: {log.read().decode(errors='replace')[-3000:]}")
            print(f"{name} answers after {time.monotonic() - begun:.0f} s", flush=True)
            yield Running(url, process.pid)
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)
    return False


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, files that it maps included, and of its descendants."""
    import psutil

    process = psutil.Process(pid)
    return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))
