"""From a model's name to a module, a tokenizer and the facts the engine needs."""

from __future__ import annotations

import copy
import logging
import pickle
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from app.builtin import resolve_model
from app.config.engine import EngineConfig
from app.config.machine import Machine, check_resources
from app.engine.execution import attention, recurrent
from app.engine.lora.layers import LoRALayers
from app.engine.model.fusion import fuse_attention, fuse_modules
from app.engine.model.linear import choose_product, pack_linears
from app.engine.tensor_parallel.communicator import Communicator
from app.engine.tensor_parallel.sharding import install_collectives, load_share
from app.errors import ConfigError, ModelError
from kernels import CpuElementwise, KernelError

logger = logging.getLogger(__name__)

# Anything else masks in a way that is not passed to the attention function.
ATTENTION_LAYER_TYPES = {"full_attention", "sliding_attention", "attention", "hybrid"}
RECURRENT_LAYER_TYPES = {"linear_attention", "mamba", "conv"}
STATELESS_LAYER_TYPES = {"mlp", "moe"}
SUPPORTED_LAYER_TYPES = ATTENTION_LAYER_TYPES | RECURRENT_LAYER_TYPES | STATELESS_LAYER_TYPES
# These change their frequencies with the length of the running text; a packed batch has no one length.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
DEFAULT_CONTEXT = 2048
_DUMMY_SEED = 0
# What reading damaged files of weights ends in.
_DAMAGED = (OSError, EOFError, RuntimeError, SafetensorError, pickle.UnpicklingError)
# transformers changes settings of the process while it loads a model.
_loading = threading.Lock()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what its files say.

    Attributes:
        attention_layers: layers that must attend; those with a recurrent state may, too.
        recurrent_layers: layers that keep a state other than keys and values.
        windowed_layers: layers whose config says that they see only a sliding window.
        max_positions: longest context it was made for, in tokens.
        eos_token_ids: tokens that end an output.
        adapters: the layers that LoRA adapters can change; `None` when there are to be no adapters.
    """

    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    dtype: torch.dtype
    attention_layers: frozenset[int]
    recurrent_layers: frozenset[int]
    vocab_size: int
    windowed_layers: frozenset[int]
    max_positions: int
    eos_token_ids: frozenset[int]
    adapters: LoRALayers | None = None


def resolve_device(name: str) -> torch.device:
    """Where to run. Raises `ConfigError` for CUDA on a machine without it."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no CUDA device here; use cpu")
    return torch.device("cuda" if name == "cuda" else "cpu")


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """Raises `ModelError` when there is none, or none that can decode incrementally."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(resolve_model(model))
    except (OSError, ValueError) as error:
        raise ModelError(f"no tokenizer for {model!r}: {one_line(error)}") from error
    if not tokenizer.is_fast:
        raise ModelError(f"{model!r} has only a slow tokenizer; Folio needs one of the tokenizers library")
    return tokenizer


def load_config(model: str) -> PreTrainedConfig:
    """The model's config. Raises `ModelError` when it cannot be found or cannot be served."""
    try:
        config = AutoConfig.from_pretrained(resolve_model(model))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot load {model!r}: {one_line(error)}") from error
    text_config = config.get_text_config()
    unsupported = set(getattr(text_config, "layer_types", None) or ()) - SUPPORTED_LAYER_TYPES
    if unsupported:
        raise ModelError(f"{model!r} ({config.model_type}) has layers that Folio cannot run yet: {sorted(unsupported)}")
    return config


def context_length(config: PreTrainedConfig) -> int:
    """The longest context whose positions the model knows and whose rope does not depend on the length."""
    text_config = config.get_text_config()
    longest: int = getattr(text_config, "max_position_embeddings", None) or DEFAULT_CONTEXT
    for rope in _rope_parameters(text_config):
        if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            original = rope.get("original_max_position_embeddings") or getattr(
                text_config, "original_max_position_embeddings", None
            )
            longest = min(longest, original or longest)
            logger.warning("rope %r depends on the length: the context is limited to %d", rope["rope_type"], longest)
    return longest


def load_model(config: EngineConfig, comm: Communicator | None = None) -> LoadedModel:
    """Load weights and tokenizer, attention bound to Folio's function; on a CPU, linear layers packed and norms fused.

    Args:
        comm: to the other ranks, if this one has only its share of the model. Loading does not use it; forwards do.

    Raises:
        ConfigError: a setting does not fit the machine, or not the model.
        ModelError: the model cannot be found, or not be run this way.
    """
    if problems := check_resources(config, Machine.detect()):
        raise ConfigError("\n".join(problems))
    hf_config = load_config(config.model)
    device = resolve_device(config.device)
    attention.register()
    dtype: Any = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
    folder, settings = resolve_model(config.model), {"dtype": dtype, "attn_implementation": attention.IMPLEMENTATION}
    plan = None
    is_random = config.load_format == "dummy"
    try:
        with _loading:
            if is_random:
                logger.warning("%r has random weights (load_format dummy): its outputs mean nothing", config.model)
                loaded_files: Any = random_model(hf_config, device, **settings), {"missing_keys": ()}
            elif comm is None:
                loaded_files = AutoModelForCausalLM.from_pretrained(
                    folder, config=hf_config, output_loading_info=True, **settings
                )
            else:
                *loaded_files, plan = load_share(folder, hf_config, comm, **settings)
    except (*_DAMAGED, ValueError) as error:
        raise ModelError(f"cannot load {config.model!r}: {_damage(folder) or one_line(error)}") from error
    except KeyError as error:  # how older models look up their attention class
        if error.args != (attention.IMPLEMENTATION,):
            raise
        raise _not_on_the_interface(config.model, hf_config) from error
    module, loading = loaded_files
    if loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])
        raise ModelError(f"{config.model!r} lacks {len(missing)} weights, {missing[0]} among them")
    if not any("Attention" in type(part).__name__ for part in module.modules()):
        raise ModelError(f"{config.model!r} ({hf_config.model_type}) has no attention; Folio needs some layers with it")
    if not module._can_set_attn_implementation():
        raise _not_on_the_interface(config.model, hf_config)
    module.eval().requires_grad_(False)
    recurrent_layers = recurrent.install(module)
    if device.type == "cpu":
        _optimise(module, int8=config.quantization == "int8")
    else:
        if config.quantization != "none":
            raise ConfigError(f"quantization is {config.quantization!r}, which is for CPUs; use 'none' on {device}")
        module.to(device)
    text_config = hf_config.get_text_config()
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config.model)
    if tokenizer is not None:
        _check_token_ids(config.model, tokenizer, text_config.vocab_size)
    loaded = LoadedModel(
        module=module,
        tokenizer=tokenizer,
        dtype=module.dtype,
        attention_layers=_attention_layers(text_config, recurrent_layers),
        recurrent_layers=recurrent_layers,
        vocab_size=text_config.vocab_size,
        windowed_layers=_windowed_layers(text_config),
        max_positions=context_length(hf_config),
        eos_token_ids=_eos_token_ids(module.generation_config),
        adapters=LoRALayers(module, plan) if config.adapters else None,
    )
    if config.max_model_len is not None and config.max_model_len > loaded.max_positions:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is beyond the {loaded.max_positions} positions of {config.model!r}"
        )
    if comm is not None and plan is not None:
        install_collectives(module, plan, comm)
    return loaded


def _check_token_ids(model: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise `ModelError` if text can become tokens that the model does not have. Special tokens it cannot become: a
    model of text may lack those of images."""
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    most = max((i for i in tokenizer.get_vocab().values() if i not in special), default=0)
    if most >= vocab_size:
        raise ModelError(
            f"the tokenizer of {model!r} has token ids up to {most}, but the model's vocab_size is {vocab_size}: it is "
            "another model's tokenizer"
        )


def _damage(folder: str) -> str | None:
    """Which of the weights' files cannot be read, and why, if one of them is the reason."""
    for path in _weight_files(folder):
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, "pt"):
                    pass
            else:
                torch.load(path, map_location="meta", weights_only=True)
        except _DAMAGED as error:
            return f"{path} is truncated or damaged ({path.stat().st_size} bytes): {one_line(error)}"
    return None


def _weight_files(model: str) -> list[Path]:
    """The files of weights in a folder, or of a Hub id those that have been downloaded."""
    folder = Path(model)
    if not folder.is_dir():
        config = try_to_load_from_cache(model, "config.json")
        if not isinstance(config, str):
            return []
        folder = Path(config).parent
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def one_line(error: Exception) -> str:
    """The error's text, which in transformers is often a paragraph."""
    return " ".join(str(error).split())


def random_model(
    config: PreTrainedConfig, device: torch.device, *, dtype: torch.dtype | Literal["auto"], attn_implementation: str
) -> PreTrainedModel:
    """A model as transformers initialises one before training, made on the device: nothing of it is ever elsewhere.

    Everything is computed, buffers such as rotary frequencies too, and embeddings are tied as the config says. On one
    device the same config gives the same weights. The random states of the CPU and of this device stay as they are.
    """
    chosen: dict[str, Any] = {} if dtype == "auto" else {"dtype": dtype}
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), device:
        torch.manual_seed(_DUMMY_SEED)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=attn_implementation, **chosen
        )
    return model


def _optimise(module: PreTrainedModel, *, int8: bool) -> None:
    product = choose_product(module.dtype, int8=int8)
    try:
        ops = CpuElementwise()
        num_fused = fuse_modules(module, ops) + fuse_attention(module, ops)
    except KernelError as error:
        num_fused = 0
        logger.warning("norms and activations stay unfused: %s", error)
    num_packed = 0 if product is None else pack_linears(module, product)
    logger.info("fused %d modules, packed %d linear layers", num_fused, num_packed)


def _not_on_the_interface(model: str, config: PreTrainedConfig) -> ModelError:
    return ModelError(
        f"{model!r} ({config.model_type}) computes attention outside transformers' AttentionInterface; "
        "Folio cannot serve it"
    )


def _attention_layers(config: PreTrainedConfig, recurrent_layers: frozenset[int]) -> frozenset[int]:
    types = getattr(config, "layer_types", None)
    if types is None:
        return frozenset(range(config.num_hidden_layers)) - recurrent_layers
    return frozenset(i for i, kind in enumerate(types) if kind in ATTENTION_LAYER_TYPES)


def _windowed_layers(config: PreTrainedConfig) -> frozenset[int]:
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return frozenset()
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return frozenset(i for i, kind in enumerate(types) if kind == "sliding_attention")


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Every rope of the model: one for all layers, or one for each layer type."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def _eos_token_ids(config: GenerationConfig | None) -> frozenset[int]:
    eos = None if config is None else config.eos_token_id
    return frozenset(() if eos is None else [eos] if isinstance(eos, int) else eos)
