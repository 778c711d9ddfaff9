"""A smaller model that guesses for a larger one: loaded, checked against it, with a KV memory of its own."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import torch

from app.config import EngineConfig
from app.engine.batch import plan_step
from app.engine.executor import Executor
from app.engine.kv_plan import build_memory
from app.engine.model_loader import LoadedModel
from app.engine.model_runner import ObservedLayers
from app.engine.scheduler import Scheduled
from app.engine.self_test import self_test
from app.engine.tensor_parallel.processes import spawn_ranks
from app.errors import ConfigError
from app.machine import num_threads
from kernels import KernelError
from vmem import KVMemory, VmemError

logger = logging.getLogger(__name__)


class DraftModel:
    """Runs on this rank alone, whatever the number of the model's ranks: it is small, and its guesses go to them with
    the step.

    Load it before the model's KV memory is made: `share` is what it takes of that. `open` makes its own.

    Args:
        config: the engine's.
        target: the model it guesses for, and `layers` of that, as this rank has them.

    Attributes:
        share: of the KV budget, so that both memories have room for as many tokens: its bytes a token, windows left
            aside, among those of both.

    Raises:
        ConfigError: it has another vocabulary, or states that cannot go back when a guess is wrong.
        ModelError: it cannot be loaded.
    """

    def __init__(self, config: EngineConfig, target: LoadedModel, layers: ObservedLayers) -> None:
        assert config.draft_model is not None
        self._num_ranks = config.tensor_parallel_size
        self._config = dataclasses.replace(
            config,
            model=config.draft_model,
            speculation="off",
            draft_model=None,
            tensor_parallel_size=1,
            num_threads=num_threads(config),
            max_model_len=None,
            max_num_batched_tokens=config.max_num_batched_tokens + config.max_draft_tokens,
            kv_memory_floor_bytes=0,
            block_tokens=None,
            swap_bytes=0,
            pinned_prompts={},
            pinned_system_prompts={},
            adapters={},
        )
        try:
            self._executor = Executor(self._config, spawn_ranks)
        except KernelError as error:
            raise ConfigError(f"draft_model {config.draft_model!r} cannot run here: {error}") from error
        try:
            _check(config.draft_model, self._executor, target)
        except ConfigError:
            self._executor.close()
            raise
        own = bytes_per_token(self._executor.layers, self._executor.model.dtype)
        self.share = own / (own + bytes_per_token(layers, target.dtype))
        self._memory: KVMemory | None = None

    @property
    def memory(self) -> KVMemory:
        """Its own, once it is open."""
        assert self._memory is not None
        return self._memory

    def open(self, max_model_len: int) -> None:
        """Make its memory and test the model on it.

        Args:
            max_model_len: context of the model it guesses for. It may itself have less.

        Raises:
            ConfigError: its share of the budget is too small for it, or its cache cannot be read here.
            ModelError: the self-test failed.
        """
        model = self._executor.model
        config = dataclasses.replace(
            self._config,
            max_model_len=min(max_model_len, model.max_positions),
            tensor_parallel_size=self._num_ranks,  # by which the machine's memory is divided
        )
        try:
            self._memory = build_memory(config, model, self._executor.layers, share=self.share)
            self_test(self._executor, self._memory.groups, config.kv_view)
            self._executor.open(self._memory)
            self._executor.started()
        except (KernelError, VmemError) as error:
            raise ConfigError(f"draft_model {config.model!r} cannot run with these settings: {error}") from error
        logger.info(
            "draft model %r: %.1f %% of the KV budget, up to %d tokens a request",
            config.model,
            self.share * 100,
            self._memory.max_tokens,
        )

    def run(self, scheduled: Sequence[Scheduled]) -> torch.Tensor:
        """Logits `[num_samples, vocab_size]` on the CPU; blocks must be owned and mapped."""
        return self._executor.run(plan_step(scheduled, self.memory), self.memory)

    def close(self) -> None:
        """Give everything back, opened or not. No sequence may be open."""
        try:
            if self._memory is not None:
                self._memory.close()
        finally:
            self._executor.close()


def bytes_per_token(layers: ObservedLayers, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers."""
    return sum(sum(spec.row_bytes(dtype)) for spec in layers.attention.values())


def _check(name: str, executor: Executor, target: LoadedModel) -> None:
    model = executor.model
    if executor.layers.states:
        raise ConfigError(
            f"draft_model {name!r} keeps a recurrent state in {len(executor.layers.states)} layers, which cannot go "
            "back when a guess is wrong; choose a draft model with attention only"
        )
    if model.vocab_size != target.vocab_size:
        raise ConfigError(
            f"draft_model {name!r} has a vocabulary of {model.vocab_size} tokens and the model one of "
            f"{target.vocab_size}; choose a draft model of the same family"
        )
    if target.tokenizer is None or model.tokenizer is None:
        return
    if model.tokenizer.get_vocab() != target.tokenizer.get_vocab():
        raise ConfigError(
            f"draft_model {name!r} has as many tokens as the model, but not the same; choose a draft model of the "
            "same family"
        )
