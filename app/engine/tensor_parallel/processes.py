"""Peers as child processes: what `LLM` uses, without Ray.

What a peer is told before it can be told anything, and what its process has to be.
"""

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

# Not imported here: this is what a child runs.
_CHILD = "app.engine.tensor_parallel.worker"


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


STEPS, MEMORY = range(2)  # the links
# Errors that a peer answers with and that mean the same here.
ERRORS: dict[str, type[FolioError]] = {error.__name__: error for error in (ConfigError, ModelError)}
# How long peers may take to start and import everything, to join the group, and to load their share and show what their
# layers need.
START_TIMEOUT_S, JOIN_TIMEOUT_S, LOAD_TIMEOUT_S = 300.0, 60.0, 3600.0


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a peer has to know.

    Attributes:
        rank: 1 or more.
        link: where messages come from.
        store: where ranks find each other.
        host: the peer's own address.
        leader_pid: rank 0's process, if all ranks are on one machine: a peer does not outlive it.
        may_kill_leader: a leader that does not move any more is to be killed, so that somebody notices.
    """

    config: EngineConfig
    rank: int
    link: MemoryAddress | SocketAddress
    store: StoreAddress
    host: str
    leader_pid: int | None
    may_kill_leader: bool


class RankProcesses(Protocol):
    """Processes for peers, which wait to be told what to do. Peer 0 is rank 1.

    Attributes:
        host: the address under which they reach this process.
        on_one_machine: whether they share its memory and process ids.
        may_kill_leader: see `RankSpec`.
    """

    host: str
    on_one_machine: bool
    may_kill_leader: bool

    def run(self, specs: Sequence[RankSpec]) -> None:
        """Let each of them do what a peer does."""
        ...

    def is_alive(self, peer: int) -> bool: ...

    def kill(self, peer: int) -> None:
        """End it now, whatever state it is in; nothing happens if it has ended."""
        ...

    def close(self) -> None:
        """All have ended: forget them."""
        ...


# (number of peers) → their processes. Called in a thread that lives as long as they should.
Launch = Callable[[int], RankProcesses]
