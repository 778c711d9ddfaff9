"""Launches of a decoder layer: what would be a kernel on a GPU, counted on a CPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from folio.app.engine.execution.model_runner import forward
from folio.app.engine.layers import attention
from folio.app.engine.layers.attention import CachedAttention
from folio.app.engine.layers.batch import BatchPart, StepBatch
from folio.app.engine.layers.fused_layer import fuse_layers
from folio.app.engine.layers.fusion import fuse_attention, fuse_modules
from folio.kernels import Activation, CpuElementwise, Elementwise, RotaryWrite, VarlenBatch
from folio.kernels.elementwise import WriteLayer
from folio.kernels.provider import AttendLayer, AttentionCall, CacheWrite, StoreLayer
from folio.kernels.reference import ReferenceProvider
from tests.architectures import FURTHER
from tests.conftest import ARCHITECTURES

NUM_SEQS, BLOCK_TOKENS = 3, 16


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


class CountedProvider(ReferenceProvider):
    """Attention that counts as one launch, and a write as another one."""

    def __init__(self, launches: Launches) -> None:
        self._launches = launches

    def prepare_write(self, new: CacheWrite) -> StoreLayer:
        return self._launches.fused("write", super().prepare_write(new))

    def prepare_attend(self, call: AttentionCall) -> AttendLayer:
        return self._launches.fused("attend", super().prepare_attend(call))


class _Group:
    def __init__(self, num_layers: int) -> None:
        self.layers, self.is_state = tuple(range(num_layers)), False


class _Tensors:
    """Caches of NUM_SEQS sequences, a block each, and layers side by side."""

    def __init__(self, num_layers: int, heads: int, dim: int) -> None:
        self.groups = (_Group(num_layers),)
        self._cache = torch.zeros(NUM_SEQS, BLOCK_TOKENS, num_layers, 2, heads, dim)

    def group_of(self, layer: int) -> int:
        return 0

    def home_view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache[:, :, layer, 0], self._cache[:, :, layer, 1]

    region_view = home_view


def decode_batch() -> StepBatch:
    """The sixth token of each sequence."""
    lengths = torch.full((NUM_SEQS,), 6, dtype=torch.int32)
    table = torch.arange(NUM_SEQS, dtype=torch.int32)[:, None]
    varlen = VarlenBatch(torch.arange(NUM_SEQS + 1, dtype=torch.int32), lengths, table, 1, 6)
    slots = torch.arange(NUM_SEQS) * BLOCK_TOKENS + 5
    part = BatchPart("block_table", slice(0, NUM_SEQS), slots, varlen)
    return StepBatch(torch.arange(NUM_SEQS), torch.full((NUM_SEQS,), 5), torch.arange(NUM_SEQS), ((part,),))


@torch.inference_mode()
def launches_of(name: str, num_layers: int) -> list[str]:
    """Launches of a decode step of a fused model with so many layers."""
    model_type, settings = (ARCHITECTURES | FURTHER)[name]
    settings = settings | {"num_hidden_layers": num_layers}
    if "mlp_only_layers" in settings:
        settings["mlp_only_layers"] = []  # experts in every layer
    if "layer_types" in settings:
        settings["layer_types"] = list(settings["layer_types"][:1]) * num_layers
    attention.register()
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.IMPLEMENTATION)
    model.eval().requires_grad_(False)
    launches = Launches()
    ops = CountedElementwise(launches)
    assert fuse_modules(model, ops)
    assert fuse_attention(model, ops) == fuse_layers(model, ops) == num_layers
    heads = config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    handler = CachedAttention(_Tensors(num_layers, heads, dim), CountedProvider(launches))  # type: ignore[arg-type]
    attention.bind_attention(model, handler)
    handler.batch = batch = decode_batch()
    launches.names.clear()
    with launches:
        forward(model, batch.token_ids, batch.positions, batch.logit_rows)
    return launches.names


def layer_launches(name: str) -> list[str]:
    """What a second layer adds."""
    one, two = launches_of(name, 1), launches_of(name, 2)
    return list((Counter(two) - Counter(one)).elements())


@pytest.mark.parametrize(
    ("name", "norms", "number"),
    [
        *((name, ["add_rms_norm"] * 2, 9) for name in ("llama", "mistral", "qwen2", "qwen3")),
        *((name, ["rms_norm", "rms_norm_add"] * 2, 11) for name in ("gemma2", "gemma3")),
    ],
)
def test_a_dense_layer_is_at_most_eleven_launches(name: str, norms: list[str], number: int) -> None:
    launches = layer_launches(name)
    assert sorted(launches) == sorted(["linear"] * 4 + norms + ["rotary_write", "attend", "gate"])
    assert len(launches) == number


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"])
def test_experts_keep_their_own_code(name: str) -> None:
    """What is around them has six launches."""
    launches = layer_launches(name)
    around = ["add_rms_norm", "linear", "rotary_write", "attend", "linear", "add_rms_norm"]
    assert not Counter(around) - Counter(launches), launches
    assert (launches.count("rms_norm"), launches.count("add_rms_norm")) == (0, 2)
    assert "topk" in launches  # the layer has a router
