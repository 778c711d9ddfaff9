"""The config of a model in transformers' form, from the settings of its GGUF file."""

from __future__ import annotations

import math
from typing import Any

from folio.app.models.gguf.architectures import architecture_name, architecture_of
from folio.app.models.gguf.header import GgufHeader, shown
from folio.app.models.gguf.settings import Settings

# Llama 3's rope, of which a file has the factors only.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_NUM_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss")
_GEMMA = ("gemma", "gemma2", "gemma3")
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def model_config(header: GgufHeader) -> dict[str, Any]:
    """The contents of `config.json`. Raises `ValueError` for a setting that is missing, wrong or not supported."""
    name = architecture_name(header)
    settings = Settings(header, name)
    architecture, file = architecture_of(header), header.files[0]
    embeddings = header.tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise ValueError(f"{file} lacks the matrix token_embd.weight")
    if not settings.flag("attention.causal", True):
        raise ValueError(f"{file} is an encoder (attention.causal); Folio serves text-generating decoders only")
    layers = settings.integer("block_count", least=1)
    if layers > len(header.tensors):
        raise ValueError(f"{file} has {layers} layers (block_count) and {len(header.tensors)} tensors")
    heads = settings.integer("attention.head_count", least=1)
    width = settings.integer("embedding_length", least=heads)
    rotary = settings.integer("rope.dimension_count", width // heads, least=1)
    head_dim = settings.integer("attention.key_length", width // heads if name == "phi3" else rotary, least=1)
    is_mixture = architecture.model_type in _EXPERTS
    config: dict[str, Any] = {
        "architectures": [architecture.module],
        "model_type": architecture.model_type,
        "dtype": _dtype(header),
        "vocab_size": embeddings.shape[0],
        "hidden_size": width,
        "intermediate_size": settings.integer(
            "feed_forward_length", 0 if is_mixture else None, least=0 if is_mixture else 1
        ),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": settings.integer("attention.head_count_kv", heads, least=1),
        "head_dim": head_dim,
        "max_position_embeddings": settings.integer("context_length", least=1, most=1 << 31),
        "rms_norm_eps": settings.number("attention.layer_norm_rms_epsilon", most=1.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": _rope(header, settings, head_dim, rotary),
        **{f"{kind}_token_id": None for kind in ("bos", "eos", "pad")},
    }
    config |= _biases(header, name)
    if name in _GEMMA:
        config |= _gemma(settings, name, config)
    elif is_mixture:
        config |= _experts(settings, architecture.model_type, config)
    elif name == "granite":
        config |= _granite(settings, file)
    elif name == "phi3":
        window = settings.integer("attention.sliding_window", 0)
        config["sliding_window"] = window or None
        config["original_max_position_embeddings"] = settings.integer(
            "rope.scaling.original_context_length", config["max_position_embeddings"], least=1
        )
        config["rope_parameters"]["partial_rotary_factor"] = rotary / head_dim
    return config


def _experts(settings: Settings, model_type: str, config: dict[str, Any]) -> dict[str, Any]:
    """Experts in every layer: the files do not say otherwise."""
    count, size = settings.integer("expert_count", least=1), "expert_feed_forward_length"
    found: dict[str, Any] = {"num_experts_per_tok": settings.integer("expert_used_count", least=1, most=count)}
    if model_type in ("mixtral", "gpt_oss"):
        own = settings.integer(size, config["intermediate_size"], least=1)
        found |= {"num_local_experts": count, "intermediate_size": own}
    else:
        found |= {"num_experts": count, "moe_intermediate_size": settings.integer(size, least=1)}
        found |= {"norm_topk_prob": model_type == "qwen3_moe"}  # as llama.cpp computes it
    if model_type == "qwen2_moe":
        found["shared_expert_intermediate_size"] = settings.integer("expert_shared_feed_forward_length", least=1)
    if model_type == "gpt_oss":
        found["sliding_window"] = settings.integer("attention.sliding_window", least=1)
        if config["rope_parameters"]["rope_type"] == "yarn":
            found["rope_parameters"] = config["rope_parameters"] | {"truncate": False}
    return found


def _dtype(header: GgufHeader) -> str:
    """Of most matrices if they are dense, else bfloat16."""
    sizes: dict[str, int] = {}
    for tensor in header.tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.kind] = sizes.get(tensor.kind, 0) + tensor.num_bytes
    return _DTYPES.get(max(sizes, key=sizes.__getitem__), "bfloat16")


def _biases(header: GgufHeader, name: str) -> dict[str, bool]:
    """Which biases a model of the Llama kind has; others know theirs by their type."""
    if name not in ("llama", "granite", "smollm3") or header.settings.get(f"{name}.expert_count"):
        return {}
    found = {}
    for key, leaves in (
        ("attention_bias", ("attn_q", "attn_k", "attn_v", "attn_output")),
        ("mlp_bias", ("ffn_gate", "ffn_up", "ffn_down")),
    ):
        have = [leaf for leaf in leaves if f"blk.0.{leaf}.bias" in header.tensors]
        if have and len(have) < len(leaves):
            raise ValueError(f"{header.files[0]} has biases of {', '.join(have)} only; {name} has all of them or none")
        found[key] = bool(have)
    return found


def _gemma(settings: Settings, name: str, config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh"}
    if name == "gemma":
        return found
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    if layers == _NUM_LAYERS_OF_27B[name]:
        head_dim = config["hidden_size"] // config["num_attention_heads"]
    found["query_pre_attn_scalar"] = head_dim
    found["final_logit_softcapping"] = settings.number("final_logit_softcapping", 30.0 if name == "gemma2" else 0.0)
    if name == "gemma2":
        found["attn_logit_softcapping"] = settings.number("attn_logit_softcapping", 50.0)
    found = {key: value or None for key, value in found.items()}
    window = settings.integer("attention.sliding_window", 4096 if name == "gemma2" else 0)
    found["sliding_window"] = window or None
    slides = _sliding_layers(settings, layers, 2 if name == "gemma2" else 6) if window else [False] * layers
    found["layer_types"] = ["sliding_attention" if slide else "full_attention" for slide in slides]
    if name == "gemma3":
        theta = settings.number("rope.freq_base_swa", 10000.0, least=1.0)
        found["rope_parameters"] = {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        }
    return found


def _sliding_layers(settings: Settings, layers: int, default: int) -> list[bool]:
    """Whether each layer has a window: by a list, or all but each last one of a period."""
    name = "attention.sliding_window_pattern"
    try:
        period = settings.integer(name, default)
    except ValueError:
        return settings.items(name, bool)
    return [(layer + 1) % period != 0 if period else False for layer in range(layers)]


def _granite(settings: Settings, file: object) -> dict[str, float]:
    if not settings.flag("rope.scaling.finetuned", True):
        raise ValueError(f"{file} is a Granite model without rope; Folio reads those with rope only")
    return {
        "logits_scaling": settings.number("logit_scale", least=1e-6),
        "residual_multiplier": settings.number("residual_scale", 1.0),
        "embedding_multiplier": settings.number("embedding_scale", 1.0),
        "attention_multiplier": settings.number("attention.scale", 1.0),
    }


def _rope(header: GgufHeader, settings: Settings, head_dim: int, rotary: int) -> dict[str, Any]:
    """Raises `ValueError` for scaling that is not known."""
    file, theta = header.files[0], settings.number("rope.freq_base", 10000.0, least=1.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    factors = _rope_factors(header, head_dim, rotary)
    if "factors_long" in factors and "factors_short" in factors:
        original = settings.integer("rope.scaling.original_context_length", least=1)
        longrope = {"long_factor": factors["factors_long"], "short_factor": factors["factors_short"]}
        return rope | {"rope_type": "longrope", "original_max_position_embeddings": original} | longrope
    if "freqs" in factors:
        return rope | _llama3_rope(header, factors["freqs"], theta, head_dim)
    kind = settings.text("rope.scaling.type", "none")
    if kind == "none" or settings.number("rope.scaling.factor", 0.0) == 0:
        return rope
    if (factor := settings.number("rope.scaling.factor", least=1.0)) == 1:
        return rope
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ValueError(f"{file} has rope.scaling.type {shown(kind)}; Folio reads none, linear, yarn and longrope")
    rope |= {"rope_type": "yarn", "factor": factor}
    rope["original_max_position_embeddings"] = settings.integer("rope.scaling.original_context_length", least=1)
    for name, key in (("beta_fast", "beta_fast"), ("beta_slow", "beta_slow"), ("attn_factor", "attention_factor")):
        if settings.has(f"rope.scaling.yarn_{name}"):
            rope[key] = settings.number(f"rope.scaling.yarn_{name}", least=1e-6)
    return rope


def _rope_factors(header: GgufHeader, head_dim: int, rotary: int) -> dict[str, list[float]]:
    factors = {
        kind: list(header.numbers[name])
        for kind in ("freqs", "factors_long", "factors_short")
        if (name := f"rope_{kind}.weight") in header.numbers
    }
    for kind, values in factors.items():
        count = (head_dim if kind == "freqs" else rotary) // 2
        if len(values) != count or not all(math.isfinite(value) and value > 0 for value in values):
            raise ValueError(
                f"{header.files[0]} has {len(values)} values in rope_{kind}.weight; it must have {count} above 0"
            )
    return factors


def _llama3_rope(header: GgufHeader, factors: list[float], theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling by its factors, if it has these: each frequency is divided by one."""
    factor = max(factors)
    low, high, original = _LLAMA3.values()
    for index, found in enumerate(factors):
        turns = original * theta ** (-2 * index / head_dim) / (2 * math.pi)
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        if not math.isclose(found, 1 / ((1 - share) / factor + share), rel_tol=1e-3):
            raise ValueError(f"{header.files[0]} has values in rope_freqs.weight that are not those of Llama 3's rope")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
