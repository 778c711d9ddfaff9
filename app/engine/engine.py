"""The engine: one model, its KV memory, and the loop that schedules, maps, computes and samples.

No Ray and no asyncio here; one thread calls it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

import torch

from app.config import EngineConfig
from app.engine.batch import build_batch, demands, memory_of, next_demands
from app.engine.detokenizer import TextStream
from app.engine.model_loader import LoadedModel, load_model
from app.engine.model_runner import ModelRunner, ObservedLayer, observe_layers
from app.engine.params import SamplingParams
from app.engine.request import Delta, Request
from app.engine.sampler import sample
from app.engine.scheduler import Scheduler
from app.engine.self_test import self_test
from app.errors import ConfigError, ContextLengthError, RequestError
from kernels import AttentionProvider, KernelError, select_provider
from vmem import (
    BudgetAnswer,
    BudgetError,
    KVLayout,
    KVMemory,
    LayerGroup,
    MappingOptions,
    MemoryReport,
    VmemError,
    longest_sequence,
    plan_groups,
    select_backend,
)

logger = logging.getLogger(__name__)

# Pages at most, and mappings at most. On Linux every page may be a mapping of its own, at home and in regions, with a
# hole beside it at home, and a process may have 65,530; a CUDA context had about 520,000 in somebody's measurement.
MAX_PAGES = {"cpu": 24_000, "cuda": 200_000}
MAX_MAPPINGS = {"cpu": 50_000, "cuda": 400_000}
# On a CUDA device, what is left to torch, and the share of the rest that the cache may take.
_HEADROOM_BYTES, _CUDA_SHARE = 2 << 30, 0.9
# Longer blocks are tried until the budget has no more pages than that.
_LONGER_BLOCK_TOKENS = (32, 64, 128, 256, 512, 1024)
# How long a step without memory waits before it looks again.
_WAIT_FOR_PAGES_S = 0.01
# A request that cannot begin although nothing else runs is failed after this long.
_GIVE_UP_S = 5.0


class Engine:
    """Requests in by `submit`, deltas out by `step`.

    Raises:
        ConfigError, ModelError: the settings or the model cannot work; nothing is left behind.
    """

    def __init__(self, config: EngineConfig) -> None:
        torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
        self.config = config
        self.model = load_model(config)
        try:
            provider = select_provider(config.attention, self.model.module.device)
            self.memory = _build_memory(config, self.model, provider)
        except (VmemError, KernelError) as error:
            raise ConfigError(f"these settings do not work here: {error}") from error
        try:
            self.max_model_len = _max_model_len(config, self.model, self.memory)
            self_test(self.model, self.memory.groups, provider, config.kv_view)
        except BaseException:
            self.memory.close()
            raise
        self._runner = ModelRunner(self.model, self.memory, provider)
        self._scheduler = Scheduler(
            self.memory,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            view=config.kv_view,
        )
        self._requests: dict[str, Request] = {}
        self._stalled_since: float | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> int:
        """Check a request against the model; returns its `max_tokens`. Safe to call from any thread.

        Raises:
            RequestError: an empty prompt, an unknown token, or stop strings without a tokenizer.
            ContextLengthError: prompt and output do not fit.
        """
        if not prompt_token_ids:
            raise RequestError("the prompt is empty; it needs at least one token", "prompt")
        if not (min(prompt_token_ids) >= 0 and max(prompt_token_ids) < self.model.vocab_size):
            raise RequestError(
                f"token ids must be between 0 and {self.model.vocab_size - 1}, "
                f"got {min(prompt_token_ids)} to {max(prompt_token_ids)}",
                "prompt",
            )
        if params.stop and self.model.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this engine runs without one", "stop")
        room = self.max_model_len - len(prompt_token_ids)
        if room < 1 or (params.max_tokens or 1) > room:
            raise ContextLengthError(
                f"the context is {self.max_model_len} tokens, but the prompt has {len(prompt_token_ids)} "
                f"and {params.max_tokens or 1} are to be generated",
                "prompt" if room < 1 else "max_tokens",
            )
        return params.max_tokens or room

    def submit(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Queue a request. Raises `RequestError` as `validate` does, and for an id that is in use."""
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use", "request_id")
        max_tokens = self.validate(prompt_token_ids, params)
        text = None
        if self.model.tokenizer is not None:
            text = TextStream(self.model.tokenizer.backend_tokenizer, prompt_token_ids, params.stop)
        request = Request(request_id, list(prompt_token_ids), params, max_tokens, text)
        self._requests[request_id] = request
        self._scheduler.add(request)

    def cancel(self, request_id: str) -> None:
        """Stop a request and free its memory; nothing happens if it is not there any more."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._scheduler.remove(request)

    def step(self) -> list[Delta]:
        """Compute one step; returns what it added, at most one delta a request."""
        scheduled = self._scheduler.schedule()
        if not scheduled:
            return self._wait_for_pages()
        self._stalled_since = None
        self.memory.ensure(demands(scheduled))
        scheduled.sort(key=lambda s: memory_of(s).view)
        batch = build_batch(scheduled, self.memory)
        self.memory.plan(next_demands(scheduled))
        sampling = [s.request for s in scheduled if s.samples]
        logits = self._runner.run(batch)
        tokens = sample(logits, sampling) if sampling else []
        for s in scheduled:
            s.request.num_computed += s.num_tokens
        sound = logits.amax(dim=-1).isfinite().tolist()  # a NaN anywhere in a row is its maximum
        deltas = []
        for request, token, is_sound in zip(sampling, tokens, sound, strict=True):
            if is_sound:
                delta = request.append(token, self.model.eos_token_ids)
            else:
                delta = Delta(request.request_id, (), "", error="the model's logits are not finite numbers")
            deltas.append(delta)
            if delta.finished:
                self.cancel(request.request_id)
        return deltas

    def _wait_for_pages(self) -> list[Delta]:
        """Nothing runs and nothing can begin: the device has less memory than the budget says, for now or for good."""
        if not self.has_work:
            return []
        now = time.monotonic()
        self._stalled_since = self._stalled_since or now
        if now - self._stalled_since < _GIVE_UP_S:
            self.memory.wait_for_progress(_WAIT_FOR_PAGES_S)
            return []
        self._stalled_since = None
        request_id = self._scheduler.next_waiting.request_id
        self.cancel(request_id)
        return [Delta(request_id, (), "", error="the device has no memory for this request, although the budget has")]

    def report(self) -> MemoryReport:
        """Where KV memory is. From any thread."""
        return self.memory.report()

    def set_budget(self, budget_bytes: int, revision: int) -> BudgetAnswer:
        """Change how much memory the KV cache may take (`KVMemory.set_budget`). From any thread.

        Raises:
            RequestError: the budget is out of bounds.
        """
        try:
            return self.memory.set_budget(budget_bytes, revision)
        except BudgetError as error:
            raise RequestError(str(error), "budget_bytes") from error

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless memory adds up; without requests, unless all of it is free."""
        self.memory.check_integrity()
        if not self._requests:
            self.memory.check_idle()

    def close(self) -> None:
        """Cancel everything and give all memory back."""
        for request_id in list(self._requests):
            self.cancel(request_id)
        self.memory.close()


def _build_memory(config: EngineConfig, model: LoadedModel, provider: AttentionProvider) -> KVMemory:
    layers = observe_layers(model, provider)
    device = model.module.device
    budget = config.kv_memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    backend = select_backend(device, capacity_bytes=budget, headroom_bytes=_HEADROOM_BYTES)
    most_pages = MAX_PAGES[device.type]
    try:
        if device.type == "cuda" and not config.kv_memory_bytes:
            budget = int(_CUDA_SHARE * backend.memory_info().available_bytes)
        # A ceiling nobody asked for is no reason to have longer blocks.
        smallest_page_bytes = budget // most_pages if config.kv_memory_bytes else 0
        groups = _plan_groups(config, model, layers, backend.granularity_bytes, smallest_page_bytes)
        page_bytes = groups[0].layout.page_bytes
        num_pages = min(budget // page_bytes, most_pages)
        smallest = sum(group.layout.block_bytes for group in groups)
        if num_pages * page_bytes < 2 * smallest:
            raise ConfigError(f"kv_memory_bytes {budget} is below two blocks of {smallest} bytes")
        capacity = longest_sequence([group.layout for group in groups], num_pages)
        memory = KVMemory(
            backend,
            groups,
            budget_bytes=num_pages * page_bytes,
            floor_bytes=config.kv_memory_floor_bytes,
            num_regions=config.max_num_seqs,
            max_tokens=min(config.max_model_len or model.max_positions, capacity),
            options=MappingOptions(idle_release_s=config.kv_idle_release_s, max_mappings=MAX_MAPPINGS[device.type]),
        )
    except (ConfigError, VmemError):
        backend.close()
        raise
    for group in groups:
        logger.info(
            "KV cache of %d layers%s: blocks of %d tokens, %d pages of %d bytes each, %.1f %% padding",
            len(group.layers),
            f" with a window of {group.window_tokens} tokens" if group.window_tokens else "",
            group.layout.block_tokens,
            group.layout.num_slices,
            group.layout.page_bytes,
            group.layout.padding * 100,
        )
    logger.info("KV cache: up to %.1f MiB, or %d tokens of one sequence", num_pages * page_bytes / 2**20, capacity)
    return memory


def _plan_groups(
    config: EngineConfig,
    model: LoadedModel,
    layers: Sequence[ObservedLayer],
    granularity_bytes: int,
    smallest_page_bytes: int,
) -> list[LayerGroup]:
    """Layers that see the same window share a block table. Blocks are longer than the planner says if their pages are
    smaller than `smallest_page_bytes`, because there would be too many."""
    members: dict[int | None, list[int]] = {}
    for i, layer in enumerate(layers):
        members.setdefault(layer.window_tokens, []).append(i)
    specs = [[layers[i].spec for i in group] for group in members.values()]

    def plan(block_tokens: int | None) -> tuple[KVLayout, ...]:
        return plan_groups(
            specs, model.dtype, granularity_bytes=granularity_bytes, kind=config.kv_layout, block_tokens=block_tokens
        )

    layouts = plan(config.block_tokens)
    longer = iter(_LONGER_BLOCK_TOKENS if config.block_tokens is None else ())
    while layouts[0].page_bytes < smallest_page_bytes and (block_tokens := next(longer, None)):
        layouts = plan(block_tokens)
    return [
        LayerGroup(tuple(group), layout, window)
        for (window, group), layout in zip(members.items(), layouts, strict=True)
    ]


def _max_model_len(config: EngineConfig, model: LoadedModel, memory: KVMemory) -> int:
    """The context: what was asked for, else what the model has, as far as the KV cache can hold one whole sequence."""
    if config.max_model_len is not None and config.max_model_len > memory.max_tokens:
        raise ConfigError(
            f"max_model_len {config.max_model_len} does not fit into the KV cache of {memory.max_tokens} tokens; "
            "raise kv_memory_bytes or lower max_model_len"
        )
    if config.max_model_len is None and model.max_positions > memory.max_tokens:
        logger.warning("the KV cache limits the context from %d to %d tokens", model.max_positions, memory.max_tokens)
    return memory.max_tokens
