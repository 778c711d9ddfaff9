"""Products whose sums do not depend on the number of rows, and models that have others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from folio.app.config.engine import EngineConfig
from folio.app.engine.layers.batch_invariance import InvariantLinear, _replace_linears, make_batch_invariant
from folio.app.engine.layers.linear import PackedLinear, choose_product, onednn_product, packed_by
from folio.app.engine.model.loader import load_model
from folio.app.errors import ConfigError
from folio.kernels import select_product
from folio.kernels.cpu.ops import WeightFields


class Linears(nn.Module):
    """Two layers with one weight, a norm and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(64, 48, bias=False)
        product = choose_product(torch.float32)
        assert product is not None
        self.first: Any = packed_by(product)("", first)
        self.second = PackedLinear(self.first.packed, (48, 64), None, product.multiply)
        self.norm, self.embedding = nn.LayerNorm(64), nn.Embedding(5, 64)


def test_packed_weights_are_marked_and_stay_shared() -> None:
    model = Linears()
    assert not WeightFields.of(model.first.packed).batch_invariant
    make_batch_invariant(model, (), None)
    assert model.first.packed is model.second.packed
    assert WeightFields.of(model.first.packed).batch_invariant == 1


def test_every_product_of_a_model_is_marked() -> None:
    """With `batch_invariant` alone."""
    for invariant in (False, True):
        config = EngineConfig(model="builtin", batch_invariant=invariant, skip_tokenizer_init=True).on_device("cpu")
        modules = load_model(config).module.modules()
        packed = [module.packed for module in modules if isinstance(module, PackedLinear)]
        assert packed
        assert {weight.batch_invariant for weight in packed} == {invariant}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gate": nn.Linear(4, 3)}, "torch multiplies with the weights of 1 modules, such as gate"),
        ({"expert": nn.ParameterList([torch.ones(2, 3, 4)])}, "such as expert"),
    ],
)
def test_what_torch_multiplies_is_refused(change: dict[str, nn.Module], reason: str) -> None:
    model = Linears()
    for name, module in change.items():
        model.add_module(name, module)
    with pytest.raises(ConfigError, match=f"batch_invariant is true, but .*{reason}"):
        make_batch_invariant(model, (), None)


def test_onednn_recurrent_layers_and_other_ranks_are_refused() -> None:
    model = Linears()
    model.first = packed_by(onednn_product())("", nn.Linear(64, 48))
    with pytest.raises(ConfigError, match="such as first"):
        make_batch_invariant(model, (), None)
    with pytest.raises(ConfigError, match="2 layers are recurrent"):
        make_batch_invariant(Linears(), (0, 2), None)
    comm: Any = SimpleNamespace(size=3, transport="NCCL")
    with pytest.raises(ConfigError, match="3 ranks add over NCCL"):
        make_batch_invariant(Linears(), (), comm)
    comm.size = 2
    make_batch_invariant(Linears(), (), comm)


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler_a_model_is_refused() -> None:
    config = EngineConfig(model="builtin", batch_invariant=True, skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match="batch_invariant is true"):
        load_model(config.on_device("cpu"))


def test_linear_layers_of_a_gpu_have_another_product() -> None:
    """In Triton's interpreter: rows are the same alone, with the weights and biases of the model."""
    pytest.importorskip("triton")
    model = nn.Sequential(nn.Linear(128, 40, dtype=torch.bfloat16), nn.Linear(40, 8, dtype=torch.bfloat16))
    linear, x = model[0], torch.randn(70, 128, dtype=torch.bfloat16)
    expected = linear(x)
    _replace_linears(model, select_product(torch.device("cuda"), batch_invariant=True))
    assert isinstance(model[0], InvariantLinear)
    assert model[0].weight is linear.weight
    assert type(model[1]) is nn.Linear  # inputs are no whole cache lines
    together = model[0](x)
    torch.testing.assert_close(together, expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(model[0](x[:1]), together[:1])
