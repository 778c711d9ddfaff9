"""Counts of a decode step: launches, copies and synchronisations that it would cost on a GPU, counted on any device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import folio.kernels.cpu.ops
import folio.kernels.cpu.provider
from folio.app.engine.execution.builder import Staging

# Calls that read a tensor's values on the host, and calls that make a tensor of the host's values.
_READS = frozenset({"cpu", "item", "tolist", "numpy", "nonzero"})
_UPLOADS = (torch.tensor, torch.from_numpy, torch.as_tensor, torch.frombuffer)


class Launches(TorchDispatchMode):
    """Counts operators that compute, each of them at least one kernel. Views and allocations launch nothing."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and "empty" not in func.__name__ and func.__name__ != "_unsafe_view.default"
        return func(*args, **(kwargs or {}))

    @contextmanager
    def of_kernels(self) -> Iterator[None]:
        """Count the calls of C++ functions, too, which models loaded within the context make."""
        with ExitStack() as undo:
            for module in (folio.kernels.cpu.ops, folio.kernels.cpu.provider):
                undo.enter_context(patch.object(module, "load_function", self._loaded(module.load_function)))
            yield

    def _loaded(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def load_counted(name: str, called: str, *args: Any, **settings: Any) -> Any:
            function = load(name, called, *args, **settings)
            if called.endswith("_bytes"):  # the size of a buffer
                return function

            def call(*arguments: Any) -> Any:
                self.count += 1
                return function(*arguments)

            return call

        return load_counted


@dataclass
class HostCalls:
    """What the host exchanges with tensors within the context.

    Attributes:
        uploads: tensors made of numbers of the host, and stagings of a plan; on a GPU each is a copy.
        read: addresses of the tensors whose values it read; on a GPU each is a wait, and a copy.
    """

    uploads: int = 0
    read: set[int] = field(default_factory=set)

    def __enter__(self) -> HostCalls:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: object, event: str, called: Any) -> None:
        if event == "call":
            self.uploads += getattr(frame, "f_code", None) is Staging.copy.__code__
        if event != "c_call":
            return
        if called in _UPLOADS:
            self.uploads += 1
        elif called.__name__ in _READS and isinstance(called.__self__, torch.Tensor):
            self.read.add(called.__self__.untyped_storage().data_ptr())
