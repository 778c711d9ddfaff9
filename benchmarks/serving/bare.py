"""Engine without a server: an `AsyncEngine` in a separate process, under the same load."""

from __future__ import annotations

import asyncio
import multiprocessing
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.serving.loops import closed_loop
from folio.app.cli.bench.load import Ask, Clock, Record, open_loop
from folio.app.config.engine import EngineConfig
from folio.app.engine import AsyncEngine, SamplingParams

START_S, STOP_S = 300.0, 30.0


class BareEngine:
    """An engine in a process of its own, made by `bare_engine`. Each call is one run, as of `load.open_loop` and
    `loops.closed_loop`.

    Raises:
        RuntimeError: the process has failed; the message has its traceback.
    """

    def __init__(self, connection: Connection, pid: int) -> None:
        self._connection = connection
        self.pid = pid

    def open_loop(self, asks: Sequence[Ask]) -> list[Record]:
        return self._call(("open", (asks,)))

    def closed_loop(self, asks: Sequence[Ask], at_once: int) -> list[Record]:
        return self._call(("closed", (asks, at_once)))

    def wait_until_ready(self) -> None:
        if not self._connection.poll(START_S):
            raise RuntimeError(f"the bare engine has not started within {START_S} s")
        self._answer()

    def _call(self, command: tuple[str, tuple[Any, ...]]) -> list[Record]:
        self._connection.send(command)
        records: list[Record] = self._answer()
        return records

    def _answer(self) -> Any:
        try:
            failure, answer = self._connection.recv()
        except EOFError:
            raise RuntimeError("the bare engine's process has ended") from None
        if failure:
            raise RuntimeError(f"the bare engine failed:\n{failure}")
        return answer


@contextmanager
def bare_engine(settings: dict[str, Any]) -> Iterator[BareEngine]:
    """Args: settings: of `EngineConfig`."""
    context = multiprocessing.get_context("spawn")  # a fork would inherit locks held by this process's threads
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, settings), daemon=True)
    process.start()
    theirs.close()
    try:
        assert process.pid is not None
        engine = BareEngine(ours, process.pid)
        engine.wait_until_ready()
        yield engine
    finally:
        ours.close()
        process.join(STOP_S)
        process.kill()


def _serve(connection: Connection, settings: dict[str, Any]) -> None:
    engine = AsyncEngine(EngineConfig(**settings))
    send = partial(_send, engine)
    runs: dict[str, Callable[..., Coroutine[Any, Any, list[Record]]]] = {
        "open": partial(open_loop, send),
        "closed": partial(closed_loop, send),
    }
    connection.send((None, None))
    try:
        while True:
            name, args = connection.recv()
            try:
                answer: tuple[str | None, Any] = (None, asyncio.run(runs[name](*args)))
            except Exception:  # noqa: BLE001 - a process's boundary: the parent raises it
                answer = (traceback.format_exc(), None)
            connection.send(answer)
    except EOFError:  # the parent has closed its end
        engine.close()


async def _send(engine: AsyncEngine, ask: Ask, record: Record, clock: Clock) -> None:
    """A `load.Send` for an engine."""
    record.sent_s = clock.now()
    params = SamplingParams(max_tokens=ask.max_tokens, temperature=0.0, ignore_eos=True)
    async for deltas in engine.generate(ask.prompt, params):
        if num_characters := sum(len(delta.text) for delta in deltas):
            record.events.append((clock.now(), num_characters))
        record.num_tokens += sum(len(delta.token_ids) for delta in deltas)
    record.status, record.done, record.ended_s = 200, True, clock.now()
