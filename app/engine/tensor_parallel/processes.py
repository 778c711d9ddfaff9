"""Peers as child processes: what `LLM` uses, without Ray."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

import torch

from app.engine.tensor_parallel.spec import RankProcesses, RankSpec
from app.errors import ConfigError

# Not imported here: this is what a child runs.
_CHILD = "app.engine.tensor_parallel.child"


class ChildProcesses:
    """Fresh interpreters, which need no `if __name__ == "__main__"` in the caller's script."""

    host = "127.0.0.1"
    on_one_machine = True
    may_kill_leader = False  # it is the user's own process

    def __init__(self, num_peers: int) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        command = [sys.executable, "-m", _CHILD, str(os.getpid())]
        self._children = [subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) for _ in range(num_peers)]

    def run(self, specs: Sequence[RankSpec]) -> None:
        num_devices = torch.cuda.device_count() if specs[0].config.device == "cuda" else len(specs) + 1
        if num_devices <= len(specs):
            raise ConfigError(
                f"tensor_parallel_size is {len(specs) + 1}, but torch sees {num_devices} CUDA devices here: each rank "
                "needs one"
            )
        for child, spec in zip(self._children, specs, strict=True):
            assert child.stdin is not None
            pickle.dump(spec, child.stdin)
            child.stdin.flush()

    def is_alive(self, peer: int) -> bool:
        return self._children[peer].poll() is None

    def kill(self, peer: int) -> None:
        self._children[peer].kill()

    def close(self) -> None:
        for child in self._children:
            child.wait()
            if child.stdin is not None:
                with suppress(BrokenPipeError):
                    child.stdin.close()


def spawn_ranks(num_peers: int) -> RankProcesses:
    """`Launch` that starts child processes."""
    return ChildProcesses(num_peers)
