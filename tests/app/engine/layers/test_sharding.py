"""Logits of a sharded model equal those of the complete model, for architectures with every kind of plan.

The engine's self-test cannot see a mistake in sharding, because it compares a share with itself.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from folio.app.config.engine import EngineConfig
from folio.app.engine.model.loader import load_model
from folio.app.engine.tensor_parallel.communicator import Communicator
from tests.conftest import SMALL, VOCAB_SIZE

IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
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


class Together:
    """Shared state of the `Communicator`s of several threads."""

    def __init__(self, size: int) -> None:
        self.tensors: list[torch.Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=60)


class ThreadCommunicator(Communicator):
    """Collectives of threads, with a count."""

    def __init__(self, rank: int, size: int, together: Together) -> None:
        self.rank, self.size = rank, size
        self._together = together
        self.num_calls = 0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(tensor)).sum(dim=0)

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        parts = self._exchange(tensor)
        assert [part.shape[-1] for part in parts] == list(sizes)
        return torch.cat(parts, dim=-1)

    def gather(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return self.all_gather(tensor, sizes)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return self._exchange(tensor)[source]

    def close(self) -> None: ...

    def abort(self) -> None: ...

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.num_calls += 1
        self._together.tensors[self.rank] = tensor.clone()
        self._together.barrier.wait()
        parts = list(self._together.tensors)
        self._together.barrier.wait()
        return parts


def make_lively(name: str, settings: dict[str, Any], folder: Path) -> None:
    """A checkpoint with random biases and norms."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **(SMALL | IDS | settings))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for path, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.25 if "embed" not in path else 1.0)
        else:
            parameter.data += torch.randn_like(parameter) * 0.3
    model.generation_config = GenerationConfig(eos_token_id=VOCAB_SIZE - 1, pad_token_id=0)
    model.save_pretrained(folder)


@torch.inference_mode()
def logits_of(model: PreTrainedModel) -> torch.Tensor:
    model.set_attn_implementation("eager")
    return model(input_ids=torch.arange(3, 20)[None] * 7 % (VOCAB_SIZE - 1), use_cache=False).logits.float()


@pytest.mark.thirds
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in MODELS), *((name, "bfloat16") for name in ("llama", "qwen2", "gemma2", "phi3"))],
)
def test_shares_add_up(name: str, dtype: str, tmp_path: Path) -> None:
    """In half precision sums of parts round differently; mixtures, which may choose other experts there, are left
    out."""
    make_lively(name, MODELS[name], tmp_path)
    shared = {"model": str(tmp_path), "dtype": dtype, "skip_tokenizer_init": True}
    expected = logits_of(load_model(EngineConfig(**shared).on_device("cpu")).module)
    for size in (2, 4):
        together = Together(size)
        comms = [ThreadCommunicator(rank, size, together) for rank in range(size)]

        def run(comm: ThreadCommunicator) -> torch.Tensor:
            model = load_model(EngineConfig(**shared, tensor_parallel_size=comm.size).on_device("cpu"), comm)
            return logits_of(model.module)

        with ThreadPoolExecutor(size) as pool:
            found = list(pool.map(run, comms))
        difference = (found[0] - expected).norm() / expected.norm()
        assert difference < TOLERANCE[dtype], f"{size} ranks: relative difference {difference:.2g}"
        assert comms[0].num_calls >= SMALL["num_hidden_layers"]
