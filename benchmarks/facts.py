"""Facts: lines of JSON that the jobs of `benchmarks.gpu_day` append to one file, each on the disk before the next."""

from __future__ import annotations

import json
import os
from pathlib import Path

# Set by gpu_day for its jobs: the file, and the job that speaks.
FILE_VARIABLE, JOB_VARIABLE = "FOLIO_FACTS", "FOLIO_JOB"


def record(fact: str, shown: str = "", **values: object) -> None:
    """Print one measured fact, and append it to the file that `FOLIO_FACTS` names, if it names one.

    Args:
        fact: what was measured.
        shown: the line of gpu_day's table for it, if it deserves one.
        values: the measured values, for JSON.
    """
    print(f"{fact}: {shown or json.dumps(values, default=str)}", flush=True)
    if path := os.environ.get(FILE_VARIABLE):
        line = {"job": os.environ.get(JOB_VARIABLE, ""), "fact": fact}
        append(Path(path), line | ({"shown": shown} if shown else {}) | values)


def append(path: Path, line: dict[str, object]) -> None:
    """Append a line and wait until it is on the disk: the next moment may be the process's last."""
    with path.open("a") as file:
        file.write(json.dumps(line, default=str) + "\n")  # one write: jobs side by side append to one file
        file.flush()
        os.fsync(file.fileno())
