"""Size of a model on any machine, computed from config.json alone: weights, KV layout and room.

The model is built on torch's meta device, whose tensors have shapes and no memory. The code that plans a loaded model's
memory then observes its layers and plans it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from folio.app.config.engine import EngineConfig, ResolvedConfig
from folio.app.config.machine import DEFAULT_MAP_COUNT, SPARE_SHARE, Machine
from folio.app.engine.execution.model_runner import ObservedLayers, observe_layers
from folio.app.engine.layers import attention, recurrent
from folio.app.engine.layers.sharding import plan_shards
from folio.app.engine.memory import kv_plan
from folio.app.engine.memory.memory_profile import DevicePlan
from folio.app.engine.model.checkpoint_module import keeps_floats, random_model
from folio.app.engine.model.context import context_length
from folio.app.engine.model.loader import LoadedModel, describe_model, load_config
from folio.app.engine.model.tokenizer import one_line
from folio.app.errors import ConfigError, ModelError
from folio.app.models.builtin import resolve_model
from folio.app.models.gguf.folder import packed_bytes
from folio.app.models.quantised.checkpoint import open_checkpoint
from folio.app.models.weights.key import weight_files
from folio.kernels import Masking, VarlenBatch
from folio.vmem import LayerGroup, longest_sequence

# Smallest unit of physical memory: a base page of Linux, and CUDA's smallest allocation.
GRANULARITY_BYTES = {"cpu": 4 << 10, "cuda": 2 << 20}


@dataclass(frozen=True, slots=True)
class Room:
    """KV memory of one rank.

    Attributes:
        budget_bytes: ceiling of the KV cache, `num_pages` pages.
        longest_tokens: the longest sequence that fits alone, which may be longer than the model's context.
        device_plan: plan of a CUDA device, with an estimate of a step; `None` on a CPU.
    """

    groups: tuple[LayerGroup, ...]
    num_pages: int
    budget_bytes: int
    longest_tokens: int
    step_tokens: int
    device_plan: DevicePlan | None

    def sequences(self, num_tokens: int) -> int:
        """Sequences of that length that fit at once without a shared prefix."""
        return self.num_pages // sum(group.most_pages(num_tokens, self.step_tokens) for group in self.groups)


class ModelSize:
    """A model's layers and weights on one rank.

    Args:
        config: `model`, `dtype`, `device` ("cpu" or "cuda"), `tensor_parallel_size`, and the settings of the cache.

    Attributes:
        num_parameters: parameters of the whole model.
        weight_bytes: weights of one rank.
        bits_per_weight: of weights that stay packed, on average; `None`: they have the dtype.

    Raises:
        ConfigError: `max_model_len` is beyond the model's context.
        ModelError: the model is not found, or Folio cannot serve it.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.on_cpu = config.device != "cuda"
        self.config = config = config.on_device("cpu" if self.on_cpu else "cuda")
        hf_config = load_config(config.model, weights=config.load_format == "auto")
        attention.register()
        module = _on_meta(hf_config, config.dtype)
        self.num_parameters = sum(parameter.numel() for parameter in module.parameters())
        if config.tensor_parallel_size > 1:
            _keep_share(module, config.tensor_parallel_size)
        self.bits_per_weight: float | None = None
        self.weight_bytes = sum(parameter.nbytes for parameter in module.parameters())
        if (packed_bytes := _packed_bytes(config)) is not None:
            self.weight_bytes = packed_bytes // config.tensor_parallel_size
            self.bits_per_weight = 8 * packed_bytes / self.num_parameters
        self.model: LoadedModel = describe_model(
            module, context_length(hf_config), recurrent.install(module), config.kv_dtype
        )
        try:
            self.layers: ObservedLayers = observe_layers(self.model, _Shapes())  # type: ignore[arg-type]
        except RuntimeError as error:  # of torch: shapes that do not fit, or an operation that needs values
            raise ModelError(
                f"{config.model!r} ({hf_config.model_type}) cannot be planned on {config.tensor_parallel_size} ranks "
                f"without its weights: {one_line(error)}"
            ) from error
        if (config.max_model_len or 0) > self.model.max_positions:
            raise ConfigError(
                f"max_model_len {config.max_model_len} is beyond the {self.model.max_positions} positions of "
                f"{config.model!r}"
            )

    @property
    def token_bytes(self) -> int:
        """KV memory of a token, without regard to windows and padding."""
        return kv_plan.bytes_per_token(self.layers, self.model.cache_dtype)

    def room(self, memory_bytes: int, num_replicas: int = 1) -> Room:
        """The KV memory of each rank.

        Args:
            memory_bytes: memory of the machine, which the ranks share, or of each rank's CUDA device.
            num_replicas: replicas that share the memory equally.

        Raises:
            ConfigError: there is no room.
        """
        config, share_bytes = self.config, memory_bytes // num_replicas
        ranks = config.tensor_parallel_size if self.on_cpu else 1
        weights, spare = self.weight_bytes * ranks, int(SPARE_SHARE * memory_bytes) if self.on_cpu else 0
        left = share_bytes - spare // num_replicas - weights
        if left <= 0:
            raise ConfigError(f"the weights take {weights} bytes of the {share_bytes} for a replica")
        machine = Machine(memory_bytes, left + spare, False, 1, DEFAULT_MAP_COUNT)
        planner = kv_plan.KVPlanner(config, self.model, self.layers, machine, self.on_cpu)
        plan = None
        if self.on_cpu:
            budget, _ = planner.ceilings(self.weight_bytes)
        else:
            share = config.gpu_memory_utilization if config.kv_memory_bytes is None else 1.0
            plan = DevicePlan(share_bytes, share, weights, kv_plan.estimated_activations(config, self.model))
            if config.kv_memory_bytes is None:
                plan.check(config)
            left = max(0, plan.kv_bytes)
            budget = config.kv_memory_bytes or left
        if budget * ranks > left:
            raise ConfigError(f"kv_memory_bytes is {budget}; weights and steps leave {left // ranks}")
        groups, num_pages = planner.plan_pages(GRANULARITY_BYTES["cpu" if self.on_cpu else "cuda"], budget)
        step_tokens = config.max_num_batched_tokens
        budget_bytes = num_pages * groups[0].layout.page_bytes
        return Room(
            tuple(groups), num_pages, budget_bytes, longest_sequence(groups, num_pages, step_tokens), step_tokens, plan
        )


def _packed_bytes(config: ResolvedConfig) -> int | None:
    """Bytes of the weights of a quantised checkpoint on this machine, by its files; `None`: of others."""
    folder = Path(resolve_model(config.model))
    if (num_bytes := packed_bytes(folder)) is not None:
        return num_bytes
    if config.load_format != "auto" or not folder.is_dir():
        return None
    if open_checkpoint(folder, floats=keeps_floats(config)) is None:
        return None
    return sum(path.stat().st_size for path in weight_files(str(folder)))


class _Shapes:
    """An attention provider for tensors without values."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: VarlenBatch, masking: Masking
    ) -> torch.Tensor:
        return query.new_empty(*query.shape[:-1], value.shape[-1])


def _on_meta(hf_config: Any, dtype: str) -> PreTrainedModel:
    """The model without weights.

    With "auto" the config's dtype counts, as for a checkpoint; many configs of float32 models have none."""
    chosen: Any = "auto" if dtype == "auto" else getattr(torch, dtype)
    try:
        module = random_model(
            hf_config, torch.device("meta"), dtype=chosen, attn_implementation=attention.IMPLEMENTATION
        )
    except KeyError as error:
        if error.args != (attention.IMPLEMENTATION,):
            raise ModelError(f"config.json describes no {hf_config.model_type} model: {error!r}") from error
        raise ModelError(f"{hf_config.model_type} computes attention outside transformers' interface") from error
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise ModelError(f"config.json describes no {hf_config.model_type} model: {one_line(error)}") from error
    if hasattr(module, "set_experts_implementation"):  # the default supports only bfloat16 on this device
        module.set_experts_implementation("batched_mm")
    return module.eval().requires_grad_(False)


def _keep_share(module: PreTrainedModel, num_ranks: int) -> None:
    """Replace each weight by rank 0's share of it."""
    plan = plan_shards(module, 0, num_ranks)
    modules = dict(module.named_modules(remove_duplicate=False))
    for name, cut in plan.cuts.items():
        path, _, own_name = name.rpartition(".")
        part: nn.Module = modules[path]
        setattr(part, own_name, nn.Parameter(cut.of(getattr(part, own_name)), requires_grad=False))
    for path, groups in plan.kv_groups.items():
        attention_module: Any = modules[path]
        attention_module.num_key_value_groups = groups


def replicas_that_fit(size: ModelSize, memory_bytes: int, num_tokens: int) -> list[Room]:
    """Rooms of one replica when 1, 2, 3, … replicas share the memory equally, as long as each can hold a sequence of
    `num_tokens` tokens."""
    rooms: list[Room] = []
    while True:
        try:
            room = size.room(memory_bytes, len(rooms) + 1)
        except ConfigError:
            return rooms
        if not room.sequences(num_tokens):
            return rooms
        rooms.append(room)
