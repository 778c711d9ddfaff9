"""Weights in GGUF files, by the names of the model's parameters in transformers."""

from __future__ import annotations

import os

import numpy as np
import torch

from folio.app.errors import ModelError
from folio.app.models.gguf.architectures import Undo, parameters
from folio.app.models.gguf.header import GgufHeader, GgufTensor
from folio.app.models.quantised.gguf_blocks import Bytes, decode
from folio.kernels import QuantisedWeight


class GgufCheckpoint:
    """A `QuantisedCheckpoint` of GGUF files.

    The files are read and not mapped: truncation of a mapped file would end the process.

    Raises:
        ValueError: the architecture, a tensor or its type is unknown.
    """

    def __init__(self, header: GgufHeader) -> None:
        self._parameters = {name: (tensor, undo) for name, tensor, undo in parameters(header)}
        heads = header.settings.get(f"{header.settings['general.architecture']}.attention.head_count")
        key_value = header.settings.get(f"{header.settings['general.architecture']}.attention.head_count_kv", heads)
        self._num_heads = {"pairs of q": heads, "pairs of k": key_value}

    def names(self) -> frozenset[str]:
        return frozenset(self._parameters)

    def read(self, name: str) -> torch.Tensor | QuantisedWeight:
        tensor, undo = self._parameters[name]
        weight = decode(tensor.kind, _read(tensor), tensor.shape)
        return weight if undo is None else self._undone(tensor, weight, undo)

    def _undone(
        self, tensor: GgufTensor, weight: torch.Tensor | QuantisedWeight, undo: Undo
    ) -> torch.Tensor | QuantisedWeight:
        if undo == "plus one":
            if isinstance(weight, QuantisedWeight):
                raise ModelError(f"{tensor.file} has the norm {tensor.name!r} in {tensor.kind}, and must have it dense")
            return weight.float() - 1
        heads, outputs = self._num_heads[undo], weight.shape[0]
        if not isinstance(heads, int) or not heads or outputs % (2 * heads):
            raise ModelError(f"{tensor.file} has {outputs} rows in {tensor.name!r} for {heads} heads")
        rows = torch.arange(outputs).view(heads, -1, 2).transpose(1, 2).reshape(-1)
        return weight.select(rows) if isinstance(weight, QuantisedWeight) else weight[rows]


def _read(tensor: GgufTensor) -> Bytes:
    """The tensor's bytes. Raises `ModelError`."""
    data = np.empty(tensor.num_bytes, np.uint8)
    rest, offset = data.data, tensor.offset
    try:
        fd = os.open(tensor.file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            while rest:
                if not (count := os.preadv(fd, [rest], offset)):
                    raise ModelError(f"{tensor.file} was truncated: it ends at byte {offset} within {tensor.name!r}")
                rest, offset = rest[count:], offset + count
        finally:
            os.close(fd)
    except OSError as error:
        raise ModelError(f"{tensor.file} cannot be read: {error.strerror}") from error
    return data
