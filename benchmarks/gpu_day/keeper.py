"""Run a command and leave none of its processes behind: `keeper.py COMMAND…`, with a pipe as standard input.

Ray's and HAProxy's daemons start sessions of their own, so a signal to the command's process group does not reach them.
The keeper is a subreaper: a descendant whose parent has ended becomes its child, and so stays in its tree of processes.
When the command ends, or the other end of the pipe is closed, as by the end of the process that holds it, the keeper
ends the whole tree. Its exit status is the command's.

Standard library only, since it runs without site-packages (`python -S`).
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# From the signal for Python's stacks to SIGKILL; and from there to the end: a process with much of a device's memory,
# or with many mappings, takes seconds, and the next job needs that memory.
GRACE_S, END_S = 3.0, 10.0
_POLL_S = 0.05
_PR_SET_CHILD_SUBREAPER = 36


def descendants(pid: int) -> list[int]:
    """Process ids of all descendants, zombies excluded."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            state, parent, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(parent), []).append(int(folder.name) if state != "Z" else 0)
    found, todo = [], [pid]
    while todo:
        new = [child for child in children.get(todo.pop(), []) if child]
        found += new
        todo += new
    return found


def keep(command: list[str]) -> int:
    """Run the command; returns its wait status once its processes have ended."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        print("keeper: the kernel has no subreapers; a job's daemons may be left running", flush=True)
    nothing = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
    job = os.posix_spawn(command[0], command, os.environ, file_actions=nothing, setsid=True)
    ended: dict[int, int] = {}
    while job not in ended and not select.select([0], [], [], _POLL_S)[0]:
        _reap(ended)
    if job not in ended:
        _signal_group(job, signal.SIGABRT)  # Python's fault handler prints where each thread is
        _wait(lambda: job in _reap(ended), GRACE_S)
    _wait(lambda: not _kill(ended), END_S)
    if left := descendants(os.getpid()):
        print(f"keeper: processes {left} do not end", flush=True)  # in a call of the driver, say
    return ended.get(job, signal.SIGKILL)


def _kill(ended: dict[int, int]) -> list[int]:
    """Kill all descendants; returns those that are left."""
    for pid in descendants(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _reap(ended)
    return descendants(os.getpid())


def _reap(ended: dict[int, int]) -> dict[int, int]:
    """Add the wait statuses of children that have ended, by process id; returns all."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


def _wait(is_over: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not is_over() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def main() -> None:
    status = keep(sys.argv[1:])
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
