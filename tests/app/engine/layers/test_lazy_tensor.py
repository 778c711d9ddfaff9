"""Lazy sums are added once, by whatever reads them first, and a model computes the same bits with and without them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import nn

from folio.app.engine.layers import fused_layer
from folio.app.engine.layers.fused_layer import FusedLayer, fuse_layers
from folio.app.engine.layers.fusion import FusedRMSNorm, fuse_attention, fuse_modules
from folio.app.engine.layers.lazy_tensor import LazySum, evaluated
from folio.kernels import CpuElementwise, Elementwise
from tests.app.engine.layers.models import CountedElementwise, Launches, bind_reference, logits_of, make_model
from tests.fakes.recorded_graph import Recorder


class Pair(NamedTuple):
    first: Any
    second: Any


class Items(list[Any]): ...


OTHER = torch.arange(24.0).view(1, 3, 8)
READS: dict[str, Callable[[Any], Any]] = {
    "operator": lambda x: OTHER * x,
    "method": lambda x: x.float().sum(-1),
    "sum": lambda x: x.add(OTHER, alpha=2),
    "index": lambda x: x[:, -1:],
    "list": lambda x: torch.cat([OTHER, x], dim=1),
    "named tuple": lambda x: torch.stack(Pair(x, OTHER)),
    "list of a class": lambda x: torch.cat(Items([x, OTHER])),
    "keyword": lambda x: nn.functional.linear(input=x, weight=OTHER[0]),
    "in place": lambda x: x.mul_(2),
    "out": lambda x: torch.add(OTHER, 1, out=x),
    "shape": lambda x: x.shape,
    "address": lambda x: x.untyped_storage().nbytes(),
    "array": lambda x: torch.from_numpy(x.numpy()),
    "extension": lambda x: CpuElementwise().gate(x, "silu"),
    "no hooks": lambda x: _without_functions(x),
    "copy": lambda x: x.clone(),
}


def _without_functions(x: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return torch.relu(x)


@pytest.mark.parametrize("name", READS)
def test_every_reader_sees_the_sum(name: str) -> None:
    torch.manual_seed(0)
    update, residual = torch.randn(2, 1, 3, 8)
    lazy, plain = LazySum(update, residual), residual + update
    for _ in range(2):
        actual, expected = READS[name](lazy), READS[name](plain)
        assert type(actual) is type(expected)
        assert torch.equal(actual, expected) if isinstance(expected, torch.Tensor) else actual == expected


def test_containers_keep_their_types() -> None:
    """Regression: within a named tuple, or a list of a class of its own, a sum was passed on as it was, without end."""
    ones, lazy = torch.ones(2), LazySum(torch.ones(2), torch.ones(2))
    given = OrderedDict(pair=Pair([lazy], {"other": ones}), items=Items([ones, (lazy,)]), size=ones.size())
    found = evaluated(given)
    assert found == OrderedDict(pair=Pair([lazy.value], {"other": ones}), items=Items([ones, (lazy.value,)]), size=(2,))
    assert [type(found), *map(type, found.values())] == [OrderedDict, Pair, Items, torch.Size]
    assert given["pair"].first[0] is lazy  # what the caller has stays as it is
    assert type(found["pair"].first[0]) is torch.Tensor
    assert found["pair"].second is given["pair"].second


def test_one_addition() -> None:
    """By the first norm; a second norm, and the residual after it, read the sum."""
    launches = Launches()
    norm = FusedRMSNorm(CountedElementwise(launches), torch.ones(8), 1e-5, 0.0)
    update, residual = torch.randn(2, 1, 3, 8)
    with launches:
        lazy = LazySum(update, residual)
        first, second, total = norm(lazy), norm(lazy), lazy.value
        late = LazySum(update, residual)
        assert torch.equal(late + 0, total)
        assert torch.equal(norm(late), first)
    assert launches.names == ["add_rms_norm", "rms_norm", "add", "add", "equal", "rms_norm", "equal"]
    assert torch.equal(first, second)
    assert torch.equal(total, residual + update)


def fused_model(ops: Elementwise, between: str) -> Any:
    """Three layers in bfloat16, with something between the first two."""
    model = make_model("llama", torch.bfloat16)
    layers, middle = model.model.layers, model.model.layers[1]
    if between == "other layer":  # twice the output: it stays unfused
        middle.__class__ = type("Twisted", (type(middle),), {"forward": lambda self, *a, **k: _doubled(self, *a, **k)})
    fuse_modules(model, ops)
    fuse_attention(model, ops)
    assert fuse_layers(model, ops) == (2 if between == "other layer" else 3)
    if between == "hook":
        layers[0].register_forward_hook(lambda _, __, out: out * 1.5)
    elif between == "captured":
        model.states = []
        for layer in layers:
            layer.register_forward_hook(lambda _, __, out: model.states.append(out))
    bind_reference(model)
    return model


def _doubled(layer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    out: torch.Tensor = super(type(layer), layer).forward(*args, **kwargs)
    return out * 2


@pytest.mark.parametrize("between", ["nothing", "other layer", "hook", "captured"])
@torch.inference_mode()
def test_a_model_computes_the_same_bits(between: str) -> None:
    """Code between two layers may read, change or keep what passes."""
    model = fused_model(CpuElementwise(), between)
    lazy = logits_of(model)
    states = [state + 0 for state in getattr(model, "states", [])]
    getattr(model, "states", []).clear()
    with patch.object(fused_layer, "LazySum", lambda update, residual: residual + update):
        bind_reference(model)
        plain = logits_of(model)
    assert torch.equal(lazy, plain)
    assert len(states) == (3 if between == "captured" else 0)
    for state, expected in zip(states, getattr(model, "states", []), strict=True):
        assert torch.equal(state, expected)


class _Torch(CpuElementwise):
    """Norms by torch, which a recorded graph can contain."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
        return nn.functional.rms_norm(x, weight.shape, weight + offset, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual + x
        return total, self.rms_norm(total, weight, eps, offset)


@torch.inference_mode()
def test_layers_within_a_graph() -> None:
    """A replay adds anew, and no sum is kept beyond the work."""

    class Attention(nn.Linear):
        def forward(self, hidden_states: torch.Tensor) -> Any:  # type: ignore[override]
            return super().forward(hidden_states), None

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn, self.mlp = Attention(8, 8), nn.Linear(8, 8)
            for name in ("input_layernorm", "post_attention_layernorm"):
                self.add_module(name, FusedRMSNorm(_Torch(), torch.rand(8), 1e-5, 0.0))

        def forward(self, hidden_states: torch.Tensor) -> None: ...

    torch.manual_seed(0)
    layers = [FusedLayer(_Torch(), Layer(), fused_layer._LAYERS[0]) for _ in range(2)]
    head, x, out = FusedRMSNorm(_Torch(), torch.rand(8), 1e-5, 0.0), torch.randn(1, 3, 8), torch.empty(1, 3, 8)

    def work() -> None:
        out.copy_(head(layers[1](layers[0](x))))

    graph = Recorder().graph()
    graph.capture(work)
    x.normal_()
    work()
    expected = out.clone()
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
