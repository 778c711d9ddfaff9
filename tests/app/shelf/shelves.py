"""Tiny models for tests of the shelf, what each of them gives alone, and shelves that hold a few of them."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest

from folio.app.config.engine import EngineConfig
from folio.app.config.shelf import ModelConfig
from folio.app.engine.async_engine import AsyncEngine
from folio.app.engine.driver import EngineDriver
from folio.app.engine.engine import Engine
from folio.app.engine.memory.kv_plan import estimated_activations
from folio.app.engine.memory.size import ModelSize
from folio.app.engine.model.device import resolve
from folio.app.engine.request.delta import Delta
from folio.app.engine.request.engine_request import EngineRequest
from folio.app.engine.sampling.params import SamplingParams
from folio.app.errors import UnavailableError
from folio.app.models.weights.arena import WeightArena
from folio.app.shelf.control import Control
from folio.app.shelf.device import ShelfDevice
from folio.app.shelf.shelf import Shelf
from folio.app.shelf.shelved_model import ShelvedModel
from tests.app.engine.lora.adapters import make_adapter
from tests.app.small_tokenizers import byte_level
from tests.conftest import GPT2, HYBRIDS, SMALL, MakeCheckpoint
from tests.processes import until_async

TINY = SMALL | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
MAX_MODEL_LEN = 128
SWAP_BYTES = 1 << 20
KV_BYTES = 400 << 10
DEADLINE_S = 90.0
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
# name → model type, its config, and settings of the engine.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", TINY, {}),
    "qwen3": ("qwen3", TINY | {"head_dim": 16}, {}),
    "gemma2": ("gemma2", TINY | {"head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 16}, {}),
    "gpt2": ("gpt2", GPT2 | {"n_embd": 32, "n_layer": 2}, {"preemption": "recompute"}),
    "mixtral": ("mixtral", TINY | {"num_local_experts": 4, "num_experts_per_tok": 2}, {}),
    "bamba": ("bamba", HYBRIDS["bamba"], {}),
    "int8": ("llama", TINY, {"quantization": "int8"}),
    "ngram": ("llama", TINY, {"speculation": "ngram", "max_draft_tokens": 4, "preemption": "swap"}),
    "draft": ("llama", TINY, {"speculation": "draft", "draft_model": "llama", "max_draft_tokens": 3}),
    "lora": ("llama", TINY, {"adapters": {"red": 1, "blue": 2}}),
    "embeds": ("qwen3", TINY | {"head_dim": 16}, {"pooling": "last"}),
}

Outputs = list[list[int]]


class Streams(Protocol):
    """A shelved model, or an engine."""

    def stream(self, request: EngineRequest) -> AsyncGenerator[list[Delta], None]: ...


class TinyModels:
    """Checkpoints of the `MODELS`, and an engine of its own for each.

    Args:
        folder: for adapters and copies.

    Attributes:
        weights_dir: of all shelves.
    """

    def __init__(self, make_checkpoint: MakeCheckpoint, folder: Path) -> None:
        self._make, self._folder = make_checkpoint, folder
        self.weights_dir = folder / "weights"
        self._engines: dict[str, AsyncEngine] = {}
        self._outputs: dict[str, Outputs] = {}
        self._sizes: dict[str, tuple[int, int]] = {}  # name → bytes of weights and of a step's workspace

    def checkpoint(self, name: str) -> Path:
        model_type, config, _ = MODELS[name]
        made = self._make(model_type, **config)
        folder = self._folder / made.name
        if not folder.exists():
            shutil.copytree(made, folder)  # other tests want it without a tokenizer
            byte_level().save_pretrained(folder)
        return folder

    def adapter(self, name: str, adapter: str) -> Path:
        """The folder of a model's adapter."""
        folder = self._folder / f"{name} {adapter}"
        if not folder.exists():
            seed = MODELS[name][2]["adapters"][adapter]
            make_adapter(folder, self.checkpoint(name), r"layers.*_proj$", seed=seed)
        return folder

    def engine(self, name: str, **settings: Any) -> EngineConfig:
        defaults: dict[str, Any] = {
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 6,
            "max_num_batched_tokens": 48,
            "block_tokens": 16,
            "num_threads": 1,
            "swap_bytes": SWAP_BYTES,
        }
        own = dict(MODELS[name][2])
        if "draft_model" in own:
            own["draft_model"] = str(self.checkpoint(own["draft_model"]))
        if "adapters" in own:
            own["adapters"] = {a: str(self.adapter(name, a)) for a in own["adapters"]}
        return EngineConfig(model=str(self.checkpoint(name)), **(defaults | own | settings))

    def config(self, name: str, *, of: str | None = None, **settings: Any) -> ModelConfig:
        """A model `name` with the engine of the model `of`."""
        return ModelConfig(name=name, engine=self.engine(of or name), **settings)

    async def alone(self, name: str, prompt: Sequence[int], params: SamplingParams, **options: Any) -> Outputs:
        """What the model gives in a process of its own."""
        key = repr((name, prompt, params, options))
        if key not in self._outputs:
            self._outputs[key] = await outputs(self.reference(name), prompt, params, **options)
        return self._outputs[key]

    def reference(self, name: str) -> AsyncEngine:
        """The model's own engine."""
        if name not in self._engines:
            self._engines[name] = AsyncEngine(self.engine(name, kv_memory_bytes=4 << 20))
        return self._engines[name]

    def weight_bytes(self, *names: str) -> int:
        return sum(self._size(name)[0] for name in names)

    def memory_for(self, *names: str, room_bytes: int, beside: Iterable[str] = ()) -> int:
        """Device memory for the weights of these models and `room_bytes` of KV memory. Their steps need a workspace, as
        do those of models `beside` them."""
        workspace_bytes = max(self._size(name)[1] for name in (*names, *beside))
        return workspace_bytes + self.weight_bytes(*names) + room_bytes

    def _size(self, name: str) -> tuple[int, int]:
        if name not in self._sizes:
            config = resolve(self.engine(name))
            size = ModelSize(config)
            self._sizes[name] = size.weight_bytes, estimated_activations(config, size.model)
        return self._sizes[name]

    @asynccontextmanager
    async def opened(
        self,
        configs: Sequence[ModelConfig],
        device_memory_bytes: int | None,
        deadline_s: float | None = DEADLINE_S,
        **settings: Any,
    ) -> AsyncIterator[Shelf]:
        """A shelf with these settings, of which nothing is left afterwards."""
        before = set(threading.enumerate())
        shelf = Shelf(configs, device_memory_bytes=device_memory_bytes, **{"weights_dir": self.weights_dir} | settings)
        try:
            async with asyncio.timeout(deadline_s):
                yield shelf
        finally:
            await asyncio.to_thread(shelf.close)
        await nothing_left(shelf, before)

    def shelf(
        self,
        *served: str | ModelConfig,
        memory_of: Sequence[str] = ("llama",),
        room_bytes: int = KV_BYTES,
        **settings: Any,
    ) -> AbstractAsyncContextManager[Shelf]:
        """A shelf with memory for the weights of some models and `room_bytes` of KV memory."""
        configs = [self.config(model) if isinstance(model, str) else model for model in served]
        beside = [model for model in served if isinstance(model, str)]
        return self.opened(configs, self.memory_for(*memory_of, room_bytes=room_bytes, beside=beside), **settings)

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


def stream_of(
    model: Streams, prompt: Sequence[int], params: SamplingParams, request_id: str = "request", **options: Any
) -> AsyncGenerator[list[Delta], None]:
    return model.stream(EngineRequest(request_id, prompt, params, **options))


async def deltas_of(model: Streams, prompt: Sequence[int], params: SamplingParams, **options: Any) -> list[Delta]:
    return [delta async for deltas in stream_of(model, prompt, params, **options) for delta in deltas]


async def outputs(model: Streams, prompt: Sequence[int], params: SamplingParams, **options: Any) -> Outputs:
    """The tokens of each output; of an embedding, its bytes."""
    return outputs_of(await deltas_of(model, prompt, params, **options))


def outputs_of(deltas: Iterable[Delta]) -> Outputs:
    found: dict[int, list[int]] = {}
    for delta in deltas:
        found.setdefault(delta.index, []).extend(delta.token_ids or delta.pooled or ())
    return [found[index] for index in sorted(found)]


def mappings(memfd: os.stat_result | None = None) -> dict[int, str]:
    """Address → line of this process's mappings of weights, and of the KV memory in `memfd`."""
    marks = [".weights", "folio-weights"]
    if memfd is not None:  # a file of another file system may have the same inode
        marks.append(f" {os.major(memfd.st_dev):02x}:{os.minor(memfd.st_dev):02x} {memfd.st_ino} ")
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = [line for line in lines if any(mark in line for mark in marks)]
    return {int(line.partition("-")[0], 16): line for line in found}


def control_of(shelf: Shelf) -> Control:
    control = shelf._control
    assert control is not None
    return control


def device_of(shelf: Shelf) -> ShelfDevice:
    device = shelf._device
    assert device is not None
    return device


def members_of(shelf: Shelf) -> list[EngineDriver] | None:
    """The engines of the step thread; `None` while another thread loads or wakes one."""
    members: Any = control_of(shelf)._thread._members
    return None if control_of(shelf)._moves else list(members)


def arenas_of(engine: Engine) -> Sequence[WeightArena]:
    return engine.footprint._arenas


async def nothing_left(shelf: Shelf, before: set[threading.Thread]) -> None:
    if shelf.device_status() is not None:
        pages = device_of(shelf).shared.pages
        pages.check_integrity()
        assert (pages.used_bytes, pages.idle_bytes, pages.charged_bytes) == (0, 0, 0)
    await until_async(lambda: not _folio_threads(before), 10.0)
    assert shelf.statuses() == ()


def _folio_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t not in before and t.name.startswith("folio")]


async def in_step_thread(shelf: Shelf, call: Callable[[], Any]) -> Any:
    return await asyncio.wrap_future(control_of(shelf)._thread.call(call))


def sleep_now(shelf: Shelf, name: str) -> None:
    """Put a model to sleep as for another one, in the step thread."""
    control_of(shelf)._put_to_sleep(shelf.model(name), "another")


async def put_to_sleep(shelf: Shelf, name: str) -> bool:
    """Put a model to sleep between two steps, as for another one; whether it was awake."""

    def sleep(model: ShelvedModel) -> bool:
        if model.state != "awake" or model.engine is None or model.engine.driver.closed.done():
            return False
        sleep_now(shelf, name)
        return True

    return bool(await in_step_thread(shelf, partial(sleep, shelf.model(name))))


@contextmanager
def asleep(shelf: Shelf, name: str) -> Iterator[None]:
    """A model that is put to sleep is not woken within."""
    model, real = shelf.model(name), control_of(shelf)._wake

    def wake(other: ShelvedModel) -> None:
        if other is not model:
            real(other)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control_of(shelf), "_wake", wake)
        yield


@asynccontextmanager
async def sleeping(shelf: Shelf, name: str) -> AsyncIterator[None]:
    """A model sleeps within, whatever it is asked for."""
    with asleep(shelf, name):
        await put_to_sleep(shelf, name)
        yield


async def served(shelf: Shelf, name: str, alone: Outputs) -> bool:
    """Whether the model answers; an answer is right."""
    try:
        assert await outputs(shelf.model(name), [1, 2], GREEDY) == alone
    except UnavailableError:
        return False
    return True


async def until_state(shelf: Shelf, name: str, *states: str) -> None:
    await until_async(lambda: shelf.model(name).state in states, 30.0)
