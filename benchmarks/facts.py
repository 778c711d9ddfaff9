"""Facts: lines of JSON that the jobs of `benchmarks.gpu_day` append to one file, each on the disk before the next.

Every fact has the dtypes that this process has measured so far (`note_dtypes`), as has its result (`harness.finish`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

# Set by gpu_day for its jobs: the file, and the job's name.
FILE_VARIABLE, JOB_VARIABLE = "FOLIO_FACTS", "FOLIO_JOB"
_dtypes: set[str] = set()


def note_dtypes(*dtypes: object) -> None:
    """Note the dtypes of tensors that are measured: of the tensors themselves, not those that were asked for."""
    _dtypes.update(str(dtype).removeprefix("torch.") for dtype in dtypes)


def noted_dtypes() -> str | None:
    """All noted dtypes, such as "bfloat16, float8_e4m3fn"; `None` if there are none."""
    return ", ".join(sorted(_dtypes)) or None


def record(fact: str, shown: str = "", **values: object) -> None:
    """Print a measured fact, and append it to the file that `FOLIO_FACTS` names, if any.

    Args:
        fact: what was measured.
        shown: its line in gpu_day's table, if it has one.
        values: the measured values, for JSON.
    """
    print(f"{fact}: {shown or json.dumps(values, default=str)}", flush=True)
    if path := os.environ.get(FILE_VARIABLE):
        line: dict[str, object] = {"job": os.environ.get(JOB_VARIABLE, ""), "fact": fact}
        line |= {"shown": shown} if shown else {}
        line |= {"dtype": dtype} if (dtype := noted_dtypes()) else {}
        append(Path(path), line | values)


def note(collected: dict[str, float], fact: str, shown: str, **figures: float) -> None:
    """Record figures, and add them to those that a result will have."""
    collected |= figures
    record(fact, shown, **{name: float(f"{value:.4g}") for name, value in figures.items()})


def append(path: Path, line: dict[str, object]) -> None:
    """Append a line and flush it to the disk, since the process may be killed at any moment."""
    with path.open("a") as file:
        file.write(json.dumps(line, default=str) + "\n")  # one write, because concurrent jobs append to one file
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[dict[str, Any]]:
    """All complete lines; a killed job may have left a partial one."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
