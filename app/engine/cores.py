"""What steps on a CPU take of its cores."""

from __future__ import annotations

import os

from app.config.engine import EngineConfig
from app.config.machine import Machine


def num_threads(config: EngineConfig) -> int:
    """CPU threads of one rank."""
    return config.num_threads or max(1, Machine.read().num_cores // config.tensor_parallel_size)


def yield_cpu(config: EngineConfig) -> None:
    """If that is wanted: this thread, and those that it starts from now on, run when nothing else wants their core."""
    if config.yield_cpu:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
