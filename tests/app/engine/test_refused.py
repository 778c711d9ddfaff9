"""Models that would be served wrongly are refused at load, with the reason."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from folio.app.engine.layers.attention import CachedAttention, RotaryLayer
from folio.app.engine.ranks.executor import Executor
from folio.app.errors import ModelError
from folio.kernels import VarlenBatch
from tests.app.engine.engines import MakeEngine
from tests.architectures import LATENT, SHARED_EXPERTS
from tests.conftest import SMALL, VOCAB_SIZE, MakeCheckpoint


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("gptj", {"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}, "Interface"),
        ("bloom", {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "n_layer": 2, "n_head": 4}, "Interface"),
        (
            "mpt",
            {"vocab_size": VOCAB_SIZE, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 256},
            "Interface",
        ),
        ("gpt_neo", {"hidden_size": 64, "num_layers": 2, "attention_types": [[["global", "local"], 1]]}, "Interface"),
        ("falcon", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}, "Interface"),
        ("codegen", {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 256}, "Interface"),
        ("bert", SMALL, "self-test failed"),  # tokens see those after them
        ("llama4_text", SMALL | {"num_local_experts": 2, "attention_chunk_size": 40}, "chunked_attention"),
        ("deepseek_v32", SMALL | LATENT | SHARED_EXPERTS, "indexed_attention"),
        ("diffllama", SMALL, "6 attention calls"),
        ("zaya", SMALL | {"head_dim": 16, "num_experts": 2, "moe_intermediate_size": 32}, "not called as a mixer"),
        (
            "zamba2",
            SMALL | {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_headdim": 16},
            "attention calls",
        ),
        (
            "mamba2",
            {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16},
            "mamba2",
        ),
    ],
)
def test_unsupported_architectures(
    model_type: str, settings: dict[str, object], reason: str, make_checkpoint: MakeCheckpoint, make_engine: MakeEngine
) -> None:
    folder = make_checkpoint(model_type, **({"vocab_size": VOCAB_SIZE} | settings))
    with pytest.raises(ModelError, match=reason):
        make_engine(folder)


def test_the_self_test_finds_wrong_attention(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bridge that forgets the scale loads and runs, but does not get past the self-test."""
    real = CachedAttention.attend_rotary

    def unscaled(
        self: CachedAttention, layer: RotaryLayer, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        return real(self, replace(layer, masking=replace(layer.masking, scale=1.0)), heads, cos, sin)

    monkeypatch.setattr(CachedAttention, "attend_rotary", unscaled)
    with pytest.raises(ModelError, match="self-test failed"):
        make_engine("llama", adapter_dir=str(tmp_path))  # layers in one call do not go over the bridge


def test_the_self_test_finds_a_cache_that_is_not_read(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 too, where single rows may differ: attention that sees only its own chunk."""

    def forgetful(
        self: CachedAttention, layer: RotaryLayer, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        q, k, v = layer.rotated(heads, cos, sin)
        lengths = torch.cat([part.attention.cu_seqlens_q.diff() for part in self.batch.parts[0]])
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)])
        table = torch.arange(len(lengths), dtype=torch.int32)[:, None].contiguous()
        batch = VarlenBatch(starts, lengths, table, int(lengths.max()), int(lengths.max()))
        keys, values = (
            torch.nn.utils.rnn.pad_sequence(list(tensor.split(lengths.tolist())), batch_first=True) for tensor in (k, v)
        )
        return self._provider.attend(q, keys, values, batch, layer.masking)

    monkeypatch.setattr(CachedAttention, "attend_rotary", forgetful)
    with pytest.raises(ModelError, match="self-test failed"):
        make_engine("builtin", adapter_dir=str(tmp_path))  # as above


def test_fewer_logits_than_tokens(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties change the logits of a prompt's tokens, which must be there."""
    real = Executor.own_logits
    monkeypatch.setattr(Executor, "own_logits", lambda self, token_ids: real(self, token_ids)[:, :-1])
    with pytest.raises(ModelError, match="fewer than its vocab_size"):
        make_engine("builtin")


def test_a_window_that_attention_never_hears_of(make_engine: MakeEngine, make_checkpoint: MakeCheckpoint) -> None:
    """PhiMoE hands its window to the mask only: prompts beyond it got other tokens than from `generate`."""
    settings = SMALL | {"sliding_window": 40, "num_local_experts": 2, "num_experts_per_tok": 1}
    folder = make_checkpoint("phimoe", **settings)
    with pytest.raises(ModelError, match=r"sliding windows in layers \[0, 1, 2\]"):
        make_engine(folder)


def test_missing_weights(make_engine: MakeEngine, llama: Path, tmp_path: Path) -> None:
    """transformers only warns, and serves random numbers in their place."""
    shutil.copytree(llama, tmp_path / "cut")
    weights = load_file(tmp_path / "cut" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "cut" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights, model\.layers\.1\.mlp\.up_proj"):
        make_engine(tmp_path / "cut")


def test_rope_that_depends_on_the_length_limits_the_context(
    make_engine: MakeEngine, make_checkpoint: MakeCheckpoint
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
    folder = make_checkpoint("llama", **(SMALL | {"rope_parameters": rope}))
    assert make_engine(folder).max_model_len == 256


def test_no_such_model(make_engine: MakeEngine, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot load"):
        make_engine(tmp_path / "missing")
