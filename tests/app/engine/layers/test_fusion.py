"""Fused modules give the originals' outputs, and deviating modules are not fused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

from folio.app.engine.layers import attention
from folio.app.engine.layers.fused_layer import FusedLayer, fuse_layers
from folio.app.engine.layers.fusion import FusedAttention, FusedGatedMLP, FusedRMSNorm, fuse_attention, fuse_modules
from folio.kernels import CpuElementwise
from tests.app.engine.layers.models import bind_reference, logits_of, make_model


@pytest.fixture(scope="module")
def ops() -> CpuElementwise:
    """Not at import: that compiles the kernels."""
    return CpuElementwise()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "norms", "mlps", "attentions", "layers"),
    [
        ("llama", 7, 3, 3, 3),
        ("qwen2", 7, 3, 3, 3),
        ("qwen3", 13, 3, 3, 3),
        ("mistral", 7, 3, 3, 3),
        ("gemma2", 13, 3, 3, 3),
        ("gemma3", 19, 3, 3, 3),
        ("gpt_oss", 7, 0, 3, 3),
        ("mixtral", 7, 0, 3, 3),  # experts are no linear layers
        ("granite", 7, 3, 3, 0),  # multiplies before it adds: beside a large residual, bfloat16 would hide that
        ("olmo2", 13, 3, 0, 0),
        ("phi3", 7, 0, 0, 0),  # a single projection
        ("opt", 0, 0, 0, 0),  # no rotary positions
    ],
)
def test_what_is_fused(
    name: str, norms: int, mlps: int, attentions: int, layers: int, dtype: torch.dtype, ops: CpuElementwise
) -> None:
    """The original attention still runs for transformers' own implementations, with the same weights. In half precision
    it rounds more often."""
    model = make_model(name, dtype)

    def check(rtol: float, atol: float) -> None:
        if dtype == torch.float32:
            torch.testing.assert_close(logits_of(model), expected, rtol=rtol, atol=atol)

    bind_reference(model)
    expected = logits_of(model)
    assert fuse_modules(model, ops) == norms + mlps
    check(1e-4, 1e-5)
    kinds = [type(module) for module in model.modules()]
    assert (kinds.count(FusedRMSNorm), kinds.count(FusedGatedMLP)) == (norms, mlps)
    assert fuse_attention(model, ops) == attentions
    fused: list[Any] = [module for module in model.modules() if isinstance(module, FusedAttention)]
    assert len(fused) == attentions
    bind_reference(model)
    check(1e-4, 1e-5)
    attention.bind_attention(model, None)
    model.set_attn_implementation("eager")
    check(1e-4, 1e-5)
    model.set_attn_implementation(attention.IMPLEMENTATION)
    if fused:
        assert [name for name, _ in fused[0].qkv_proj.merged] == ["q_proj", "k_proj", "v_proj"]
        windowed = name in ("mistral", "gemma2", "gemma3", "gpt_oss")
        assert fused[0].rotary.masking.window_left == (47 if windowed else -1)
        assert not any("q_proj" in path for path, _ in model.named_parameters())
    assert fuse_layers(model, ops) == layers
    bind_reference(model)
    check(1e-3, 1e-4)


def test_a_deviating_norm_is_not_fused(ops: CpuElementwise) -> None:
    class ShiftedRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.rms_norm(x, (16,), self.weight, self.eps) + 0.01

    assert fuse_modules(nn.Sequential(ShiftedRMSNorm()), ops) == 0


@pytest.mark.parametrize("twist", ["clip", "positions", "scale"])
def test_deviating_attention_is_not_fused(twist: str, ops: CpuElementwise) -> None:
    """Clipping shows in large states only, and a dependency on positions only far from the beginning."""

    class Twisted(LlamaAttention):
        def forward(
            self, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: Any, **kwargs: Any
        ) -> Any:
            if twist == "clip":
                hidden_states = hidden_states.clamp(-50, 50)
            elif twist == "positions" and kwargs["position_ids"].max() > 8192:
                hidden_states = hidden_states * 1.2
            out, weights = super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)
            return (out * 0.9 if twist == "scale" else out), weights

    model = make_model("llama")
    for layer in model.model.layers[:2]:
        layer.self_attn.__class__ = Twisted
    assert fuse_attention(model, ops) == 1


@pytest.mark.parametrize("twist", ["factor", "order", "swapped"])
def test_deviating_layers_are_not_fused(twist: str, ops: CpuElementwise) -> None:
    """A fused one keeps what models read."""

    class Twisted(LlamaDecoderLayer):
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if twist == "swapped":
                kwargs["position_ids"], kwargs["attention_mask"] = kwargs["attention_mask"], kwargs["position_ids"]
            residual = self.input_layernorm(hidden_states) if twist == "order" else hidden_states
            x, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
            hidden_states = residual + x * (0.9 if twist == "factor" else 1.0)
            return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

    model = make_model("llama", torch.bfloat16)
    for layer in model.model.layers[:2]:
        layer.__class__ = Twisted
    model.model.layers[2].attention_type = "full_attention"
    fuse_modules(model, ops)
    assert fuse_attention(model, ops) == 3
    assert fuse_layers(model, ops) == 1
    layer = model.model.layers[2]
    assert isinstance(layer, FusedLayer)
    assert (layer.attention_type, layer.hidden_size, layer.training) == ("full_attention", 64, False)


@pytest.mark.parametrize(
    ("activation", "fused"),
    [("silu", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("relu", None)],
)
def test_gelus_are_told_apart_in_half_precision(activation: str, fused: str | None, ops: CpuElementwise) -> None:
    """Their outputs differ by less than bfloat16's rounding. ReLU is not fused."""
    model = make_model("llama", torch.bfloat16, hidden_act=activation)
    fuse_modules(model, ops)
    found = [module.activation for module in model.modules() if isinstance(module, FusedGatedMLP)]
    assert found == ([fused] * 3 if fused else [])
