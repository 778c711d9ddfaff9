"""Pinned prefixes and forks of models that sleep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from folio.app.engine.lora.source import AdapterSource, files_version
from folio.app.engine.request.delta import Delta
from folio.app.errors import (
    RequestError,
    UnknownPinError,
    UnknownRequestError,
)
from folio.vmem import PinError
from folio.vmem.prefix.store.handover import PrefixReceiver
from tests.app.shelf.shelves import (
    GREEDY,
    KV_BYTES,
    LONG,
    Outputs,
    TinyModels,
    in_step_thread,
    outputs,
    outputs_of,
    put_to_sleep,
    sleeping,
)
from tests.conftest import tokens
from tests.processes import until_async

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


async def collect(stream: AsyncIterator[list[Delta]]) -> Outputs:
    return outputs_of([delta async for deltas in stream for delta in deltas])


async def test_outputs_are_forked_while_their_model_sleeps(models: TinyModels) -> None:
    [alone] = await models.alone("llama", tokens(20), LONG)
    async with models.shelf("llama") as shelf:
        engine = await shelf.model("llama").ready()
        stream = engine.generate(tokens(20), LONG, "parent")
        got = outputs_of(await anext(stream))[0]
        async with sleeping(shelf, "llama"):
            forks = [
                asyncio.create_task(collect(engine.fork("parent", replace(GREEDY, max_tokens=10, n=2), f"fork {i}")))
                for i in range(2)
            ]
            await until_async(lambda: engine.num_requests[1] == 5)
            with pytest.raises(UnknownRequestError):
                await collect(engine.fork("another", GREEDY))
        for outputs_of_fork in await asyncio.gather(*forks):
            assert len(outputs_of_fork) == 2
            for output in outputs_of_fork:  # both are greedy
                assert any(output == alone[i : i + 10] for i in range(len(got), 90))
        async for deltas in stream:
            got += outputs_of(deltas)[0]
        assert got == alone


async def test_pins_survive_a_sleep(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: those of adapters were computed again without the adapter, whose requests then gave other tokens. A
    model that slept reported no pins to a new replica, where one that was loaded left out those of adapters, without
    waiting for the adapter to be read."""
    document, folder = tokens(64, 9), models.adapter("lora", "red")
    alone = await models.alone("lora", [*document, 5], GREEDY, adapter="red")
    async with models.shelf("lora", memory_of=["lora"]) as shelf:
        model = shelf.model("lora")
        engine = await model.ready()

        def pins() -> set[str]:
            return {pin.name for pin in engine.report().pins if pin.num_bytes}

        await engine.set_loaded([AdapterSource("loaded", str(folder), files_version(folder))])
        await engine.pin("document", document, adapter="red")
        await engine.pin("of one that is unloaded", tokens(32, 4), adapter="loaded")
        await engine.pin("other", tokens(32, 4))
        for left in ({"document", "of one that is unloaded", "other"}, {"document", "other"}):
            async with sleeping(shelf, "lora"):
                await shelf.check_integrity()
                assert engine.held_bytes == 0
            for _ in range(2):
                assert await outputs(model, [*document, 5], GREEDY, adapter="red") == alone
                await until_async(lambda left=left: pins() == left)
            await shelf.check_integrity()
            await engine.set_loaded([])
        async with sleeping(shelf, "lora"):
            assert {pin.name: pin.num_bytes for pin in engine.report().pins} == {"document": 0, "other": 0}
            with pytest.raises(RequestError, match="another prefix named 'other' is pinned already"):
                await engine.pin("other", tokens(32, 5))
            await asyncio.to_thread(engine.unpin, "other")
            prefixes = engine.hot_prefixes()
        assert await outputs(model, [*document, 5], GREEDY, adapter="red") == alone
        await until_async(lambda: pins() == {"document"})
    assert [prefix.pin_name for prefix in prefixes] == ["document"]
    # Regression: an engine that waited for a peer's blocks counted as starved, and the pin was left out.
    monkeypatch.setattr(PrefixReceiver, "read", lambda *args, **options: None)  # they never come
    async with models.shelf("lora", memory_of=["lora"], prefixes_of_others=lambda _: [prefixes]) as shelf:
        engine = await shelf.model("lora").ready()
        assert pins() == {"document"}


async def test_a_prefix_is_unpinned_at_any_moment_of_a_sleep_and_wake(models: TinyModels) -> None:
    """Regression: while it was computed again after a wake, it was unknown, and pinned afterwards."""
    async with models.shelf("llama") as shelf:
        model = shelf.model("llama")
        engine = await model.ready()

        def wake_and_unpin(steps: int) -> None:
            own = engine.driver.engine
            own.footprint.map_weights()
            own.wake()
            own.set_kv_budget(KV_BYTES // 2)
            for _ in range(steps):
                own.step()
            assert [pin.name for pin in own.report().pins] == ["document"]
            own.unpin("document")
            assert own.report().pins == ()
            with pytest.raises(UnknownPinError):
                own.unpin("document")
            while own.has_work:
                assert own.step() == []
            assert own.report().pins == ()
            model.note_awake(0.0)

        for steps in range(5):  # the prefix takes two or three
            await engine.pin("document", tokens(96, 9))
            async with sleeping(shelf, "llama"):
                await in_step_thread(shelf, partial(wake_and_unpin, steps))
            await shelf.check_integrity()


async def test_a_prefix_that_cannot_be_computed_again_stays_pinned(models: TinyModels) -> None:
    """Regression: after a wake without memory for it, it was no longer pinned, and only the log said so."""
    document = tokens(64, 9)
    async with models.shelf("llama") as shelf:
        model = shelf.model("llama")
        engine = await model.ready()
        await engine.pin("document", document)

        def pins() -> list[tuple[str, bool]]:
            return [(pin.name, pin.num_bytes > 0) for pin in engine.report().pins]

        async def sleep_and_wake() -> None:
            await put_to_sleep(shelf, "llama")
            await outputs(model, [1, 2], GREEDY)
            await until_async(lambda: not engine.driver.engine.requests)

        def refuse(*_: Any) -> None:
            raise PinError("no room within its pin quota")

        for then in ("sleep", "pin", "unpin"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine.driver.engine.memory, "pin", refuse)
                await sleep_and_wake()
            assert pins() == [("document", False)]
            if then == "pin":
                await engine.pin("document", document)
            elif then == "unpin":
                await asyncio.to_thread(engine.unpin, "document")
            if then != "pin":
                await sleep_and_wake()
            assert pins() == ([("document", True)] if then != "unpin" else [])
