"""Coroutines and the engine's thread: streams, cancellation, failures."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from folio.app.config.engine import EngineConfig
from folio.app.engine import AsyncEngine, Delta, SamplingParams
from folio.app.engine.request.faults import device_fault
from folio.app.errors import EngineError, RequestError, UnavailableError
from folio.vmem import IntegrityError, MapError
from tests.app.engine.engines import Replaced, greedy, raising, stall_after

GREEDY, LONG = greedy(30), greedy(900)
DEADLINE_S = 60


@pytest.fixture
def engine(llama: Path) -> Iterator[AsyncEngine]:
    config = EngineConfig(model=str(llama), kv_memory_bytes=16 << 20, max_num_seqs=8, skip_tokenizer_init=True)
    engine = AsyncEngine(config, new_engine=Replaced)
    yield engine
    engine.close()  # raises if anything is still owned


def instead_of(engine: AsyncEngine) -> dict[str, Callable[..., Any]]:
    replaced = engine.driver.engine
    assert isinstance(replaced, Replaced)
    return replaced.instead


async def collect(engine: AsyncEngine, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return [token async for deltas in engine.generate(prompt, params) for delta in deltas for token in delta.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def until_all_is_free(engine: AsyncEngine) -> None:
    await until(lambda: engine.report().active_bytes == 0)


async def test_many_at_once(engine: AsyncEngine) -> None:
    alone = await collect(engine, [7, 8, 9])
    together = await asyncio.gather(*(collect(engine, [7, 8, 9]) for _ in range(20)))
    assert together == [alone] * 20
    assert len(alone) == 30
    assert engine.report().active_bytes == 0


async def test_closing_a_stream_frees_its_pages(engine: AsyncEngine) -> None:
    stream = engine.generate([1, 2, 3], LONG)
    await anext(stream)
    assert engine.report().active_bytes > 0
    await stream.aclose()
    await until_all_is_free(engine)


async def test_cancelling_a_task_frees_its_pages(engine: AsyncEngine) -> None:
    tasks = [asyncio.create_task(collect(engine, [i], LONG)) for i in range(1, 12)]
    await until(lambda: engine.load().num_running > 0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until_all_is_free(engine)


def test_a_closed_event_loop_frees_its_pages(engine: AsyncEngine) -> None:
    loop, stream = asyncio.new_event_loop(), engine.generate([1, 2], LONG)
    loop.run_until_complete(anext(stream))
    loop.close()
    asyncio.run(until_all_is_free(engine))
    assert engine.healthy
    assert len(asyncio.run(collect(engine, [1, 2]))) == 30


def test_requests_may_begin_while_they_are_counted(engine: AsyncEngine) -> None:
    """Regression: a request failed with "dictionary changed size during iteration", where the garbage collector ran."""
    arriving = engine.driver._arriving
    arriving |= {f"request {i}": (1, 0) for i in range(200)}

    def begin(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and arriving:
            arriving.popitem()

    threshold = gc.get_threshold()
    gc.callbacks.append(begin)
    gc.set_threshold(1)
    try:
        while arriving:
            assert len(engine.driver.arriving) >= len(arriving)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(begin)


async def test_invalid_requests_raise_before_the_first_delta(engine: AsyncEngine) -> None:
    with pytest.raises(RequestError, match="empty"):
        await collect(engine, [])


@pytest.mark.parametrize(("call", "said"), [("ensure", "a step failed"), ("append", "the request failed")])
async def test_a_refusing_device_fails_its_requests_and_no_others(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, call: str, said: str
) -> None:
    """While a step is mapped, or while a request is admitted: half admitted, it once stopped the engine."""
    with monkeypatch.context() as patch:
        patch.setattr(engine.driver.engine.memory, call, raising(MapError("injected")))
        with pytest.raises(EngineError, match=said):
            await collect(engine, [1, 2])
    assert engine.healthy
    assert len(await collect(engine, [1, 2])) == 30
    assert engine.report().active_bytes == 0


async def test_broken_books_stop_the_engine(engine: AsyncEngine) -> None:
    instead_of(engine)["step"] = raising(IntegrityError("injected"))
    with pytest.raises(EngineError, match="has stopped"):
        await collect(engine, [1, 2])
    assert not engine.healthy
    with pytest.raises(EngineError, match="has stopped"):
        await collect(engine, [1, 2])
    with pytest.raises(EngineError):
        engine.report()


async def test_books_are_audited_while_requests_run(engine: AsyncEngine) -> None:
    """Between two steps. When they do not add up the engine stops."""
    task = asyncio.create_task(collect(engine, [1, 2], LONG))
    await asyncio.sleep(0)
    for _ in range(3):
        await engine.check_integrity()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until_all_is_free(engine)
    await engine.check_integrity()
    instead_of(engine)["check_integrity"] = raising(IntegrityError("injected"))
    with pytest.raises(IntegrityError, match="injected"):
        await engine.check_integrity()
    await until(lambda: not engine.healthy)
    with pytest.raises(EngineError, match="has stopped"):
        await engine.check_integrity()


async def test_close_fails_what_is_in_flight(engine: AsyncEngine) -> None:
    task = asyncio.create_task(collect(engine, [1], LONG))
    await until(lambda: engine.load().num_running > 0)
    await asyncio.to_thread(engine.close)
    with pytest.raises(EngineError, match="has stopped"):
        await task


class Panic(BaseException):
    """As a library in Rust raises it."""


@pytest.mark.parametrize("error", [OSError("no space left on device"), Panic("index out of bounds")])
async def test_steps_that_fail_again_and_again_stop_the_engine(
    engine: AsyncEngine, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    """Regression: a replica whose steps all failed was healthy, and its speed at failing drew requests. A panic ended
    the thread."""

    async def fail_twice() -> None:
        instead_of(engine)["step"] = raising(error)
        for _ in range(2):
            with pytest.raises(EngineError, match="a step failed"):
                await collect(engine, [1, 2])

    for _ in range(2):  # never three in a row
        await fail_twice()
        instead_of(engine).clear()
        assert engine.healthy
        assert len(await collect(engine, [1, 2])) == 30
    await fail_twice()
    with pytest.raises(UnavailableError, match="send the request again"):
        await collect(engine, [1, 2])
    await until(lambda: not engine.healthy)
    with pytest.raises(UnavailableError):
        engine.check()
    assert engine.take_activity().num_failed_steps == 7
    assert [r.getMessage() for r in caplog.records if "the engine stops" in r.getMessage()] == [
        "the engine stops: 3 failures in a row; the engine is replaced, send the request again"
    ]


ILLEGAL = "CUDA error: an illegal memory access was encountered"
ECC = "CUDA error: uncorrectable ECC error encountered"


@pytest.mark.parametrize(
    ("fault", "where", "is_retried"),
    [
        (ILLEGAL, "step", False),
        (ECC, "step", True),
        (ILLEGAL, "append", False),
        (ILLEGAL, "add_request", False),
        (None, "step", False),
    ],
)
async def test_a_lost_device_stops_the_engine_at_once(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, fault: str | None, where: str, is_retried: bool
) -> None:
    """Regression: every call of CUDA failed, and the replica failed all requests of three steps, or ten one by one.
    Requests that may be the cause are not sent to another replica; those lost with a broken device are."""
    error = RuntimeError(fault or "CUDA error: invalid argument")
    fail = raising(error)
    with monkeypatch.context() as patch:
        patch.setattr("folio.app.engine.driver.device_fault", lambda _: error if fault else None)
        patch.setattr(engine.driver.engine.memory if where == "append" else engine.driver.engine, where, fail)
        failed = await asyncio.gather(*(collect(engine, [1, 2]) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(error, EngineError) for error in failed)
    begun = failed if where == "step" else failed[:1]  # the other two are not admitted any more
    assert [isinstance(error, UnavailableError) for error in begun] == [is_retried] * len(begun)
    if fault is None:
        assert engine.healthy
        assert len(await collect(engine, [1, 2])) == 30
    else:
        await until(lambda: not engine.healthy)
        with pytest.raises(UnavailableError, match="send the request again"):
            await collect(engine, [1, 2])


def test_devices_without_a_context_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError(ILLEGAL)
    monkeypatch.setattr(torch.cuda, "synchronize", raising(error))
    if not torch.cuda.is_initialized():
        assert device_fault(torch.device("cuda")) is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)  # by another engine
    assert device_fault(torch.device("cpu")) is None
    assert device_fault(torch.device("cuda")) is error


async def test_requests_that_fail_again_and_again_stop_the_engine(engine: AsyncEngine) -> None:
    """Each by itself, and none by its sender's fault: nobody is served any more."""

    def fail() -> list[Delta]:
        [request_id] = engine.driver.engine.requests
        engine.driver.engine.cancel(request_id)
        return [Delta(request_id, (), "", error=EngineError("not finite"))]

    assert len(await collect(engine, [1, 2])) == 30
    instead_of(engine)["step"] = fail
    for _ in range(10):
        assert engine.healthy
        with pytest.raises(EngineError, match="not finite"):
            await collect(engine, [1, 2])
    await until(lambda: not engine.healthy)


async def test_a_panic_while_a_request_begins_is_its_own(engine: AsyncEngine) -> None:
    instead_of(engine)["add_request"] = raising(Panic("unreachable"))
    with pytest.raises(EngineError, match="cannot begin"):
        await collect(engine, [1, 2])
    instead_of(engine).clear()
    assert len(await collect(engine, [1, 2])) == 30


@pytest.mark.parametrize("error", [SystemExit(3), Panic("unreachable")])
def test_whatever_ends_a_start_is_told(error: BaseException) -> None:
    """Regression: what is no `Exception` ended the thread, and whoever made the engine waited for ever."""
    told: list[BaseException] = []

    def start() -> None:
        try:
            AsyncEngine(EngineConfig(model="builtin"), new_engine=raising(error))
        except BaseException as raised:  # noqa: BLE001 - what it is, is looked at below
            told.append(raised)

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert [str(raised) for raised in told] == [f"the engine cannot start: {type(error).__name__}: {error}"]
    assert isinstance(told[0], EngineError)
    assert told[0].__cause__ is error


async def test_an_engine_that_hangs_is_noticed(engine: AsyncEngine) -> None:
    """Regression: with its thread alive in a kernel or behind a lock, it was healthy, and its streams waited."""
    entered, let_go = threading.Event(), threading.Event()

    def hang() -> list[Delta]:
        entered.set()
        assert let_go.wait(DEADLINE_S)
        return []

    instead_of(engine)["step"] = hang
    try:
        tasks = [asyncio.create_task(collect(engine, [1, 2]))]
        await asyncio.to_thread(entered.wait, DEADLINE_S)
        tasks.append(asyncio.create_task(collect(engine, [3])))  # it never begins
        await asyncio.sleep(0)
        engine.check()  # a step may take long
        stall_after(engine, 0.0)
        await until(lambda: not engine.healthy)
        with pytest.raises(UnavailableError):
            engine.check()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [UnavailableError] * 2
        engine.close()  # does not wait for the thread
    finally:
        let_go.set()
    await until(engine.driver.closed.done)  # it stops when it comes back


async def test_an_engine_without_work_does_not_hang(engine: AsyncEngine) -> None:
    """However long it has had none; and steps that are computed are progress."""
    stall_after(engine, 30.0)
    assert len(await collect(engine, [1, 2], LONG)) == 900
    assert engine.driver._longest_s > 0
    await until(lambda: engine.driver._working_since is None)
    stall_after(engine, 0.0)
    assert engine.healthy
