"""What a peer is told before it can be told anything, and what its process has to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from app.config import EngineConfig
from app.engine.tensor_parallel.communicator import StoreAddress
from app.engine.tensor_parallel.shared_memory import MemoryAddress
from app.engine.tensor_parallel.sockets import SocketAddress
from app.errors import ConfigError, FolioError, ModelError

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
