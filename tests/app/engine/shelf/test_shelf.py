"""A shelf of tiny models: each gives the tokens that it gives alone, whatever happens to the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from app.engine.pooled import PoolingParams
from app.engine.sampling.params import SamplingParams
from app.engine.shelf import shelved_model
from app.engine.shelf.shelf import Shelf
from app.errors import (
    ContextLengthError,
    DeadlineError,
    EngineError,
    OverloadedError,
    RequestError,
    UnavailableError,
    UnknownModelError,
    UnknownRequestError,
)
from tests.app.engine.shelf.shelves import (
    MODELS,
    Outputs,
    TinyModels,
    control_of,
    in_step_thread,
    outputs,
    outputs_of,
    put_to_sleep,
    until_state,
)
from tests.conftest import tokens
from tests.processes import until_async
from vmem import IntegrityError

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0, seed=7, ignore_eos=True)
PARALLEL = SamplingParams(max_tokens=24, temperature=1.0, seed=3, n=3, ignore_eos=True)
BEAMS = SamplingParams(max_tokens=24, n=2, best_of=3, use_beam_search=True, temperature=0, ignore_eos=True)
STOPPED = SamplingParams(max_tokens=60, temperature=1.0, seed=1, stop=("a", "e", "o"))
KV_BYTES = 400 << 10
EMBED = {"pooling": PoolingParams()}

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture(autouse=True)
def _soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelved_model, "_FIRST_RETRY_S", 0.1)


def requests_of(name: str) -> list[tuple[list[int], SamplingParams, dict[str, Any]]]:
    if name == "embeds":
        return [(tokens(n, n), SamplingParams(max_tokens=1), EMBED) for n in (3, 40, 90)]
    options: list[dict[str, Any]] = [{}, {"adapter": "red"}, {"adapter": "blue"}] if name == "lora" else [{}]
    sampled: Sequence[SamplingParams] = (GREEDY, SAMPLED, STOPPED)
    if name not in ("ngram", "draft"):
        sampled = (*sampled, PARALLEL, BEAMS)
    return [(tokens(5 + 13 * i, i), params, some) for some in options for i, params in enumerate(sampled)]


async def expected(models: TinyModels, name: str) -> list[Outputs]:
    return [await models.alone(name, *case[:2], **case[2]) for case in requests_of(name)]


async def actual(shelf: Shelf, name: str) -> list[Outputs]:
    return await asyncio.gather(*(outputs(shelf.model(name), *case[:2], **case[2]) for case in requests_of(name)))


async def test_all_kinds_of_models_share_memory_for_a_few(models: TinyModels) -> None:
    memory_bytes = models.memory_for("llama", "bamba", room_bytes=KV_BYTES, beside=MODELS)
    alone = {name: await expected(models, name) for name in MODELS}
    async with models.opened([models.config(name) for name in MODELS], memory_bytes) as shelf:
        for _ in range(2):
            together = await asyncio.gather(*(actual(shelf, name) for name in MODELS))
            await shelf.check_integrity()
            for name, found in zip(MODELS, together, strict=True):
                assert found == alone[name], name
        assert sum(status.num_evictions for status in shelf.statuses()) > 0


@pytest.mark.parametrize("name", MODELS)
async def test_a_model_sleeps_while_its_requests_run(models: TinyModels, name: str) -> None:
    alone = await expected(models, name)
    async with models.opened([models.config(name)], models.memory_for(name, room_bytes=KV_BYTES)) as shelf:
        await shelf.model(name).ready()
        task = asyncio.create_task(actual(shelf, name))
        slept = 0
        while not task.done():
            slept += await put_to_sleep(shelf, name)
            await shelf.check_integrity()
            await asyncio.sleep(0.01)
        assert await task == alone
        assert slept > (name != "embeds")  # one step may do for them
