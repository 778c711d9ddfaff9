"""Fused modules give what the originals give, and whatever differs keeps its own code."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from app.engine.fuse import FusedRMSNorm, FusedSwiGLU, fuse_modules
from kernels import CpuElementwise
from tests.conftest import ARCHITECTURES


@pytest.mark.parametrize(
    ("name", "norms", "mlps"),
    [("llama", 7, 3), ("qwen3", 13, 3), ("gemma2", 13, 0), ("mixtral", 7, 0), ("opt", 0, 0)],
)
def test_what_is_fused(name: str, norms: int, mlps: int) -> None:
    """Gemma's MLP is gated by GELU and Mixtral's experts are no linear layers: they stay as they are."""
    torch.manual_seed(0)
    model_type, settings = ARCHITECTURES[name]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings)).eval()
    tokens = torch.randint(400, (1, 30))
    with torch.inference_mode():
        expected = model(tokens).logits
        assert fuse_modules(model, CpuElementwise()) == norms + mlps
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-5)
    kinds = [type(module) for module in model.modules()]
    assert (kinds.count(FusedRMSNorm), kinds.count(FusedSwiGLU)) == (norms, mlps)


def test_a_twist_is_noticed() -> None:
    class ShiftedRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.rms_norm(x, (16,), self.weight, self.eps) + 0.01

    model = nn.Sequential(ShiftedRMSNorm())
    assert fuse_modules(model, CpuElementwise()) == 0
