"""Peer processes: their specification, the Protocol for starting them, and child processes as used by `LLM`."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch

from app.config.engine import EngineConfig
from app.engine.tensor_parallel.communicator import StoreAddress
from app.engine.tensor_parallel.shared_memory import MemoryAddress
from app.engine.tensor_parallel.sockets import SocketAddress
from app.errors import ConfigError, FolioError, ModelError

STEPS, MEMORY = range(2)  # the links
# Errors that a peer reports and rank 0 raises under the same name.
ERRORS: dict[str, type[FolioError]] = {error.__name__: error for error in (ConfigError, ModelError)}
# Limits for peers: to start and import, to join the process group, to load their shards and observe their layers.
START_TIMEOUT_S, JOIN_TIMEOUT_S, LOAD_TIMEOUT_S = 300.0, 60.0, 3600.0


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Settings of a peer.

    Attributes:
        rank: 1 or more.
        link: address of rank 0's messages.
        store: address at which ranks find each other.
        host: the peer's own address.
        leader_pid: rank 0's process, if all ranks are on one machine: a peer does not outlive it.
        may_kill_leader: whether peers kill a hanging rank 0, so that its replica is replaced.
    """

    config: EngineConfig
    rank: int
    link: MemoryAddress | SocketAddress
    store: StoreAddress
    host: str
    leader_pid: int | None
    may_kill_leader: bool


class RankProcesses(Protocol):
    """Processes that wait for their `RankSpec`. Peer 0 is rank 1.

    Attributes:
        host: this process's address, as peers see it.
        on_one_machine: whether peers share memory and process ids with this process.
        may_kill_leader: see `RankSpec`.
    """

    host: str
    on_one_machine: bool
    may_kill_leader: bool

    def run(self, specs: Sequence[RankSpec]) -> None:
        """Start a worker in each process."""
        ...

    def is_alive(self, peer: int) -> bool: ...

    def kill(self, peer: int) -> None:
        """End a process at once, in any state; idempotent."""
        ...

    def close(self) -> None:
        """Release resources, after all processes have ended."""
        ...


# (number of peers) → their processes. Called in a thread that lives as long as the processes.
Launch = Callable[[int], RankProcesses]


class ChildProcesses:
    """Fresh interpreters, which need no `if __name__ == "__main__"` in the caller's script."""

    host = "127.0.0.1"
    on_one_machine = True
    may_kill_leader = False  # rank 0 is the user's own process

    def __init__(self, num_peers: int) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        command = [sys.executable, "-m", "app.engine.tensor_parallel.worker", str(os.getpid())]
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


spawn_ranks: Launch = ChildProcesses
