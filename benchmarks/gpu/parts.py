"""Parts of a job of `benchmarks.gpu_day`: a part that fails is a fact, and costs only itself."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence

from benchmarks.facts import record

NO_RAY = "Ray is not installed here: this job needs it, in the environment or from the archive of tools.offline_bundle"
_ANSWER_S = 10.0


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Of a job. `--fake`: small, without a device."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fake", action="store_true", help="show that this program works; measure nothing")
    return parser


class Parts:
    """Runs a job's parts one after the other.

    Args:
        limit_s: seconds after which no part begins; the job's own limit is a little later.
    """

    def __init__(self, limit_s: float) -> None:
        self._ends_at = time.monotonic() + limit_s
        self._failed: list[str] = []

    @property
    def left_s(self) -> float:
        return max(0.0, self._ends_at - time.monotonic())

    def run(self, name: str, part: Callable[[], object], *, at_least_s: float = 5.0) -> bool:
        """Run a part, unless too little time is left. Returns whether it succeeded.

        Args:
            at_least_s: time without which the part is not worth beginning.
        """
        try:
            if self.left_s < at_least_s:
                raise TimeoutError(
                    f"not begun: {self.left_s:.0f} s are left of this job, and it takes {at_least_s:.0f}"
                )
            part()
        except Exception as error:  # noqa: BLE001 - the boundary of a part: the others go on
            reason = f"{type(error).__name__}: {error}"
            record(name, f"FAILED: {reason[:400]}", failed=True, traceback=traceback.format_exc()[-3000:])
            self._failed.append(f"{name}: {reason.splitlines()[0][:200]}")
            return False
        return True

    def finish(self) -> None:
        """Exit with status 1 and a line for each part that has failed, the last lines of the job's output."""
        if self._failed:
            print("\n".join(self._failed), flush=True)
            sys.exit(1)


def gpu_memory_bytes() -> int | None:
    """Memory in use on the first GPU by all processes, of nvidia-smi; `None` without it."""
    return None if (row := _nvidia_smi("memory.used")) is None else int(row.split()[0]) << 20


def record_gpu(when: str) -> int | None:
    """Record what nvidia-smi says of memory, load, clocks and temperature. Returns the memory in use."""
    names = "memory.used,utilization.gpu,clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"
    row = _nvidia_smi(names)
    record("nvidia-smi", f"{when}: {row or 'there is none'}", columns=names, row=row)
    return gpu_memory_bytes()


def _nvidia_smi(names: str) -> str | None:
    if (program := shutil.which("nvidia-smi")) is None:
        return None
    command: Sequence[str] = (program, f"--query-gpu={names}", "--format=csv,noheader", "--id=0")
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=True).stdout.strip()
    except (subprocess.SubprocessError, OSError) as error:
        record("nvidia-smi", f"no answer: {error}"[:200])
        return None
