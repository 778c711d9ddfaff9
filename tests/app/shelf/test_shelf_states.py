"""Requests of a model in every state, when something happens to them or to the model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from folio.app.engine.request.pooled import PoolingParams
from folio.app.engine.sampling.params import SamplingParams
from folio.app.errors import ContextLengthError, DeadlineError, RequestError, UnavailableError, UnknownModelError
from folio.app.models.weights.store import StoredWeights
from folio.app.shelf import control
from folio.app.shelf.shelf import Shelf
from folio.app.shelf.shelved_model import ShelvedModel
from tests.app.shelf.shelf_faults import Mount
from tests.app.shelf.shelves import GREEDY, LONG, Outputs, TinyModels, asleep, outputs, put_to_sleep
from tests.conftest import tokens
from tests.processes import until_async

STATES = ("new", "loading", "waking", "awake", "asleep")
PROMPT = tokens(20, 1)
IN_FLIGHT = (
    LONG,
    SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=3, ignore_eos=True),
    SamplingParams(max_tokens=12, n=2, best_of=3, use_beam_search=True, temperature=0, ignore_eos=True),
)
IMPOSSIBLE: list[tuple[type[Exception], str | None, list[int], dict[str, Any]]] = [
    (RequestError, "empty", [], {}),
    (ContextLengthError, None, tokens(200), {}),
    (ContextLengthError, None, tokens(40), {"max_tokens": 1000}),
    (RequestError, None, [10**6], {}),
    (UnknownModelError, None, [1], {"adapter": "none"}),
    (RequestError, None, [1], {"pooling": PoolingParams()}),
    (RequestError, "timeout_s", [1], {"timeout_s": -1.0}),
]

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


@dataclass
class Stage:
    """Requests in flight of a model that stays in its state until `go_on` is called.

    Attributes:
        alone: what they give.
    """

    shelf: Shelf
    model: ShelvedModel
    state: str
    tasks: Sequence[asyncio.Task[Outputs]]
    alone: Sequence[Outputs]
    go_on: Callable[[], None]

    async def ended(self) -> list[Outputs | BaseException]:
        self.go_on()
        return await asyncio.gather(*self.tasks, return_exceptions=True)

    async def check_unavailable(self) -> None:
        """They end with the reason; of a model that is awake, some may have ended before."""
        ended = await self.ended()
        refused = [isinstance(end, UnavailableError) for end in ended]
        assert all(refused) or self.state == "awake", ended
        assert any(refused)
        assert all(is_refused or end in self.alone for is_refused, end in zip(refused, ended, strict=True)), ended


@asynccontextmanager
async def requested(shelf: Shelf, state: str, alone: Sequence[Outputs]) -> AsyncIterator[Stage]:
    model = shelf.model("mine")
    if state not in ("new", "loading"):
        await model.ready()
    with ExitStack() as held:
        mount = None
        if state in ("loading", "waking"):
            patch = held.enter_context(pytest.MonkeyPatch.context())
            owner, name = (control, "AsyncEngine") if state == "loading" else (StoredWeights, "open")
            mount = Mount(patch, owner, name, "mine")
            held.callback(mount.answers.set)
        elif state == "asleep":
            held.enter_context(asleep(shelf, "mine"))
        if state in ("waking", "asleep"):
            await put_to_sleep(shelf, "mine")
        tasks = [asyncio.create_task(outputs(model, PROMPT, params)) for params in IN_FLIGHT]
        if mount is not None:
            await until_async(mount.asked.is_set, 30.0)
        elif state != "new":
            await until_async(lambda: model.status.num_running if state == "awake" else model.status.num_waiting)
        assert model.state == state
        yield Stage(shelf, model, state, tasks, alone, held.close)


async def others_are_impossible(stage: Stage) -> None:
    refused = []
    for _, _, prompt, options in IMPOSSIBLE:
        params = replace(GREEDY, max_tokens=options.get("max_tokens", 24))
        options = {name: option for name, option in options.items() if name != "max_tokens"}
        refused.append(asyncio.create_task(outputs(stage.model, prompt, params, **options)))
    assert await stage.ended() == stage.alone
    for task, (kind, reason, *_) in zip(refused, IMPOSSIBLE, strict=True):
        with pytest.raises(kind, match=reason):
            await task


async def others_are_late(stage: Stage) -> None:
    """Regression: the time until the first load did not count."""
    for timeout_s in (1e-6, 0.02):
        with pytest.raises(DeadlineError, match="request 'late"):
            await outputs(stage.model, [1, 2], LONG, request_id="late", timeout_s=timeout_s)
    early = asyncio.create_task(outputs(stage.model, PROMPT, IN_FLIGHT[1], timeout_s=60.0))
    assert await stage.ended() == stage.alone
    assert await early == stage.alone[1]


async def all_are_cancelled(stage: Stage) -> None:
    more = [asyncio.create_task(outputs(stage.model, [i + 1], LONG)) for i in range(100)]
    await asyncio.sleep(0)
    for task in (*stage.tasks, *more):
        task.cancel()
    await asyncio.gather(*stage.tasks, *more, return_exceptions=True)
    assert all(task.cancelled() for task in (*stage.tasks, *more))
    await until_async(lambda: stage.model.status.num_running + stage.model.status.num_waiting == 0)
    await stage.shelf.check_integrity()
    if stage.state == "asleep":
        assert (stage.model.state, stage.model.status.kv_bytes) == ("asleep", 0)
    stage.go_on()


async def the_model_is_removed(stage: Stage) -> None:
    """Its name is used again while it closes. Regression: a request to a model that had been removed loaded it again
    after the back-off, and never ended."""
    removal = asyncio.create_task(stage.shelf.remove("mine"))
    await until_async(lambda: "mine" not in stage.shelf.names)
    with pytest.raises(UnknownModelError):
        stage.shelf.model("mine")
    with pytest.raises(UnknownModelError):
        await stage.shelf.remove("mine")
    stage.shelf.add(replace(stage.shelf.model("qwen3").config, name="mine"))
    await stage.check_unavailable()
    await removal
    for after_s in (0, 0.2):
        await asyncio.sleep(after_s)
        for request in (outputs(stage.model, [1, 2], LONG), stage.model.ready()):
            with pytest.raises(UnavailableError, match="removed"):
                await request


async def the_shelf_is_closed(stage: Stage) -> None:
    closing = asyncio.create_task(asyncio.to_thread(stage.shelf.close))
    await stage.check_unavailable()
    await closing
    with pytest.raises(UnavailableError):
        await outputs(stage.model, [1, 2], GREEDY)
    with pytest.raises(UnavailableError):
        await stage.shelf.check_integrity()
    with pytest.raises(UnavailableError):
        stage.shelf.add(replace(stage.model.config, name="another"))
    with pytest.raises(UnavailableError):
        stage.shelf.check()
    assert not stage.shelf.healthy
    stage.shelf.close()


EVENTS = (others_are_impossible, others_are_late, all_are_cancelled, the_model_is_removed, the_shelf_is_closed)


@pytest.mark.thirds
@pytest.mark.parametrize("state", STATES)
async def test_requests_in_a_state(models: TinyModels, state: str) -> None:
    """Requests of other models give their tokens meanwhile, and so do later ones of this model."""
    alone = [await models.alone("llama", PROMPT, params) for params in IN_FLIGHT]
    other = await models.alone("qwen3", PROMPT, GREEDY)
    config = models.config("mine", of="llama")
    async with models.shelf(config, "qwen3", memory_of=("llama", "qwen3")) as shelf:
        for event in EVENTS:
            beside = asyncio.create_task(outputs(shelf.model("qwen3"), PROMPT, GREEDY))
            async with requested(shelf, state, alone) as stage:
                await event(stage)
            [found] = await asyncio.gather(beside, return_exceptions=True)
            if event is the_shelf_is_closed:
                assert isinstance(found, UnavailableError) or found == other
                continue
            assert found == other
            is_removed = event is the_model_is_removed
            found = await outputs(shelf.model("mine"), PROMPT, GREEDY)
            assert found == (other if is_removed else [alone[0][0][:24]])
            await shelf.check_integrity()
            if is_removed or state in ("new", "loading"):
                await shelf.remove("mine")
                shelf.add(config)
