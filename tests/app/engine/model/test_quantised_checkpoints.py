"""Models of quantised checkpoints compute what their dequantised weights do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from folio.app.engine.layers.linear import PackedLinear
from folio.kernels import CpuLinear
from tests.app.engine.model.quantised_checkpoints import KINDS, ROUNDED, load, logits_of, write_quantised
from tests.conftest import MakeCheckpoint


def logits(folder: Path) -> tuple[torch.Tensor, int]:
    """And the bytes of all linear layers."""
    module = load(folder)
    return logits_of(module), sum(part.packed.nbytes for part in module.modules() if isinstance(part, PackedLinear))


@pytest.mark.parametrize(
    ("name", "kind"), [*(("llama", kind) for kind in KINDS), ("lfm2", "int4"), ("falcon_h1", "int8")]
)
def test_logits_are_those_of_the_dequantised_weights(
    name: str, kind: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    if CpuLinear().unsupported(torch.float32) is not None:
        pytest.skip("packed weights need a processor with AVX2 or NEON")
    packed, dense = write_quantised(checkpoint(name), kind, tmp_path)
    (expected, whole_bytes), (actual, packed_bytes) = logits(dense), logits(packed)
    difference = ((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).median().item()
    assert difference < ROUNDED.get(kind, 1e-5), f"relative difference {difference:.1e}"
    assert packed_bytes < (0.75 if name == "lfm2" else 0.6) * whole_bytes  # some of its layers stay plain
