"""The peers as rank 0 sees them: started, told what to do, watched, and ended all together.

A rank that dies or does not finish a step in time ends the group: the others cannot go on without it. Then all peers
are killed, whoever waits for them stops waiting, and `check` raises from then on.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from app.config.engine import EngineConfig
from app.engine.tensor_parallel import processes as spec
from app.engine.tensor_parallel import shared_memory
from app.engine.tensor_parallel.communicator import Communicator, open_store
from app.engine.tensor_parallel.messages import Link, RankOrder
from app.engine.tensor_parallel.processes import ERRORS, MEMORY, STEPS, Launch, RankProcesses, RankSpec
from app.engine.tensor_parallel.shared_memory import MemoryAddress, RingWriter
from app.engine.tensor_parallel.sockets import SocketAddress, SocketListener
from app.errors import EngineError, FolioError, UnavailableError

logger = logging.getLogger(__name__)

_LOOK_S = 0.05
# Peers show about once a second that they are running.
_LEAST_SILENCE_S = 3.0
# How long peers may take to leave by themselves.
_GRACE_S = 5.0

R = TypeVar("R")


class RankGroup:
    """The peers of one engine. It is the `vmem.Peers` of its memory, too.

    Raises:
        ConfigError: there is no place for the processes.
        UnavailableError: they cannot be started.
    """

    def __init__(self, config: EngineConfig, launch: Launch) -> None:
        self._config = config
        self._num_peers = config.tensor_parallel_size - 1
        self._reason: str | None = None
        self._refusal: FolioError | None = None  # why they were not started
        self._failing = threading.Lock()
        self._busy: set[_Busy] = set()
        self._links: list[Link] = []
        self._asking = [threading.Lock() for _ in (STEPS, MEMORY)]  # from a question to its answers
        self._files: list[int] = []
        self._memory: mmap.mmap | None = None
        self._listener: SocketListener | None = None
        self._comm: Communicator | None = None
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
            raise self._refusal or self._unavailable()

    # ---- starting ----

    def connect(self, device: torch.device) -> Communicator:
        """Returns when all ranks have found each other. Raises `UnavailableError`."""
        try:
            return self._connect(device)
        except (OSError, RuntimeError, EOFError) as error:
            self.fail(f"the ranks did not find each other: {error}")
            raise self._unavailable() from error

    def _connect(self, device: torch.device) -> Communicator:
        processes = self._processes
        assert processes is not None
        size = self._num_peers + 1
        store_address, store = open_store(processes.host, size, spec.JOIN_TIMEOUT_S)
        link: MemoryAddress | SocketAddress
        in_memory = processes.on_one_machine and shared_memory.is_supported()
        if in_memory:
            link = shared_memory.create_rings(2, self._num_peers)
            self._files.append(link.fd)
            self._memory = link.open()
            self._links = [RingWriter(self._memory, link, index, self.check_alive) for index in (STEPS, MEMORY)]
        else:
            self._listener = SocketListener(processes.host)
            link = self._listener.address
        logger.info("%d ranks, messages over %s", size, "shared memory" if in_memory else "TCP")
        leader_pid = os.getpid() if processes.on_one_machine else None
        processes.run(
            [
                RankSpec(self._config, rank, link, store_address, processes.host, leader_pid, processes.may_kill_leader)
                for rank in range(1, size)
            ]
        )
        with self._busy_with(spec.START_TIMEOUT_S):
            if self._listener is not None:
                self._links = list(self._listener.accept(2, self._num_peers, self.check_alive))
            self._post(bytes([RankOrder.CONNECT]), answered=True)
            self._links[STEPS].collect()  # all are up, and about to join
        self._close_files()
        self._comm = Communicator(store, 0, size, device, processes.host, spec.JOIN_TIMEOUT_S)
        return self._comm

    # ---- what all do ----

    def load(self, act: Callable[[], R]) -> R:
        """Have every peer load its share of the model while this rank does the same; returns what it returned here.

        Raises:
            FolioError: what a peer raised.
        """
        self.check_alive()
        with self._busy_with(spec.LOAD_TIMEOUT_S):
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
        """Have every peer compute something that this rank computes within the context.

        Args:
            limit_s: how long that may take, by default a step's time.

        Raises:
            UnavailableError: it failed here or elsewhere, or took too long: the ranks do not agree any more about what
                comes next.
        """
        self.check_alive()
        try:
            with self._busy_with(limit_s or self._config.step_timeout_s):
                self._post(message)
                yield
            self.check_alive()  # what was computed with ranks that are gone may be anything
        except BaseException as error:
            self.fail(f"a step failed: {error or type(error).__name__}")
            if isinstance(error, Exception) and not isinstance(error, UnavailableError):
                raise self._unavailable() from error
            raise

    def command(self, order: RankOrder, message: bytes) -> None:
        """Have every peer do something, after what was ordered before."""
        self._post(bytes([order]) + message)

    def ask_all(self, order: RankOrder, message: bytes) -> list[bytes]:
        """The same, and what each peer answers. Raises `UnavailableError` if one does not."""
        self._begin_asking(STEPS, lambda: self._post(bytes([order]) + message, answered=True))
        answers = self._collect(STEPS)
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
        return UnavailableError(f"{self._reason}; the request may be sent again")

    # ---- vmem.Peers: when ranks are lost memory goes on without them, and whoever checks hears of it ----

    def open_memory(self) -> int:
        return next(self._memories) % 256

    @property
    def num_ordered(self) -> int:
        return self._num_ordered

    def post_order(self, order: bytes) -> None:
        self._post(bytes([RankOrder.MEMORY]) + order)

    def call_order(self, order: bytes) -> Callable[[], list[bytes]]:
        self._begin_asking(STEPS, lambda: self._post(bytes([RankOrder.MEMORY]) + order, answered=True))
        return lambda: self._collect(STEPS)

    def post_request(self, request: bytes) -> None:
        self._send(MEMORY, bytes([False]) + request, False)

    def call_request(self, request: bytes) -> Callable[[], list[bytes]]:
        self._begin_asking(MEMORY, lambda: self._send(MEMORY, bytes([True]) + request, True))
        return lambda: self._collect(MEMORY)

    # ---- the end ----

    def fail(self, reason: str) -> None:
        """A rank is lost: end all of them."""
        with self._failing:
            if self._reason is not None:
                return
            self._reason = reason
        logger.error("the ranks end: %s", reason)
        try:
            self._kill_all()
        finally:
            if self._comm is not None:
                self._comm.abort()

    def close(self) -> None:
        """Let the peers end, and make sure that they have."""
        if self._reason is None and self._links:
            self._post(bytes([RankOrder.STOP]))
        self._stop.set()
        self._watcher.join()
        self._close_files()
        if self._listener is not None:
            self._listener.close()
        if self._reason is None:
            self._reason = "the engine has been closed"
        links, self._links = self._links, []
        for link in links:
            link.close()
        if self._memory is not None:
            self._memory.close()
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
            with self._busy_with(self._config.step_timeout_s):
                self._links[link].post(message, answered=answered)
        except (UnavailableError, OSError) as error:
            self.fail(f"a peer cannot be reached: {error}")

    def _begin_asking(self, link: int, ask: Callable[[], None]) -> None:
        """Take the link's lock, which `_collect` lets go of: the mapper of one memory and the owner of another may ask
        at once."""
        self._asking[link].acquire()
        try:
            ask()
        except BaseException:
            self.fail("a question was interrupted")  # its answers would be taken for those to the next
            self._asking[link].release()
            raise

    def _collect(self, link: int) -> list[bytes]:
        """The answers to what was asked."""
        try:
            with self._busy_with(self._config.step_timeout_s):
                self.check_alive()
                return self._links[link].collect()
        except (UnavailableError, OSError, EOFError) as error:
            self.fail(f"a peer does not answer: {error}")
            return []
        except BaseException:
            self.fail("an answer was not waited for")
            raise
        finally:
            self._asking[link].release()

    @contextmanager
    def _busy_with(self, limit_s: float) -> Iterator[None]:
        """Something is waited for that must not take longer than that."""
        busy = _Busy(limit_s)
        self._busy.add(busy)
        try:
            yield
        finally:
            self._busy.discard(busy)

    def _watch(self, launch: Launch) -> None:
        """The thread: start the processes, look after them, end them. Their system kills them when it ends."""
        try:
            self._processes = launch(self._num_peers)
        except Exception as error:
            logger.exception("the ranks cannot be started")
            self._refusal = error if isinstance(error, FolioError) else None
            self._reason = f"the ranks cannot be started: {error}"
            return
        finally:
            self._launched.set()
        try:
            self._look_after(self._processes)
        except Exception as error:
            logger.exception("nobody looks after the ranks any more")
            self.fail(f"the ranks cannot be watched: {error}")
        finally:
            self._kill_all()
            self._processes.close()

    def _look_after(self, processes: RankProcesses) -> None:
        """Until it is time to end them, and they had a while to do that by themselves."""
        peers = range(self._num_peers)
        silent = [_Silence() for _ in peers]
        looked_at = time.monotonic()
        while not self._stop.wait(_LOOK_S):
            now = time.monotonic()
            # Time in which this process did not run itself (it was stopped, say) does not count.
            elapsed, looked_at = min(now - looked_at, 4 * _LOOK_S), now
            if self._reason is not None:
                continue
            for peer in peers:
                if not processes.is_alive(peer):
                    self.fail(f"rank {peer + 1} died")
            for busy in list(self._busy):
                busy.elapsed_s += elapsed
                if busy.elapsed_s > busy.limit_s:
                    self.fail(f"the ranks have not answered for {busy.limit_s:.0f} s")
            link = self._links[MEMORY] if self._links else None
            if isinstance(link, RingWriter):
                link.beat()
                for peer, (silence, beats) in enumerate(zip(silent, link.beats(), strict=True), start=1):
                    if silence.lasts(beats, elapsed) > max(self._config.step_timeout_s, _LEAST_SILENCE_S):
                        self.fail(f"rank {peer} has not moved for {silence.elapsed_s:.0f} s")
        deadline = time.monotonic() + (_GRACE_S if self._reason is None and self._links else 0)
        while time.monotonic() < deadline and any(map(processes.is_alive, peers)):
            time.sleep(_LOOK_S)
            if self._links and isinstance(link := self._links[MEMORY], RingWriter):
                link.beat()

    def _close_files(self) -> None:
        """Every peer has opened them, or never will."""
        while self._files:
            os.close(self._files.pop())

    def _kill_all(self) -> None:
        if self._processes is not None:
            for peer in range(self._num_peers):
                try:
                    self._processes.kill(peer)
                except Exception:
                    logger.exception("rank %d could not be killed", peer + 1)


@dataclass(slots=True, eq=False)
class _Busy:
    """A wait, how long it may take, and how long it has taken."""

    limit_s: float
    elapsed_s: float = 0.0


@dataclass(slots=True)
class _Silence:
    """How long a peer has not shown that it is running, since it first has."""

    beats: int = 0
    elapsed_s: float = 0.0

    def lasts(self, beats: int, elapsed_s: float) -> float:
        """Seconds, after so many more."""
        self.elapsed_s = self.elapsed_s + elapsed_s if beats and beats == self.beats else 0.0
        self.beats = beats
        return self.elapsed_s
