"""Fusion record: which modules of a model were fused, to fuse the same model again before its weights are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from torch import nn

# What was learned from the behaviour of a module; plain values, for JSON.
Learned = dict[str, Any]


class FusionRecord:
    """The modules of a model that were fused, by path, each with what was learned from the original's behaviour. With
    it the same model can be fused again before its weights are read: nothing is computed or compared then.

    Attributes:
        learned: plain values, for JSON.
        is_known: whether the record is of an earlier fusion, so that nothing has to be compared.
        scope: whether the module at a path may be fused now.
    """

    def __init__(self) -> None:
        self.learned: dict[str, Learned] = {}
        self.is_known = False
        self.scope: Callable[[str], bool] = lambda _: True

    @classmethod
    def known(cls, learned: Mapping[str, Learned]) -> Self:
        """The record of an earlier fusion of the same model."""
        record = cls()
        record.learned, record.is_known = dict(learned), True
        return record

    def may_fuse(self, path: str) -> bool:
        return self.scope(path) and (not self.is_known or path in self.learned)

    def find(self, path: str) -> Learned | None:
        """What is known of a module; `None` if it has to be compared with its replacement."""
        return self.learned[path] if self.is_known else None


# (module, what is known of it) → its replacement, and what was learned; `None` if it stays.
_Fuse = Callable[[nn.Module, Learned | None], tuple[nn.Module, Learned] | None]


def replace_modules(parent: nn.Module, fuse: _Fuse, record: FusionRecord, prefix: str = "") -> int:
    """Replace the modules that `fuse` has a replacement for, the outermost first; return their number."""
    num_fused = 0
    for name in [name for name, _ in parent.named_children()]:  # a list of modules would keep replaced ones alive
        child, path = parent.get_submodule(name), f"{prefix}{name}"
        found = fuse(child, record.find(path)) if record.may_fuse(path) else None
        if found is None:
            num_fused += replace_modules(child, fuse, record, f"{path}.")
        else:
            fused, learned = found
            record.learned[path] = learned
            setattr(parent, name, fused)
            num_fused += 1
    return num_fused
