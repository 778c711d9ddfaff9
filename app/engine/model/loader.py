"""Model loader: weights, tokenizer and the facts that the engine needs, from a folder or a Hub id."""

from __future__ import annotations

import ctypes
import logging
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from folio.app.config.checkpoint import weight_faults
from folio.app.config.engine import KVDtype, ResolvedConfig
from folio.app.config.machine import Machine, check_resources
from folio.app.engine.layers.batch_invariance import make_batch_invariant
from folio.app.engine.layers.cpu_layer import run_in_one_call
from folio.app.engine.layers.linear import keep_logits_unrounded
from folio.app.engine.layers.sharding import install_collectives
from folio.app.engine.lora.layers import LoRALayers
from folio.app.engine.model.checkpoint_files import read_checkpoint, read_contents
from folio.app.engine.model.checkpoint_module import MadeModule, make_module
from folio.app.engine.model.context import context_length, read_config
from folio.app.engine.model.kv_scales import StoredScales, cache_dtype, has_scales, stored_scales
from folio.app.engine.model.pooling import Pooling, find_pooling
from folio.app.engine.model.stored_module import key_of, stored_module
from folio.app.engine.model.tokenizer import load_tokenizer
from folio.app.engine.tensor_parallel.communicator import Communicator
from folio.app.errors import ConfigError, ModelError
from folio.app.models.builtin import resolve_model
from folio.app.models.weights.arena import WeightArena
from folio.app.models.weights.key import weight_files
from folio.app.models.weights.store import WeightStore

logger = logging.getLogger(__name__)
_libc = ctypes.CDLL(None)

# Layers of other types use masks that are not passed to the attention function.
ATTENTION_LAYER_TYPES = {"full_attention", "sliding_attention", "attention", "hybrid"}
RECURRENT_LAYER_TYPES = {"linear_attention", "mamba", "conv"}
STATELESS_LAYER_TYPES = {"mlp", "moe"}
SUPPORTED_LAYER_TYPES = ATTENTION_LAYER_TYPES | RECURRENT_LAYER_TYPES | STATELESS_LAYER_TYPES


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and its properties.

    Attributes:
        attention_layers: layers that must attend; layers with a recurrent state may also do so.
        recurrent_layers: layers with a state other than keys and values.
        windowed_layers: layers with a sliding window according to the config.
        max_positions: longest context that the model supports, in tokens.
        cache_dtype: dtype of the KV cache.
        stored_scales: the checkpoint's scales for a cache of 8-bit floats.
        eos_token_ids: tokens that end an output.
        adapters: layers that LoRA adapters can change; `None` if the settings have no adapter and no `adapter_dir`.
        pooling: how embeddings or scores are made; `None` for a model without.
        generates: the checkpoint has an output layer.
        weights: the range of the model's tensors, if they are in a store.
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
    cache_dtype: torch.dtype
    stored_scales: StoredScales = field(default_factory=dict)
    adapters: LoRALayers | None = None
    pooling: Pooling | None = None
    generates: bool = True
    weights: WeightArena | None = None


def load_config(model: str, *, weights: bool) -> PreTrainedConfig:
    """The model's config. Raises `ModelError` if it is not found or has unsupported layers. With `weights` the headers
    and sizes of a folder's weight files are checked, too."""
    config, folder = read_config(model), Path(resolve_model(model))
    if weights and any(folder.glob("*.safetensors")) and (faults := list(weight_faults(folder))):
        raise ModelError(f"cannot load {model!r}: {'; '.join(faults)}")
    text_config = config.get_text_config()
    unsupported = set(getattr(text_config, "layer_types", None) or ()) - SUPPORTED_LAYER_TYPES
    if unsupported:
        raise ModelError(f"{model!r} ({config.model_type}) has layers that Folio cannot run yet: {sorted(unsupported)}")
    return config


def read_weights(config: ResolvedConfig, weights: WeightStore) -> None:
    """Read what `load_model` will read of a model and its draft model into the page cache: files of weights, which are
    checked, or checkpoints. Uses no device.

    Raises:
        ModelError: a model is not found, or has unsupported layers.
    """
    for model in (config.model, config.draft_model):
        if model is None:
            continue
        part = replace(config, model=model)
        hf_config = load_config(model, weights=part.load_format == "auto")
        found = weights.find(key_of(part, weights, pools=find_pooling(part, hf_config) is not None))
        if found is None:
            read_checkpoint(part)
            continue
        try:
            read_contents(found.contents.fd, found.contents.offset, found.header.table.num_bytes)
        finally:
            found.close()


def _check_settings(
    config: ResolvedConfig, max_positions: int, comm: Communicator | None, weights: WeightStore | None
) -> None:
    if (config.max_model_len or 0) > max_positions:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is beyond the {max_positions} positions of {config.model!r}"
        )
    if weights is not None and comm is not None:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}; a model that shares its device has one rank"
        )


def load_model(
    config: ResolvedConfig, comm: Communicator | None = None, weights: WeightStore | None = None
) -> LoadedModel:
    """Load weights and tokenizer, with Folio's attention function and fused layers; on a CPU, pack linear layers.

    Args:
        comm: collectives of a rank that loads only its share of the model. Loading does not use them; forwards do.
        weights: store of the tensors, which can then be unmapped; for one rank.

    Raises:
        ConfigError: a setting does not fit the machine or the model.
        ModelError: the model is not found, or cannot be run with these settings.
        OutOfPages: the weights do not fit into the memory of their device.
    """
    if problems := check_resources(config, Machine.detect()):
        raise ConfigError("\n".join(problems))
    hf_config = load_config(config.model, weights=config.load_format == "auto")
    text_config = hf_config.get_text_config()
    max_positions = context_length(hf_config)
    _check_settings(config, max_positions, comm, weights)
    device = torch.device(config.device)
    if config.load_format == "dummy":
        logger.warning("%r has random weights (load_format dummy): outputs are meaningless", config.model)
    pooling = find_pooling(config, hf_config)
    with ExitStack() as undo:
        if weights is None:
            made, arena = make_module(config, hf_config, comm, pooling), None
        else:
            made, arena = stored_module(config, hf_config, pooling, weights)
            undo.callback(arena.close)
        module: Any = made.module
        tokenizer = None if config.skip_tokenizer_init else _matching_tokenizer(config.model, text_config.vocab_size)
        adapters = LoRALayers(module, made.plan) if config.adapters or config.adapter_dir is not None else None
        loaded = replace(
            describe_model(module, max_positions, made.recurrent_layers, config.kv_dtype, tokenizer, adapters),
            pooling=pooling,
            generates=made.generates,
            weights=arena,
        )
        if has_scales(loaded.cache_dtype) and config.load_format == "auto":
            loaded = replace(loaded, stored_scales=stored_scales(weight_files(resolve_model(config.model))))
        _complete(made, config, comm, whole=adapters is None and device.type == "cpu")
        undo.pop_all()
    _trim_heap()
    return loaded


def _complete(made: MadeModule, config: ResolvedConfig, comm: Communicator | None, *, whole: bool) -> None:
    """Let the module's products keep their order, and its layers have collectives or run in one call. Args: `whole`:
    layers may."""
    if config.batch_invariant:
        make_batch_invariant(made.module, made.recurrent_layers, comm)
    if comm is not None and made.plan is not None:
        install_collectives(made.module, made.plan, comm)
    elif whole:
        logger.info("%d layers run in one call each", run_in_one_call(made.module))
    output: Any = made.module.get_output_embeddings()
    keep_logits_unrounded(output)


def _trim_heap() -> None:
    """Give back what a load has freed: glibc keeps as much as the weights of a small model."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def describe_model(
    module: PreTrainedModel,
    max_positions: int,
    recurrent_layers: frozenset[int],
    kv_dtype: KVDtype,
    tokenizer: PreTrainedTokenizerBase | None = None,
    adapters: LoRALayers | None = None,
) -> LoadedModel:
    """The module with its properties. Args: `recurrent_layers`: those of `recurrent.install`."""
    text_config = module.config.get_text_config()
    return LoadedModel(
        module=module,
        tokenizer=tokenizer,
        dtype=module.dtype,
        attention_layers=_attention_layers(text_config, recurrent_layers),
        recurrent_layers=recurrent_layers,
        vocab_size=text_config.vocab_size,
        windowed_layers=_windowed_layers(text_config),
        max_positions=max_positions,
        eos_token_ids=_eos_token_ids(module.generation_config),
        cache_dtype=cache_dtype(kv_dtype, module.dtype),
        adapters=adapters,
    )


def _matching_tokenizer(model: str, vocab_size: int) -> PreTrainedTokenizerBase:
    """The tokenizer. Raises `ModelError` if text can become tokens that the model does not have. Special tokens are
    excepted, because text cannot become one: a model of text may lack those of images."""
    tokenizer = load_tokenizer(model)
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    most = max((i for i in tokenizer.get_vocab().values() if i not in special), default=0)
    if most >= vocab_size:
        raise ModelError(
            f"the tokenizer of {model!r} has token ids up to {most}, but the model's vocab_size is {vocab_size}: it is "
            "another model's tokenizer"
        )
    return tokenizer


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


def _eos_token_ids(config: GenerationConfig | None) -> frozenset[int]:
    eos = None if config is None else config.eos_token_id
    return frozenset(() if eos is None else [eos] if isinstance(eos, int) else eos)
