"""Models of every architecture, converted as llama.cpp's program does it, and read again: the same logits.

The changes of the program are written down here once more, with the names of the package `gguf`.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from folio.app.models.gguf.config import model_config
from folio.app.models.gguf.files import read_gguf
from folio.app.models.gguf.header import GgufHeader
from folio.app.models.quantised.gguf import GgufCheckpoint
from folio.kernels import QuantisedWeight
from tests.app.models.gguf.files import Tensor, dense, tiny_llama, together, write_gguf
from tests.conftest import EXPERTS

gguf: Any = pytest.importorskip("gguf")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
OWN_YARN = YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.25}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128}
LONGROPE |= {"long_factor": [1.5 + i for i in range(8)], "short_factor": [1.0 + i / 8 for i in range(8)]}
OSS_YARN = YARN | {"truncate": False}
# Name: architecture, class, settings of the config.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "Llama", {"head_dim": 16}),
    "llama, another head": ("llama", "Llama", {"head_dim": 32, "tie_word_embeddings": True}),
    "llama, biases": ("llama", "Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3": ("llama", "Llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8192}}),
    "llama, linear": ("llama", "Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "mistral": ("llama", "Mistral", {"head_dim": 16, "sliding_window": None}),
    "qwen2": ("qwen2", "Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2, yarn": ("qwen2", "Qwen2", {"rope_parameters": YARN}),
    "qwen2, yarn of its own": ("qwen2", "Qwen2", {"rope_parameters": OWN_YARN}),
    "qwen3": ("qwen3", "Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", "SmolLM3", {"num_hidden_layers": 5}),
    "granite": (
        "granite",
        "Granite",
        {"logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 4.0, "attention_multiplier": 0.1},
    ),
    "phi3": ("phi3", "Phi3", {"original_max_position_embeddings": 512, "sliding_window": 12}),
    "phi3, longrope": ("phi3", "Phi3", {"original_max_position_embeddings": 128, "rope_parameters": LONGROPE}),
    "phi3, a part of each head": (
        "phi3",
        "Phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "mixtral": ("llama", "Mixtral", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2moe": ("qwen2moe", "Qwen2Moe", EXPERTS),
    "qwen3moe": ("qwen3moe", "Qwen3Moe", EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "gpt-oss": (
        "gpt-oss",
        "GptOss",
        {
            "head_dim": 32,
            "sliding_window": 6,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": OSS_YARN,
        },
    ),
    "gemma": ("gemma", "Gemma", {"head_dim": 32}),
    "gemma2": ("gemma2", "Gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 6}),
    "gemma3": (
        "gemma3",
        "Gemma3",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 6, "num_hidden_layers": 7},
    ),
}


def source(kind: str) -> tuple[str, PreTrainedModel]:
    architecture, name, settings = MODELS[kind]
    config_class = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    config = config_class(**{"num_hidden_layers": 3, **SIZES, **settings})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # norms begin as ones or zeros
        torch.nn.init.normal_(parameter, std=0.2)
    return architecture, model


def converted(folder: Path, architecture: str, model: PreTrainedModel) -> Path:
    config = model.config
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config.num_hidden_layers
    )
    tensors: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture in ("llama", "smollm3", "granite") and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            weight = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
            weight = weight.swapaxes(1, 2).flatten(0, 2)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            weight = weight + 1
        for own, part in apart(name, weight, architecture == "gpt-oss"):
            tensors[names.get_name(own, try_suffixes=(".weight", ".bias")) or own] = dense(part)
    facts: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    facts |= special_facts(architecture, config)
    if architecture != "gemma":
        facts |= rope_facts(architecture, config, tensors)
    settings = {"general.architecture": architecture} | {f"{architecture}.{key}": fact for key, fact in facts.items()}
    return write_gguf(folder / "m.gguf", settings, tensors)


def apart(name: str, weight: torch.Tensor, is_oss: bool) -> list[tuple[str, torch.Tensor]]:
    """The tensors that the program makes of a parameter."""
    if name.endswith("sinks"):
        return [(f"blk.{name.split('.')[2]}.attn_sinks.weight", weight)]
    if name.endswith("shared_expert_gate.weight"):
        return [(name, weight[0])]
    stem, experts, leaf = name.partition(".mlp.experts.")
    if not experts:
        return [(name, weight)]
    layer = f"blk.{stem.split('.')[2]}.ffn_"
    kind = "bias" if leaf.endswith("_bias") else "weight"
    if is_oss and kind == "weight":
        weight = weight.transpose(1, 2)
    if leaf.startswith("down"):
        return [(f"{layer}down_exps.{kind}", weight)]
    gate, up = (weight[:, ::2], weight[:, 1::2]) if is_oss else weight.chunk(2, 1)
    return [(f"{layer}gate_exps.{kind}", gate), (f"{layer}up_exps.{kind}", up)]


def special_facts(architecture: str, config: Any) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    facts: dict[str, Any] = {}
    if architecture in ("llama", "smollm3", "granite", "phi3"):
        facts["rope.dimension_count"] = int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1))
    if architecture in ("qwen3", "qwen3moe", "gpt-oss", "gemma", "gemma2", "gemma3"):
        facts |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if architecture in ("gemma2", "gemma3", "phi3", "gpt-oss"):
        facts["attention.sliding_window"] = config.sliding_window or 0
    if architecture == "gemma2":
        facts["attn_logit_softcapping"] = config.attn_logit_softcapping
        facts["final_logit_softcapping"] = config.final_logit_softcapping
    if hasattr(config, "num_experts_per_tok"):
        size = getattr(config, "moe_intermediate_size", config.intermediate_size)
        count = getattr(config, "num_local_experts", None) or config.num_experts
        facts |= {"expert_count": count, "expert_used_count": config.num_experts_per_tok}
        facts["expert_feed_forward_length"] = size
    if architecture == "qwen2moe":
        facts["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if architecture == "granite":
        facts |= {"attention.scale": config.attention_multiplier, "embedding_scale": config.embedding_multiplier}
        facts |= {"residual_scale": config.residual_multiplier, "logit_scale": config.logits_scaling}
    return facts


def rope_facts(architecture: str, config: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    facts = {"rope.freq_base": rope["rope_theta"]}
    if architecture == "phi3":
        facts["rope.scaling.original_context_length"] = config.original_max_position_embeddings
    if rope["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = dense(torch.tensor(llama3_factors(rope, config.head_dim)))
    elif rope["rope_type"] == "longrope":
        for length in ("long", "short"):
            tensors[f"rope_factors_{length}.weight"] = dense(torch.tensor(rope[f"{length}_factor"]))
    elif rope["rope_type"] != "default":
        facts |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
        if original := rope.get("original_max_position_embeddings"):
            facts["rope.scaling.original_context_length"] = original
        for key in ("beta_fast", "beta_slow", "attention_factor"):
            if key in rope:
                facts[f"rope.scaling.yarn_{key.replace('attention', 'attn')}"] = rope[key]
    return facts


def llama3_factors(rope: dict[str, Any], dim: int) -> list[float]:
    low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / dim)
        if wavelength < old / high:
            factors.append(1.0)
        elif wavelength > old / low:
            factors.append(rope["factor"])
        else:
            smooth = (old / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors


def read_again(path: Path) -> PreTrainedModel:
    header = read_gguf(path)
    found = model_config(header)
    config = AutoConfig.for_model(**found)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    checkpoint = GgufCheckpoint(header)
    weights = {name: checkpoint.read(name) for name in checkpoint.names()}
    assert not any(isinstance(weight, QuantisedWeight) for weight in weights.values())
    weights = together(weights, model)
    loaded = model.load_state_dict(weights, strict=False)
    assert loaded.unexpected_keys == []
    assert loaded.missing_keys == (["lm_head.weight"] if config.tie_word_embeddings else [])
    model.tie_weights()
    assert type(model).__name__ == found["architectures"][0]
    return model


@pytest.mark.parametrize("kind", MODELS)
@torch.inference_mode()
def test_logits_of_a_converted_model(tmp_path: Path, kind: str) -> None:
    architecture, model = source(kind)
    again = read_again(converted(tmp_path, architecture, model))
    ids = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert again.config.max_position_embeddings == model.config.max_position_embeddings


def fault(folder: Path, settings: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    header = read_gguf(write_gguf(folder / "m.gguf", settings, tensors))
    with pytest.raises(ValueError, match=r"m\.gguf") as error:
        _read(header)
    return str(error.value)


def _read(header: GgufHeader) -> None:
    model_config(header)
    GgufCheckpoint(header)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"general.architecture": "mamba"},
        "has the architecture 'mamba'; of GGUF files Folio reads llama,",
    ),
    "none": ({"general.architecture": 3}, "does not say its general.architecture"),
    "experts": (
        {"general.architecture": "qwen3", "qwen3.expert_count": 8},
        "is a mixture of 8 experts of the architecture 'qwen3'; of GGUF files Folio reads those of llama, qwen2moe",
    ),
    "an encoder": ({"llama.attention.causal": False}, "is an encoder (attention.causal)"),
    "missing": ({"llama.block_count": None}, "lacks llama.block_count"),
    "a text": ({"llama.block_count": "2"}, "has llama.block_count '2'; it must be of the type int"),
    "negative": ({"llama.embedding_length": -64}, "it must be of the type int, at least 0"),
    "layers that differ": ({"llama.attention.head_count_kv": [2, 1]}, "it must be the same for all layers"),
    "a number": ({"llama.rope.freq_base": math.inf}, "it must be a number from 1 to 1e+15"),
    "rope": ({"llama.rope.scaling.type": "x", "llama.rope.scaling.factor": 2.0}, "Folio reads none, linear, yarn and"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused(tmp_path: Path, kind: str) -> None:
    settings, tensors = tiny_llama()
    changed, named = REFUSED[kind]
    settings = {name: value for name, value in (settings | changed).items() if value is not None}
    assert named in fault(tmp_path, settings, tensors)


def test_tensors_that_are_refused(tmp_path: Path) -> None:
    settings, tensors = tiny_llama()
    odd = {"blk.0.attn_gate.weight": dense(torch.ones(4, 4))}
    assert "has the tensor 'blk.0.attn_gate.weight', which Folio does not know of 'llama'" in fault(
        tmp_path, settings, tensors | odd
    )
    coarse = {"blk.0.ffn_up.weight": Tensor("IQ2_XXS", (96, 256), bytes(96 * 66))}
    assert "has the tensor 'blk.0.ffn_up.weight' in IQ2_XXS; of GGUF's types Folio reads F32" in fault(
        tmp_path, settings, tensors | coarse
    )
    wrong = {"rope_freqs.weight": dense(torch.linspace(1, 8, 8))}
    assert "not those of Llama 3's rope" in fault(tmp_path, settings, tensors | wrong)
    some = {"blk.0.attn_q.bias": dense(torch.ones(64))}
    assert "has biases of attn_q only; llama has all of them or none" in fault(tmp_path, settings, tensors | some)
    del tensors["token_embd.weight"]
    assert "lacks the matrix token_embd.weight" in fault(tmp_path, settings, tensors)
