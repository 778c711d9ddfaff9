"""Rendezvous: the ranks find each other through a store, and agree on what their collectives use."""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from folio.app.compat.torch import gloo_group, nccl_group
from folio.app.engine.tensor_parallel.communicator import Communicator, MemoryCommunicator, ProcessGroupCommunicator
from folio.app.engine.tensor_parallel.gpu_sharing import Sharing, allow_sharing_in_nccl
from folio.kernels import KernelError, shared_group_bytes

logger = logging.getLogger(__name__)

dist: Any = torch.distributed  # only partly annotated
Store = Any

# Timeout of a collective. `RankGroup` kills a rank that hangs long before.
_TIMEOUT = timedelta(hours=1)
_NAME_BYTES = 16
_OFFER, _DECISION = "folio/offer", "folio/decision"
_YES, _NO = b"yes", b"no"


def open_store(host: str, size: int, timeout_s: float, port: int | None = None) -> tuple[int, Store]:
    """The store through which `size` ranks find each other, and its port.

    Args:
        timeout_s: limit of a rank's wait for the others.
        port: port of the store to join; by default a new store is opened, at a free port of this address only.
    """
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s), "wait_for_workers": False}
    if port is None:
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        options |= {"is_master": True, "master_listen_fd": listener.detach()}
    return port, dist.TCPStore(host, port, size, **options)


def join(
    store: Store,
    rank: int,
    size: int,
    device: torch.device,
    host: str,
    timeout_s: float,
    *,
    shares_memory: bool = False,
    sharing: Sharing | None = None,
) -> Communicator:
    """Connect this rank with the others: over NCCL for CUDA devices, else over shared memory if every rank can map
    rank 0's, else over gloo.

    Args:
        host: this rank's address; gloo listens there.
        timeout_s: limit of the wait for the others to join.
        shares_memory: on rank 0: offer memory to the peers, which are on this machine and end with this process.
        sharing: how ranks share GPUs.

    Raises:
        RuntimeError: a rank did not join.
    """
    on_cuda = device.type == "cuda"
    if on_cuda and sharing != "gloo":
        if sharing is not None:
            allow_sharing_in_nccl()
        return ProcessGroupCommunicator(nccl_group(store, rank, size, _TIMEOUT), rank, size, nccl=True)
    if not on_cuda:
        memory = _offer_memory(store, size, shares_memory) if rank == 0 else _accept_memory(store, rank, size)
        if memory is not None:
            return MemoryCommunicator(memory, rank, size)
    group = gloo_group(store, rank, size, host, join_timeout=timedelta(seconds=timeout_s), timeout=_TIMEOUT)
    return ProcessGroupCommunicator(group, rank, size, nccl=False)


def _offer_memory(store: Store, size: int, shares: bool) -> mmap.mmap | None:
    """Rank 0's side: memory that every peer has mapped, or `None`, as on the peers."""
    try:
        num_bytes = shared_group_bytes(size) if shares else 0
    except KernelError as error:
        logger.warning("the ranks' collectives use gloo, which is slower than shared memory: %s", error)
        num_bytes = 0
    if not num_bytes:
        store.set(_OFFER, b"")
        return None
    name = secrets.token_bytes(_NAME_BYTES)
    fd = os.memfd_create("folio-ranks", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, num_bytes + _NAME_BYTES)
        memory = mmap.mmap(fd, num_bytes + _NAME_BYTES)
        memory[num_bytes:] = name
        store.set(_OFFER, f"{os.getpid()} {fd} {num_bytes} {name.hex()}")
        answers = [store.get(f"{_OFFER}/{peer}") for peer in range(1, size)]
    finally:
        os.close(fd)
    agreed = all(answer == _YES for answer in answers)
    store.set(_DECISION, _YES if agreed else _NO)
    return memory if agreed else None


def _accept_memory(store: Store, rank: int, size: int) -> mmap.mmap | None:
    offer = store.get(_OFFER).decode().split()
    if not offer:
        return None
    pid, fd, num_bytes, name = offer
    memory = _open_memory(f"/proc/{pid}/fd/{fd}", int(num_bytes), bytes.fromhex(name), size)
    store.set(f"{_OFFER}/{rank}", _NO if memory is None else _YES)
    return memory if store.get(_DECISION) == _YES else None


def _open_memory(path: str, num_bytes: int, name: bytes, size: int) -> mmap.mmap | None:
    """The memory that ends with `name`; `None` on another machine, where the path leads to something else."""
    try:
        if "folio-ranks" not in os.readlink(path) or shared_group_bytes(size) != num_bytes:
            return None
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (OSError, KernelError) as error:
        logger.warning("rank 0's memory cannot be shared: %s", error)
        return None
    try:
        memory = mmap.mmap(fd, num_bytes + len(name))
    except (OSError, ValueError):  # ValueError: the file is shorter
        return None
    finally:
        os.close(fd)
    return memory if memory[num_bytes:] == name else None
