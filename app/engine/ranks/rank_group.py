"""Rank group: starts, orders, watches and ends rank 0's peers together.

A rank that dies or exceeds a time limit ends the group, because the others cannot continue without it: all peers are
killed, waits for them end, and `check_alive` raises from then on.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from folio.app.config.engine import ResolvedConfig
from folio.app.engine.ranks import processes as limits
from folio.app.engine.ranks.processes import ERRORS, MEMORY, STEPS, Launch, Link, RankOrder, RankProcesses, RankSpec
from folio.app.engine.tensor_parallel import shared_memory
from folio.app.engine.tensor_parallel.communicator import Communicator
from folio.app.engine.tensor_parallel.gpu_sharing import read_sharing
from folio.app.engine.tensor_parallel.rendezvous import Store, join, open_store
from folio.app.engine.tensor_parallel.shared_memory import MemoryAddress, RingWriter
from folio.app.engine.tensor_parallel.sockets import SocketAddress, SocketListener
from folio.app.errors import EngineError, FolioError, UnavailableError

logger = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 0.05
# Peers send a heartbeat about once a second.
_LEAST_SILENCE_S = 3.0
# Time for peers to end by themselves.
_GRACE_S = 5.0

R = TypeVar("R")


class RankGroup:
    """The peers of one engine; also the `folio.vmem.PeerRanks` of its memory.

    Raises:
        ConfigError: no room for the processes, or GPUs cannot be shared as the environment asks.
        UnavailableError: the processes cannot be started.
    """

    def __init__(self, config: ResolvedConfig, launch: Launch) -> None:
        self._config = config
        self._sharing = read_sharing(config)
        self._num_peers = config.tensor_parallel_size - 1
        self._reason: str | None = None  # why the group has ended
        self._launch_error: FolioError | None = None
        self._failing = threading.Lock()
        self._waits: set[_Wait] = set()
        self._links: list[Link] = []
        self._call_locks = [threading.Lock() for _ in (STEPS, MEMORY)]  # held from a call to its answers
        self._undo = ExitStack()
        self._comm: Communicator | None = None
        self._store: Store = None
        self._num_ordered = 0
        self._ordering = threading.Lock()  # orders are counted in the order in which they are sent
        self._memories = itertools.count()
        self._processes: RankProcesses | None = None
        self._launched, self._stop = threading.Event(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, args=(launch,), name="folio-ranks", daemon=True)
        self._watcher.start()
        self._launched.wait()
        if self._reason is not None:
            self.close()
            raise self._launch_error or self._unavailable()

    # ---- starting ----

    def connect(self, device: torch.device) -> Communicator:
        """Start the workers and connect all ranks. Raises `UnavailableError`."""
        try:
            return self._connect(device)
        except (OSError, RuntimeError, EOFError) as error:
            self.fail(f"the ranks cannot connect: {error}")
            raise self._unavailable() from error

    def _connect(self, device: torch.device) -> Communicator:
        processes = self._processes
        assert processes is not None
        size = self._num_peers + 1
        host = processes.host
        port, store = open_store(host, size, limits.JOIN_TIMEOUT_S)
        self._store = store  # peers read it after this rank has joined
        link: MemoryAddress | SocketAddress
        listener: SocketListener | None = None
        # Closed below, or by `close`: after every peer has opened the file, or failed to.
        shared = self._undo.enter_context(ExitStack())
        if processes.on_one_machine and shared_memory.is_supported():
            link = shared_memory.create_rings(2, self._num_peers)
            shared.callback(os.close, link.fd)
            memory = self._undo.enter_context(link.open())
            self._links = [RingWriter(memory, link, index, self.check_alive) for index in (STEPS, MEMORY)]
        else:
            listener = self._undo.enter_context(closing(SocketListener(host)))
            link = listener.address
        leader_pid = os.getpid() if processes.on_one_machine else None
        processes.run(
            [
                RankSpec(
                    self._config, rank, link, (host, port), host, leader_pid, processes.may_kill_leader, self._sharing
                )
                for rank in range(1, size)
            ]
        )
        with self._limited(limits.START_TIMEOUT_S):
            if listener is not None:
                self._links = list(listener.accept(2, self._num_peers, self.check_alive))
            self._post(bytes([RankOrder.CONNECT]), answered=True)
            self._links[STEPS].collect()  # all have started, and join next
        self.check_alive()  # of a group that has ended nobody was asked, and nobody joins
        shared.close()
        here = processes.on_one_machine
        self._comm = join(
            store, 0, size, device, host, limits.JOIN_TIMEOUT_S, shares_memory=here, sharing=self._sharing
        )
        messages = "TCP" if listener else "shared memory"
        logger.info("%d ranks, messages over %s, collectives over %s", size, messages, self._comm.transport)
        return self._comm

    # ---- orders ----

    def load(self, act: Callable[[], R]) -> R:
        """Run `act` while every peer loads its shard of the model; return its result.

        Raises:
            FolioError: the error of a peer.
        """
        self.check_alive()
        with self._limited(limits.LOAD_TIMEOUT_S):
            self._post(bytes([RankOrder.LOAD]), answered=True)
            result = act()
            try:
                answers = self._links[STEPS].collect()
            except (OSError, EOFError) as error:
                self.fail(f"a peer cannot be reached: {error}")
                raise self._unavailable() from error
        for rank, answer in enumerate(answers, start=1):
            if answer:
                name, _, message = answer.decode(errors="replace").partition(":")
                raise ERRORS.get(name, EngineError)(f"rank {rank}: {message}")
        return result

    @contextmanager
    def step(self, message: bytes, limit_s: float | None = None) -> Iterator[None]:
        """Have every peer execute an order while this rank computes the same within the context.

        Args:
            limit_s: time limit, by default `step_timeout_s`.

        Raises:
            UnavailableError: a rank failed or exceeded the limit; the ranks' collectives no longer match, and the group
                ends.
        """
        self.check_alive()
        try:
            with self._limited(limit_s or self._config.step_timeout_s):
                self._post(message)
                yield
            self.check_alive()  # results of a step that lost a rank are undefined
        except BaseException as error:
            self.fail(f"a step failed: {error or type(error).__name__}")
            if isinstance(error, Exception) and not isinstance(error, UnavailableError):
                raise self._unavailable() from error
            raise

    def command(self, order: RankOrder, message: bytes) -> None:
        """Post an order without an answer; orders are executed in sequence."""
        self._post(bytes([order]) + message)

    def ask_all(self, order: RankOrder, message: bytes) -> list[bytes]:
        """Post an order and return the peers' answers. Raises `UnavailableError` if a peer does not answer."""
        answers = self._call(STEPS, lambda: self._post(bytes([order]) + message, answered=True))()
        self.check_alive()
        return answers

    @property
    def available(self) -> bool:
        return self._reason is None

    def check_alive(self) -> None:
        """Raise `UnavailableError` if a rank is lost."""
        if self._reason is not None:
            raise self._unavailable()

    def _unavailable(self) -> UnavailableError:
        return UnavailableError(f"{self._reason}; send the request again")

    # ---- folio.vmem.PeerRanks: without the peers memory continues on this rank; `check_alive` reports the loss ----

    def open_memory(self) -> int:
        return next(self._memories) % 256

    @property
    def num_ordered(self) -> int:
        return self._num_ordered

    def post_order(self, order: bytes) -> None:
        self._post(bytes([RankOrder.MEMORY]) + order)

    def call_order(self, order: bytes) -> Callable[[], list[bytes]]:
        return self._call(STEPS, lambda: self._post(bytes([RankOrder.MEMORY]) + order, answered=True))

    def post_request(self, request: bytes) -> None:
        self._send(MEMORY, bytes([False]) + request, False)

    def call_request(self, request: bytes) -> Callable[[], list[bytes]]:
        return self._call(MEMORY, lambda: self._send(MEMORY, bytes([True]) + request, True))

    # ---- the end ----

    def fail(self, reason: str) -> None:
        """End the group because a rank is lost."""
        with self._failing:
            if self._reason is not None:
                return
            self._reason = reason
        logger.error("ending all ranks: %s", reason)
        try:
            self._kill_all()
        finally:
            if self._comm is not None:
                self._comm.abort()

    def close(self) -> None:
        """End the peers and wait for them."""
        if self._reason is None and self._links:
            self._post(bytes([RankOrder.STOP]))
        self._stop.set()
        self._watcher.join()
        if self._reason is None:
            self._reason = "the engine has been closed"
        links, self._links = self._links, []
        for link in links:  # before the memory that they are in
            link.close()
        self._undo.close()
        if self._comm is not None:
            self._comm.close()

    # ---- inside ----

    def _post(self, message: bytes, *, answered: bool = False) -> None:
        with self._ordering:
            self._num_ordered += 1
            self._send(STEPS, bytes([answered]) + message, answered)

    def _send(self, link: int, message: bytes, answered: bool) -> None:
        if self._reason is not None:
            return
        try:
            with self._limited(self._config.step_timeout_s):
                self._links[link].post(message, answered=answered)
        except (UnavailableError, OSError) as error:
            self.fail(f"a peer cannot be reached: {error}")

    def _call(self, link: int, send: Callable[[], None]) -> Callable[[], list[bytes]]:
        """Send a message and return the function that collects its answers. The link's lock is held until then: the
        mapper of one memory and the owner of another may call at the same time."""
        self._call_locks[link].acquire()
        try:
            send()
        except BaseException:
            self.fail("a call was interrupted")  # its answers would be taken for those of the next call
            self._call_locks[link].release()
            raise
        return lambda: self._collect(link)

    def _collect(self, link: int) -> list[bytes]:
        try:
            with self._limited(self._config.step_timeout_s):
                self.check_alive()
                return self._links[link].collect()
        except (UnavailableError, OSError, EOFError) as error:
            self.fail(f"a peer does not answer: {error}")
            return []
        except BaseException:
            self.fail("the wait for an answer was interrupted")
            raise
        finally:
            self._call_locks[link].release()

    @contextmanager
    def _limited(self, limit_s: float) -> Iterator[None]:
        """End the group if the context takes longer."""
        wait = _Wait(limit_s)
        self._waits.add(wait)
        try:
            yield
        finally:
            self._waits.discard(wait)

    def _watch(self, launch: Launch) -> None:
        """The watcher thread: start, watch and end the processes. The system kills them when this thread ends."""
        try:
            self._processes = launch(self._num_peers)
        except Exception as error:
            logger.exception("the ranks cannot be started")
            self._launch_error = error if isinstance(error, FolioError) else None
            self._reason = f"the ranks cannot be started: {error}"
            return
        finally:
            self._launched.set()
        try:
            self._watch_peers(self._processes)
        except Exception as error:
            logger.exception("watching the ranks failed")
            self.fail(f"the ranks cannot be watched: {error}")
        finally:
            self._kill_all()
            self._processes.close()

    def _watch_peers(self, processes: RankProcesses) -> None:
        """Find faults until `close`; then let the peers end by themselves for a while."""
        silences = [_Silence() for _ in range(self._num_peers)]
        checked_at = time.monotonic()
        while not self._stop.wait(_WATCH_INTERVAL_S):
            now = time.monotonic()
            # Time in which this process itself did not run (because it was stopped, for example) does not count.
            elapsed_s, checked_at = min(now - checked_at, 4 * _WATCH_INTERVAL_S), now
            if self._reason is None:
                self._find_faults(processes, silences, elapsed_s)
        deadline = time.monotonic() + (_GRACE_S if self._reason is None and self._links else 0)
        while time.monotonic() < deadline and any(map(processes.is_alive, range(self._num_peers))):
            time.sleep(_WATCH_INTERVAL_S)
            if (ring := self._ring) is not None:
                ring.beat()

    def _find_faults(self, processes: RankProcesses, silences: list[_Silence], elapsed_s: float) -> None:
        for rank in range(1, self._num_peers + 1):
            if not processes.is_alive(rank - 1):
                self.fail(f"rank {rank} died")
        for wait in list(self._waits):
            wait.elapsed_s += elapsed_s
            if wait.elapsed_s > wait.limit_s:
                self.fail(f"the ranks have not answered for {wait.limit_s:.0f} s")
        if (ring := self._ring) is not None:
            ring.beat()
            limit_s = max(self._config.step_timeout_s, _LEAST_SILENCE_S)
            for rank, (silence, beats) in enumerate(zip(silences, ring.beats(), strict=True), start=1):
                if silence.update(beats, elapsed_s) > limit_s:
                    self.fail(f"rank {rank} has sent no heartbeat for {silence.elapsed_s:.0f} s")

    @property
    def _ring(self) -> RingWriter | None:
        link = self._links[MEMORY] if self._links else None
        return link if isinstance(link, RingWriter) else None

    def _kill_all(self) -> None:
        if self._processes is not None:
            for peer in range(self._num_peers):
                try:
                    self._processes.kill(peer)
                except Exception:
                    logger.exception("rank %d could not be killed", peer + 1)


@dataclass(slots=True, eq=False)
class _Wait:
    """A wait for peers and its time limit."""

    limit_s: float
    elapsed_s: float = 0.0


@dataclass(slots=True)
class _Silence:
    """Time since a peer's last heartbeat, from its first one on."""

    beats: int = 0
    elapsed_s: float = 0.0

    def update(self, beats: int, elapsed_s: float) -> float:
        """The silence in seconds, given the current count of heartbeats and the time since the last call."""
        self.elapsed_s = self.elapsed_s + elapsed_s if beats and beats == self.beats else 0.0
        self.beats = beats
        return self.elapsed_s
