"""A rank's share of a weight: what is read of the file, and that it is the part of the whole weight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from folio.app.models.gguf.files import read_gguf
from folio.app.models.quantised import files
from folio.app.models.quantised.files import TensorFiles
from folio.app.models.quantised.gguf import GgufCheckpoint
from folio.app.models.quantised.share import Share
from folio.kernels import QuantisedWeight
from tests.app.models.gguf.files import Tensor, tiny_llama, write_gguf

LAYER = "model.layers.0."


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each read."""
    sizes, read = list[int](), files.read_bytes

    def noted(path: Path, offset: int, num_bytes: int, name: str) -> torch.Tensor:
        sizes.append(num_bytes)
        return read(path, offset, num_bytes, name)

    monkeypatch.setattr(files, "read_bytes", noted)
    return sizes


def values(weight: torch.Tensor | QuantisedWeight) -> torch.Tensor:
    return weight.dequantised() if isinstance(weight, QuantisedWeight) else weight


@pytest.mark.parametrize(
    ("name", "dim", "spans", "share"),
    [
        ("model.embed_tokens", 0, ((100, 200),), 100 / 264),
        (f"{LAYER}self_attn.q_proj", 0, ((32, 64),), 1 / 2),  # two heads, whose rows are in pairs
        (f"{LAYER}self_attn.k_proj", 0, ((0, 16),), 1 / 2),
        (f"{LAYER}mlp.up_proj", 0, ((8, 24), (56, 72)), 1 / 3),
        (f"{LAYER}mlp.down_proj", 1, ((32, 96),), 1),
        (f"{LAYER}self_attn.o_proj", 1, ((16, 48),), 1),  # blocks would be cut: the caller decides
    ],
)
def test_gguf(
    name: str, dim: int, spans: tuple[tuple[int, int], ...], share: float, tmp_path: Path, num_read: list[int]
) -> None:
    settings, tensors = tiny_llama(1)
    for leaf in ("ffn_up", "ffn_down", "attn_q", "attn_output"):
        shape = tensors[f"blk.0.{leaf}.weight"].shape
        blocks = torch.randint(0, 64, (shape[0] * shape[1] // 32, 34), dtype=torch.uint8)
        tensors[f"blk.0.{leaf}.weight"] = Tensor("Q8_0", shape, blocks.numpy().tobytes())
    checkpoint = GgufCheckpoint(read_gguf(write_gguf(tmp_path / "m.gguf", settings, tensors)))
    whole = values(checkpoint.read(f"{name}.weight"))
    [num_bytes] = num_read
    num_read.clear()
    part = values(checkpoint.read(f"{name}.weight", Share(tuple(whole.shape), dim, spans)))
    assert sum(num_read) == round(num_bytes * share)
    if name.endswith("o_proj"):
        spans = ((0, whole.shape[1]),)
    torch.testing.assert_close(part, torch.cat([whole.narrow(dim, a, b - a) for a, b in spans], dim), rtol=0, atol=0)
    other = Share((7, 7), dim, spans)
    torch.testing.assert_close(values(checkpoint.read(f"{name}.weight", other)), whole, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_of_safetensors(dtype: torch.dtype, tmp_path: Path, num_read: list[int]) -> None:
    tensors = {"a": torch.randn(10, 6).to(dtype), "b": torch.randn(8).to(dtype)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = TensorFiles(tmp_path)
    rows = ((1, 3), (6, 10))
    part = found.share("a", Share((10, 6), 0, rows))
    if dtype == torch.float64:  # read whole
        assert torch.equal(part, tensors["a"])
        return
    assert torch.equal(part, torch.cat([tensors["a"][1:3], tensors["a"][6:]]))
    assert sum(num_read) == 6 * 6 * dtype.itemsize
    assert torch.equal(found.share("b", Share((8,), 0, ((4, 8),))), tensors["b"][4:])
    assert torch.equal(found.share("a", Share((10, 6), 1, ((0, 3),))), tensors["a"])
    assert torch.equal(found.share("a", None), tensors["a"])
