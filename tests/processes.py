"""Limits of tests: no process without the mark `processes`, and no wait without a deadline."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
DEADLINE_S = 180.0
# Between two looks. Longer ones when something takes long: a look may call a server that needs the processor to start.
SHORT_PAUSE_S, LONG_PAUSE_S, _OF_THE_WAIT = 0.005, 0.05, 0.05

# What compilers make is kept for the next run; `uname` is how Python learns about its platform, and `ldconfig` how it
# finds a library.
ALLOWED = {"g++", "c++", "gcc", "cc", "uname", "ldconfig"}


@contextmanager
def no_processes() -> Iterator[None]:
    """Fail a test that starts a process within: Ray, `subprocess`, asyncio and the engine's ranks all use `Popen`."""
    start = subprocess.Popen.__init__

    def refuse(self: subprocess.Popen[Any], args: Any, *more: Any, **options: Any) -> None:
        program = os.fsdecode(args if isinstance(args, str | bytes | os.PathLike) else args[0])
        if Path(program).name not in ALLOWED:
            refusal = f"starts {program}; a test that does is marked @pytest.mark.processes"
            print(refusal, file=sys.stderr)  # the code that is tested may turn the exception into another
            pytest.fail(refusal)
        start(self, args, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", refuse)
        yield


def until(
    reached: Callable[[], T],
    deadline_s: float = DEADLINE_S,
    state: Callable[[], object] = lambda: "",
    longest_pause_s: float = LONG_PAUSE_S,
) -> T:
    """Poll until a condition is true; returns its value.

    Args:
        state: what the failure shows.
        longest_pause_s: `SHORT_PAUSE_S` for what is true for a moment only.
    """
    began_at = time.monotonic()
    while not (found := reached()):
        waited_s = time.monotonic() - began_at
        assert waited_s < deadline_s, state()
        time.sleep(min(_pause_s(waited_s), longest_pause_s))
    return found


async def until_async(reached: Callable[[], Awaitable[object] | object], deadline_s: float = DEADLINE_S) -> None:
    """Poll until a condition is true, in an event loop."""
    began_at = time.monotonic()
    async with asyncio.timeout(deadline_s):
        while not (await found if inspect.isawaitable(found := reached()) else found):
            await asyncio.sleep(_pause_s(time.monotonic() - began_at))


def _pause_s(waited_s: float) -> float:
    return min(max(SHORT_PAUSE_S, _OF_THE_WAIT * waited_s), LONG_PAUSE_S)
