"""Prepared launches: a kernel's arguments bound once, and some tensors replaced for each launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_ALIGNMENT = 16  # bytes, of addresses from which kernels load vectors


class Launch:
    """A kernel, compiled for its arguments.

    Triton binds and specialises every argument of every launch, and asks the driver about each tensor's address. Here
    that happens once; a launch passes addresses.

    Args:
        arguments: all of the kernel's, by name, as they are at the first launch. Their tensors are kept.
        changing: names of the tensors that each launch replaces, by tensors of equal dtype on the same device.
        options: `num_warps` and `num_stages`.

    Raises:
        ValueError: the tensors are on several devices.
    """

    def __init__(self, kernel: Any, arguments: Mapping[str, Any], changing: Sequence[str], **options: int) -> None:
        self._kernel, self._arguments, self._changing, self._options = kernel, dict(arguments), changing, options
        tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
        devices = {tensor.device for tensor in tensors}
        if len(devices) != 1:
            raise ValueError(f"a kernel's tensors are on several devices: {', '.join(sorted(map(str, devices)))}")
        self._device = torch.cuda.device_of(tensors[0])
        self._run: Any = None
        replaced = [arguments[name] for name in changing]
        if isinstance(kernel, JITFunction) and not any(tensor.data_ptr() % _ALIGNMENT for tensor in replaced):
            with self._device:
                compiled = kernel.warmup(grid=(1, 1, 1), **arguments, **options)
                self._run = compiled.run  # loads the kernel onto the device
            self._binary = compiled.function, compiled.packed_metadata
            self._values = [_address(arguments[name]) for name in kernel.arg_names]
            self._places = [kernel.arg_names.index(name) for name in changing]

    def __call__(self, grid: tuple[int, int, int], *tensors: torch.Tensor) -> None:
        """Launch with these tensors in place of the changing ones, in their order."""
        with self._device:
            if self._run is not None:
                values, bits = self._values, 0
                for place, tensor in zip(self._places, tensors, strict=True):
                    address = values[place] = tensor.data_ptr()
                    bits |= address
                if not bits % _ALIGNMENT:
                    stream = driver.active.get_current_stream(driver.active.get_current_device())
                    # `compiled[grid](…)` without the arguments for profilers' hooks, which took 3 of its 4 us.
                    self._run(*grid, stream, *self._binary, None, None, None, *values)
                    return
            # The interpreter, or addresses of which the compiled kernel would assume too much.
            replaced = zip(self._changing, tensors, strict=True)
            self._kernel[grid](**(self._arguments | dict(replaced)), **self._options)


def _address(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value
