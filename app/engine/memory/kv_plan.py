"""KV plan: layer groups, page size and budget of a model's KV memory, from its layers and the settings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from folio.app.config.engine import EngineConfig, LayoutKind, ResolvedConfig
from folio.app.config.machine import SPARE_SHARE, Machine, check_resources, resident_bytes
from folio.app.engine.execution.model_runner import ObservedLayers
from folio.app.engine.execution.work_queue import QueuedContents, ThreadQueue
from folio.app.engine.layers.recurrent import state_bytes
from folio.app.engine.memory.memory_profile import HEADROOM_BYTES, DevicePlan
from folio.app.engine.model.loader import LoadedModel
from folio.app.engine.sampling.logprobs import CHUNK_ELEMENTS
from folio.app.errors import ConfigError
from folio.kernels import select_block_copy
from folio.vmem import (
    Backend,
    DevicePages,
    KVMemory,
    LayerGroup,
    MappingOptions,
    PeerRanks,
    StateLayout,
    VmemError,
    longest_sequence,
    plan_groups,
    select_backend,
)
from folio.vmem.tensor_parallel.mirror import mirror
from folio.vmem.tensors import BlockContents, CacheTensors

logger = logging.getLogger(__name__)

# Most pages and most mappings. On Linux every page may be a mapping of its own, at home and in regions, with a hole
# beside it at home. The CPU's values are for the default vm.max_map_count; a CUDA context was measured to hold about
# 520,000.
MAX_PAGES = {"cpu": 24_000, "cuda": 200_000}
MAX_MAPPINGS = {"cpu": 50_000, "cuda": 400_000}
_MAP_COUNT = 65_530
# Block lengths to try while the budget has more than the most pages.
_LONGER_BLOCK_TOKENS = (32, 64, 128, 256, 512, 1024)
# Memory that sampling takes for each logit of a chunk: float32, ranks, masks, noise. On a CUDA device it is measured.
_SAMPLING_BYTES_A_LOGIT = 40


def build_memory(
    config: ResolvedConfig,
    model: LoadedModel,
    layers: ObservedLayers,
    ranks: PeerRanks | None = None,
    *,
    share: float = 1.0,
    queue: ThreadQueue | None = None,
    plan: DevicePlan | None = None,
    pages: DevicePages | None = None,
    most_bytes: int | None = None,
) -> KVMemory:
    """The KV memory of a model.

    Args:
        ranks: peers with the same memory; the settings are for each rank.
        share: part of the configured budget; another model's memory has the rest.
        queue: the queue of the thread that computes, on a CPU with asynchronous scheduling.
        plan: plan of a CUDA device's memory, if `pages` are not given.
        pages: memory of a device that other models share. The budget may then be lowered to 0.
        most_bytes: most bytes of it that this model may take; by default all.

    Raises:
        ConfigError: the settings do not fit the machine, or are too small for two blocks of each group.
        VmemError: the device refuses memory, or no layout fits.
    """
    device = model.module.device
    planner = KVPlanner(config, model, layers, Machine.detect(), device.type == "cpu", share, pages)
    if pages is not None and ranks is not None:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}; a model that shares its device with others has "
            "one rank"
        )
    if pages is not None and most_bytes is None:
        most_bytes = pages.capacity_bytes
    ceiling, swap_bytes = planner.ceilings(resident_bytes(), most_bytes)
    budget = int(share * ceiling)
    # The memory's budget limits pages; the backend's capacity has room for the anchor page, whose size is not planned
    # yet.
    bounds = {"capacity_bytes": 2 * budget, "headroom_bytes": HEADROOM_BYTES}
    backend, contents = mirror(
        select_backend(device, **bounds, queue=queue, pages=pages),
        ranks,
        **bounds,
        copy_blocks=select_block_copy(device),
    )
    try:
        if plan is not None and plan.kv_limit_bytes is None:
            # The rank with the least memory counts; the plan is of this rank's device.
            available = backend.memory_info().available_bytes - plan.activation_bytes - plan.graph_bytes
            budget = min(int(share * plan.kv_bytes), available)
        if queue is None:
            return planner.create(backend, contents, budget, swap_bytes)
        return planner.create(backend, lambda tensors: QueuedContents(contents(tensors), queue), budget, swap_bytes)
    except (ConfigError, VmemError):
        backend.close()
        raise


@dataclass(frozen=True, slots=True)
class KVPlanner:
    """Plans the KV memory of a model on one rank.

    Attributes:
        machine: the machine's memory with the weights loaded.
        share: part of the configured budget.
        pages: memory of a device that other models share.
    """

    config: ResolvedConfig
    model: LoadedModel
    layers: ObservedLayers
    machine: Machine
    on_cpu: bool
    share: float = 1.0
    pages: DevicePages | None = None

    @property
    def most_pages(self) -> int:
        return self._part_of(MAX_PAGES)

    def _part_of(self, most: Mapping[str, int]) -> int:
        """This memory's part of `MAX_PAGES` or `MAX_MAPPINGS` on this machine: on a CPU they follow vm.max_map_count.

        All memories of a process share the limit of mappings. Over the same `pages` they count mappings together, so
        that one busy model may have nearly all of them, and models may come later. The number of pages needs no
        division: a page is mapped at home once, by the memory that has it, and pages of at least `capacity_bytes /
        most_pages` bytes (smaller ones only with `block_tokens` set) are at most `most_pages` in all. Without `pages`
        two memories, of a model and of its draft model, hold about as many blocks each.
        """
        bound = float(most["cuda"])
        if self.on_cpu:
            bound = min(bound, most["cpu"] * self.machine.max_map_count / _MAP_COUNT)
        return int(bound if self.share == 1 or self.pages is not None else 0.5 * bound)

    def create(
        self,
        backend: Backend,
        contents: Callable[[CacheTensors], BlockContents],
        budget_bytes: int,
        swap_bytes: int,
    ) -> KVMemory:
        """Create the memory. Raises as `build_memory` does; the caller still owns the backend then."""
        config, pages = self.config, self.pages
        groups, num_pages = self.plan_pages(backend.granularity_bytes, budget_bytes)
        step_tokens = config.max_num_batched_tokens
        capacity = longest_sequence(groups, num_pages, step_tokens)
        memory = KVMemory(
            backend,
            groups,
            budget_bytes=num_pages * groups[0].layout.page_bytes,
            floor_bytes=config.kv_memory_floor_bytes,
            # Each running sequence decodes in every step, and one region is mapped for the prompt that begins next.
            num_regions=min(config.max_num_seqs, step_tokens) + 1,
            max_tokens=min(config.max_model_len or self.model.max_positions, capacity),
            step_tokens=step_tokens,
            may_be_empty=pages is not None,
            mappings=None if pages is None else pages.mappings,
            options=MappingOptions(
                idle_release_s=config.kv_idle_release_s,
                cache_release_s=config.prefix_cache_release_s,
                max_mappings=self._part_of(MAX_MAPPINGS),
            ),
            prefix_cache=config.prefix_cache,
            pin_quota=config.pin_quota,
            retain_quota=config.retain_quota,
            swap_bytes=swap_bytes,
            swap_space=None if pages is None else pages.swap_space,
            contents=contents,
        )
        self._log(memory, capacity, budget_bytes)
        return memory

    def _log(self, memory: KVMemory, capacity_tokens: int, budget_bytes: int) -> None:
        for group in memory.groups:
            logger.info(
                "KV cache of %d layers%s: %s, %d pages of %d bytes each, %.1f %% padding",
                len(group.layers) or len(self.layers.states),
                f" with a window of {group.window_tokens} tokens" if group.window_tokens else "",
                "one state for each sequence" if group.is_state else f"blocks of {group.layout.block_tokens} tokens",
                group.layout.num_slices,
                group.layout.page_bytes,
                group.layout.padding * 100,
            )
            if group.layout.extent_blocks > 1:
                logger.info(
                    "KV cache: %d blocks share one %d-byte mapping, so regions are off; set kv_view: region for "
                    "regions with larger blocks",
                    group.layout.extent_blocks,
                    group.layout.handle_bytes,
                )
        num_pages, page_bytes = memory.pages.most, memory.pages.page_bytes
        logger.info(
            "KV cache: up to %.1f MiB, or %d tokens of one sequence", num_pages * page_bytes / 2**20, capacity_tokens
        )
        if self.on_cpu and num_pages == self.most_pages and budget_bytes > (num_pages + 1) * page_bytes:
            logger.info(
                "KV cache: %.1f MiB would be allowed, but vm.max_map_count, %d, has mappings for %d pages only; set "
                "kv_memory_bytes for longer blocks, or raise vm.max_map_count (sysctl)",
                budget_bytes / 2**20,
                self.machine.max_map_count,
                num_pages,
            )

    def plan_pages(self, granularity_bytes: int, budget_bytes: int) -> tuple[list[LayerGroup], int]:
        """The layer groups, and the number of pages within the budget. Raises `ConfigError` for less than two blocks
        of each group."""
        # Longer blocks: only for a configured amount, or on a shared device, whose models have `most_pages` together.
        shared_bytes = 0 if self.pages is None else self.pages.capacity_bytes
        smallest_page_bytes = max(shared_bytes, budget_bytes if self.config.kv_memory_bytes else 0) // self.most_pages
        groups = self._plan_groups(granularity_bytes, smallest_page_bytes)
        layout = groups[0].layout
        page_bytes = layout.page_bytes
        num_pages = min(budget_bytes // page_bytes, self.most_pages * layout.extent_blocks)
        if layout.extent_blocks > 1:
            num_pages -= num_pages % layout.extent_pages
        smallest = sum(group.layout.extent_blocks * group.layout.block_bytes for group in groups)
        if num_pages * page_bytes < 2 * smallest:
            raise ConfigError(f"kv_memory_bytes {budget_bytes} is below two blocks of {smallest} bytes; {self.machine}")
        return groups, num_pages

    def ceilings(self, weight_bytes: int, most_bytes: int | None = None) -> tuple[int, int]:
        """Most bytes of KV cache and of swap space on one rank; 0 for an unconfigured cache on a CUDA device.

        By default the cache gets a quarter of the machine's memory, or the memory available beside a step's work if
        that is less. Swap space gets the remainder, up to `swap_bytes`; without it preempted requests are recomputed.

        Args:
            weight_bytes: bytes of one rank's weights, and of all else that its process holds.
            most_bytes: bytes of memory that other models share; the default is then all of it.

        Raises:
            ConfigError: settings do not fit the machine.
        """
        config, machine, ranks = self.config, self.machine, self.config.tensor_parallel_size
        token_bytes = _step_bytes_a_token(self.model) if self.on_cpu else 0
        sampling_bytes = _sampling_bytes(self.model) if self.on_cpu else 0
        step_bytes = token_bytes * config.max_num_batched_tokens + sampling_bytes
        problems = check_resources(config, machine, reserved_bytes=weight_bytes + step_bytes)
        left = machine.memory_bytes // ranks - weight_bytes - sampling_bytes
        if token_bytes * config.max_num_batched_tokens > left:
            problems.append(
                f"max_num_batched_tokens is {config.max_num_batched_tokens}; at most {max(left, 0) // token_bytes}: "
                f"each takes up to {token_bytes} bytes in a step, and the weights leave {max(left, 0)}: {machine}"
            )
        if problems:
            raise ConfigError("\n".join(problems))
        room = int(machine.available_bytes // ranks - step_bytes - SPARE_SHARE * machine.memory_bytes // ranks)
        default = max(0, min(machine.memory_bytes // 4 // ranks, room)) if self.on_cpu else 0
        ceiling = reserved = config.kv_memory_bytes or default
        if most_bytes is not None:
            ceiling, reserved = min(config.kv_memory_bytes or most_bytes, most_bytes), most_bytes
        elif self.on_cpu and ceiling > room:
            logger.warning(
                "kv_memory_bytes is %d, of which %d bytes are available now: %s", ceiling, max(room, 0), machine
            )
        swap_bytes = min(config.swap_bytes, max(0, room - (reserved if self.on_cpu else 0)))
        if swap_bytes < config.swap_bytes:
            logger.info("swap space: only %d of %d bytes (swap_bytes): %s", swap_bytes, config.swap_bytes, machine)
        return ceiling, swap_bytes

    def _plan_groups(self, granularity_bytes: int, smallest_page_bytes: int) -> list[LayerGroup]:
        """Layers with the same window share a block table; recurrent states are a group of their own. To limit the
        number of mappings, blocks are lengthened until a handle has at least `smallest_page_bytes`."""
        config, layers = self.config, self.layers
        members: dict[int | None, list[int]] = {}
        for layer in layers.attention:
            members.setdefault(layers.windows.get(layer), []).append(layer)
        specs = [[layers.attention[layer] for layer in group] for group in members.values()]
        for block_tokens in (config.block_tokens, *(_LONGER_BLOCK_TOKENS if config.block_tokens is None else ())):
            layouts = plan_groups(
                specs,
                self.model.cache_dtype,
                granularity_bytes=granularity_bytes,
                kind=layout_kind(config),
                block_tokens=block_tokens,
                expected_tokens=config.expected_tokens,
                shares_handles=config.kv_view != "region" and not layers.states,
            )
            if layouts[0].handle_bytes >= smallest_page_bytes:
                break
        groups = [
            LayerGroup(tuple(group), layout, window)
            for (window, group), layout in zip(members.items(), layouts, strict=True)
        ]
        if layers.states:
            groups.append(LayerGroup((), StateLayout(state_bytes(layers.states), layouts[0].page_bytes)))
        return groups


def bytes_per_token(layers: ObservedLayers, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one token in all layers."""
    return sum(sum(spec.row_bytes(dtype)) for spec in layers.attention.values())


def estimated_activations(config: ResolvedConfig, model: LoadedModel) -> int:
    """Approximate memory of the largest step on a CUDA device, where it is measured once the model is loaded."""
    logits = min(config.max_num_seqs, config.max_num_batched_tokens) * model.vocab_size
    own = _step_bytes_a_token(model) - model.vocab_size * model.dtype.itemsize
    return own * config.max_num_batched_tokens + logits * model.dtype.itemsize + _sampling_bytes(model)


def _sampling_bytes(model: LoadedModel) -> int:
    return _SAMPLING_BYTES_A_LOGIT * max(CHUNK_ELEMENTS, model.vocab_size)


def _step_bytes_a_token(model: LoadedModel) -> int:
    """Approximate memory of a step for each token: a layer holds two rows of the hidden size and three of the
    intermediate size at once, and every token has logits if prompt log probabilities are requested."""
    config = model.module.config.get_text_config()
    hidden = config.hidden_size
    widths = getattr(config, "intermediate_size", None) or 4 * hidden
    widest = max(widths) if isinstance(widths, list | tuple) else widths
    return int((2 * hidden + 3 * widest + model.vocab_size) * model.dtype.itemsize)


def layout_kind(config: EngineConfig) -> LayoutKind:
    """The layout that "auto" stands for: kernels on CUDA read tiles of 64 tokens, and should not touch every page."""
    if config.kv_layout != "auto":
        return config.kv_layout
    return "sliced" if config.device == "cuda" else "interleaved"
