"""Weights in GGUF files, by the names of the model's parameters in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from folio.app.errors import ModelError
from folio.app.models.gguf.architectures import Undo, parameters
from folio.app.models.gguf.header import GgufHeader, GgufTensor
from folio.app.models.quantised.files import read_spans
from folio.app.models.quantised.gguf_blocks import decode
from folio.app.models.quantised.share import Share
from folio.kernels import QuantisedWeight

_GATE_BIAS, _UP_BIAS = ".experts.gate_up_proj_bias", ".experts.up_proj_bias"
# Of gpt-oss; that of the ups is read with that of the gates.
_BIASES = {"gate_proj.bias": "gate_up_proj_bias", "up_proj.bias": "up_proj_bias", "down_proj.bias": "down_proj_bias"}


class GgufCheckpoint:
    """A `QuantisedCheckpoint` of GGUF files.

    The files are read and not mapped: truncation of a mapped file would end the process.

    Raises:
        ValueError: the architecture, a tensor or its type is unknown.
    """

    def __init__(self, header: GgufHeader) -> None:
        self._parameters = {
            name: (tensor, undo) for name, whole, undo in parameters(header) for name, tensor in _by_expert(name, whole)
        }
        heads = header.settings.get(f"{header.settings['general.architecture']}.attention.head_count")
        key_value = header.settings.get(f"{header.settings['general.architecture']}.attention.head_count_kv", heads)
        self._num_heads = {"pairs of q": heads, "pairs of k": key_value}

    def names(self) -> frozenset[str]:
        return frozenset(self._parameters)

    def read(self, name: str, share: Share | None = None) -> torch.Tensor | QuantisedWeight:
        tensor, undo = self._parameters[name]
        rows: tuple[tuple[int, int], ...] = ((0, tensor.shape[0]),)
        columns: tuple[int, int] | None = None
        if share is not None and share.whole == tensor.shape and not name.endswith(_GATE_BIAS):
            rows, columns = (share.spans, None) if share.dim == 0 else (rows, share.spans[0])
        data = read_spans(tensor.file, tensor.offset, tensor.num_bytes // tensor.shape[0], rows, tensor.name)
        shape = (sum(end - start for start, end in rows), *tensor.shape[1:])
        try:
            weight = decode(tensor.kind, data.numpy(), shape, columns)
        except ValueError as error:
            raise ModelError(f"{tensor.file}: {tensor.name!r} has {error}") from None
        if name.endswith(_GATE_BIAS):  # gpt-oss, whose gates and ups alternate in transformers
            up = self.read(name.replace(_GATE_BIAS, _UP_BIAS))
            if not (isinstance(weight, torch.Tensor) and isinstance(up, torch.Tensor) and up.shape == weight.shape):
                raise ModelError(f"{tensor.file} has biases of experts that do not fit: {tensor.name!r}")
            return torch.stack((weight, up), -1).flatten(1)
        return weight if undo is None else self._undone(tensor, weight, undo)

    def _undone(
        self, tensor: GgufTensor, weight: torch.Tensor | QuantisedWeight, undo: Undo
    ) -> torch.Tensor | QuantisedWeight:
        if undo == "plus one":
            if isinstance(weight, QuantisedWeight):
                raise ModelError(f"{tensor.file} has the norm {tensor.name!r} in {tensor.kind}, and must have it dense")
            return weight.float() - 1
        heads, outputs = self._num_heads[undo], weight.shape[0]
        if isinstance(heads, int):
            heads = heads * outputs // tensor.shape[0]  # a share has whole ones
        if not isinstance(heads, int) or not heads or outputs % (2 * heads):
            raise ModelError(f"{tensor.file} has {outputs} rows in {tensor.name!r} for {heads} heads")
        rows = torch.arange(outputs).view(heads, -1, 2).transpose(1, 2).reshape(-1)
        return weight.select(rows) if isinstance(weight, QuantisedWeight) else weight[rows]


def _by_expert(name: str, tensor: GgufTensor) -> Iterator[tuple[str, GgufTensor]]:
    """Of experts, which are one tensor, each one's weight, and all biases; of others the tensor itself."""
    stem, is_experts, leaf = name.partition(".*.")
    if name.endswith("shared_expert_gate.weight"):
        yield name, replace(tensor, shape=(1, *tensor.shape[-1:]))
    elif not is_experts:
        yield name, tensor
    elif leaf.endswith(".bias"):
        yield f"{stem}.{_BIASES[leaf]}", tensor
    elif len(tensor.shape) != 3:
        raise ValueError(f"{tensor.file} has the experts {tensor.name!r} in {len(tensor.shape)} dimensions, not 3")
    else:
        count, *shape = tensor.shape
        size = tensor.num_bytes // count
        for expert in range(count):
            one = replace(tensor, shape=tuple(shape), offset=tensor.offset + expert * size, num_bytes=size)
            yield f"{stem}.{expert}.{leaf}", one
