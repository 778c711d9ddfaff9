"""What the ranks' collectives use, and that all of it gives the same."""

from __future__ import annotations

import gc
import io
import itertools
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from folio.app.config.engine import EngineConfig
from folio.app.engine.ranks.processes import ChildProcesses, RankSpec
from folio.app.engine.tensor_parallel import rendezvous
from folio.app.engine.tensor_parallel.communicator import Communicator
from folio.app.engine.tensor_parallel.gpu_sharing import SWITCH, Sharing, rank_device, read_sharing
from folio.app.engine.tensor_parallel.rendezvous import join, open_store
from folio.app.engine.tensor_parallel.sockets import SocketAddress
from folio.app.errors import ConfigError
from folio.kernels import KernelError

HOST, SIZE, TIMEOUT_S = "127.0.0.1", 3, 20.0
CPU = torch.device("cpu")


def join_all(
    size: int = SIZE, *, shares: bool = False, device: torch.device = CPU, sharing: Sharing | None = None
) -> list[Communicator]:
    port, store = open_store(HOST, size, TIMEOUT_S)

    def join_one(rank: int) -> Communicator:
        own = open_store(HOST, size, TIMEOUT_S, port)[1] if rank else store
        shares_memory = shares and rank == 0
        return join(own, rank, size, device, HOST, TIMEOUT_S, shares_memory=shares_memory, sharing=sharing)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(join_one, range(size), timeout=60))


def on_all(comms: list[Communicator], act: Callable[[Communicator], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(comms)) as pool:
        return list(pool.map(act, comms, timeout=60))


@pytest.mark.parametrize(
    ("transport", "size", "device", "dtype"),
    [
        ("shared memory", 3, "cpu", torch.float32),
        ("gloo", 3, "cpu", torch.float32),
        ("gloo", 3, "cpu", torch.bfloat16),
        ("gloo", 1, "cpu", torch.float32),
        pytest.param("gloo", 3, "cuda", torch.float32, marks=pytest.mark.gpu),
        pytest.param("gloo", 3, "cuda", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param("NCCL", 1, "cuda", torch.float32, marks=pytest.mark.gpu),
        pytest.param("NCCL", 1, "cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_collectives(transport: str, size: int, device: str, dtype: torch.dtype) -> None:
    """All that Folio calls. Over gloo the ranks on CUDA share a device; with NCCL each needs one."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    at = torch.device(device)
    comms = join_all(
        size, shares=transport == "shared memory", device=at, sharing="gloo" if transport == "gloo" else None
    )
    assert {comm.transport for comm in comms} == {transport}
    assert [comm.rank for comm in comms] == list(range(size))
    sizes = [2, 0, 3][:size]
    joined = torch.tensor([[0.0, 0.0, 2.0, 2.0, 2.0][: sum(sizes)]] * 4, dtype=dtype, device=at)

    def part(comm: Communicator) -> torch.Tensor:
        return torch.full((4, sizes[comm.rank]), float(comm.rank), dtype=dtype, device=at)

    assert all(torch.equal(got, joined) for got in on_all(comms, lambda comm: comm.all_gather(part(comm), sizes)))
    first, *others = on_all(comms, lambda comm: comm.gather(part(comm), sizes))
    assert torch.equal(first, joined)
    assert [other.shape[-1] for other in others] == sizes[1:]
    numbers = torch.arange(6.0, dtype=dtype, device=at).reshape(2, 3).t()  # not contiguous

    def add_up(comm: Communicator) -> torch.Tensor:
        return comm.all_reduce(numbers * (comm.rank + 1))

    assert all(torch.equal(got, numbers * sum(range(1, size + 1))) for got in on_all(comms, add_up))
    for source in range(size):

        def send(comm: Communicator, source: int = source) -> tuple[torch.Tensor, torch.Tensor]:
            own = torch.full((5,), comm.rank + (1 << 40), device=at)
            return own, comm.broadcast(own, source)

        for own, got in on_all(comms, send):
            assert own.tolist() == got.tolist() == [source + (1 << 40)] * 5
    for comm in comms:
        comm.close()


@pytest.mark.parametrize(
    ("value", "settings", "version", "expected"),
    [
        (None, {}, (2, 28, 9), None),
        ("", {}, (2, 28, 9), None),
        ("gloo", {"device": "cpu"}, (2, 28, 9), None),
        ("gloo", {}, (2, 28, 9), "gloo"),
        ("nccl", {}, (2, 30, 3), "nccl"),
        ("nccl", {}, (3, 0, 0), "nccl"),
        ("nccl", {}, (2, 28, 9), r"NCCL is 2\.28\.9, .* must be 2\.30 or later: install it, or use gloo"),
        ("1", {}, (2, 30, 3), "is '1'; it must be gloo or nccl"),
        ("gloo", {"kv_memory_bytes": None}, (2, 30, 3), "kv_memory_bytes is not set"),
    ],
)
def test_ranks_share_gpus_where_the_environment_says_so(
    value: str | None, settings: dict[str, Any], version: tuple[int, ...], expected: str | None
) -> None:
    device = settings.get("device", "cuda")
    bounded = {"kv_memory_bytes": 1 << 30, "tensor_parallel_size": 2, "device": device}
    config = EngineConfig(model="builtin", **(bounded | settings)).on_device(device)
    environment = {} if value is None else {SWITCH: value}
    if expected in (None, "gloo", "nccl"):
        assert read_sharing(config, environment, lambda: version) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            read_sharing(config, environment, lambda: version)


def test_ranks_go_round_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: `spawn_ranks` refused two ranks on a machine with one GPU, and would have given rank 1 cuda:1."""
    settings = EngineConfig(model="builtin", device="cuda", tensor_parallel_size=2).on_device("cuda")
    devices = ["one"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    children, pipe = ChildProcesses(0), io.BytesIO()
    children._children = [SimpleNamespace(stdin=pipe)]  # type: ignore[list-item]
    spec = RankSpec(settings, 1, SocketAddress(HOST, 1, b""), (HOST, 2), HOST, None, may_kill_leader=False)
    with pytest.raises(ConfigError, match="sees 1 CUDA devices here: each rank needs one, unless FOLIO_RANKS_SHARE"):
        children.run([spec])
    children.run([replace(spec, sharing="gloo")])
    sent: RankSpec = pickle.loads(pipe.getvalue())
    assert rank_device(sent.config, sent.rank, sent.sharing) == torch.device("cuda", 0)
    devices.append("another")
    assert [rank_device(settings, rank, "nccl").index for rank in range(4)] == [0, 1, 0, 1]
    assert rank_device(settings, 3, None) == torch.device("cuda", 3)
    assert rank_device(EngineConfig(model="builtin").on_device("cpu"), 3, None) == CPU


def open_files() -> int:
    """Number of shared files that are open or, which Python does not tell apart, mapped."""
    links = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that this list is read from
            links.append(os.readlink(link))
    return sum("folio-ranks" in link for link in links)


def fails(_: int) -> int:
    raise KernelError("no C++ compiler")


@pytest.mark.parametrize(
    ("name", "fake", "tries"), [("_open_memory", lambda *_: None, SIZE - 1), ("shared_group_bytes", fails, 1)]
)
def test_all_use_gloo_if_a_single_rank_cannot_map_the_memory(
    name: str, fake: Callable[..., Any], tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer is on another machine, or rank 0 without a compiler."""
    lock, calls, real = threading.Lock(), itertools.count(), getattr(rendezvous, name)

    def once(*args: Any) -> Any:
        with lock:
            is_first = next(calls) == 0
        return fake(*args) if is_first else real(*args)

    monkeypatch.setattr(rendezvous, name, once)
    assert {comm.transport for comm in join_all(shares=True)} == {"gloo"}
    assert next(calls) == tries


def test_a_process_of_that_number_on_another_machine() -> None:
    """Its files are not opened, or found to be another group's."""
    size, open_memory = rendezvous.shared_group_bytes(2), rendezvous._open_memory
    assert open_memory("/proc/self/fd/999999", size, b"name", 2) is None
    assert open_memory("/proc/self/exe", size, b"name", 2) is None
    fd = os.memfd_create("folio-ranks")
    try:
        path = f"/proc/self/fd/{fd}"
        assert open_memory(path, size, b"name", 2) is None  # too short
        os.ftruncate(fd, size + 4)
        assert open_memory(path, size, b"name", 2) is None
        os.pwrite(fd, b"name", size)
        assert open_memory(path, size, b"name", 2) is not None
        assert open_memory(path, size, b"name", 3) is None  # of another number of ranks
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
        join(store, 0, SIZE, CPU, HOST, 1.0, shares_memory=True)
    gc.collect()
    assert open_files() == before
