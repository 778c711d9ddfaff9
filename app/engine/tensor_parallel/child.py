"""`python -m app.engine.tensor_parallel.child PARENT`: a peer that `ChildProcesses` has started.

PARENT is the process id of rank 0; what to do comes through standard input.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import signal
import sys

import torch

from app.engine.tensor_parallel.spec import RankSpec
from app.engine.tensor_parallel.worker import RankWorker, run_to_the_end
from app.machine import num_threads

_PR_SET_PDEATHSIG = 1


def main() -> None:
    # Even if it is stopped: a child does not outlive the thread that started it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which then says what to do
    try:
        spec: RankSpec = pickle.load(sys.stdin.buffer)
    except EOFError:  # rank 0 did not come that far
        return
    logging.basicConfig(format=f"%(asctime)s %(levelname)s rank {spec.rank} %(name)s: %(message)s")
    device = torch.device("cuda", spec.rank) if spec.config.device == "cuda" else torch.device("cpu")
    run_to_the_end(RankWorker(spec, num_threads(spec.config), device))


if __name__ == "__main__":
    main()
