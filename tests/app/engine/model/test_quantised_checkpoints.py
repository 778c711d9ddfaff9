"""Models of quantised checkpoints compute what their dequantised weights do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from folio.app.engine.layers.linear import PackedLinear
from folio.kernels import CpuLinear
from tests.app.engine.model.quantised_kinds import KINDS, ROUNDED, load, logits_of
from tests.conftest import MakeCheckpoint


def logits(folder: Path) -> tuple[torch.Tensor, int]:
    """And the bytes of all linear layers."""
    module = load(folder)
    return logits_of(module), sum(part.packed.nbytes for part in module.modules() if isinstance(part, PackedLinear))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_dequantised_weights(kind: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    if CpuLinear().unsupported(torch.float32) is not None:
        pytest.skip("packed weights need a processor with AVX2 or NEON")
    quantise, quantization = KINDS[kind]
    source = checkpoint("llama")
    dense = load_file(source / "model.safetensors")
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in list(dense.items()):
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and tensor.ndim == 2 and "_proj" in name:
            tensors, dense[name] = quantise(tensor.float())
            packed |= {f"{module}.{part}": value.contiguous() for part, value in tensors.items()}
        else:
            packed[name] = tensor
    config = json.loads((source / "config.json").read_text())
    for folder, content, weights in (
        (tmp_path / "dense", config, {name: tensor.contiguous() for name, tensor in dense.items()}),
        (tmp_path / "packed", config | {"quantization_config": quantization}, packed),
    ):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(content))
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (expected, whole_bytes), (actual, packed_bytes) = logits(tmp_path / "dense"), logits(tmp_path / "packed")
    difference = ((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).median().item()
    assert difference < ROUNDED.get(kind, 1e-5), f"relative difference {difference:.1e}"
    assert packed_bytes < 0.6 * whole_bytes
