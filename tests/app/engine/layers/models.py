"""Small random models in memory, and counts of what a GPU would launch for them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from folio.app.engine.layers import attention
from folio.app.engine.layers.attention import GeometryProbe
from folio.kernels import Activation, CpuElementwise, Elementwise, RotaryWrite
from folio.kernels.elementwise import WriteLayer
from folio.kernels.reference import ReferenceProvider
from tests.architectures import ALL


def make_model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model with Folio's attention, which is not bound yet."""
    torch.manual_seed(0)
    model_type, settings = ALL[name]
    attention.register()
    config = AutoConfig.for_model(model_type, **settings | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.IMPLEMENTATION)
    return model.eval().requires_grad_(False)


def bind_reference(model: Any) -> None:
    """Attention over the call's own tokens, by the reference."""
    attention.bind_attention(model, GeometryProbe(ReferenceProvider()))


@torch.inference_mode()
def logits_of(model: Any, num_tokens: int = 30) -> torch.Tensor:
    """Of the same random tokens for each model."""
    tokens = torch.randint(400, (1, num_tokens), generator=torch.Generator().manual_seed(1))
    logits: torch.Tensor = model(tokens, use_cache=False).logits
    return logits


class Launches(TorchDispatchMode):
    """Counts operators that compute, and calls of fused kernels, inside of which nothing is counted. Views and
    allocations launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        launches = not func.is_view and "empty" not in func.__name__ and func.__name__ != "_unsafe_view.default"
        if launches and not self.inside:
            self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))

    def fused(self, name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            self.names.append(name)
            self.inside = True
            try:
                return function(*args)
            finally:
                self.inside = False

        return call


class CountedElementwise(Elementwise):
    def __init__(self, launches: Launches) -> None:
        self._ops, self._launches = CpuElementwise(), launches

    def rms_norm(self, *arguments: Any) -> torch.Tensor:
        return self._launches.fused("rms_norm", self._ops.rms_norm)(*arguments)

    def add_rms_norm(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self._launches.fused("add_rms_norm", self._ops.add_rms_norm)(*arguments)

    def rms_norm_add(self, *arguments: Any) -> torch.Tensor:
        return self._launches.fused("rms_norm_add", self._ops.rms_norm_add)(*arguments)

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        return self._launches.fused("gate", self._ops.gate)(gate_up, activation)

    def prepare_rotary_write(self, call: RotaryWrite) -> WriteLayer:
        return self._launches.fused("rotary_write", self._ops.prepare_rotary_write(call))
