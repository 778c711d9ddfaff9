"""Fused modules give the originals' outputs, and deviating modules are not fused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

from folio.app.engine.layers import attention
from folio.app.engine.layers.attention import GeometryProbe
from folio.app.engine.layers.fused_layer import FusedLayer, fuse_layers
from folio.app.engine.layers.fusion import FusedAttention, FusedGatedMLP, FusedRMSNorm, fuse_attention, fuse_modules
from folio.kernels import CpuElementwise
from folio.kernels.reference import ReferenceProvider
from tests.architectures import FURTHER
from tests.conftest import ARCHITECTURES


@pytest.mark.parametrize(
    ("name", "norms", "mlps"), [("llama", 7, 3), ("qwen3", 13, 3), ("gemma2", 13, 3), ("mixtral", 7, 0), ("opt", 0, 0)]
)
def test_what_is_fused(name: str, norms: int, mlps: int) -> None:
    """Mixtral's experts are no linear layers and stay as they are."""
    torch.manual_seed(0)
    model_type, settings = ARCHITECTURES[name]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings)).eval()
    tokens = torch.randint(400, (1, 30))
    with torch.inference_mode():
        expected = model(tokens).logits
        assert fuse_modules(model, CpuElementwise()) == norms + mlps
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-5)
    kinds = [type(module) for module in model.modules()]
    assert (kinds.count(FusedRMSNorm), kinds.count(FusedGatedMLP)) == (norms, mlps)


def test_a_deviating_norm_is_not_fused() -> None:
    class ShiftedRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.rms_norm(x, (16,), self.weight, self.eps) + 0.01

    model = nn.Sequential(ShiftedRMSNorm())
    assert fuse_modules(model, CpuElementwise()) == 0


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("llama", 3),
        ("qwen2", 3),
        ("qwen3", 3),
        ("mistral", 3),
        ("mixtral", 3),
        ("gemma2", 3),
        ("gpt_oss", 3),
        ("opt", 0),
        ("phi3", 0),
    ],
)
def test_which_attention_is_fused(name: str, layers: int) -> None:
    """OPT has no rotary positions, Phi-3 a single projection. The original layer still runs for transformers' own
    attention, with the same weights."""
    torch.manual_seed(0)
    model_type, settings = ARCHITECTURES[name]
    attention.register()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings)).eval()
    tokens = torch.randint(400, (1, 30))
    provider = GeometryProbe(ReferenceProvider())
    attention.bind_attention(model, provider)
    with torch.inference_mode():
        expected = model(tokens, use_cache=False).logits
        model.set_attn_implementation(attention.IMPLEMENTATION)
        assert fuse_attention(model, CpuElementwise()) == layers
        fused = [module for module in model.modules() if isinstance(module, FusedAttention)]
        assert len(fused) == layers
        attention.bind_attention(model, provider)
        torch.testing.assert_close(model(tokens, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)
        attention.bind_attention(model, None)
        model.set_attn_implementation("eager")
        torch.testing.assert_close(model(tokens, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)
    if layers:
        assert [name for name, _ in fused[0].qkv_proj.merged] == ["q_proj", "k_proj", "v_proj"]  # type: ignore[union-attr, misc]
        assert fused[0].rotary.masking.window_left == (47 if name in ("mistral", "gemma2", "gpt_oss") else -1)
        paths = [path for path, _ in model.named_parameters()]
        assert not any("q_proj" in path for path in paths)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_attention_is_fused_in_half_precision(name: str) -> None:
    """The original rounds more often."""
    torch.manual_seed(0)
    model_type, settings = ARCHITECTURES[name]
    attention.register()
    config = AutoConfig.for_model(model_type, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention.IMPLEMENTATION)
    assert fuse_attention(model.eval(), CpuElementwise()) == 3


@pytest.mark.parametrize("twist", ["clip", "positions", "scale"])
def test_deviating_attention_is_not_fused(twist: str) -> None:
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

    attention.register()
    config = AutoConfig.for_model("llama", **ARCHITECTURES["llama"][1])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.IMPLEMENTATION).eval()
    for layer in model.model.layers[:2]:
        layer.self_attn.__class__ = Twisted
    assert fuse_attention(model, CpuElementwise()) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("llama", 3),
        ("qwen3", 3),
        ("gemma2", 3),
        ("gemma3", 3),
        ("gpt_oss", 3),
        ("granite", 0),
        ("olmo2", 0),
        ("phi3", 0),
    ],
)
def test_which_layers_are_fused(name: str, layers: int, dtype: torch.dtype) -> None:
    """Granite multiplies before it adds: beside a large residual, a small attention output would hide that in bfloat16.
    The others have attention of their own."""
    model = make_model(name, dtype)
    tokens, ops = torch.randint(400, (1, 30)), CpuElementwise()
    attention.bind_attention(model, GeometryProbe(ReferenceProvider()))
    with torch.inference_mode():
        expected = model(tokens, use_cache=False).logits
        fuse_modules(model, ops)
        fuse_attention(model, ops)
        assert fuse_layers(model, ops) == layers
        attention.bind_attention(model, GeometryProbe(ReferenceProvider()))
        if dtype == torch.float32:
            torch.testing.assert_close(model(tokens, use_cache=False).logits, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("twist", ["factor", "order", "swapped"])
def test_deviating_layers_are_not_fused(twist: str) -> None:
    class Twisted(LlamaDecoderLayer):
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if twist == "swapped":
                kwargs["position_ids"], kwargs["attention_mask"] = kwargs["attention_mask"], kwargs["position_ids"]
            residual = self.input_layernorm(hidden_states) if twist == "order" else hidden_states
            x, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
            hidden_states = residual + x * (0.9 if twist == "factor" else 1.0)
            return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

    model, ops = make_model("llama", torch.bfloat16), CpuElementwise()
    for layer in model.model.layers[:2]:
        layer.__class__ = Twisted
    fuse_modules(model, ops)
    assert fuse_attention(model, ops) == 3
    assert fuse_layers(model, ops) == 1


def test_a_fused_layer_keeps_what_models_read() -> None:
    model, ops = make_model("llama", torch.float32), CpuElementwise()
    model.model.layers[0].attention_type = "full_attention"
    fuse_modules(model, ops)
    fuse_attention(model, ops)
    fuse_layers(model, ops)
    layer = model.model.layers[0]
    assert isinstance(layer, FusedLayer)
    assert (layer.attention_type, layer.hidden_size, layer.training) == ("full_attention", 64, False)


def make_model(name: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model_type, settings = (ARCHITECTURES | FURTHER)[name]
    attention.register()
    config = AutoConfig.for_model(model_type, **settings)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.IMPLEMENTATION).eval()


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_gelus_are_told_apart_in_half_precision(activation: str) -> None:
    """Their outputs differ by less than bfloat16's rounding. ReLU is not fused."""
    torch.manual_seed(0)
    model_type, settings = ARCHITECTURES["llama"]
    config = AutoConfig.for_model(model_type, **settings | {"hidden_act": activation})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    fuse_modules(model, CpuElementwise())
    fused = [module for module in model.modules() if isinstance(module, FusedGatedMLP)]
    names = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
    assert [mlp.activation for mlp in fused] == ([names[activation]] * 3 if activation in names else [])
