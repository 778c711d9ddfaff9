"""Model loader: weights, tokenizer and the facts that the engine needs, from a folder or a Hub id."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from app.builtin import resolve_model
from app.compat.transformers import uses_attention_interface
from app.config.engine import KVDtype, ResolvedConfig
from app.config.machine import Machine, check_resources
from app.engine.execution import attention, recurrent
from app.engine.lora.layers import LoRALayers
from app.engine.model.checkpoint_files import read_checkpoint, read_contents
from app.engine.model.context import context_length, read_config
from app.engine.model.cpu_layer import run_in_one_call
from app.engine.model.fused_layer import fuse_layers
from app.engine.model.fusion import fuse_attention, fuse_modules
from app.engine.model.fusion_record import FusionRecord
from app.engine.model.kv_scales import StoredScales, cache_dtype, stored_scales
from app.engine.model.linear import choose_product, pack_linears
from app.engine.model.load_turn import LoadTurn
from app.engine.model.model_parts import fingerprint
from app.engine.model.pooling import Pooling, find_pooling, is_classifier
from app.engine.model.tokenizer import load_tokenizer, one_line
from app.engine.model.weight_arena import Collection, Skeleton, WeightArena, collect
from app.engine.model.weight_key import WeightKey, weight_files, weight_key
from app.engine.model.weight_store import StoredFile, WeightStore
from app.engine.tensor_parallel.communicator import Communicator
from app.engine.tensor_parallel.sharding import ShardPlan, install_collectives, load_share
from app.errors import ConfigError, ModelError
from kernels import KernelError, select_elementwise

logger = logging.getLogger(__name__)

# Layers of other types use masks that are not passed to the attention function.
ATTENTION_LAYER_TYPES = {"full_attention", "sliding_attention", "attention", "hybrid"}
RECURRENT_LAYER_TYPES = {"linear_attention", "mamba", "conv"}
STATELESS_LAYER_TYPES = {"mlp", "moe"}
SUPPORTED_LAYER_TYPES = ATTENTION_LAYER_TYPES | RECURRENT_LAYER_TYPES | STATELESS_LAYER_TYPES
_DUMMY_SEED = 0
# Exceptions from reading damaged weight files.
_DAMAGED = (OSError, EOFError, RuntimeError, SafetensorError, pickle.UnpicklingError)
_load_turn = LoadTurn()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and its properties.

    Attributes:
        attention_layers: layers that must attend; layers with a recurrent state may also do so.
        recurrent_layers: layers with a state other than keys and values.
        windowed_layers: layers with a sliding window according to the config.
        max_positions: longest context that the model supports, in tokens.
        cache_dtype: of the KV cache.
        stored_scales: the checkpoint's, for a cache of 8-bit floats.
        eos_token_ids: tokens that end an output.
        adapters: layers that LoRA adapters can change; `None` if the settings have no adapter and no `adapter_dir`.
        pooling: of embeddings or scores; `None` for a model without.
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


def load_config(model: str) -> PreTrainedConfig:
    """The model's config. Raises `ModelError` if it is not found or has unsupported layers."""
    config = read_config(model)
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
        found = weights.find(_key_of(part, pools=find_pooling(part, load_config(model)) is not None))
        if found is None:
            read_checkpoint(part)
            continue
        try:
            read_contents(found.contents.fd, found.contents.offset, found.header.table.num_bytes)
        finally:
            found.close()


def load_model(
    config: ResolvedConfig, comm: Communicator | None = None, weights: WeightStore | None = None
) -> LoadedModel:
    """Load weights and tokenizer, with Folio's attention function and fused layers; on a CPU, pack linear layers.

    Args:
        comm: collectives of a rank that loads only its share of the model. Loading does not use them; forwards do.
        weights: where the tensors move to, so that they can be unmapped; for one rank. oneDNN's packed weights, which
            are the fastest for bfloat16 on processors with AMX, cannot move: Folio's own products are used.

    Raises:
        ConfigError: a setting does not fit the machine or the model.
        ModelError: the model is not found, or cannot be run with these settings.
        OutOfPages: the weights do not fit into the memory of their device.
        UnavailableError: the load of another model does not end.
    """
    if problems := check_resources(config, Machine.detect()):
        raise ConfigError("\n".join(problems))
    hf_config = load_config(config.model)
    text_config = hf_config.get_text_config()
    max_positions = context_length(hf_config)
    if (config.max_model_len or 0) > max_positions:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is beyond the {max_positions} positions of {config.model!r}"
        )
    device = torch.device(config.device)
    if device.type != "cpu" and config.quantization != "none":
        raise ConfigError(f"quantization is {config.quantization!r}, which is for CPUs; use 'none' on {device}")
    if weights is not None and comm is not None:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}; weights that can be unmapped are for one rank"
        )
    if config.load_format == "dummy":
        logger.warning("%r has random weights (load_format dummy): outputs are meaningless", config.model)
    pooling = find_pooling(config, hf_config)
    with ExitStack() as undo:
        if weights is None:
            made, arena = _make_module(config, hf_config, comm, pooling), None
        else:
            made, arena = _in_arena(config, hf_config, pooling, weights)
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
        if loaded.cache_dtype != loaded.dtype and config.load_format == "auto":
            loaded = replace(loaded, stored_scales=stored_scales(weight_files(resolve_model(config.model))))
        if comm is not None and made.plan is not None:
            install_collectives(module, made.plan, comm)
        elif adapters is None and device.type == "cpu":
            logger.info("%d layers run in one call each", run_in_one_call(module))
        undo.pop_all()
    return loaded


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


@dataclass(frozen=True, slots=True)
class _MadeModule:
    """A module on its device, fused and packed.

    Attributes:
        plan: of a rank's share.
        record: which modules were fused.
    """

    module: PreTrainedModel
    plan: ShardPlan | None
    generates: bool
    recurrent_layers: frozenset[int]
    record: FusionRecord

    @property
    def facts(self) -> dict[str, Any]:
        """What a file of the module's tensors has to say about it."""
        generation = self.module.generation_config
        return {
            "dtype": str(self.module.dtype).removeprefix("torch."),
            "generates": self.generates,
            "eos_token_id": None if generation is None else generation.eos_token_id,
            "fused": self.record.learned,
            "fingerprint": fingerprint(self.module),
        }


def _make_module(
    config: ResolvedConfig,
    hf_config: PreTrainedConfig,
    comm: Communicator | None,
    pooling: Pooling | None,
    *,
    room: Callable[[int], None] | None = None,
) -> _MadeModule:
    """The module from its checkpoint.

    Args:
        room: of a module whose tensors can move: called with their bytes before they are on the device.
    """
    device, record, movable = torch.device(config.device), FusionRecord(), room is not None
    module: Any
    module, plan, generates = _load_module(config, hf_config, device, comm, pooling)
    recurrent_layers = recurrent.install(module)
    if room is not None:
        room(sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers())))
    module.to(device)
    _optimise(module, device, record, int8=config.quantization == "int8", movable=movable)
    return _MadeModule(module, plan, generates, recurrent_layers, record)


def _in_arena(
    config: ResolvedConfig, hf_config: PreTrainedConfig, pooling: Pooling | None, weights: WeightStore
) -> tuple[_MadeModule, WeightArena]:
    """The module with its tensors in an arena, before anything keeps their addresses. From its file if there is one."""
    pools = pooling is not None
    key = _key_of(config, pools=pools)

    def make() -> tuple[_MadeModule, Collection]:
        with ExitStack() as undo:
            taken = undo.enter_context(ExitStack())

            def room(num_bytes: int) -> None:
                taken.callback(weights.room_to_make(num_bytes))

            def build() -> tuple[_MadeModule, Collection]:
                made = _make_module(config, hf_config, None, pooling, room=room)
                return made, collect(made.module, made.facts, taken.close)

            read_checkpoint(config)
            try:
                built = build()
            except BaseException as error:
                _forget_frames(error)  # whose tensors have the memory that `taken` gives back
                raise
            undo.pop_all()
            return built

    def again() -> Collection:
        if _key_of(config, pools=pools) != key:
            raise ModelError(f"the checkpoint {config.model!r} has changed since it was loaded; load it again")
        return make()[1]

    if (found := weights.find(key)) is not None:
        opened: StoredFile | WeightArena | None = found
        try:
            made = _without_values(config, hf_config, found.header.facts)
            skeleton = Skeleton(made.module, found.header.table)
            opened = None  # `map` closes the file if it fails
            opened = arena = weights.map(key, found, again)
            skeleton.fill(arena.contents)
            return made, arena
        except BaseException as error:
            if opened is not None:
                opened.close()
            # Of torch: an operation needs values, or a tensor cannot be swapped. Of the facts: another version's.
            if not isinstance(error, ModelError | RuntimeError | KeyError | TypeError | AttributeError):
                raise
            logger.info("%r is loaded from its checkpoint, not from the file of its weights: %s", config.model, error)
    made, tensors = make()
    try:
        before, key = key, _key_of(config, pools=pools)
        if key != before and Path(key.place["model"]).is_dir():
            raise ModelError(f"the checkpoint {config.model!r} has changed while it was loaded; load it again")
    except ModelError:
        tensors.drop()
        raise
    # A model of the Hub has been downloaded meanwhile: the key before was of fewer files.
    return made, weights.move(tensors, key, again)


def _forget_frames(error: BaseException) -> None:
    """Free what the functions that an error has ended refer to, those of the errors that led to it included."""
    errors: list[BaseException | None] = [error]
    for found in errors:  # which grows meanwhile
        if found is not None:
            traceback.clear_frames(found.__traceback__)
            errors += (other for other in (found.__cause__, found.__context__) if other not in errors)
    gc.collect()  # parts of a module may refer to each other


def _key_of(config: ResolvedConfig, *, pools: bool) -> WeightKey:
    try:
        return weight_key(config, pools=pools)
    except OSError as error:
        raise ModelError(f"cannot load {config.model!r}: {one_line(error)}") from error


def _without_values(config: ResolvedConfig, hf_config: PreTrainedConfig, facts: dict[str, Any]) -> _MadeModule:
    """The module that a file was written of, on torch's meta device. Raises `ModelError` if it is another one."""
    attention.register()
    dtype, record = getattr(torch, facts["dtype"]), FusionRecord.known(facts["fused"])
    with _load_turn.of(config.model):
        module: Any = random_model(
            hf_config, torch.device("meta"), dtype=dtype, attn_implementation=attention.IMPLEMENTATION
        )
    module.eval().requires_grad_(False)
    if module.generation_config is not None:
        module.generation_config.eos_token_id = facts["eos_token_id"]
    recurrent_layers = recurrent.install(module)
    _optimise(module, torch.device(config.device), record, int8=config.quantization == "int8", movable=True)
    if fingerprint(module) != facts["fingerprint"]:
        raise ModelError("its modules are not those of the file")
    return _MadeModule(module, None, facts["generates"], recurrent_layers, record)


def _load_module(
    config: ResolvedConfig,
    hf_config: PreTrainedConfig,
    device: torch.device,
    comm: Communicator | None,
    pooling: Pooling | None,
) -> tuple[PreTrainedModel, ShardPlan | None, bool]:
    """The model with all its weights, or a rank's share of them and the plan of that share; and whether it generates.
    Only a model that pools may lack the output layer."""
    attention.register()
    dtype: Any = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
    folder, settings = resolve_model(config.model), {"dtype": dtype, "attn_implementation": attention.IMPLEMENTATION}
    module: Any
    plan: ShardPlan | None = None
    loading: dict[str, Any] = {"missing_keys": ()}
    try:
        with _load_turn.of(config.model):
            if config.load_format == "dummy":
                module = random_model(hf_config, device, **settings)
            elif comm is None:
                options = {"config": hf_config, "output_loading_info": True}
                module, loading = AutoModelForCausalLM.from_pretrained(folder, **options, **settings)  # type: ignore[misc]
            else:
                module, loading, plan = load_share(folder, hf_config, comm, **settings)
    except (*_DAMAGED, ValueError) as error:
        raise ModelError(f"cannot load {config.model!r}: {_damage(folder) or one_line(error)}") from error
    except KeyError as error:  # older models look up their attention class in a dict
        if error.args != (attention.IMPLEMENTATION,):
            raise
        raise _outside_the_interface(config.model, hf_config) from error
    missing = set(loading["missing_keys"])
    generates = pooling is None or not is_classifier(hf_config)
    if pooling is not None and missing and missing <= _output_weights(module):
        missing, generates = set(), False
    if missing:
        raise ModelError(f"{config.model!r} lacks {len(missing)} weights, {min(missing)} among them")
    if not any("Attention" in type(part).__name__ for part in module.modules()):
        raise ModelError(f"{config.model!r} ({hf_config.model_type}) has no attention; Folio needs some layers with it")
    if not uses_attention_interface(module):
        raise _outside_the_interface(config.model, hf_config)
    return module.eval().requires_grad_(False), plan, generates


def _output_weights(module: PreTrainedModel) -> set[str]:
    """Names of the output layer's weights."""
    head = module.get_output_embeddings()
    path = next(path for path, part in module.named_modules() if part is head)
    return {f"{path}.{name}" for name, _ in head.named_parameters()}


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


def _damage(folder: str) -> str | None:
    """The first unreadable weight file and the reason, if there is one."""
    for path in weight_files(folder):
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, "pt"):
                    pass
            else:
                torch.load(path, map_location="meta", weights_only=True)
        except _DAMAGED as error:
            return f"{path} is truncated or damaged ({path.stat().st_size} bytes): {one_line(error)}"
    return None


def random_model(
    config: PreTrainedConfig, device: torch.device, *, dtype: torch.dtype | Literal["auto"], attn_implementation: str
) -> PreTrainedModel:
    """A model as transformers initialises it for training, created on the device without a copy elsewhere.

    Buffers such as rotary frequencies are computed, and embeddings are tied according to the config. On one device the
    same config gives the same weights. The random states of the CPU and of this device do not change.
    """
    chosen: dict[str, Any] = {} if dtype == "auto" else {"dtype": dtype}
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), device:
        torch.manual_seed(_DUMMY_SEED)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=attn_implementation, **chosen
        )
    return model


def _optimise(
    module: PreTrainedModel, device: torch.device, record: FusionRecord, *, int8: bool, movable: bool
) -> None:
    """Fuse layers; for a CPU, pack linear layers. The module is on the device, or on torch's meta device."""
    product = choose_product(module.dtype, int8=int8, movable=movable) if device.type == "cpu" else None
    try:
        ops = select_elementwise(device)
        num_fused = sum(fuse(module, ops, record) for fuse in (fuse_modules, fuse_attention, fuse_layers))
    except KernelError as error:
        num_fused = 0
        logger.warning("layers stay unfused: %s", error)
    num_packed = 0 if product is None else pack_linears(module, product)
    logger.info("fused %d modules, packed %d linear layers", num_fused, num_packed)


def _outside_the_interface(model: str, config: PreTrainedConfig) -> ModelError:
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


def _eos_token_ids(config: GenerationConfig | None) -> frozenset[int]:
    eos = None if config is None else config.eos_token_id
    return frozenset(() if eos is None else [eos] if isinstance(eos, int) else eos)
