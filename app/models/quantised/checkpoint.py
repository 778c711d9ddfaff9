"""Checkpoints whose weights stay packed."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from folio.app.errors import ModelError
from folio.app.models.gguf.checkpoint import GgufCheckpoint
from folio.app.models.gguf.folder import gguf_files
from folio.app.models.gguf.header import read_gguf
from folio.kernels import QuantisedWeight


class QuantisedCheckpoint(Protocol):
    """Weights by the names of the model's parameters in transformers. Nothing is read before it is asked for."""

    def names(self) -> frozenset[str]:
        """Names of all parameters that the checkpoint has."""

    def read(self, name: str) -> torch.Tensor | QuantisedWeight:
        """A weight, on the CPU: what is quantised has two dimensions. Raises `ModelError` if it is damaged."""


def open_checkpoint(folder: Path) -> QuantisedCheckpoint | None:
    """The weights of a folder that are packed; `None` if they are none. Raises `ModelError`."""
    if files := gguf_files(folder):
        try:
            return GgufCheckpoint(read_gguf(files[0]))
        except ValueError as error:
            raise ModelError(str(error)) from None
    return None
