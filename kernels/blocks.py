"""Copying blocks of a cache: for copy-on-write, and to and from where swaps are staged."""

from __future__ import annotations

import ctypes
import importlib
import logging
from typing import Protocol

import torch

from kernels.cpu.build import load_library
from kernels.provider import KernelError

logger = logging.getLogger(__name__)

_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64


class CopyBlocks(Protocol):
    """`target[target_rows[i]] = source[source_rows[i]]` for every i, in one pass.

    `source`, `target` `[num_blocks, words]` int64 with adjacent words and any row stride; they may be the same tensor
    if no row is read that is written. `source_rows`, `target_rows` `[n]` int64 on the same device, not checked against
    the number of blocks.

    Raises:
        ValueError: the tensors are not that.
    """

    def __call__(
        self, source: torch.Tensor, target: torch.Tensor, source_rows: torch.Tensor, target_rows: torch.Tensor
    ) -> None: ...


def select_block_copy(device: torch.device) -> CopyBlocks:
    """The fastest copy for the device: Triton's, the CPU's, or by torch's indexing where the other is not to be had."""
    try:
        if device.type == "cpu":
            return CpuBlockCopy()
        copy: CopyBlocks = importlib.import_module("kernels.triton.copy").copy_blocks
        return copy
    except (KernelError, ImportError) as error:
        logger.warning("blocks are copied by indexing, in two passes: %s", error)
        return copy_by_index


def copy_by_index(
    source: torch.Tensor, target: torch.Tensor, source_rows: torch.Tensor, target_rows: torch.Tensor
) -> None:
    """`CopyBlocks` in plain torch."""
    check_copy(source, target, source_rows, target_rows)
    target.index_copy_(0, target_rows, source.index_select(0, source_rows))


class CpuBlockCopy:
    """`CopyBlocks` by all processors (`csrc/copy.cpp`).

    Raises:
        KernelError: there is no compiler, or it failed.
    """

    def __init__(self) -> None:
        self._library = load_library("copy")
        self._library.folio_copy_blocks.argtypes = [ctypes.POINTER(_CopyCall)]
        self._library.folio_copy_blocks.restype = None

    def __call__(
        self, source: torch.Tensor, target: torch.Tensor, source_rows: torch.Tensor, target_rows: torch.Tensor
    ) -> None:
        check_copy(source, target, source_rows, target_rows)
        call = _CopyCall(
            *(tensor.data_ptr() for tensor in (source, target, source_rows, target_rows)),
            8 * source.stride(0),
            8 * target.stride(0),
            8 * source.shape[1],
            len(source_rows),
        )
        self._library.folio_copy_blocks(call)


class _CopyCall(ctypes.Structure):
    """`CopyCall` of copy.cpp, field by field."""

    _fields_ = [
        *((name, _POINTER) for name in ("source", "target", "source_rows", "target_rows")),
        *((name, _INT64) for name in ("source_stride", "target_stride", "row_bytes", "count")),
    ]


def check_copy(
    source: torch.Tensor, target: torch.Tensor, source_rows: torch.Tensor, target_rows: torch.Tensor
) -> None:
    """Raise `ValueError` unless the tensors are what `CopyBlocks` takes."""
    for name, blocks in (("source", source), ("target", target)):
        if blocks.ndim != 2 or blocks.dtype != torch.int64 or (blocks.shape[1] > 1 and blocks.stride(1) != 1):
            raise ValueError(
                f"{name} must be an int64 tensor [blocks, words] with adjacent words, "
                f"got {list(blocks.shape)} {blocks.dtype} with strides {blocks.stride()}"
            )
    for name, rows in (("source_rows", source_rows), ("target_rows", target_rows)):
        if rows.ndim != 1 or rows.dtype != torch.int64 or not rows.is_contiguous():
            raise ValueError(f"{name} must be a contiguous int64 vector, got {list(rows.shape)} {rows.dtype}")
    if target.shape[1] != source.shape[1] or source_rows.shape != target_rows.shape:
        raise ValueError(
            f"cannot copy {len(source_rows)} blocks of {source.shape[1]} words to {len(target_rows)} of "
            f"{target.shape[1]} words"
        )
