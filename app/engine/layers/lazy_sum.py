"""Lazy sums: a layer's last residual is added by the norm that comes next."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch

from folio.app.compat.torch import tensor_without_memory


class LazySum(torch.Tensor):
    """`residual + update`, which is added by the first operation that reads it, once.

    `FusedRMSNorm` adds both in its own pass. Everything else sees the sum: torch calls `__torch_function__` for every
    function, method and attribute of a tensor, so code between two layers, or a layer that is not fused, needs to know
    nothing of it. The tensor has no memory of its own that anything else could read.

    Args:
        update, residual: of equal shape, dtype and device.
    """

    _parts: tuple[torch.Tensor, torch.Tensor] | None
    _total: torch.Tensor | None

    @staticmethod
    def __new__(cls, update: torch.Tensor, residual: torch.Tensor) -> LazySum:
        lazy = tensor_without_memory(cls, residual)
        lazy._parts, lazy._total = (update, residual), None
        return lazy

    def added_by(
        self, add: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor | None:
        """The second result of `add(update, residual)`, whose first is the sum; `None` if that is known already."""
        if self._parts is None:
            return None
        self._total, result = add(*self._parts)
        self._parts = None
        return result

    @property
    def total(self) -> torch.Tensor:
        """The sum."""
        if self._parts is not None:
            update, residual = self._parts
            self._total, self._parts = residual + update, None
        assert self._total is not None
        return self._total

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*evaluated(args), **evaluated(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """The same for calls that begin in C++."""
        return func(*evaluated(args), **evaluated(kwargs or {}))


def evaluated(value: Any) -> Any:
    """The value with the sum in place of every `LazySum`, also in lists, tuples, dictionaries and subclasses of them,
    at any depth. Containers without one are returned as they are, others are copied."""
    if isinstance(value, LazySum):
        return value.total
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
