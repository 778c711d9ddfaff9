"""The engine: one model, its KV memory, and the loop that schedules, maps, computes and samples.

No Ray and no asyncio here; one thread calls it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import torch

from app.config import EngineConfig
from app.engine.batch import build_batch
from app.engine.detokenizer import TextStream
from app.engine.model_loader import LoadedModel, load_model
from app.engine.model_runner import ModelRunner, observe_layers
from app.engine.params import SamplingParams
from app.engine.request import Delta, Request
from app.engine.sampler import sample
from app.engine.scheduler import Scheduler
from app.engine.self_test import self_test
from app.errors import ConfigError, ContextLengthError, RequestError
from kernels import AttentionProvider, KernelError, select_provider
from vmem import HostBackend, KVMemory, MemoryReport, VmemError, plan_layout

logger = logging.getLogger(__name__)

# Every page may become a mapping of its own, at home and in a region, and Linux allows a process 65,530.
MAX_BLOCKS = 24_000


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
            provider = select_provider(config.attention, torch.device("cpu"))  # all that `DEVICES` has so far
            self.memory = _build_memory(config, self.model, provider)
        except (VmemError, KernelError) as error:
            raise ConfigError(f"these settings do not work here: {error}") from error
        try:
            self.max_model_len = _max_model_len(config, self.model, self.memory)
            self_test(self.model, self.memory.layout, provider, config.kv_view)
        except BaseException:
            self.memory.close()
            raise
        self._runner = ModelRunner(self.model, self.memory, provider, config.kv_view)
        self._scheduler = Scheduler(
            self.memory,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            view=config.kv_view,
        )
        self._requests: dict[str, Request] = {}

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
            return []
        self.memory.ensure(s.request.memory for s in scheduled if s.request.memory is not None)
        batch = build_batch(scheduled, self.memory, self.config.kv_view)
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

    def report(self) -> MemoryReport:
        return self.memory.report()

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
    budget = config.kv_memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    backend = HostBackend(budget)
    try:
        layout = plan_layout(
            layers, model.dtype, granularity_bytes=backend.granularity_bytes, block_tokens=config.block_tokens
        )
        num_blocks = min(budget // layout.block_bytes, MAX_BLOCKS)
        if num_blocks < 2:
            raise ConfigError(f"kv_memory_bytes {budget} is below two blocks of {layout.block_bytes} bytes")
        longest = min(config.max_model_len or model.max_positions, num_blocks * layout.block_tokens)
        memory = KVMemory(backend, layout, num_blocks=num_blocks, num_regions=config.max_num_seqs, max_tokens=longest)
    except (ConfigError, VmemError):
        backend.close()
        raise
    logger.info(
        "KV cache: up to %d blocks of %d tokens (%.1f MiB), %d bytes a token, %.1f %% padding",
        num_blocks,
        layout.block_tokens,
        num_blocks * layout.block_bytes / 2**20,
        layout.token_bytes,
        layout.waste * 100,
    )
    return memory


def _max_model_len(config: EngineConfig, model: LoadedModel, memory: KVMemory) -> int:
    """The context: what was asked for, else what the model has, as far as the KV cache can hold one whole sequence."""
    capacity = memory.num_blocks * memory.layout.block_tokens
    if config.max_model_len is not None:
        if config.max_model_len > capacity:
            raise ConfigError(
                f"max_model_len {config.max_model_len} does not fit into the KV cache of {capacity} tokens; "
                "raise kv_memory_bytes or lower max_model_len"
            )
        return config.max_model_len
    if model.max_positions > capacity:
        logger.warning("the KV cache limits the context from %d to %d tokens", model.max_positions, capacity)
    return min(model.max_positions, capacity)
