"""Module from its checkpoint: transformers loads it, then layers are fused, and on a CPU packed."""

from __future__ import annotations

import copy
import logging
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from folio.app.compat.transformers import uses_attention_interface, weights_copied
from folio.app.config.engine import ResolvedConfig
from folio.app.config.machine import Machine
from folio.app.engine.layers import attention, recurrent
from folio.app.engine.layers.fused_layer import fuse_layers
from folio.app.engine.layers.fusion import fuse_attention, fuse_modules
from folio.app.engine.layers.fusion_record import FusionRecord
from folio.app.engine.layers.linear import choose_product, pack_linears, use_few_row_products
from folio.app.engine.layers.sharding import ShardPlan, load_share
from folio.app.engine.model.pooling import Pooling, is_classifier
from folio.app.engine.model.tokenizer import one_line
from folio.app.engine.tensor_parallel.communicator import Communicator
from folio.app.errors import ConfigError, ModelError
from folio.app.models.builtin import resolve_model
from folio.app.models.weights.key import weight_files
from folio.app.models.weights.model_parts import fingerprint
from folio.kernels import KernelError, select_elementwise, select_product

logger = logging.getLogger(__name__)

_DUMMY_SEED = 0
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
    device, record, movable = torch.device(config.device), FusionRecord(), room is not None
    module: Any
    module, plan, generates = _load_module(config, hf_config, device, comm, pooling)
    recurrent_layers = recurrent.install(module)
    if room is not None:
        room(sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers())))
    module.to(device)
    optimise(module, config, record, movable=movable)
    return MadeModule(module, plan, generates, recurrent_layers, record)


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


def optimise(module: PreTrainedModel, config: ResolvedConfig, record: FusionRecord, *, movable: bool) -> None:
    """Fuse layers; for a CPU, pack linear layers. The module is on the settings' device, or on torch's meta device.

    Raises:
        ConfigError: the settings ask for kernels that this device does not have.
    """
    device, int8 = torch.device(config.device), config.quantization == "int8"
    product = choose_product(module.dtype, int8=int8, movable=movable) if device.type == "cpu" else None
    few_rows, dependent = config.few_row_products, config.dependent_launch
    try:
        ops = select_elementwise(device, dependent=dependent)
        few = select_product(device, dependent=dependent) if few_rows else None
        num_fused = sum(fuse(module, ops, record) for fuse in (fuse_modules, fuse_attention, fuse_layers))
    except KernelError as error:
        if few_rows or dependent:
            raise ConfigError(
                f"few_row_products is {few_rows} and dependent_launch {dependent}, which {device} cannot do: {error}; "
                "leave both out"
            ) from error
        num_fused, few = 0, None
        logger.warning("layers stay unfused: %s", error)
    num_packed = 0 if product is None else pack_linears(module, product)
    num_few = 0 if few is None else use_few_row_products(module, few)
    logger.info(
        "fused %d modules, packed %d linear layers, %d with products of few rows", num_fused, num_packed, num_few
    )


def _outside_the_interface(model: str, config: PreTrainedConfig) -> ModelError:
    return ModelError(
        f"{model!r} ({config.model_type}) computes attention outside transformers' AttentionInterface; "
        "Folio cannot serve it"
    )
