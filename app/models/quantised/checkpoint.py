"""Checkpoints whose weights stay packed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

import torch

from folio.app.config.quantised import READ_AS_BFLOAT16, expert_fault, read_scheme
from folio.app.errors import ModelError
from folio.app.models.gguf.files import read_gguf
from folio.app.models.gguf.folder import gguf_files
from folio.app.models.quantised import awq, compressed, gptq, nf4
from folio.app.models.quantised import fp8 as float8
from folio.app.models.quantised.files import TensorFiles
from folio.app.models.quantised.gguf import GgufCheckpoint
from folio.app.models.quantised.mxfp4 import Mxfp4Folder
from folio.app.models.quantised.packed import PackedFolder
from folio.app.models.quantised.share import Share
from folio.kernels import QuantisedWeight

_LAYOUTS = {
    "gptq": gptq.LAYOUT,
    "awq": awq.LAYOUT,
    "compressed-tensors": compressed.LAYOUT,
    "fp8": float8.LAYOUT,
    "bitsandbytes": nf4.LAYOUT,
}


class QuantisedCheckpoint(Protocol):
    """Weights by the names of the model's parameters in transformers. Nothing is read before it is asked for."""

    def names(self) -> frozenset[str]:
        """Names of all parameters that the checkpoint has."""

    def read(self, name: str, share: Share | None = None) -> torch.Tensor | QuantisedWeight:
        """A weight, on the CPU: what is quantised has two dimensions. Raises `ModelError` if it is damaged.

        Args:
            share: what the caller needs of it. Readers that can, read and return this alone.
        """


def open_checkpoint(folder: Path, *, floats: bool = True) -> QuantisedCheckpoint | None:
    """The checkpoint of a folder; `None` if its weights are not quantised, or transformers turns them into bfloat16.

    Args:
        floats: read weights in FP8 and MXFP4, too, which transformers can.

    Raises:
        ModelError: its config.json or its files are damaged, or of a kind that is not read.
    """
    path = folder / "config.json"
    try:
        if files := gguf_files(folder):
            return GgufCheckpoint(read_gguf(files[0]))
        config = json.loads(path.read_text(encoding="utf-8"))
        quantization = config.get("quantization_config") if isinstance(config, dict) else None
        scheme = None if quantization is None else read_scheme(quantization)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: {error}") from None
    if scheme is None or (scheme.method in READ_AS_BFLOAT16 and not floats):
        return None
    tensors = TensorFiles(folder)
    if (fault := expert_fault(scheme.method, tensors.names())) is not None:
        if scheme.method in READ_AS_BFLOAT16:
            return None
        raise ModelError(f"{folder}: {fault}")
    return Mxfp4Folder(tensors) if scheme.method == "mxfp4" else PackedFolder(tensors, _LAYOUTS[scheme.method], scheme)
