"""Experts in MXFP4, as gpt-oss has them; rows of gates and ups alternate, as in transformers' module.

blocks   uint8 [experts, outputs, inputs / 32, 16]   the lower half of a byte first
scales   uint8 [experts, outputs, inputs / 32]       powers of 2, 127 added
"""

from __future__ import annotations

import re

import torch

from folio.app.errors import ModelError
from folio.app.models.quantised.files import TensorFiles
from folio.app.models.quantised.gguf_blocks import mxfp4
from folio.app.models.quantised.packed import unpacked
from folio.app.models.quantised.share import Share
from folio.kernels import QuantisedWeight

_BLOCKS, _SCALES = "_blocks", "_scales"
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")


class Mxfp4Folder:
    """`QuantisedCheckpoint` of a folder of safetensors files. An expert's weights have names of their own."""

    def __init__(self, files: TensorFiles) -> None:
        self._files = files
        stems = [name.removesuffix(_BLOCKS) for name in files.names() if name.endswith(_BLOCKS)]
        packed = {stem + ending for stem in stems for ending in (_BLOCKS, _SCALES)}
        self._names = (files.names() - packed) | {
            f"{path}.{expert}.{leaf}.weight"
            for path, _, leaf in (stem.rpartition(".") for stem in stems)
            for expert in range(files.shape(f"{path}.{leaf}{_BLOCKS}")[0])
        }

    def names(self) -> frozenset[str]:
        return self._names

    def read(self, name: str, share: Share | None = None) -> torch.Tensor | QuantisedWeight:
        if not (found := _EXPERT.fullmatch(name)):
            return self._files.share(name, share)
        stem, expert = f"{found[1]}.{found[3]}", int(found[2])
        blocks, scales = (self._files.bytes_of(stem + ending, expert) for ending in (_BLOCKS, _SCALES))
        for ending, part, rank in ((_BLOCKS, blocks, 3), (_SCALES, scales, 2)):
            if part.ndim != rank or part.shape[:2] != blocks.shape[:2]:
                raise ModelError(f"{self._files.folder}: {stem}{ending} has the shape {list(part.shape)} of an expert")
        if blocks.shape[2] != 16:
            raise ModelError(f"{self._files.folder}: {stem}{_BLOCKS} has blocks of {blocks.shape[2]} bytes, not of 16")
        codes = unpacked(blocks.view(torch.int32).flatten(1), 4)
        try:
            return mxfp4(codes.view(*blocks.shape[:2], 32).numpy(), scales.numpy())
        except ValueError as error:
            raise ModelError(f"{self._files.folder}: {stem}{_SCALES} has {error}") from None
