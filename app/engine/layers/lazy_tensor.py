"""Tensors that are computed by the first operation that reads them."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch

from folio.app.compat.torch import tensor_without_memory


class LazyTensor(torch.Tensor):
    """A tensor whose value is computed when something reads it, once.

    torch calls `__torch_function__` for every function, method and attribute of a tensor, so code that reads one needs
    to know nothing of it. The tensor has no memory of its own that anything else could read.
    """

    _value: torch.Tensor | None

    @property
    def value(self) -> torch.Tensor:
        if self._value is None:
            self._value = self._computed()
        return self._value

    def _computed(self) -> torch.Tensor:
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*evaluated(args), **evaluated(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """The same for calls that begin in C++."""
        return func(*evaluated(args), **evaluated(kwargs or {}))


class LazySum(LazyTensor):
    """`residual + update`: a layer's last residual, which the norm that comes next adds in its own pass.

    Args:
        update, residual: of equal shape, dtype and device.
    """

    _parts: tuple[torch.Tensor, torch.Tensor] | None

    @staticmethod
    def __new__(cls, update: torch.Tensor, residual: torch.Tensor) -> LazySum:
        lazy = tensor_without_memory(cls, residual)
        lazy._parts, lazy._value = (update, residual), None
        return lazy

    def added_by(
        self, add: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor | None:
        """The second result of `add(update, residual)`, whose first is the sum; `None` if that is known already."""
        if self._parts is None:
            return None
        self._value, result = add(*self._parts)
        self._parts = None
        return result

    def _computed(self) -> torch.Tensor:
        assert self._parts is not None
        (update, residual), self._parts = self._parts, None
        return residual + update


def evaluated(value: Any) -> Any:
    """The argument with the value in place of every `LazyTensor`, also in lists, tuples, dictionaries and subclasses
    of them, at any depth. Containers without one are returned as they are, others are copied."""
    if isinstance(value, LazyTensor):
        return value.value
    if isinstance(value, (list, tuple)):
        items = [evaluated(item) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        if isinstance(value, tuple):
            make = getattr(type(value), "_make", type(value))  # named tuples take each item as an argument
            return make(items)
        value = copy.copy(value)
        value[:] = items
        return value
    if isinstance(value, dict):
        changed = {name: new for name, item in value.items() if (new := evaluated(item)) is not item}
        if changed:
            value = copy.copy(value)
            value.update(changed)
    return value
