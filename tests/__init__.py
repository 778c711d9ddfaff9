"""Tests, as a tree like the code's."""

import os

# One of several processes (`pytest -n`) has cores of its own, or their threads would fight; before torch is imported.
# Where there are more processes than cores, the first one has all: it waits for Ray's processes, which inherit them.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    cores, count = sorted(os.sched_getaffinity(0)), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    number = int(worker.removeprefix("gw"))
    if count <= len(cores):
        os.sched_setaffinity(0, cores[number::count])
    elif number:
        os.sched_setaffinity(0, [cores[(number - 1) % len(cores)]])
