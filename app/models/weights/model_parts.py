"""Parts of a model: everything that its modules refer to, the tensors and the rest."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

# Dictionaries of a module whose entries are attributes.
_OF_MODULES = ("_parameters", "_buffers", "_modules")
# Notes of transformers about loading, in which equal models differ.
_NOTES = {"_is_hf_initialized", "_use_kernels", "_weight_conversions"}
_PLAIN = (bool, int, float, str, torch.dtype)


def find_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(path, tensor) of every tensor that the model refers to, each once: parameters, buffers, packed weights, and
    those of modules and dataclasses in plain attributes. Tensors in closures and in C++ are not found."""
    return ((path, part) for path, part in _walk(model) if isinstance(part, torch.Tensor))


def fingerprint(model: nn.Module) -> str:
    """A digest of everything about a model but its tensors' values: equal for models that compute the same with equal
    tensors."""
    digest = hashlib.sha256()
    for path, part in _walk(model):
        if isinstance(part, _PLAIN):
            digest.update(f"{path} {part!r}\n".encode())
        elif not isinstance(part, torch.Tensor):
            digest.update(f"{path} {type(part).__module__}.{type(part).__qualname__}\n".encode())
    return digest.hexdigest()


def _walk(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(path, part) of tensors, modules, containers, dataclasses and plain values; each once, except plain values."""
    seen: set[int] = set()

    def visit(path: str, part: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(part, _PLAIN):
            yield path, part
            return
        is_walked = isinstance(part, torch.Tensor | nn.Module | Mapping | list | tuple) or (
            dataclasses.is_dataclass(part) and not isinstance(part, type | PreTrainedConfig)
        )
        if not is_walked or id(part) in seen:
            return
        seen.add(id(part))
        yield path, part
        if not isinstance(part, torch.Tensor):
            for name, child in _parts(part):
                yield from visit(f"{path}.{name}" if path else str(name), child)

    yield from visit("", model)


def _parts(part: Any) -> Iterator[tuple[Any, Any]]:
    """The named parts of a module, mapping, sequence or dataclass."""
    if isinstance(part, nn.Module):
        attributes = vars(part)
        for name in _OF_MODULES:
            yield from attributes[name].items()
        yield from ((name, value) for name, value in attributes.items() if name not in _NOTES.union(_OF_MODULES))
    elif isinstance(part, Mapping):
        yield from part.items()
    elif isinstance(part, list | tuple):
        yield from enumerate(part)
    else:
        yield from ((field.name, getattr(part, field.name)) for field in dataclasses.fields(part))
