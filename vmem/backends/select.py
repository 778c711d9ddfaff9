"""The memory backend of a device."""

from __future__ import annotations

import torch

from folio.vmem.backends.base import AccountedBackend, FenceQueue
from folio.vmem.backends.cuda import CudaBackend
from folio.vmem.backends.host import HostBackend
from folio.vmem.device_pages import DevicePages
from folio.vmem.errors import MapError


def select_backend(
    device: torch.device,
    *,
    capacity_bytes: int,
    headroom_bytes: int = 0,
    queue: FenceQueue | None = None,
    pages: DevicePages | None = None,
) -> AccountedBackend:
    """Create the backend of a CPU or a CUDA device.

    Args:
        capacity_bytes: the most that may be created on a CPU without `pages`.
        headroom_bytes: memory left free on a CUDA device for torch.
        queue: of a CPU whose work another thread does.
        pages: the device's memory, which other backends share.

    Raises:
        MapError: there is no such device here, or its driver cannot be used.
    """
    if device.type == "cpu":
        return HostBackend(capacity_bytes, queue, pages)
    if device.type != "cuda":
        raise MapError(f"there is no memory backend for {device.type}; choose cpu or cuda")
    if not torch.cuda.is_available():
        raise MapError("device cuda was asked for, but torch sees no CUDA device here")
    index = torch.cuda.current_device() if device.index is None else device.index
    return CudaBackend(index, headroom_bytes=headroom_bytes, pages=pages)
