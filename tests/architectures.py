"""Architectures that are tested for equal tokens and little else; `docs/reference/models.md` lists them, too.

What makes each special is on, and small enough to matter within 700 tokens.
"""

from __future__ import annotations

from typing import Any

from tests.conftest import ARCHITECTURES, DELTA, DELTA_TYPES, EXPERTS, GPT2, HYBRIDS, IDS, SMALL

Settings = dict[str, Any]

WINDOW = {"sliding_window": 48}
MIXED_TYPES = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
SHARED_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
# Latent attention: keys and values are made from one small vector, and have different head sizes.
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
}
# Inputs of their own for each layer, and layers that attend over an earlier layer's keys and values.
GEMMA_SHARED = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": SMALL["vocab_size"],
}


def rope(kind: str, **settings: Any) -> Settings:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0} | settings}


# name → (model type, settings)
FURTHER: dict[str, tuple[str, Settings]] = {
    "llama3_rope": (
        "llama",
        SMALL
        | rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "yarn": ("llama", SMALL | rope("yarn", factor=8.0, original_max_position_embeddings=128)),
    "qwen2_window": ("qwen2", SMALL | WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    "phi3_window": ("phi3", SMALL | WINDOW | {"pad_token_id": 0}),
    "ministral3": (  # queries that grow with the position
        "ministral3",
        SMALL
        | {"head_dim": 32}
        | rope("yarn", factor=4.0, original_max_position_embeddings=64, llama_4_scaling_beta=0.5),
    ),
    "qwen2_moe": ("qwen2_moe", SMALL | EXPERTS | {"mlp_only_layers": [0]}),
    "qwen3_moe": ("qwen3_moe", SMALL | EXPERTS | {"head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "olmoe": ("olmoe", SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 2.0}),
    "glm4_moe": (
        "glm4_moe",
        SMALL | SHARED_EXPERTS | {"head_dim": 32, "use_qk_norm": True} | rope("default", partial_rotary_factor=0.5),
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        SMALL
        | {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 2, "moe_intermediate_size": 32}
        | {"moe_layer_start_index": 1},
    ),
    "minimax_m2": (
        "minimax_m2",
        SMALL | {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2} | rope("default"),
    ),
    "deepseek_v2": ("deepseek_v2", SMALL | LATENT | SHARED_EXPERTS | {"topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("deepseek_v3", SMALL | LATENT | SHARED_EXPERTS),
    "gpt_bigcode": ("gpt_bigcode", GPT2 | {"multi_query": True}),
    "gpt_neox": ("gpt_neox", SMALL | rope("default", partial_rotary_factor=0.25)),
    "phi": ("phi", SMALL | {"qk_layernorm": True} | rope("default", partial_rotary_factor=0.5)),
    "stablelm": (
        "stablelm",
        SMALL
        | {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True}
        | rope("default", partial_rotary_factor=0.25),
    ),
    "starcoder2": ("starcoder2", SMALL | WINDOW),
    "nemotron": ("nemotron", SMALL | {"head_dim": 16} | rope("default", partial_rotary_factor=0.5)),
    "olmo2": ("olmo2", SMALL),
    "olmo3": ("olmo3", SMALL | WINDOW | MIXED_TYPES),
    "granite": (
        "granite",
        SMALL
        | {"embedding_multiplier": 2.0, "attention_multiplier": 0.4, "residual_multiplier": 0.5, "logits_scaling": 3.0},
    ),
    "smollm3": ("smollm3", SMALL | {"pad_token_id": 0, "no_rope_layers": [1, 0, 1]}),
    "exaone4": ("exaone4", SMALL | WINDOW | MIXED_TYPES),
    "cohere": ("cohere", SMALL | {"use_qk_norm": True, "logit_scale": 0.5}),
    "cohere2": ("cohere2", SMALL | WINDOW | MIXED_TYPES | {"logit_scale": 0.5}),
    "glm4": ("glm4", SMALL | {"head_dim": 32, "pad_token_id": 0} | rope("default", partial_rotary_factor=0.5)),
    "gemma3": (
        "gemma3_text",
        SMALL | WINDOW | MIXED_TYPES | {"head_dim": 32, "query_pre_attn_scalar": 24, "final_logit_softcapping": 3.0},
    ),
    "gemma3n": (
        "gemma3n_text",
        SMALL
        | WINDOW
        | GEMMA_SHARED
        | {
            "intermediate_size": [96] * 4,
            "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0],
            "laurel_rank": 8,
            "altup_num_inputs": 2,
        },
    ),
    "gemma4": ("gemma4_text", SMALL | WINDOW | GEMMA_SHARED | {"global_head_dim": 32, "use_double_wide_mlp": True}),
    "qwen3_5": ("qwen3_5_text", SMALL | IDS | DELTA | DELTA_TYPES | {"head_dim": 32}),
    "kimi_linear": (
        "kimi_linear",
        SMALL
        | IDS
        | LATENT
        | DELTA_TYPES
        | {"q_lora_rank": None, "linear_head_dim": 16, "linear_num_heads": 4, "num_local_experts": 4}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
}
ALL: dict[str, tuple[str, dict[str, Any]]] = (
    ARCHITECTURES | {name: (name, settings) for name, settings in HYBRIDS.items()} | FURTHER
)
