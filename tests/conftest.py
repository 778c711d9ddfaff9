"""Checkpoints that the tests make themselves: random weights from a fixed seed, in transformers' own format."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import inspect
import os
from collections.abc import Callable, Coroutine, Generator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

# Threads of a parallel region that wait for each other sleep. By default they spin, and where two test processes share
# two cores each spins away the other's time: 70 s of processor time for tests that need 16.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # libgomp reads it when torch loads it

import torch

from tests import selection, times
from tests.cluster import cluster_url, front  # noqa: F401 (fixtures)
from tests.processes import no_processes
from tests.real_models import gemma3_270m, pip_gives_up, smollm2  # noqa: F401 (fixtures)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports Triton: it defines functions of its own then

if importlib.util.find_spec("hypothesis"):  # not on every GPU machine
    from hypothesis import Phase, settings

    settings.register_profile("nightly", print_blob=True)  # `pytest --hypothesis-profile=nightly`
    settings.register_profile(  # tests/mutation: the first failure is enough, and the same ones are found each time
        "mutants", phases=[Phase.explicit, Phase.generate], derandomize=True, deadline=None
    )

VOCAB_SIZE = 512
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
GPT2 = {"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 1024}

# What makes each architecture special is on, and small enough to matter within 700 tokens.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SMALL),
    "qwen2": ("qwen2", SMALL),
    "qwen3": ("qwen3", SMALL | {"head_dim": 32}),
    "mistral": ("mistral", SMALL | {"sliding_window": 48}),
    "gemma2": (
        "gemma2",
        SMALL | {"head_dim": 32, "sliding_window": 48, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0},
    ),
    "opt": ("opt", SMALL | {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gpt2": ("gpt2", GPT2),
    "phi3": ("phi3", SMALL | {"pad_token_id": 0}),
    "mixtral": ("mixtral", SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (  # attention sinks, a window in every other layer
        "gpt_oss",
        SMALL | {"head_dim": 32, "sliding_window": 48, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}

# Layers with a recurrent state, beside attention or in other layers.
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "chunk_size": 16,
    "time_step_min": 1e-12,  # its prefill clamps the time step from below, and its decode does not
}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
DELTA_TYPES = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
CONV_TYPES = {"layer_types": ["conv", "full_attention", "conv"]}

HYBRIDS: dict[str, dict[str, Any]] = {
    "bamba": SMALL | IDS | MAMBA | {"attn_layer_indices": [1]},
    "falcon_h1": SMALL | IDS | MAMBA | {"mamba_d_ssm": 128},
    "granitemoehybrid": SMALL
    | IDS
    | MAMBA
    | {
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 96,
    },
    "nemotron_h": SMALL
    | IDS
    | NEMOTRON
    | {"num_hidden_layers": 4, "layers_block_type": ["mamba", "attention", "mlp", "mamba"], "head_dim": 16},
    "qwen3_next": SMALL | IDS | DELTA | DELTA_TYPES | EXPERTS | {"head_dim": 32},
    "olmo_hybrid": SMALL | IDS | DELTA | DELTA_TYPES,
    "lfm2": SMALL | IDS | CONV_TYPES | {"block_ff_dim": 96, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": SMALL | IDS | CONV_TYPES | EXPERTS | {"num_dense_layers": 1},
    "jamba": SMALL
    | IDS
    | {
        "attn_layer_offset": 1,
        "attn_layer_period": 3,
        "expert_layer_offset": 0,
        "expert_layer_period": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 16,
        "mamba_dt_rank": 8,
    },
}

MakeCheckpoint = Callable[..., Path]


def pytest_addoption(parser: pytest.Parser) -> None:
    selection.pytest_addoption(parser)
    times.pytest_addoption(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(selection.Selection(config))
    config.pluginmanager.register(times.FileTimes(config, judges=selection.is_daily(config)))


def pytest_itemcollected(item: pytest.Item) -> None:
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
        item.obj = _in_event_loop(item.obj)


def _in_event_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine, run in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    may_start = item.get_closest_marker("processes") or item.get_closest_marker("gpu")
    with nullcontext() if may_start else no_processes():
        return (yield)


def tokens(length: int, seed: int = 0) -> list[int]:
    """A random prompt."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE - 1, (length,), generator=generator).tolist()


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """`make_checkpoint(model_type, **config)` → folder of a random-init checkpoint; the same call, the same folder."""
    made: dict[str, Path] = {}

    def make(model_type: str, **settings: Any) -> Path:
        # Imported here: it takes seconds, and the tests of kernels and of memory do without.
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

        key = f"{model_type} {sorted(settings.items())}"
        if key not in made:
            torch.manual_seed(11)
            config = AutoConfig.for_model(model_type, **settings)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            for name, parameter in model.named_parameters():  # livelier than the usual initialisation
                if parameter.ndim >= 2:
                    torch.nn.init.normal_(parameter, std=0.25 if "embed" not in name else 1.0)
                else:  # biases are zero, and norms one
                    parameter.data += 0.1 * torch.randn_like(parameter)
            model.generation_config = GenerationConfig(eos_token_id=VOCAB_SIZE - 1, pad_token_id=0)
            folder = tmp_path_factory.mktemp(model_type)
            model.save_pretrained(folder)
            made[key] = folder
        return made[key]

    return make
