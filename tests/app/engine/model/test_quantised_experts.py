"""Quantised experts compute what their dequantised weights do, and stay packed."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
from torch import nn

from folio.app.config.engine import EngineConfig
from folio.app.engine.layers.experts import ExpertProduct, PackedExperts, experts_of, projections_of
from folio.app.engine.model import stored_module
from folio.app.engine.model.loader import load_model
from folio.app.engine.model.quantised_experts import ExpertReader
from folio.app.errors import ModelError
from folio.app.models.quantised.share import Share
from folio.app.models.weights.store import WeightStore
from folio.kernels import CpuLinear, QuantisedWeight, quantise
from tests.app.engine.model.quantised_checkpoints import KINDS, ROUNDED, load, logits_of, logits_of_ranks, write_mixture
from tests.conftest import EXPERTS, SMALL, MakeCheckpoint

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", SMALL | EXPERTS | {"head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen2_moe": ("qwen2_moe", SMALL | EXPERTS),
    "mixtral": ("mixtral", SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "gpt_oss",
        SMALL | {"head_dim": 32, "sliding_window": 48, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1, "mlp_only_layers": [], "layer_types": ["full_attention"]}
# Of an expert: two ranks have whole groups of them.
WIDE = {"moe_intermediate_size": 64, "intermediate_size": 64}


@pytest.fixture(autouse=True)
def products() -> None:
    if reason := CpuLinear().unsupported(torch.float32):
        pytest.skip(reason)


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        *(("qwen3_moe", kind) for kind in KINDS),
        ("qwen2_moe", "int4"),
        ("mixtral", "gptq"),
        ("gpt_oss", "mxfp4"),
    ],
)
def test_logits_are_those_of_the_dequantised_experts(
    model: str, kind: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    name, settings = MODELS[model]
    dense, packed = write_mixture(checkpoint(name, **settings), tmp_path, kind)
    expected = load(dense)
    for dtype, bound in (("float32", ROUNDED.get(kind, 1e-5)), ("bfloat16", 0.2)):
        actual = load(packed, dtype=dtype)
        experts = [part for part in actual.modules() if isinstance(part, PackedExperts)]
        assert experts
        assert not any(p.ndim == 3 for p in actual.parameters())
        assert all(part.packed.is_quantised for part in actual.modules() if isinstance(part, ExpertProduct))
        logits = logits_of(actual), logits_of(expected)
        assert (difference := _difference(*logits)) < bound, f"relative difference {difference:.1e} in {dtype}"
        if bound < 1e-4:
            assert torch.equal(*(each.argmax(-1) for each in logits))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("model", ["qwen3_moe", "gpt_oss"])
@torch.inference_mode()
def test_experts_are_quantised_at_load(model: str, bits: Literal[4, 8], checkpoint: MakeCheckpoint) -> None:
    """`quantization: int8 | int4` computes with the values that the codes stand for."""
    name, settings = MODELS[model]
    plain, folder = [], checkpoint(name, **settings)
    for path, experts in experts_of(load(folder)):
        for projection in projections_of(experts):
            weight = getattr(experts, projection)
            for one in weight.data:
                matrix = one.t() if experts.is_transposed else one
                matrix.copy_(quantise(matrix, bits).dequantised())
        plain.append((path, experts))
    found = load(folder, quantization=f"int{bits}")
    x, chosen = torch.randn(9, 64), torch.randint(0, 4, (9, 2))
    weights = torch.rand(9, 2)
    for path, experts in plain:
        packed = found.get_submodule(path)
        assert isinstance(packed, PackedExperts)
        torch.testing.assert_close(packed(x, chosen, weights), experts(x, chosen, weights), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "kind"), [("gpt_oss", "mxfp4"), ("qwen3_moe", "gptq"), ("qwen3_moe", "fp8"), ("mixtral", "awq")]
)
@torch.inference_mode()
def test_products_of_cuda(
    model: str, kind: str, checkpoint: MakeCheckpoint, triton_products: None, tmp_path: Path
) -> None:
    """From the checkpoint, and from the stored file of the first start; float8 stays what it is."""
    name, settings = MODELS[model]
    dense, packed = write_mixture(checkpoint(name, **settings | ONE_LAYER), tmp_path, kind)
    [(path, experts)] = experts_of(load(dense))
    x, chosen, shares = torch.randn(9, 64).bfloat16(), torch.randint(0, 4, (9, 2)), torch.rand(9, 2)
    expected, found = experts(x.float(), chosen, shares), []
    config = EngineConfig(model=str(packed), skip_tokenizer_init=True).on_device("cpu")
    for _ in range(2):
        loaded = load_model(config, weights=WeightStore(tmp_path / "weights"))
        module: Any = loaded.module.get_submodule(path)
        products = [product for product in module.children() if isinstance(product, ExpertProduct)]
        parts = [part for product in products for part in product.packed.parts]
        assert {part.codes.is_floating_point() for part in parts} == {kind == "fp8"}
        found.append(module(x, chosen, shares.bfloat16()).float())
        assert loaded.weights is not None
        loaded.weights.close()
    assert torch.equal(*found)
    assert (difference := _difference(found[0], expected)) < 0.02, f"relative difference {difference:.1e}"


@torch.inference_mode()
def test_quantised_at_load_on_cuda(checkpoint: MakeCheckpoint, triton_products: None) -> None:
    """In groups of 128."""
    name, settings = MODELS["qwen3_moe"]
    folder = checkpoint(name, **settings | ONE_LAYER)
    [(path, experts)] = experts_of(load(folder))
    packed = load(folder, dtype="bfloat16", quantization="int8").get_submodule(path)
    x, chosen, shares = torch.randn(9, 64).bfloat16(), torch.randint(0, 4, (9, 2)), torch.rand(9, 2)
    assert isinstance(packed, PackedExperts)
    difference = _difference(packed(x, chosen, shares.bfloat16()), experts(x.float(), chosen, shares))
    assert difference < 0.03, f"relative difference {difference:.1e}"


class Weights(dict[str, torch.Tensor | QuantisedWeight]):
    """A checkpoint."""

    def names(self) -> frozenset[str]:
        return frozenset(self)

    def read(self, name: str, share: Share | None = None) -> torch.Tensor | QuantisedWeight:
        return self[name]


@pytest.mark.parametrize(
    ("model", "kind"),
    [("gpt_oss", "mxfp4"), ("gpt_oss", "int8 at load"), *(("qwen3_moe", kind) for kind in ("fp8", "awq", "nf4"))],
)
def test_ranks_have_their_share(model: str, kind: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    name, settings = MODELS[model]
    folder, more = checkpoint(name, **settings | WIDE), {"quantization": "int8"}
    if kind != "int8 at load":
        (_, folder), more = write_mixture(folder, tmp_path, kind), {}
    expected, found = logits_of(load(folder, **more)), logits_of_ranks(folder, 2, **more)
    assert (difference := _difference(found, expected)) < 1e-5, f"relative difference {difference:.1e}"


def test_groups_that_a_share_would_cut_are_named(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    name, settings = MODELS["mixtral"]
    _, packed = write_mixture(checkpoint(name, **settings), tmp_path, "int4")
    with pytest.raises(ModelError, match=r"2 ranks cannot share model.layers.0.mlp.experts.0.down_proj.weight: inputs"):
        load(packed, SimpleNamespace(rank=0, size=2), tensor_parallel_size=2)


@pytest.mark.parametrize("model", ["qwen3_moe", "gpt_oss"])
@torch.inference_mode()
def test_gates_and_ups_apart(model: str, checkpoint: MakeCheckpoint) -> None:
    """As in GGUF files: of gpt-oss they alternate in the module. One expert has a zero point where the others have
    several, as happens with AWQ, and one scales beyond float16."""
    name, settings = MODELS[model]
    path, (_, module) = "experts", next(experts_of(load(checkpoint(name, **settings))))
    weights = Weights()
    for e, part in product(range(module.num_experts), ("gate_proj", "up_proj", "down_proj")):
        both = getattr(module, "down_proj" if part == "down_proj" else "gate_up_proj").data[e]
        matrix = both.t() if module.is_transposed else both
        if part != "down_proj":
            own = int(part == "up_proj")
            matrix = matrix[own::2] if model == "gpt_oss" else matrix.chunk(2)[own]
        weight = quantise(matrix, 4)
        if e == 1:
            weight = replace(weight, offsets=None, zero=8)
        if e == 2:
            weight = replace(weight, factors=torch.full((len(matrix),), 2.0**-1))
        matrix.copy_(weight.dequantised())
        weights[f"{path}.{e}.{part}.weight"] = weight
    x, chosen, shares = torch.randn(9, 64), torch.randint(0, 4, (9, 2)), torch.rand(9, 2)
    expected = module(x, chosen, shares)
    holder = nn.ModuleDict({"experts": module})
    packed = ExpertReader(holder, weights, CpuLinear(), torch.device("cpu")).read(path, module)
    assert packed is not None
    torch.testing.assert_close(packed(x, chosen, shares), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "kind"), [("gpt_oss", "mxfp4"), ("qwen3_moe", "gptq"), ("qwen3_moe", "int8 at load")], ids=str
)
def test_stored_files_have_them(model: str, kind: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Replicas share the file; a later start reads no checkpoint."""
    name, settings = MODELS[model]
    folder, more = checkpoint(name, **settings), {"quantization": "int8"}
    if kind in ("mxfp4", "gptq"):
        (_, folder), more = write_mixture(folder, tmp_path, kind), {}
    config = EngineConfig(model=str(folder), skip_tokenizer_init=True, **more).on_device("cpu")  # type: ignore[arg-type]
    with ExitStack() as undo:
        found = []
        for start in range(2):
            if start:
                undo.enter_context(patch.object(stored_module, "make_module"))  # it would return no module
            model_of = load_model(config, weights=WeightStore(tmp_path / "weights"))
            assert model_of.weights is not None
            undo.callback(model_of.weights.close)
            model_of.module.set_attn_implementation("eager")
            assert any(isinstance(part, PackedExperts) for part in model_of.module.modules())
            found.append(logits_of(model_of.module))
        assert torch.equal(*found)


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.float(), expected.float()
    return ((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).median().item()
