"""What ranks add up and collect while they compute a step: a process group of `torch.distributed`."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

dist: Any = torch.distributed  # only partly annotated
Store = Any

# How long ranks wait for one another in a collective. Whoever watches them has ended a rank that hangs long before.
_TIMEOUT = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where ranks find each other."""

    host: str
    port: int


def open_store(host: str, size: int, timeout_s: float) -> tuple[StoreAddress, Store]:
    """A store for `size` ranks, at a free port of this host's address and no other.

    Args:
        timeout_s: how long a rank waits there for the others.
    """
    listener = socket.create_server((host, 0))
    address = StoreAddress(host, listener.getsockname()[1])
    store = dist.TCPStore(
        host,
        address.port,
        size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return address, store


def join_store(address: StoreAddress, size: int, timeout_s: float) -> Store:
    return dist.TCPStore(
        address.host, address.port, size, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )


class Communicator:
    """Collectives over all ranks; every rank must call the same ones in the same order. NCCL for CUDA devices, else
    gloo.

    It is a process group of its own, and not torch's default one, so that there may be several engines in a process.

    Args:
        host: this rank's address; gloo listens there.
        timeout_s: how long the others may take to join.

    Raises:
        RuntimeError: some rank did not join.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, host: str, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._device = device
        if uses_nccl(device):
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _TIMEOUT
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = timedelta(seconds=timeout_s)
            options._threads = 1
            self._group = dist.ProcessGroupGloo(store, rank, size, options)
            self._group._set_default_timeout(_TIMEOUT)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, which replaces the tensor where it is contiguous."""
        tensor = tensor.contiguous()
        self._group.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """The ranks' tensors side by side in the last dimension.

        Args:
            sizes: of each rank's last dimension.
        """
        parts = [tensor.new_empty(*tensor.shape[:-1], max(sizes)) for _ in sizes]
        self._group.allgather([parts], [_padded(tensor, max(sizes))]).wait()
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)

    def gather(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """The same on rank 0; the others get their own tensor back."""
        parts = [tensor.new_empty(*tensor.shape[:-1], max(sizes)) for _ in sizes] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._group.gather([parts] if parts else [], [_padded(tensor, max(sizes))], options).wait()
        if not parts:
            return tensor
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)

    def close(self) -> None:
        """Leave the group. Nothing may be collected any more."""
        self._group = None

    def abort(self) -> None:
        """End what waits for ranks that are gone. gloo notices that itself."""
        group = self._group
        if group is not None and uses_nccl(self._device):
            group.abort()


def uses_nccl(device: torch.device) -> bool:
    """Whether ranks with such devices meet over NCCL, which wants a device for each; else over gloo."""
    return device.type == "cuda"


def _padded(tensor: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, size - tensor.shape[-1])).contiguous()
