"""Tests, as a tree like the code's."""

import os

# One of several processes (`pytest -n`) has cores of its own, or their threads would fight; before torch is imported.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    cores, count = sorted(os.sched_getaffinity(0)), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.sched_setaffinity(0, cores[int(worker.removeprefix("gw")) % len(cores) :: count])
