"""Rank worker: a peer, which executes rank 0's orders until STOP or the loss of rank 0.

`python -m folio.app.engine.ranks.worker PARENT` runs a peer for `ChildProcesses`: PARENT is rank 0's process
id, and standard input carries the pickled `RankSpec`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import select
import signal
import sys
import threading
import time

import torch

from folio.app.config.machine import num_threads
from folio.app.engine.execution.builder import BatchBuilder
from folio.app.engine.execution.model_runner import ModelRunner
from folio.app.engine.lora.rank import RankAdapters
from folio.app.engine.model.loader import LoadedModel, load_model
from folio.app.engine.ranks.processes import (
    ERRORS,
    JOIN_TIMEOUT_S,
    MEMORY,
    STEPS,
    PeerLink,
    RankOrder,
    RankSpec,
    unpack_arrays,
    unpack_step,
)
from folio.app.engine.tensor_parallel.communicator import Communicator
from folio.app.engine.tensor_parallel.gpu_sharing import rank_device
from folio.app.engine.tensor_parallel.rendezvous import join, open_store
from folio.app.engine.tensor_parallel.shared_memory import MemoryAddress, RingReader
from folio.kernels import select_block_copy, select_provider
from folio.vmem import LocalContents, PeerMemory, select_backend
from folio.vmem.tensor_parallel.orders import is_failure

logger = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 1.0


class RankWorker:
    """One peer, in its own process or, in tests, in a thread of rank 0's.

    Args:
        num_threads: CPU threads of a step.
        device: this rank's device.

    Attributes:
        stopping: set it, from any thread, to end `run` soon; set when `run` has ended.
    """

    def __init__(self, spec: RankSpec, num_threads: int, device: torch.device) -> None:
        self.spec = spec
        self.links = _open_links(spec)
        self._num_threads = num_threads
        self._device = device
        self._memory = PeerMemory(
            spec.rank,
            lambda capacity, headroom: select_backend(device, capacity_bytes=capacity, headroom_bytes=headroom),
            lambda tensors: LocalContents(tensors, select_block_copy(device)),
        )
        self.stopping = threading.Event()
        if isinstance(link := self.links[MEMORY], RingReader):
            link.beat()  # rank 0 measures silence from the first heartbeat on
        self._memory_error: Exception | None = None  # of the memory thread
        self._comm: Communicator
        self._model: LoadedModel
        self._runner: ModelRunner
        self._builder: BatchBuilder
        self._adapters: RankAdapters | None = None

    def run(self) -> None:
        """Execute orders until STOP. Raises the error of an order that must not fail."""
        torch.set_num_threads(self._num_threads)
        self._use_device()
        requests = threading.Thread(target=self._answer_requests, name=f"folio-memory-{self.spec.rank}", daemon=True)
        requests.start()
        link = self.links[STEPS]
        try:
            while not self.stopping.is_set():
                message = link.receive(_CHECK_INTERVAL_S)
                if self._memory_error is not None:
                    raise self._memory_error
                if message is None:
                    continue
                answered, order = message[0], RankOrder(message[1])
                if order is RankOrder.STOP:
                    break
                answer = self._execute(order, message[2:])
                if answered:
                    link.reply(answer)
                if order is RankOrder.CONNECT:  # after the answer: rank 0 joins when all peers are ready to
                    self._connect()
                self._memory.done()
        finally:
            self.stopping.set()
            if self._adapters is not None:
                self._adapters.close()
        requests.join()

    def _execute(self, order: RankOrder, message: bytes) -> bytes:
        """Execute an order; return its answer, empty on success."""
        match order:
            case RankOrder.CONNECT:
                return b""
            case RankOrder.LOAD:
                return self._load()
            case RankOrder.OBSERVE:
                config = self.spec.config
                provider = select_provider(config.attention, self._device, batch_invariant=config.batch_invariant)
                self._runner = ModelRunner(self._model, provider)
            case RankOrder.MEMORY:
                return self._memory.handle_order(message)
            case RankOrder.OPEN:
                tensors = self._memory.tensors(message[0])
                self._runner.attach_caches(tensors)
                self._builder = BatchBuilder(tensors, self._device, self.spec.config.max_num_seqs)
            case RankOrder.STEP:
                plan = unpack_step(message)
                batch = self._builder.build(plan)
                if plan.pending.size:
                    self._comm.broadcast(batch.token_ids)
                self._runner.run(batch)
            case RankOrder.OWN_LOGITS:
                [token_ids] = unpack_arrays(message)
                self._runner.own_logits(torch.from_numpy(token_ids))
            case RankOrder.ROUNDED_LOGITS:
                [token_ids] = unpack_arrays(message)
                self._runner.rounded_logits(torch.from_numpy(token_ids))
            case RankOrder.LARGEST:
                [sizes] = unpack_arrays(message)
                self._runner.run_largest(*sizes.tolist())
            case RankOrder.ADAPTER:
                return self._order_adapter(message)
            case _:
                raise ValueError(f"unknown order {order!r}")
        return b""

    def _order_adapter(self, message: bytes) -> bytes:
        if self._adapters is None:
            assert self._model.adapters is not None
            self._adapters = RankAdapters(self._model.adapters)
        return self._adapters.handle_adapter_order(message)

    def _load(self) -> bytes:
        """Load this rank's shard; return `error name:message` on failure."""
        try:
            self._model = load_model(self.spec.config, self._comm)
        except Exception as error:
            logger.exception("rank %d cannot load its shard", self.spec.rank)
            name = next((name for name, kind in ERRORS.items() if isinstance(error, kind)), "EngineError")
            return f"{name}:{error}".encode()
        return b""

    def _connect(self) -> None:
        spec = self.spec
        size = spec.config.tensor_parallel_size
        host, port = spec.store
        _, store = open_store(host, size, JOIN_TIMEOUT_S, port)
        self._comm = join(store, spec.rank, size, self._device, spec.host, JOIN_TIMEOUT_S, sharing=spec.sharing)

    # ---- the memory thread ----

    def _answer_requests(self) -> None:
        link = self.links[MEMORY]
        try:
            self._use_device()
            while not self.stopping.is_set():
                message = link.receive(_CHECK_INTERVAL_S)
                if message is None:
                    continue
                answer = self._memory.answer(message[1:])
                if message[0]:  # an answer is expected
                    link.reply(answer)
                elif is_failure(answer):
                    reason = answer[1:].decode(errors="replace")
                    raise RuntimeError(f"a memory request that must not fail did: {reason}")
        except EOFError:
            pass  # the main thread gets it too
        except Exception as error:
            logger.exception("the memory thread of rank %d failed", self.spec.rank)
            self._memory_error = error

    def _use_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)


def _open_links(spec: RankSpec) -> list[PeerLink]:
    peer = spec.rank - 1
    if isinstance(spec.link, MemoryAddress):
        memory = spec.link.open()
        return [RingReader(memory, spec.link, index, peer) for index in (STEPS, MEMORY)]
    return [spec.link.connect(index, peer) for index in (STEPS, MEMORY)]


def run_to_the_end(worker: RankWorker) -> None:
    """Run a worker in its own process, which ends with rank 0's process or on an error."""
    if worker.spec.leader_pid is not None:
        threading.Thread(target=_watch_leader, args=(worker,), name="folio-watch", daemon=True).start()
    try:
        worker.run()
    except Exception:
        logger.exception("rank %d ends after an error", worker.spec.rank)
        os._exit(1)  # other threads may be blocked


def _watch_leader(worker: RankWorker) -> None:
    """End this process when rank 0's process has ended. Kill rank 0, if `may_kill_leader`, when its heartbeat is
    missing for longer than a step may take."""
    spec, link = worker.spec, worker.links[MEMORY]
    assert spec.leader_pid is not None
    leader = os.pidfd_open(spec.leader_pid)
    poll = select.poll()
    poll.register(leader, select.POLLIN)
    beats, silent_s, checked_at = 0, 0.0, time.monotonic()
    while not poll.poll(_CHECK_INTERVAL_S * 1000):
        if worker.stopping.is_set():
            return
        now = time.monotonic()
        silent_s += min(now - checked_at, 2 * _CHECK_INTERVAL_S)  # not the time in which this process was stopped
        checked_at = now
        if not isinstance(link, RingReader):
            continue
        link.beat()
        if link.beats() != beats:
            beats, silent_s = link.beats(), 0.0
        elif spec.may_kill_leader and silent_s > spec.config.step_timeout_s + 2 * _CHECK_INTERVAL_S:
            logger.error("rank 0 has sent no heartbeat for %.0f s: killing it", silent_s)
            signal.pidfd_send_signal(leader, signal.SIGKILL)
    logger.error("rank %d ends: rank 0 has ended", spec.rank)
    os._exit(1)


_PR_SET_PDEATHSIG = 1


def main() -> None:
    # Even a stopped child does not outlive the thread that started it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C
    try:
        spec: RankSpec = pickle.load(sys.stdin.buffer)
    except EOFError:  # rank 0 failed before it sent the spec
        return
    logging.basicConfig(format=f"%(asctime)s %(levelname)s rank {spec.rank} %(name)s: %(message)s")
    device = rank_device(spec.config, spec.rank, spec.sharing)
    run_to_the_end(RankWorker(spec, num_threads(spec.config), device))


if __name__ == "__main__":
    main()
