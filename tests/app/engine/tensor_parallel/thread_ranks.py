"""Peers as threads of the test's process: they start quickly, and errors have a traceback."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from folio.app.engine.ranks.processes import RankSpec
from folio.app.engine.ranks.worker import RankWorker


class ThreadRanks:
    """`RankProcesses` of threads, which end at their next check after `kill`."""

    host = "127.0.0.1"
    may_kill_leader = False

    def __init__(self, num_peers: int, *, on_one_machine: bool = True) -> None:
        self.on_one_machine = on_one_machine
        self.workers: list[RankWorker] = []
        self._threads: list[threading.Thread | None] = [None] * num_peers

    def run(self, specs: Sequence[RankSpec]) -> None:
        for peer, spec in enumerate(specs):
            thread = threading.Thread(target=self._work, args=(spec,), daemon=True)
            thread.start()
            self._threads[peer] = thread  # now: until it is started it is not alive

    def is_alive(self, peer: int) -> bool:
        thread = self._threads[peer]
        return thread is None or thread.is_alive()

    def kill(self, peer: int) -> None:
        for worker in self.workers:
            if worker.spec.rank == peer + 1:
                worker.stopping.set()

    def close(self) -> None:
        for thread in self._threads:
            if thread is not None:
                thread.join(timeout=2)

    def _work(self, spec: RankSpec) -> None:
        device = torch.device("cuda", 0) if spec.config.device == "cuda" else torch.device("cpu")
        worker = RankWorker(spec, num_threads=1, device=device)
        self.workers.append(worker)
        worker.run()


def thread_ranks(num_peers: int) -> ThreadRanks:
    return ThreadRanks(num_peers)


def socket_ranks(num_peers: int) -> ThreadRanks:
    """As on other machines, over TCP."""
    return ThreadRanks(num_peers, on_one_machine=False)
