"""Programmatic dependent launch: a kernel's programs start while the kernel before it drains.

The driver launches them once every program of the kernel before has called `start_next` or ended. A kernel waits with
`wait_for_previous` before it reads or writes anything but weights: the wait ends when the kernel before has ended and
what it wrote can be seen. Every kernel of a chain must wait, even one that reads nothing of its predecessor: for all
earlier kernels its successor relies on it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs

_CAPABILITY = (9, 0)
_OPTION = "launch_pdl"


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr) -> None:  # noqa: N803
    """Wait until the kernel before has ended and its writes can be read; nothing unless `DEPENDENT`."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def start_next(DEPENDENT: tl.constexpr) -> None:  # noqa: N803
    """Let the next kernel start once all programs have called this or ended; nothing unless `DEPENDENT`."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


def launch_options(dependent: bool) -> dict[str, bool]:
    """Options of a launch."""
    return {_OPTION: True} if dependent else {}


def unsupported(device: torch.device) -> str | None:
    """Why the device has no dependent launches; `None` if it has."""
    if knobs.runtime.interpret:
        return "Triton's interpreter runs one kernel at a time"
    if not hasattr(getattr(tl.extra, "cuda", None), "gdc_wait"):
        return f"Triton {triton.__version__} has no programmatic dependent launch; 3.6 has it"
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < _CAPABILITY:
        return f"{device} is not a CUDA device of compute capability 9.0"
    return None
