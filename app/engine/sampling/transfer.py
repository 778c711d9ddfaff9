"""Transfers: copies arrays to the device of the logits, and results back, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

# Alignment of packed arrays in bytes; views of wider types need their own.
_ALIGNMENT = 16


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on `device`: on a CPU they share the arrays' memory, elsewhere one copy from pinned memory
    is queued for all of them."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    packed = torch.empty(packed_bytes(arrays), dtype=torch.uint8, pin_memory=True)
    pack(arrays, packed)
    return unpack(packed.to(device, non_blocking=True), arrays)


def packed_bytes(arrays: Sequence[np.ndarray]) -> int:
    return sum(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)


def pack(arrays: Sequence[np.ndarray], packed: torch.Tensor) -> None:
    """Copy the arrays into `packed [packed_bytes(arrays)]` uint8."""
    target, offset = packed.numpy(), 0
    for array in arrays:
        target[offset : offset + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
        offset += packed_bytes([array])


def unpack(packed: torch.Tensor, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Views of `packed` with the types and shapes of the arrays."""
    views, offset = [], 0
    for array in arrays:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        views.append(packed[offset : offset + array.nbytes].view(dtype).view(array.shape))
        offset += packed_bytes([array])
    return views


class Readback:
    """A device tensor's copy on the host. On a CPU it is the tensor itself.

    Args:
        tensor: `[n]` on any device; its copy is queued now.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy, self._copied = tensor, None
        if tensor.device.type != "cpu":
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> np.ndarray:
        """The values, once the device has computed them."""
        if self._copied is not None:
            self._copied.synchronize()
        values: np.ndarray = self._copy.numpy()
        return values
