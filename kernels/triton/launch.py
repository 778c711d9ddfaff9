"""Prepared launches: a kernel's arguments bound once, and some tensors replaced for each launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from triton.runtime.jit import JITFunction

_ALIGNMENT = 16  # bytes, of addresses from which kernels load vectors
_MAX_VARIANTS = 1024


class Kernel:
    """A kernel, and its variants compiled so far.

    Triton binds and specialises every argument of every launch, and asks the driver about each tensor's address, which
    takes tens of microseconds. Here that happens once for equal arguments, and launches pass addresses.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self._compiled: dict[tuple[object, ...], Any] = {}

    def prepare(self, arguments: Mapping[str, Any], changing: Sequence[str], **options: int) -> Launch:
        """A launch with these arguments.

        Args:
            arguments: all of the kernel's, by name, as they are at the first launch. Tensors that do not change are
                kept.
            changing: names of the tensors that each launch replaces, by tensors of equal dtype on the same device.
            options: `num_warps` and `num_stages`.

        Raises:
            ValueError: the tensors are on several devices.
        """
        tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
        devices = {tensor.device for tensor in tensors}
        if len(devices) != 1:
            raise ValueError(f"a kernel's tensors are on several devices: {', '.join(sorted(map(str, devices)))}")
        compiled = None
        if isinstance(self.function, JITFunction) and all(_aligned(arguments[name]) for name in changing):
            # Finer than the keys of Triton, which distinguishes numbers by divisibility only.
            key = *devices, *options.items(), *map(_kind, arguments.values())
            compiled = self._compiled.get(key)
            if compiled is None:
                if len(self._compiled) >= _MAX_VARIANTS:
                    self._compiled.clear()  # Triton has them all
                with torch.cuda.device_of(tensors[0]):
                    compiled = self._compiled[key] = self.function.warmup(grid=(1, 1, 1), **arguments, **options)
        return Launch(self.function, compiled, arguments, changing, options)


class Launch:
    """A launch of a kernel, of which some tensors are replaced each time."""

    def __init__(
        self,
        function: Any,
        compiled: Any,
        arguments: Mapping[str, Any],
        changing: Sequence[str],
        options: Mapping[str, int],
    ) -> None:
        self._function, self._changing, self._options = function, changing, options
        # Not the first layer's tensors: they would be kept as long as this launch.
        self._others = {name: value for name, value in arguments.items() if name not in changing}
        self._device = torch.cuda.device_of(arguments[changing[0]])
        self._compiled = compiled
        if compiled is not None:
            self._values = [_address(arguments[name]) for name in function.arg_names]
            self._places = [function.arg_names.index(name) for name in changing]

    def __call__(self, grid: tuple[int, int, int], *tensors: torch.Tensor, **numbers: int) -> None:
        """Launch with these tensors in place of the changing ones, in their order, and these numbers, for which the
        kernel is not specialised."""
        with self._device:
            if self._compiled is not None:
                values, bits = self._values, 0
                for place, tensor in zip(self._places, tensors, strict=True):
                    address = values[place] = tensor.data_ptr()
                    bits |= address
                for name, number in numbers.items():
                    values[self._function.arg_names.index(name)] = number
                if not bits % _ALIGNMENT:
                    self._compiled[grid](*values)
                    return
            # The interpreter, or addresses of which the compiled kernel would assume too much.
            replaced = zip(self._changing, tensors, strict=True)
            self._function[grid](**(self._others | dict(replaced) | numbers), **self._options)


def _kind(value: Any) -> object:
    return (value.dtype, _aligned(value)) if isinstance(value, torch.Tensor) else value


def _aligned(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % _ALIGNMENT == 0


def _address(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value
