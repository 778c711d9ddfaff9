"""Communicator: collectives of the ranks during a forward, over shared memory, or over a process group of torch."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed

from folio.kernels import SharedGroup

dist: Any = torch.distributed  # only partly annotated


class Communicator(ABC):
    """Collectives over all ranks; every rank must call the same ones in the same order.

    Attributes:
        transport: the means of the collectives, for the log.
    """

    rank: int
    size: int
    transport: str

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place if the tensor is contiguous."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Concatenate the ranks' tensors in the last dimension.

        Args:
            sizes: size of each rank's last dimension.
        """

    @abstractmethod
    def gather(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """`all_gather` on rank 0 only; other ranks get their own tensor back."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """`tensor` of rank `source`, on all ranks; others give one of the same shape and dtype, which is overwritten if
        it is contiguous."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group; no collective may follow."""

    @abstractmethod
    def abort(self) -> None:
        """End collectives that wait for lost ranks, from any thread."""


class MemoryCommunicator(Communicator):
    """Ranks of one machine without devices of their own. A sum is the same on all ranks, bit for bit.

    Args:
        memory: shared by all ranks, of `shared_group_bytes(size)` bytes.
    """

    transport = "shared memory"

    def __init__(self, memory: mmap.mmap, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._group = SharedGroup(memory, rank, size)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        self._group.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return self._group.gather(tensor.contiguous(), sizes)

    def gather(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        if self.rank == 0:
            return self.all_gather(tensor, sizes)
        self._group.give(tensor.contiguous(), sizes)
        return tensor

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        tensor = tensor.contiguous()
        self._group.broadcast(tensor, source)
        return tensor

    def close(self) -> None:
        self._group.end()

    def abort(self) -> None:
        self._group.end()


class ProcessGroupCommunicator(Communicator):
    """A group of `torch.distributed`.

    Args:
        group: gloo, whose collectives end by themselves when a rank is lost, or NCCL.
    """

    def __init__(self, group: Any, rank: int, size: int, *, nccl: bool) -> None:
        self.rank, self.size = rank, size
        self.transport = "NCCL" if nccl else "gloo"
        self._group = group
        self._nccl = nccl

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        self._group.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        parts = [tensor.new_empty(*tensor.shape[:-1], max(sizes)) for _ in sizes]
        self._group.allgather([parts], [_padded(tensor, max(sizes))]).wait()
        return _concatenated(parts, sizes)

    def gather(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        parts = [tensor.new_empty(*tensor.shape[:-1], max(sizes)) for _ in sizes] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._group.gather([parts] if parts else [], [_padded(tensor, max(sizes))], options).wait()
        return _concatenated(parts, sizes) if parts else tensor

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        tensor = tensor.contiguous()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        self._group.broadcast([tensor], options).wait()
        return tensor

    def close(self) -> None:
        self._group = None

    def abort(self) -> None:
        if self._group is not None and self._nccl:
            self._group.abort()


def _concatenated(parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)


def _padded(tensor: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, size - tensor.shape[-1])).contiguous()
