"""Module from its checkpoint: transformers loads it, then layers are fused, and on a CPU packed."""

from __future__ import annotations

import copy
import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from folio.app.compat.transformers import uses_attention_interface, weights_copied
from folio.app.config.engine import Quantization, ResolvedConfig
from folio.app.config.machine import Machine
from folio.app.engine.layers import attention, recurrent
from folio.app.engine.layers.experts import quantise_experts
from folio.app.engine.layers.fused_layer import fuse_layers
from folio.app.engine.layers.fusion import fuse_attention, fuse_modules
from folio.app.engine.layers.fusion_record import FusionRecord
from folio.app.engine.layers.linear import (
    choose_product,
    pack_linears,
    packed_by,
    rounding_product,
    use_few_row_products,
)
from folio.app.engine.layers.sharding import ShardPlan, load_share, plan_shards
from folio.app.engine.model.pooling import Pooling, is_classifier
from folio.app.engine.model.quantised_module import (
    Descriptions,
    Fuse,
    QuantisedLoader,
    blanks,
    by_layer,
    described,
    embed_as,
    packed_as,
)
from folio.app.engine.model.tokenizer import one_line
from folio.app.engine.tensor_parallel.communicator import Communicator
from folio.app.errors import ConfigError, ModelError
from folio.app.models.builtin import resolve_model
from folio.app.models.quantised.checkpoint import QuantisedCheckpoint, open_checkpoint
from folio.app.models.weights.key import weight_files
from folio.app.models.weights.model_parts import fingerprint
from folio.kernels import (
    FewRowProduct,
    KernelError,
    PackedProduct,
    select_elementwise,
    select_packed_product,
    select_product,
)
from folio.kernels.threads import one_thread

logger = logging.getLogger(__name__)

_DUMMY_SEED = 0
_BITS: dict[Quantization, Literal[4, 8]] = {"int8": 8, "int4": 4}
# Copies of weights may take the available memory divided by this; quantised or packed ones need the rest.
_COPIED = 2
# Exceptions from reading damaged weight files.
_DAMAGED = (OSError, EOFError, RuntimeError, SafetensorError, pickle.UnpicklingError)
# Held while transformers makes a module: it changes torch's default dtype and random state, the initialisers of
# `torch.nn.init`, and methods of `PreTrainedModel`, which would affect a module that another thread makes.
_making = threading.Lock()


@dataclass(frozen=True, slots=True)
class MadeModule:
    """A module on its device, fused and packed.

    Attributes:
        plan: plan of a rank's share; `None` for the whole model.
        record: which modules were fused.
    """

    module: PreTrainedModel
    plan: ShardPlan | None
    generates: bool
    recurrent_layers: frozenset[int]
    record: FusionRecord

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the module, to be stored in the file of its tensors."""
        generation = self.module.generation_config
        return {
            "dtype": str(self.module.dtype).removeprefix("torch."),
            "generates": self.generates,
            "eos_token_id": None if generation is None else generation.eos_token_id,
            "fused": self.record.learned,
            "packed": described(self.module),
            "fingerprint": fingerprint(self.module),
        }


def make_module(
    config: ResolvedConfig,
    hf_config: PreTrainedConfig,
    comm: Communicator | None,
    pooling: Pooling | None,
    *,
    room: Callable[[int], None] | None = None,
) -> MadeModule:
    """The module from its checkpoint.

    Args:
        room: for a module whose tensors can move: called with their bytes before they are put on the device.
    """
    checkpoint = find_quantised(config, hf_config)
    if checkpoint is not None:
        return _quantised_module(config, hf_config, checkpoint, comm, pooling, room or (lambda _: None))
    device, record, movable = torch.device(config.device), FusionRecord(), room is not None
    module: Any
    module, plan, generates = _load_module(config, hf_config, device, comm, pooling)
    recurrent_layers = recurrent.install(module)
    if room is not None:
        room(sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers())))
    if config.quantization == "none":
        module.to(device)
        optimise(module, config, record, movable=movable)
    else:
        _quantise(module, config, record)
    return MadeModule(module, plan, generates, recurrent_layers, record)


def find_quantised(config: ResolvedConfig, hf_config: PreTrainedConfig) -> QuantisedCheckpoint | None:
    """The checkpoint, downloaded if it is of the Hub, if its weights stay packed. Raises `ModelError`."""
    if config.load_format != "auto":
        return None
    folder, quantization = Path(resolve_model(config.model)), getattr(hf_config, "quantization_config", None)
    if not folder.is_dir():
        if quantization is None:
            return None
        try:
            folder = Path(snapshot_download(config.model, allow_patterns=["*.json", "*.safetensors"]))
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot load {config.model!r}: {one_line(error)}") from error
    return open_checkpoint(folder, floats=keeps_floats(config))


def keeps_floats(config: ResolvedConfig) -> bool:
    """Whether weights in FP8 and MXFP4 stay packed, for which there are no kernels in every dtype."""
    return config.quantization == "none" and config.dtype != ("float16" if config.device == "cpu" else "float32")


def _quantised_module(
    config: ResolvedConfig,
    hf_config: PreTrainedConfig,
    checkpoint: QuantisedCheckpoint,
    comm: Communicator | None,
    pooling: Pooling | None,
    room: Callable[[int], None],
) -> MadeModule:
    """The module with the checkpoint's codes. Raises `ConfigError` where they cannot be computed with."""
    name = config.model
    if config.quantization != "none":
        raise ConfigError(f"quantization is {config.quantization!r}, but {name!r} is quantised already; use 'none'")
    device, dtype = torch.device(config.device), quantised_dtype(config, hf_config)
    linear = _packed_product(device, dtype, f"the weights of {name!r} are quantised", "use another dtype")
    room(sum(path.stat().st_size for path in weight_files(resolve_model(name))))
    attention.register()
    record = FusionRecord()
    with _making, _parameters_on_meta():
        module: Any = random_model(
            hf_config, torch.device("cpu"), dtype=dtype, attn_implementation=attention.IMPLEMENTATION
        )
    with suppress(OSError):  # there is none, and the config may name the tokens that end a text
        module.generation_config = GenerationConfig.from_pretrained(resolve_model(name))
    _check_attention(module, name, hf_config)
    module.eval().requires_grad_(False)
    plan = None if comm is None else plan_shards(module, comm.rank, comm.size)
    recurrent_layers = recurrent.install(module)
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # buffers
    fuse, few = _fusion(config)
    try:
        with one_thread():  # a layer's tensors are small
            num_fused = QuantisedLoader(module, checkpoint, linear, device, plan).load(fuse, record)
    except ModelError as error:
        raise ModelError(f"cannot load {name!r}: {error}") from error
    num_few = 0 if few is None else use_few_row_products(module, few)
    logger.info("fused %d modules, %d with products of few rows; quantised weights stay packed", num_fused, num_few)
    generates = pooling is None or not is_classifier(hf_config)
    return MadeModule(module, plan, generates, recurrent_layers, record)


def _packed_product(device: torch.device, dtype: torch.dtype, given: str, remedy: str) -> PackedProduct:
    """The products with quantised weights. Raises `ConfigError`, with what is given and the remedy, if there are
    none."""
    try:
        linear = select_packed_product(device)
        reason = linear.unsupported(dtype)
    except KernelError as error:
        reason = str(error)
    if reason is not None:
        raise ConfigError(f"{given}, which is not possible with {dtype} here: {reason}; {remedy}")
    return linear


def _quantise(module: Any, config: ResolvedConfig, record: FusionRecord) -> None:
    """Move the module to the settings' device, fuse it, and quantise its linear layers. Raises `ConfigError`."""
    device, bits = torch.device(config.device), _BITS[config.quantization]
    linear = _packed_product(device, module.dtype, f"quantization is {config.quantization!r}", "use 'none'")
    fuse, few = _fusion(config)
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))
    num_experts = 0

    def fill(path: str) -> None:
        nonlocal num_experts
        num_experts += quantise_experts(module.get_submodule(path).to(device), bits, linear)

    num_fused = by_layer(module, fill, fuse, record, packed_by(rounding_product(linear, bits)))
    num_few = 0 if few is None else use_few_row_products(module, few)
    logger.info(
        "fused %d modules, %d with products of few rows; linear layers, and experts of %d modules, in %d bits",
        *(num_fused, num_few, num_experts, bits),
    )


def quantised_dtype(config: ResolvedConfig, hf_config: PreTrainedConfig) -> torch.dtype:
    """The dtype to compute in with quantised weights: as configured, else bfloat16."""
    return torch.bfloat16 if config.dtype == "auto" else getattr(torch, config.dtype)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters of modules that this thread makes meanwhile take no memory; buffers are computed."""
    own = threading.get_ident()  # torch's hook is for all threads, which may be loading other models

    def take(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or threading.get_ident() != own:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=False)

    hook = register_module_parameter_registration_hook(take)  # type: ignore[arg-type]  # lacks the return value
    try:
        yield
    finally:
        hook.remove()


def empty_module(hf_config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The module on torch's meta device, before its layers are fused."""
    attention.register()
    with _making:
        module = random_model(
            hf_config, torch.device("meta"), dtype=dtype, attn_implementation=attention.IMPLEMENTATION
        )
    return module.eval().requires_grad_(False)


def _check_attention(module: PreTrainedModel, name: str, hf_config: PreTrainedConfig) -> None:
    if not any("Attention" in type(part).__name__ for part in module.modules()):
        raise ModelError(f"{name!r} ({hf_config.model_type}) has no attention; Folio needs some layers with it")
    if not uses_attention_interface(module):
        raise _outside_the_interface(name, hf_config)


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
        with _making:
            if config.load_format == "dummy":
                module = random_model(hf_config, device, **settings)
            elif comm is None:
                options = {"config": hf_config, "output_loading_info": True}
                with weights_copied(Machine.detect().available_bytes // _COPIED):
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
    _check_attention(module, config.model, hf_config)
    return module.eval().requires_grad_(False), plan, generates


def _output_weights(module: PreTrainedModel) -> set[str]:
    """Names of the output layer's weights."""
    head = module.get_output_embeddings()
    path = next(path for path, part in module.named_modules() if part is head)
    return {f"{path}.{name}" for name, _ in head.named_parameters()}


def _damage(folder: str) -> str | None:
    """The first unreadable weight file and the reason, if there is one."""
    for path in weight_files(folder):
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, "pt", backend="pread"):
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


def optimise(
    module: PreTrainedModel,
    config: ResolvedConfig,
    record: FusionRecord,
    *,
    movable: bool,
    packed: Descriptions | None = None,
) -> None:
    """Fuse layers; pack linear layers for a CPU. The module is on the settings' device, or on torch's meta device.

    Args:
        packed: quantised weights of a module on torch's meta device.

    Raises:
        ConfigError: the settings ask for kernels that this device does not have.
    """
    device = torch.device(config.device)
    product = choose_product(module.dtype, movable=movable) if device.type == "cpu" and not packed else None
    fuse, few = _fusion(config)
    num_fused, num_packed = fuse(module, record), 0
    if packed:
        linear, weights = select_packed_product(device), blanks(packed)
        embed_as(module, weights, linear)
        num_packed = pack_linears(module, packed_as(weights, linear))
    elif product is not None:
        num_packed = pack_linears(module, packed_by(product))
    num_few = 0 if few is None else use_few_row_products(module, few)
    logger.info(
        "fused %d modules, packed %d linear layers, %d with products of few rows", num_fused, num_packed, num_few
    )


def _fusion(config: ResolvedConfig) -> tuple[Fuse, FewRowProduct | None]:
    """What fuses layers for the settings' device, and its product of few rows if they ask for it."""
    device, few_rows, dependent = torch.device(config.device), config.few_row_products, config.dependent_launch
    try:
        ops = select_elementwise(device, dependent=dependent)
        few = select_product(device, dependent=dependent) if few_rows else None
    except KernelError as error:
        if few_rows or dependent:
            raise ConfigError(
                f"few_row_products is {few_rows} and dependent_launch {dependent}, which {device} cannot do: {error}; "
                "leave both out"
            ) from error
        logger.warning("layers stay unfused: %s", error)
        return lambda module, record: 0, None
    return lambda module, record: sum(f(module, ops, record) for f in (fuse_modules, fuse_attention, fuse_layers)), few


def _outside_the_interface(model: str, config: PreTrainedConfig) -> ModelError:
    return ModelError(
        f"{model!r} ({config.model_type}) computes attention outside transformers' AttentionInterface; "
        "Folio cannot serve it"
    )
