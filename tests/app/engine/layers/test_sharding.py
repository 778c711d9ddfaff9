"""Logits of a sharded model equal those of the complete model, for architectures with every kind of plan.

The engine's self-test cannot see a mistake in sharding, because it compares a share with itself.
"""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from folio.app.config.engine import EngineConfig
from folio.app.engine.model.loader import load_model
from folio.app.engine.tensor_parallel.communicator import MemoryCommunicator
from folio.kernels import shared_group_bytes
from tests.conftest import IDS, SMALL, VOCAB_SIZE, MakeCheckpoint

EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "gemma2": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32},
    "phi": {},
    "phi3": {},
    "gpt_neox": {},
    "starcoder2": {},
    "cohere": {},
    "cohere2": {"head_dim": 32},
    "glm": {"head_dim": 16},
    "olmo2": {},
    "granite": {},
    "mixtral": EXPERTS,
    "qwen2_moe": EXPERTS,
    "qwen3_moe": EXPERTS | {"head_dim": 32},
    "gpt_oss": EXPERTS | {"head_dim": 32},
    "deepseek_v3": EXPERTS | LATENT,
    "dots1": EXPERTS,
}
# Relative difference of all logits together.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}


class Counted(MemoryCommunicator):
    """Collectives of threads, with a count of sums."""

    num_sums = 0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_sums += 1
        return super().all_reduce(tensor)


@torch.inference_mode()
def logits_of(model: PreTrainedModel) -> torch.Tensor:
    model.set_attn_implementation("eager")
    return model(input_ids=torch.arange(3, 20)[None] * 7 % (VOCAB_SIZE - 1), use_cache=False).logits.float()


@pytest.mark.thirds
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in MODELS), *((name, "bfloat16") for name in ("llama", "qwen2", "gemma2", "phi3"))],
)
def test_shares_add_up(name: str, dtype: str, make_checkpoint: MakeCheckpoint) -> None:
    """In half precision sums of parts round differently; mixtures, which may choose other experts there, are left
    out."""
    folder = make_checkpoint(name, **SMALL | IDS | MODELS[name])
    shared = {"model": str(folder), "dtype": dtype, "skip_tokenizer_init": True}
    expected = logits_of(load_model(EngineConfig(**shared).on_device("cpu")).module)
    for size in (2, 4):
        memory = mmap.mmap(-1, shared_group_bytes(size))
        comms = [Counted(memory, rank, size) for rank in range(size)]

        def run(comm: Counted) -> torch.Tensor:
            model = load_model(EngineConfig(**shared, tensor_parallel_size=comm.size).on_device("cpu"), comm)
            return logits_of(model.module)

        with ThreadPoolExecutor(size) as pool:
            found = list(pool.map(run, comms, timeout=120))
        difference = (found[0] - expected).norm() / expected.norm()
        assert difference < TOLERANCE[dtype], f"{size} ranks: relative difference {difference:.2g}"
        assert comms[0].num_sums >= SMALL["num_hidden_layers"]
