"""Log of a server's start on a terminal: one line for each phase, with its seconds, and the errors.

Ray, Serve and HAProxy write forty lines in a start that concern their developers. They are hidden, and shown when the
start fails. Of Folio's own processes, lines from WARNING on are shown, and from the end of the start on all lines.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence

# A line of Folio's (`folio.app.config.logs`), and one of Serve's (its controller, proxies and replicas).
_OURS = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ (?P<level>[A-Z]+) (?P<logger>[\w.]+): (?P<message>.*)")
_SERVES = re.compile(r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d{4}-\d\d-\d\d ")
_MINOR = ("DEBUG", "INFO")
# An error of Serve's that a start repeats: the traceback of a replica that failed. It ends with the reason.
_REPLICA_FAILED = "Exception in Replica("
# A warning of Serve's for the user: the cluster has too few CPUs or GPUs, and the start waits for ever.
_WAITS_FOR_EVER = "to be scheduled"
# Loggers whose lines tell a phase of a replica's start.
_PHASES = ("folio.app.engine.startup", "folio.kernels.cpu.build")
_PROGRESS_BAR = "Loading weights:"  # of transformers; those of downloads are shown
_MOST_HIDDEN = 200  # lines that are kept for a failed start


class StartLog:
    """Collects the lines of a start. Lines of workers come in a thread of Ray's.

    Args:
        verbose: hide nothing.
        begun_at: `time.monotonic()` at the command's start.
    """

    def __init__(self, *, verbose: bool = False, begun_at: float | None = None) -> None:
        self.verbose = verbose
        self._begun_at = self._lap_at = time.monotonic() if begun_at is None else begun_at
        self._is_starting = self._hides_failures = True
        self._hidden: deque[str] = deque(maxlen=_MOST_HIDDEN)
        if not verbose:  # lines of this process
            for name, level in (
                ("ray", logging.ERROR),
                ("ray.serve", logging.ERROR),
                ("folio.kernels", logging.WARNING),
            ):
                logging.getLogger(name).setLevel(level)

    @property
    def ray_level(self) -> int:
        """The level of `ray.init`, which would reset it."""
        return logging.INFO if self.verbose else logging.ERROR

    def lap(self, phase: str) -> None:
        """Write that a phase, which began with the end of the one before, has ended."""
        now = time.monotonic()
        self.say(f"{phase} ({now - self._lap_at:.1f} s)")
        self._lap_at = now

    def end(self) -> None:
        """The server is ready: from now on show all of Folio's lines."""
        self._is_starting = self._hides_failures = False
        self._hidden.clear()
        self.say(f"ready ({time.monotonic() - self._begun_at:.1f} s in all)")

    def fail(self, *, is_explained: bool = False) -> None:
        """Show the hidden lines: the reason may be among them.

        Args:
            is_explained: Folio knows the reason, and logs it.
        """
        self._is_starting, self._hides_failures = False, is_explained  # its lines may come later
        if is_explained:
            self._hidden.clear()
        while self._hidden:  # to which Ray's thread may still append
            print(self._hidden.popleft(), file=sys.stderr)

    def visible(self, actor: str, lines: Sequence[str]) -> list[str]:
        """The lines of a worker's output to show. Lines without a head belong to the line before."""
        if self.verbose:
            return list(lines)
        return list(self._visible(actor, lines))

    def _visible(self, actor: str, lines: Sequence[str]) -> Iterator[str]:
        is_hidden = False
        for line in lines:
            if match := _OURS.match(line):
                is_hidden = self._is_starting and match["level"] in _MINOR
                if is_hidden and match["logger"] in _PHASES:
                    self.say(match["message"])
                    continue
            elif match := _SERVES.match(line):
                is_hidden = match["level"] in (*_MINOR, "WARNING") and _WAITS_FOR_EVER not in line
                is_hidden |= self._hides_failures and _REPLICA_FAILED in line
                if match["level"] in _MINOR:
                    continue  # would push out more important lines
            elif line.lstrip("\r").startswith(_PROGRESS_BAR):
                continue
            if not is_hidden:
                yield line
            elif self._is_starting:
                self._hidden.append(f"({actor}) {line}")

    def say(self, text: str) -> None:
        """Write a line of the start."""
        print(f"==> {text}", file=sys.stderr, flush=True)
