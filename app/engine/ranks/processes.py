"""Peer processes of a tensor-parallel engine: specification, start, and the messages from rank 0."""

from __future__ import annotations

import enum
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import torch

from folio.app.config.engine import ResolvedConfig
from folio.app.engine.layers.batch import Array, PlanHeader, PlanRun, StepPlan
from folio.app.engine.tensor_parallel.gpu_sharing import SWITCH, Sharing
from folio.app.engine.tensor_parallel.shared_memory import MemoryAddress
from folio.app.engine.tensor_parallel.sockets import SocketAddress
from folio.app.errors import ConfigError, FolioError, ModelError

STEPS, MEMORY = range(2)  # the links
# Errors that a peer reports and rank 0 raises under the same name.
ERRORS: dict[str, type[FolioError]] = {error.__name__: error for error in (ConfigError, ModelError)}
# Time limits for peers: to start and import, to join the process group, to load their shards and observe their layers.
START_TIMEOUT_S, JOIN_TIMEOUT_S, LOAD_TIMEOUT_S = 300.0, 60.0, 3600.0


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Settings of a peer.

    Attributes:
        rank: 1 or more.
        link: address of rank 0's messages.
        store: host and port of the store through which ranks find each other.
        host: the peer's own address.
        leader_pid: rank 0's process, if all ranks are on one machine: a peer does not outlive it.
        may_kill_leader: whether peers kill a hanging rank 0, so that its replica is replaced.
        sharing: how ranks share GPUs; `None`: each has one of its own.
    """

    config: ResolvedConfig
    rank: int
    link: MemoryAddress | SocketAddress
    store: tuple[str, int]
    host: str
    leader_pid: int | None
    may_kill_leader: bool
    sharing: Sharing | None = None


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
        command = [sys.executable, "-m", "folio.app.engine.ranks.worker", str(os.getpid())]
        self._children = [subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) for _ in range(num_peers)]

    def run(self, specs: Sequence[RankSpec]) -> None:
        has_own = specs[0].config.device == "cuda" and specs[0].sharing is None
        if has_own and (num_devices := torch.cuda.device_count()) <= len(specs):
            raise ConfigError(
                f"tensor_parallel_size is {len(specs) + 1}, but torch sees {num_devices} CUDA devices here: each rank "
                f"needs one, unless {SWITCH}=gloo lets them share"
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


_DTYPES = tuple(np.dtype(name) for name in ("bool", "int32", "int64"))
_HEADER = struct.Struct("<BBII")  # dtype, dimensions, their sizes


class RankOrder(enum.IntEnum):
    """Orders for the main thread of a peer, executed in sequence."""

    CONNECT = 1  # join the process group
    LOAD = 2  # load the shard of the model
    OBSERVE = 3  # observe the layers' geometry
    MEMORY = 4  # see `folio.vmem.tensor_parallel.orders.MemoryOrder`
    OPEN = 5  # use the memory of the given number
    STEP = 6  # compute a step
    OWN_LOGITS = 7  # compute one sequence by the model's own attention
    STOP = 8
    ADAPTER = 9  # see `lora.rank.RankAdapters`
    LARGEST = 10  # compute the largest step without a cache
    ROUNDED_LOGITS = 11  # compute one sequence without a cache, rounded as if by one of 8-bit floats


def pack_arrays(arrays: Sequence[Array]) -> bytes:
    """Arrays of at most two dimensions."""
    parts = []
    for array in arrays:
        rows, columns = (*array.shape, 0, 0)[:2]
        parts += [_HEADER.pack(_DTYPES.index(array.dtype), array.ndim, rows, columns), array.tobytes()]
    return b"".join(parts)


def unpack_arrays(message: bytes) -> list[Array]:
    arrays, at = [], 0
    while at < len(message):
        dtype, ndim, *sizes = _HEADER.unpack_from(message, at)
        shape = sizes[:ndim]
        count = int(np.prod(shape))
        at += _HEADER.size
        array = np.frombuffer(message, _DTYPES[dtype], count, at).reshape(shape)
        at += array.nbytes
        arrays.append(array.copy())  # torch needs writable, aligned memory
    return arrays


def pack_step(plan: StepPlan) -> bytes:
    header, runs, *arrays = (getattr(plan, field.name) for field in fields(plan))
    return pack_arrays([np.array(header), np.array(runs), *arrays])


def unpack_step(message: bytes) -> StepPlan:
    header, runs, *arrays = unpack_arrays(message)
    return StepPlan(PlanHeader(*header.tolist()), tuple(PlanRun(*run) for run in runs.tolist()), *arrays)


class Link(Protocol):
    """Rank 0's end of a link. `post` may be called from several threads, `collect` from one at a time. Both call the
    link's `check` periodically while they wait, and raise its exception.
    """

    def post(self, message: bytes, *, answered: bool = False) -> None:
        """Send a message to every peer.

        Args:
            answered: every peer answers, and `collect` follows before the next answered message.
        """
        ...

    def collect(self) -> list[bytes]:
        """The peers' answers to the last answered message, by rank."""
        ...

    def close(self) -> None: ...


class PeerLink(Protocol):
    """A peer's end of a link."""

    def receive(self, timeout_s: float) -> bytes | None:
        """The next message; `None` after the timeout. Raises `EOFError` when a TCP connection to rank 0 has ended."""
        ...

    def reply(self, answer: bytes) -> None:
        """Answer the last received message."""
        ...
