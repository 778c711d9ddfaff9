"""Block copies, for copy-on-write and for staging swaps."""

from __future__ import annotations

import ctypes
import importlib
import logging
from collections.abc import Callable

import torch

from folio.kernels.cpu.build import load_function
from folio.kernels.errors import KernelError

logger = logging.getLogger(__name__)

_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64


# (source, target, source rows, target rows): `target[target_rows[i]] = source[source_rows[i]]` for every i.
# Tensors `[num_blocks, words]` int64 with adjacent words and any row stride; they may be the same tensor if no row is
# both read and written. Rows `[n]` int64 on the same device, contiguous, not checked against the number of blocks.
CopyBlocks = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def select_block_copy(device: torch.device) -> CopyBlocks | None:
    """The one-pass copy for the device, Triton's or the CPU's; `None` without Triton or a compiler."""
    try:
        if device.type == "cpu":
            return CpuBlockCopy()
        copy: CopyBlocks = importlib.import_module("folio.kernels.triton.cache").copy_blocks
        return copy
    except (KernelError, ImportError) as error:
        logger.warning("no one-pass block copy; blocks are copied by indexing, in two passes: %s", error)
        return None


class CpuBlockCopy:
    """`CopyBlocks` on all processors (`csrc/copy.cpp`). Raises `KernelError` if it cannot be compiled."""

    def __init__(self) -> None:
        self._copy = load_function("copy", "folio_copy_blocks", ctypes.POINTER(_CopyCall))

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
        self._copy(call)


class _CopyCall(ctypes.Structure):
    """`CopyCall` of copy.cpp, field by field."""

    _fields_ = [
        *((name, _POINTER) for name in ("source", "target", "source_rows", "target_rows")),
        *((name, _INT64) for name in ("source_stride", "target_stride", "row_bytes", "count")),
    ]


def check_copy(
    source: torch.Tensor, target: torch.Tensor, source_rows: torch.Tensor, target_rows: torch.Tensor
) -> None:
    """Raise `ValueError` unless the tensors fit `CopyBlocks`."""
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
