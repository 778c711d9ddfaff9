"""Collectives of processes of one machine, over memory that all of them have mapped (`csrc/collectives.cpp`)."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import torch

from folio.kernels.cpu.build import load_function
from folio.kernels.cpu.ops import CPP_DTYPES

_POINTER, _INT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class _SharedGroup(ctypes.Structure):
    """`SharedGroup` of collectives.cpp, field by field."""

    _fields_ = [("memory", _POINTER), ("rank", ctypes.c_int32), ("size", ctypes.c_int32), ("round", ctypes.c_uint32)]


def shared_group_bytes(size: int) -> int:
    """Bytes of the memory of a group of `size` ranks, zeros at first. Raises `KernelError`, see `SharedGroup`."""
    num_bytes: int = load_function("collectives", "folio_group_bytes", _INT, result=_INT64)(size)
    return num_bytes


class SharedGroup:
    """One rank of a group; every rank must call the same collectives in the same order, from one thread at a time.

    Args:
        memory: of `shared_group_bytes(size)` bytes.

    Raises:
        KernelError: the library cannot be compiled.
    """

    def __init__(self, memory: mmap.mmap, rank: int, size: int) -> None:
        group = ctypes.POINTER(_SharedGroup)
        self._all_reduce = load_function("collectives", "folio_all_reduce", group, _INT, _POINTER, _INT64, result=_INT)
        self._gather = load_function(
            "collectives", "folio_gather", group, _POINTER, _INT64, ctypes.POINTER(_INT64), _POINTER, result=_INT
        )
        self._broadcast = load_function("collectives", "folio_broadcast", group, _POINTER, _INT64, _INT, result=_INT)
        self._end = load_function("collectives", "folio_end_group", group)
        self._memory = ctypes.c_char.from_buffer(memory)  # keeps it mapped
        self._group = _SharedGroup(ctypes.addressof(self._memory), rank, size, 0)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a contiguous tensor of float32, bfloat16 or float16 by its sum over all ranks: in float32, in the
        order of ranks, rounded once, and equal on all ranks."""
        if tensor.dtype not in CPP_DTYPES:
            raise ValueError(
                f"a tensor of {tensor.dtype} cannot be summed; use one of {', '.join(map(str, CPP_DTYPES))}"
            )
        _check_contiguous(tensor)
        self._finish(self._all_reduce(self._group, CPP_DTYPES[tensor.dtype], tensor.data_ptr(), tensor.numel()))

    def gather(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Concatenate the ranks' contiguous tensors in the last dimension, of these sizes."""
        out = tensor.new_empty(*tensor.shape[:-1], sum(sizes))
        self._exchange(tensor, sizes, out.data_ptr())
        return out

    def give(self, tensor: torch.Tensor, sizes: Sequence[int]) -> None:
        """Give this rank's tensor to the `gather` of others, without waiting for them."""
        self._exchange(tensor, sizes, None)

    def _exchange(self, tensor: torch.Tensor, sizes: Sequence[int], out: int | None) -> None:
        _check_contiguous(tensor)
        if tensor.shape[-1] != sizes[self._group.rank]:
            raise ValueError(f"a tensor {list(tensor.shape)} of rank {self._group.rank}; the ranks' sizes are {sizes}")
        row_bytes = (_INT64 * len(sizes))(*(size * tensor.element_size() for size in sizes))
        rows = tensor.shape[:-1].numel()
        self._finish(self._gather(self._group, tensor.data_ptr(), rows, row_bytes, out))

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Replace a contiguous tensor by that of rank `source`, which has the same shape and dtype."""
        _check_contiguous(tensor)
        self._finish(self._broadcast(self._group, tensor.data_ptr(), tensor.nbytes, source))

    def end(self) -> None:
        """End the collectives of all ranks, now and later, from any thread."""
        self._end(self._group)

    def _finish(self, done: int) -> None:
        """Raise `ConnectionAbortedError` if the group has ended."""
        if not done:
            raise ConnectionAbortedError("the group of ranks has ended")


def _check_contiguous(tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"a tensor of strides {tensor.stride()} on {tensor.device}; it must be contiguous, on the CPU")
