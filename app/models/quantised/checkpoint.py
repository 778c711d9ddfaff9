"""Checkpoints whose weights stay packed."""

from __future__ import annotations

from typing import Protocol

import torch

from folio.kernels import QuantisedWeight


class QuantisedCheckpoint(Protocol):
    """Weights by the names of the model's parameters in transformers. Nothing is read before it is asked for."""

    def names(self) -> frozenset[str]:
        """Names of all parameters that the checkpoint has."""

    def read(self, name: str) -> torch.Tensor | QuantisedWeight:
        """A weight, on the CPU: what is quantised has two dimensions. Raises `ModelError` if it is damaged."""
