"""A test starts no process unless it is marked `processes`: then the others need neither Ray nor a second Python."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# What compilers make is kept for the next run; `uname` is how Python learns about its platform.
ALLOWED = {"g++", "c++", "gcc", "cc", "uname"}


@contextmanager
def no_processes() -> Iterator[None]:
    """Whoever starts one within fails, as Ray, `subprocess`, asyncio and the engine's ranks would do by `Popen`."""
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
