"""Communicator: collectives of the ranks during a forward, over a process group of `torch.distributed`."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from app.compat.torch import gloo_group, nccl_group

dist: Any = torch.distributed  # only partly annotated
Store = Any

# Timeout of a collective. `RankGroup` kills a rank that hangs long before.
_TIMEOUT = timedelta(hours=1)


def open_store(host: str, size: int, timeout_s: float, port: int | None = None) -> tuple[int, Store]:
    """The store through which `size` ranks find each other, and its port.

    Args:
        timeout_s: limit of a rank's wait for the others.
        port: of the store to join; by default a new one, at a free port of this host's address only.
    """
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s), "wait_for_workers": False}
    if port is None:
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        options |= {"is_master": True, "master_listen_fd": listener.detach()}
    return port, dist.TCPStore(host, port, size, **options)


class Communicator:
    """Collectives over all ranks; every rank must call the same ones in the same order. NCCL for CUDA devices, else
    gloo.

    Args:
        host: this rank's address; gloo listens there.
        timeout_s: limit of the wait for the others to join.

    Raises:
        RuntimeError: a rank did not join.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, host: str, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._device = device
        if uses_nccl(device):
            self._group = nccl_group(store, rank, size, _TIMEOUT)
        else:
            self._group = gloo_group(
                store, rank, size, host, join_timeout=timedelta(seconds=timeout_s), timeout=_TIMEOUT
            )

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place if the tensor is contiguous."""
        tensor = tensor.contiguous()
        self._group.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Concatenate the ranks' tensors in the last dimension.

        Args:
            sizes: of each rank's last dimension.
        """
        parts = [tensor.new_empty(*tensor.shape[:-1], max(sizes)) for _ in sizes]
        self._group.allgather([parts], [_padded(tensor, max(sizes))]).wait()
        return _concatenated(parts, sizes)

    def gather(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """`all_gather` on rank 0 only; other ranks get their own tensor back."""
        parts = [tensor.new_empty(*tensor.shape[:-1], max(sizes)) for _ in sizes] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._group.gather([parts] if parts else [], [_padded(tensor, max(sizes))], options).wait()
        return _concatenated(parts, sizes) if parts else tensor

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """`tensor` of rank `source`, on all ranks; others give one of the same shape and dtype, which is overwritten if
        it is contiguous."""
        tensor = tensor.contiguous()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        self._group.broadcast([tensor], options).wait()
        return tensor

    def close(self) -> None:
        """Leave the group; no collective may follow."""
        self._group = None

    def abort(self) -> None:
        """End collectives that wait for lost ranks; gloo ends them itself."""
        if self._group is not None and uses_nccl(self._device):
            self._group.abort()


def uses_nccl(device: torch.device) -> bool:
    """Whether ranks on such devices use NCCL, which needs one device for each rank, rather than gloo."""
    return device.type == "cuda"


def _concatenated(parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)


def _padded(tensor: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, size - tensor.shape[-1])).contiguous()
