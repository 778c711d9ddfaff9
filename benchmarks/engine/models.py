"""Architecture coverage: every causal language model of the installed transformers, shrunk and compared.

Each type's default config is shrunk by the names of its settings, so that windows, experts and patterns of layers stay
but are small; the weights are random, in float32. The engine generates from prompts that arrive one after the other,
so that chunks of prompts and decodes share steps, and its greedy tokens must be those of transformers' own `generate`.
Each type runs in a process of its own with a time limit. Outcomes:

    equal       the same tokens
    refused     the engine refuses this type at load, with a reason
    WRONG       other tokens without an error: a defect
    fails       an error that is not a refusal: a defect, too
    not tried   no small model could be made, or transformers' own `generate` does not run it

--only limits the run to these types. --quick tries six.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar

from benchmarks import harness
from folio.app.config.engine import EngineConfig
from folio.app.engine import SamplingParams
from folio.app.engine.engine import Engine
from folio.app.errors import ConfigError, ModelError

QUICK = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "gpt_bigcode", "bloom")
TIME_LIMIT_S = 180
MOST_PARAMETERS = 20_000_000  # a config with a size that the table below does not know
NUM_LAYERS, VOCAB_SIZE, CONTEXT = 4, 500, 512
PROMPT_LENGTHS, NEW_TOKENS = (1, 17, 90, 230), 12

# Sizes by the name of a setting, at any place in a config; a setting that is off (`None`, 0) stays off.
SIZES: dict[int, tuple[str, ...]] = {
    VOCAB_SIZE: ("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size", "decoder_vocab_size"),
    CONTEXT: ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length", "context_length"),
    NUM_LAYERS: (
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"),
        *("num_decoder_layers", "num_encoder_layers", "num_blocks", "num_layers_per_stack"),
        *(
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "decoder_attention_heads",
            "encoder_attention_heads",
        ),
        *("num_decoder_attention_heads", "num_encoder_attention_heads", "attention_heads", "swa_num_attention_heads"),
        *("linear_num_value_heads", "linear_num_heads"),
        *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    ),
    2: (
        *("num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads", "linear_num_key_heads", "num_query_groups"),
        *("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k"),
        *("n_group", "num_expert_group", "n_groups", "mamba_n_groups", "o_groups", "index_n_heads", "n_mamba_heads"),
        *(
            "_sliding_window_pattern",
            "layer_group_size",
            "attn_layer_period",
            "expert_layer_period",
            "max_window_layers",
        ),
        *("num_kv_shared_layers", "zero_expert_num"),
    ),
    1: ("first_k_dense_replace", "topk_group", "topk_group_num", "num_dense_layers", "attn_layer_offset"),
    64: (
        *("hidden_size", "d_model", "n_embd", "embedding_dim", "emb_dim", "embedding_size", "word_embed_proj_dim"),
        *("input_embedding_size", "output_embedding_size", "lru_width", "dim_model_base"),
        *("hidden_size_global", "backbone_hidden_size", "input_size", "index_topk"),
    ),
    96: (
        *(
            "intermediate_size",
            "ffn_dim",
            "decoder_ffn_dim",
            "encoder_ffn_dim",
            "n_inner",
            "ffn_hidden_size",
            "d_inner",
        ),
        *("intermediate_size_mlp", "dense_intermediate_size", "dim_ff", "dff", "d_ff", "feed_forward_size"),
        *("shared_intermediate_size", "block_ff_dim"),
    ),
    16: (
        *("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "index_head_dim", "linear_key_head_dim", "kv_channels"),
        *("linear_value_head_dim", "linear_head_dim", "attention_head_dim", "d_head", "d_kv", "dim_head"),
        *("swa_head_dim", "attention_head_size", "mamba_d_head", "mamba_head_dim", "mamba_headdim", "global_head_dim"),
        *("mamba_d_state", "ssm_state_size", "state_size", "mamba_dt_rank", "time_step_rank", "mamba_chunk_size"),
        *("chunk_size", "laurel_rank", "hidden_size_per_layer_input", "query_pre_attn_scalar", "router_hidden_size"),
        *("adapter_rank", "gated_norm_rank", "hc_lowrank", "ple_embed_dim", "num_centroids"),
    ),
    24: ("v_head_dim",),
    32: (
        *("qk_head_dim", "kv_lora_rank", "q_lora_rank", "o_lora_rank", "moe_intermediate_size"),
        *("shared_expert_intermediate_size", "shared_experts_intermediate_size", "expert_ffn_hidden_size"),
        *("moe_shared_expert_intermediate_size", "block_size"),
    ),
    8: ("mamba_n_heads", "mamba_num_heads", "rotary_dim"),
    128: ("mamba_d_ssm", "original_max_position_embeddings"),
    40: (
        *("sliding_window", "attention_chunk_size", "sliding_window_size", "window_size", "local_attention"),
        *("attention_window_size", "keep_window_size", "floor_scale", "log_scaling_n_floor"),
    ),
}
SIZE_OF = {name: size for size, names in SIZES.items() for name in names}
# Beyond the table of names: settings without a default, and settings that must agree.
MOE = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}
TYPES = ["full_attention", "sliding_attention"] * 2
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": MAMBA | {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "layer_types": TYPES,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in set(TYPES)},
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 10000.0}},
    "deepseek_v2": MOE,
    "dots1": MOE | {"layer_types": TYPES},
    "falcon_h1": MAMBA | {"time_step_min": 1e-12},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": MAMBA | {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 16, "layer_types": TYPES},
    "modernbert-decoder": {"global_attn_every_n_layers": 2},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "nemotron_h": {"time_step_min": 1e-12},  # its prefill clamps the time step from below, and its decode does not
    "recurrent_gemma": {"block_types": ["recurrent", "recurrent", "attention"]},
    "rwkv": {"attention_hidden_size": 64},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4, "n_mamba_heads": 2},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "n_mamba_heads": 8,
    },
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome for a model type, in the words of the module's docstring, and its reason."""

    kind: str
    detail: str = ""


class NotTriedError(Exception):
    """No small model can be made of this type."""


def small_config(model_type: str) -> PreTrainedConfig:
    """The type's default config with the sizes of the table."""
    default = AutoConfig.for_model(model_type)
    settings = _shrink(default.to_dict()) | SPECIAL.get(model_type, {})
    settings.pop("model_type", None)
    return AutoConfig.for_model(model_type, **settings)


def _shrink(settings: dict[str, Any]) -> dict[str, Any]:
    num_layers = settings.get("num_hidden_layers", settings.get("num_layers"))
    shrunk: dict[str, Any] = {}
    for name, value in settings.items():
        if name in ("per_layer_config", "transformers_version", "id2label", "label2id", "torch_dtype", "architectures"):
            continue  # of removed layers, or without effect
        if name.endswith(("token_id", "token_index")):
            shrunk[name] = _token_id(value)
        elif isinstance(value, dict):
            shrunk[name] = _shrink(value)
        elif isinstance(value, list) and value and len(value) == num_layers:
            shrunk[name] = _of_layers(name, value)
        else:
            shrunk[name] = _small(name, value)
    heads, kv_heads = settings.get("num_attention_heads"), settings.get("num_key_value_heads")
    if kv_heads is not None and kv_heads in (heads, 1):  # multi-head and multi-query attention stay as they are
        shrunk["num_key_value_heads"] = 1 if kv_heads == 1 else shrunk["num_attention_heads"]
    return shrunk


def _of_layers(name: str, values: list[Any]) -> list[Any]:
    """Values of few layers, with every kind of layer among them."""
    kinds = list(dict.fromkeys(values)) if isinstance(values[0], str) else values
    return [_small(name, kinds[i % len(kinds)]) for i in range(NUM_LAYERS)]


def _token_id(value: Any) -> Any:
    return None if value is None else value if isinstance(value, int) and value < VOCAB_SIZE else 3


def _small(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        return value
    return min(value, SIZE_OF.get(name, value))


def make_model(model_type: str) -> PreTrainedModel:
    """Random weights from a fixed seed, with a larger spread than the usual initialisation. Raises `NotTriedError`."""
    try:
        config = small_config(model_type)
        with torch.device("meta"):
            num_parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if num_parameters > MOST_PARAMETERS:
            raise NotTriedError(f"{num_parameters / 1e6:.0f} million parameters in its smallest form")
        torch.manual_seed(11)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except NotTriedError:
        raise
    except Exception as error:  # a config may raise anything
        raise NotTriedError(f"no small model: {type(error).__name__}: {error}") from error
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                torch.nn.init.normal_(parameter, std=0.25 if "embed" not in name else 1.0)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.generation_config = GenerationConfig(eos_token_id=VOCAB_SIZE - 1, pad_token_id=0)
    return model


def engine_tokens(folder: str, prompts: Sequence[list[int]]) -> tuple[list[list[int]], int]:
    """Greedy tokens of the prompts that fit, and the number of these prompts."""
    engine = Engine(
        EngineConfig(
            model=folder,
            kv_memory_bytes=64 << 20,
            max_num_batched_tokens=64,
            num_threads=1,
            skip_tokenizer_init=True,
        )
    )
    try:
        fitting = [prompt for prompt in prompts if len(prompt) + NEW_TOKENS <= engine.max_model_len]
        outputs: list[list[int]] = [[] for _ in fitting]
        arriving = list(enumerate(fitting))
        while arriving or engine.has_work:
            if arriving:
                i, prompt = arriving.pop(0)
                engine.submit(str(i), prompt, SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True))
            for _ in range(2):
                for delta in engine.step():
                    outputs[int(delta.request_id)].extend(delta.token_ids)
    finally:
        engine.close()
    return outputs, len(fitting)


def own_tokens(folder: str, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Greedy tokens of transformers' `generate`, one prompt at a time. Raises `NotTriedError`."""
    outputs = []
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        for prompt in prompts:
            ids = torch.tensor([prompt])
            tokens = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            outputs.append(tokens[0, len(prompt) :].tolist())
    except Exception as error:
        raise NotTriedError(f"transformers does not generate: {type(error).__name__}: {error}") from error
    return outputs


def try_type(model_type: str) -> Outcome:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(4, VOCAB_SIZE - 1, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    with tempfile.TemporaryDirectory() as folder:
        try:
            make_model(model_type).save_pretrained(folder)
            expected = own_tokens(folder, prompts)
        except NotTriedError as error:
            return Outcome("not tried", str(error))
        try:
            actual, num_prompts = engine_tokens(folder, prompts)
        except (ModelError, ConfigError) as error:
            return Outcome("refused", str(error).replace(folder, model_type))
        except Exception as error:  # a defect is a result here
            logging.exception("%s", model_type)
            return Outcome("fails", f"{type(error).__name__}: {error}")
    for prompt, tokens, wanted in zip(prompts, actual, expected, strict=False):
        if tokens != wanted:
            first = next(i for i, pair in enumerate(zip(tokens, wanted, strict=True)) if pair[0] != pair[1])
            return Outcome("WRONG", f"token {first} after a prompt of {len(prompt)}")
    return Outcome("equal", "" if num_prompts == len(prompts) else f"up to {len(prompts[num_prompts - 1])} tokens")


def _child(model_type: str, results: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bar()
    results.send(try_type(model_type))


def try_apart(model_type: str) -> Outcome:
    """`try_type` in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["folio.app.engine.engine", "benchmarks.harness"])  # imported once for all types
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(model_type, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(TIME_LIMIT_S):
            return Outcome("fails", f"not done after {TIME_LIMIT_S} s")
        outcome: Outcome = receiver.recv()
        return outcome
    except EOFError:
        process.join()
        return Outcome("fails", f"its process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), metavar="TYPE")
    args = parser.parse_args()
    types = args.only or (QUICK if args.quick else sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    outcomes: dict[str, Outcome] = {}
    for model_type in types:
        outcome = outcomes[model_type] = try_apart(model_type)
        print(
            f"{model_type:<26} {outcome.kind:<10} {outcome.detail.splitlines()[0] if outcome.detail else ''}",
            flush=True,
        )
    counts = Counter(outcome.kind for outcome in outcomes.values())
    print(json.dumps(counts))
    if not args.only:
        harness.finish("models", args, dict(counts), {name: asdict(outcome) for name, outcome in outcomes.items()})


if __name__ == "__main__":
    main()
