"""Triton without a device, in a process without its interpreter."""

from __future__ import annotations

import sys
from types import SimpleNamespace


def use_no_device() -> None:
    """Let Triton specialise and compile for an H100 that is not there; launches do nothing."""
    import triton
    from triton.backends.compiler import GPUTarget

    device_free = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        launcher_cls=lambda source, metadata: lambda *arguments: None,
        utils=SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": sys.maxsize},
            load_binary=lambda *arguments: (1, 0, 0, 0, 1024),
        ),
    )
    triton.runtime.driver.set_active(device_free)
