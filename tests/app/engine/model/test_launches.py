"""Launches of a decoder layer: what would be a kernel on a GPU, counted on a CPU."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from folio.app.engine.execution.model_runner import forward
from folio.app.engine.layers import attention
from folio.app.engine.layers.attention import CachedAttention
from folio.app.engine.layers.batch import BatchPart, StepBatch
from folio.app.engine.layers.fused_layer import fuse_layers
from folio.app.engine.layers.fusion import fuse_attention, fuse_modules
from folio.kernels import VarlenBatch
from folio.kernels.provider import AttendLayer, AttentionCall, CacheWrite, StoreLayer
from folio.kernels.reference import ReferenceProvider
from tests.app.engine.layers.models import CountedElementwise, Launches, make_model
from tests.architectures import ALL

NUM_SEQS, BLOCK_TOKENS = 3, 16


class CountedProvider(ReferenceProvider):
    """Attention that counts as one launch, and a write as another one."""

    def __init__(self, launches: Launches) -> None:
        self._launches = launches

    def prepare_write(self, new: CacheWrite) -> StoreLayer:
        return self._launches.fused("write", super().prepare_write(new))

    def prepare_attend(self, call: AttentionCall) -> AttendLayer:
        return self._launches.fused("attend", super().prepare_attend(call))


def make_caches(num_layers: int, heads: int, dim: int) -> Any:
    """`KVTensors` of NUM_SEQS sequences, a block each, and layers side by side."""
    cache = torch.zeros(NUM_SEQS, BLOCK_TOKENS, num_layers, 2, heads, dim)

    def view(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return cache[:, :, layer, 0], cache[:, :, layer, 1]

    group = SimpleNamespace(layers=tuple(range(num_layers)), is_state=False)
    return SimpleNamespace(groups=(group,), group_of=lambda layer: 0, home_view=view, region_view=view)


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
    settings: dict[str, Any] = {"num_hidden_layers": num_layers}
    if "mlp_only_layers" in ALL[name][1]:
        settings["mlp_only_layers"] = []  # experts in every layer
    if "layer_types" in ALL[name][1]:
        settings["layer_types"] = list(ALL[name][1]["layer_types"][:1]) * num_layers
    model = make_model(name, **settings)
    launches = Launches()
    ops = CountedElementwise(launches)
    assert fuse_modules(model, ops)
    assert fuse_attention(model, ops) == fuse_layers(model, ops) == num_layers
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    caches = make_caches(num_layers, config.num_key_value_heads, dim)
    handler = CachedAttention(caches, CountedProvider(launches))
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
