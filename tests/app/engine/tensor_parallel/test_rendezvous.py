"""What the ranks' collectives use, and that all of it gives the same."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from app.engine.tensor_parallel import rendezvous
from app.engine.tensor_parallel.communicator import Communicator
from app.engine.tensor_parallel.rendezvous import join, open_store
from kernels import KernelError

HOST, SIZE, TIMEOUT_S = "127.0.0.1", 3, 20.0


def join_all(*, shares: bool) -> list[Communicator]:
    port, store = open_store(HOST, SIZE, TIMEOUT_S)

    def join_one(rank: int) -> Communicator:
        own = open_store(HOST, SIZE, TIMEOUT_S, port)[1] if rank else store
        return join(own, rank, SIZE, torch.device("cpu"), HOST, TIMEOUT_S, shares=shares and rank == 0)

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(join_one, range(SIZE), timeout=60))


def on_all(comms: list[Communicator], act: Callable[[Communicator], Any]) -> list[Any]:
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(act, comms, timeout=60))


@pytest.mark.parametrize("shares", [False, True])
def test_collectives(shares: bool) -> None:
    comms = join_all(shares=shares)
    assert {comm.transport for comm in comms} == {"shared memory" if shares else "gloo"}
    assert [comm.rank for comm in comms] == [0, 1, 2]
    sizes = [2, 0, 3]
    joined = torch.tensor([[0.0, 0.0, 2.0, 2.0, 2.0]] * 4)

    def part(comm: Communicator) -> torch.Tensor:
        return torch.full((4, sizes[comm.rank]), float(comm.rank))

    assert all(torch.equal(got, joined) for got in on_all(comms, lambda comm: comm.all_gather(part(comm), sizes)))
    first, *others = on_all(comms, lambda comm: comm.gather(part(comm), sizes))
    assert torch.equal(first, joined)
    assert [other.shape[-1] for other in others] == sizes[1:]

    def add_up(comm: Communicator) -> torch.Tensor:
        return comm.all_reduce(torch.arange(6.0).reshape(2, 3).t() * (comm.rank + 1))  # not contiguous

    assert all(torch.equal(got, torch.arange(6.0).reshape(2, 3).t() * 6) for got in on_all(comms, add_up))
    for source in range(SIZE):

        def send(comm: Communicator, source: int = source) -> tuple[torch.Tensor, torch.Tensor]:
            own = torch.full((5,), comm.rank + (1 << 40))
            return own, comm.broadcast(own, source)

        for own, got in on_all(comms, send):
            assert own.tolist() == got.tolist() == [source + (1 << 40)] * 5
    for comm in comms:
        comm.close()


def open_files() -> int:
    """Number of shared files that are open or, which Python does not tell apart, mapped."""
    links = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that this list is read from
            links.append(os.readlink(link))
    return sum("folio-ranks" in link for link in links)


def test_one_rank_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """All use gloo if a single one cannot map the memory."""
    opened, real = [], rendezvous._open_memory

    def open_memory(*args: Any) -> Any:
        opened.append(real(*args))
        return opened[-1] if len(opened) == 1 else None

    monkeypatch.setattr(rendezvous, "_open_memory", open_memory)
    assert {comm.transport for comm in join_all(shares=True)} == {"gloo"}
    assert len(opened) == SIZE - 1


def test_a_rank_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> int:
        raise KernelError("no C++ compiler")

    monkeypatch.setattr(rendezvous, "shared_group_bytes", fail)
    assert {comm.transport for comm in join_all(shares=True)} == {"gloo"}


def test_a_process_of_that_number_on_another_machine() -> None:
    """Its files are not opened, or found to be another group's."""
    size = rendezvous.shared_group_bytes(2)
    assert rendezvous._open_memory("/proc/self/fd/999999", size, b"name", 2) is None
    assert rendezvous._open_memory("/proc/self/exe", size, b"name", 2) is None
    fd = os.memfd_create("folio-ranks")
    try:
        path = f"/proc/self/fd/{fd}"
        assert rendezvous._open_memory(path, size, b"name", 2) is None  # too short
        os.ftruncate(fd, size + 4)
        assert rendezvous._open_memory(path, size, b"name", 2) is None
        os.pwrite(fd, b"name", size)
        assert rendezvous._open_memory(path, size, b"name", 2) is not None
        assert rendezvous._open_memory(path, size, b"name", 3) is None  # of another number of ranks
    finally:
        os.close(fd)


def test_an_abort_ends_waits_and_the_memory_is_freed() -> None:
    gc.collect()  # of other tests
    before = open_files()
    comms = join_all(shares=True)
    assert open_files() == before + SIZE
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(comms[0].all_reduce, torch.ones(3))
        comms[1].abort()
        with pytest.raises(ConnectionAbortedError):
            waiting.result(10)
    comms.clear()
    del waiting
    gc.collect()
    assert open_files() == before


def test_a_missing_rank() -> None:
    before = open_files()
    _, store = open_store(HOST, SIZE, 1.0)
    with pytest.raises(RuntimeError):
        join(store, 0, SIZE, torch.device("cpu"), HOST, 1.0, shares=True)
    gc.collect()
    assert open_files() == before
