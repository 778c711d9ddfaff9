"""Models and requests of the random test of a shelf, and what each request must give."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from folio.app.config.shelf import SLO, Keep, ModelConfig
from folio.app.engine.request.delta import Delta
from folio.app.engine.request.pooled import PoolingParams
from folio.app.engine.sampling.params import SamplingParams
from folio.app.errors import DeadlineError, EngineError, FolioError, RequestError, UnknownModelError
from folio.app.shelf.shelved_model import ShelvedModel
from tests.app.shelf.shelf_faults import Faults
from tests.app.shelf.shelves import MODELS, Outputs, TinyModels, outputs_of
from tests.conftest import tokens

NAMES = tuple(MODELS)
RETRY_S = 0.1  # of the shelf, after a failure; see conftest.py
IDLE_S = 0.1  # with it, models sleep
LOADED = "loaded"  # name of the adapter that is loaded at run time, with the files of one of these
ADAPTERS = ("red", "blue")
FORKED = 6  # tokens of a fork
_MOST_DIFFERENCE = 1e-5  # of embeddings of length 1, in float32
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
# Prompts begin like the same document, so that prefixes are shared.
DOCUMENT = tokens(80, 5)
CASES = [
    ([*DOCUMENT[:length], length + 1], params)
    for length, params in (
        (0, GREEDY),
        (17, GREEDY),
        (70, GREEDY),
        (48, replace(GREEDY, max_tokens=1)),
        (5, replace(GREEDY, max_tokens=6)),
        (33, replace(GREEDY, max_tokens=8, temperature=1.0, seed=4)),
        (48, replace(GREEDY, max_tokens=6, temperature=0.8, top_p=0.9, seed=5, n=3)),
        (17, replace(GREEDY, max_tokens=6, n=2, best_of=3, use_beam_search=True)),
        (33, SamplingParams(max_tokens=12, temperature=1.0, seed=6, stop=("a", "e", "t"))),
    )
]


def config_of(models: TinyModels, name: str, of: str, dice: random.Random, keep: Keep | None = None) -> ModelConfig:
    """A model with the engine of another one."""
    settings: dict[str, Any] = {
        "kv_memory_bytes": dice.choice([512, 2048]) << 10,
        "preemption": dice.choice(["auto", "swap", "recompute"]),
    }
    if of == "lora":
        settings["max_loaded_adapters"] = dice.choice([1, 8])
    return ModelConfig(
        name=name,
        engine=models.engine(of, **settings),
        keep=keep or dice.choice(["auto", IDLE_S]),
        weight=dice.choice([0.5, 1.0, 4.0]),
        slo=SLO(ttft_s=dice.choice([0.05, 1.0])),
    )


def case_of(of: str, dice: random.Random) -> tuple[list[int], SamplingParams, dict[str, Any]]:
    """Prompt, parameters and options of a request that this model can serve."""
    prompt, params = dice.choice(CASES)
    if of == "embeds":
        return prompt, SamplingParams(max_tokens=1), {"pooling": PoolingParams()}
    if of in ("ngram", "draft") and params.n > 1:
        params = GREEDY
    return prompt, params, adapter_of(of, dice)


def adapter_of(of: str, dice: random.Random) -> dict[str, Any]:
    """The option of a request to use an adapter, or none."""
    adapter = dice.choice([None, *ADAPTERS, LOADED]) if of == "lora" else None
    return {} if adapter is None else {"adapter": adapter}


def _vector(outputs: Outputs) -> np.ndarray[Any, Any]:
    [embedding] = outputs
    return np.frombuffer(bytes(embedding), np.float32)


@dataclass(eq=False)
class Sent:
    """A request.

    Attributes:
        of: the model that says what it gives; empty for a pin.
        loaded: whose files the adapter `LOADED` may have for this request; `None`: it is not loaded.
        parent: of a fork.
        removed: its model was removed before it ended.
    """

    model: ShelvedModel
    of: str
    prompt: list[int]
    params: SamplingParams
    request_id: str
    options: dict[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None
    loaded: list[str | None] = field(default_factory=list)
    parent: Sent | None = None
    sent_at: float = field(default_factory=time.monotonic)
    removed: bool = False
    cancelled: bool = False
    deltas: list[Delta] = field(default_factory=list)
    task: asyncio.Task[None] = field(init=False)

    @property
    def adapters(self) -> set[str | None]:
        """Whose files the request may have been computed with."""
        adapter = self.options.get("adapter")
        return set(self.loaded) if adapter == LOADED else {adapter}

    def start(self, stream: Any) -> None:
        self.task = asyncio.create_task(self._collect(stream))

    async def _collect(self, stream: Any) -> None:
        async for deltas in stream:
            self.deltas += deltas

    async def check(self, models: TinyModels, faults: Faults) -> str:
        """Assert that the request, which has ended, has ended well; returns how."""
        if self.task.cancelled():
            assert self.cancelled
            return "ended by its caller"
        error = self.task.exception()
        if error is None:
            if self.of:
                await self._check_outputs(models)
            return "equal" if self.of else "pinned"
        assert isinstance(error, FolioError), error
        if isinstance(error, DeadlineError):
            assert self.timeout_s is not None, error
        elif isinstance(error, UnknownModelError):
            assert None in self.loaded, error
        elif isinstance(error, RequestError):  # of a fork: the parent has not begun; of a pin: the name is in use
            assert self.parent is not None or not self.of, error
        else:
            assert isinstance(error, EngineError), error
            is_explained = self.removed or faults.hit(self.model.name, self.sent_at - RETRY_S)
            assert is_explained, f"{self.model.name}: {error!r}"
        return type(error).__name__

    async def _check_outputs(self, models: TinyModels) -> None:
        found = outputs_of(self.deltas)
        options = [self.options]
        if "adapter" in self.options:
            options = [{"adapter": adapter} for adapter in self.adapters if adapter is not None]
        if self.parent is None:
            alone = [await models.alone(self.of, self.prompt, self.params, **some) for some in options]
            what = f"{self.model.name} ({self.of}) {len(self.prompt)} {self.params} {self.options}"
            if "pooling" in self.options:  # sums of prompts in other pieces differ in the last bits
                difference = np.abs(_vector(found) - _vector(*alone)).max()
                assert difference < _MOST_DIFFERENCE, f"{what}: a difference of {difference}"
            else:
                assert found in alone, f"{what}: {found}, alone {alone}"
            return
        assert len(found) == 2
        params = replace(GREEDY, max_tokens=GREEDY.max_tokens + FORKED)
        alone = [await models.alone(self.of, self.prompt, params, **some) for some in options]
        pieces = [one[i : i + FORKED] for [one] in alone for i in range(GREEDY.max_tokens + 1)]
        for output in found:  # parent and forks are greedy
            assert output in pieces, (output, alone)
