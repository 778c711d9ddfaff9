"""Products whose sums do not depend on the number of rows, and models that have others."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from folio.app.config.engine import EngineConfig
from folio.app.engine.layers.batch_invariance import (
    ByRow,
    InvariantLinear,
    VariantOperations,
    _replace_linears,
    make_batch_invariant,
)
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


def test_recurrent_layers_and_other_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch_invariant is true, .*: 2 layers are recurrent"):
        make_batch_invariant(Linears(), (0, 2), None)
    comm: Any = SimpleNamespace(size=3, transport="NCCL")
    with pytest.raises(ConfigError, match="3 ranks add over NCCL"):
        make_batch_invariant(Linears(), (), comm)
    comm.size = 2
    make_batch_invariant(Linears(), (), comm)


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (lambda x: nn.functional.linear(x, x), "mm"),
        (lambda x: nn.functional.linear(x, x, x[:, 0]), "addmm"),
        (lambda x: x[None] @ x[None], "bmm"),
        (lambda x: nn.functional.silu(x), "silu"),
        (lambda x: nn.functional.gelu(x, approximate="tanh"), "gelu"),
        (lambda x: onednn_product().multiply(x, onednn_product().pack(x), None), "_linear_pointwise"),
    ],
)
def test_what_torch_rounds_by_the_batch_is_found(compute: Callable[[torch.Tensor], object], name: str) -> None:
    """Also in inference mode, where products are not taken apart."""
    for inference in (False, True):
        with torch.inference_mode(inference), VariantOperations() as operations:
            compute(torch.ones(8, 8))
        assert operations.names
        assert operations.names <= ({name} | ({"linear", "matmul"} if inference else set()))


def test_other_operations_are_not_refused() -> None:
    """Angles of positions, exact functions, sums of rows, and activations by row."""
    x = torch.ones(8, 8)
    with VariantOperations() as operations:
        _ = x[None, :, :1] @ x[None, :1]
        _ = nn.functional.gelu(x), x.softmax(-1), x.mean(-1), nn.functional.layer_norm(x, (8,))
        ByRow(nn.SiLU())(x)
    assert not operations.names


@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU(approximate="tanh")], ids=str)
def test_activations_by_row(activation: nn.Module) -> None:
    """In float32, whose rounding depends on the place among all values otherwise."""
    x = torch.randn(1, 37, 999)
    together = ByRow(activation)(x)
    torch.testing.assert_close(together, activation(x))
    assert all(torch.equal(together[:, i], ByRow(activation)(x[:, i])) for i in range(37))


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
