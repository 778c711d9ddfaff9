"""Shared streams: a reader and a replica's side of them in one loop, joined by calls that can be broken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

from ray.exceptions import ActorUnavailableError

from folio.app.engine import SamplingParams
from folio.app.errors import EngineError, FolioError
from folio.app.fleet.messages import GenerateRequest, Piece, SharedStreamCall, SharedStreamKey
from folio.app.fleet.overload import LoadShedder
from folio.app.serving.calls import ReplicaClient
from folio.app.serving.shared_streams import SharedReader, SharedStreams
from tests.processes import until_async

NUM = 8


class Call:
    """A call as Serve carries it out: the method runs in a task of its own, and what it yields arrives later."""

    def __init__(self, generator: AsyncGenerator[Any, None]) -> None:
        self.items: list[Any] = []  # that have been sent
        self.cancelled = False
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(generator))

    async def _run(self, generator: AsyncGenerator[Any, None]) -> None:
        try:
            async with aclosing(generator):
                async for item in generator:
                    self.items.append(item)
                    self._queue.put_nowait(item)
            self._queue.put_nowait(StopAsyncIteration())
        except FolioError as error:
            self._queue.put_nowait(error)

    def cancel(self) -> None:
        self.cancelled = True
        self._task.cancel()

    def break_off(self) -> None:
        """As when the process at the other end is gone, or the connection."""
        self._task.cancel()
        self._queue.put_nowait(ActorUnavailableError("gone", None))

    async def __aiter__(self) -> AsyncIterator[Any]:
        while not isinstance(item := await self._queue.get(), Exception):
            yield item
        if not isinstance(item, StopAsyncIteration):
            raise item


class Replica:
    """A handle of one replica, whose requests get a piece each in every `step`."""

    def __init__(self, **bounds: Any) -> None:
        self.streams = SharedStreams(**bounds)
        self.calls: list[GenerateRequest] = []
        self.own: list[Call] = []
        self.shared: list[Call] = []
        self.pieces: list[asyncio.Queue[Piece | FolioError]] = []
        self.closed = 0
        self.num_open = 0  # shared streams
        self.generate_stream = SimpleNamespace(remote=self._generate)
        self.open_shared_stream = SimpleNamespace(remote=self._share)

    def options(self, **_: Any) -> Replica:
        return self

    def step(self, text: str, end: bool = False, requests: range = range(NUM)) -> None:
        for number in requests:
            piece = Piece(f"{number}{text}", (number,), 0, "stop" if end else None, replica="r")
            self.pieces[number].put_nowait(piece)

    def _generate(self, call: GenerateRequest) -> Call:
        self.calls.append(call)
        self.pieces.append(asyncio.Queue())
        self.own.append(Call(self._diverted(self._lists(self.pieces[-1]), call)))
        return self.own[-1]

    async def _diverted(
        self, lists: AsyncGenerator[list[Piece], None], call: GenerateRequest
    ) -> AsyncGenerator[list[Piece] | int, None]:
        async with (
            aclosing(lists),
            aclosing(self.streams.route_pieces(lists, call.share)) as own,
        ):  # as `EngineReplica` does
            async for item in own:
                yield item

    async def _lists(self, pieces: asyncio.Queue[Piece | FolioError]) -> AsyncGenerator[list[Piece], None]:
        try:
            while True:
                piece = await pieces.get()
                if isinstance(piece, FolioError):
                    raise piece
                yield [piece]
                if piece.ends_request:
                    return
        finally:
            self.closed += 1

    def _share(self, call: SharedStreamCall) -> Call:
        self.shared.append(Call(self._counted(self.streams.messages(call))))
        return self.shared[-1]

    async def _counted(self, messages: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        self.num_open += 1
        try:
            async with aclosing(messages):
                async for entries in messages:
                    yield entries
        finally:
            self.num_open -= 1


class Crowd:
    """Requests with output, and an open shared stream."""

    def __init__(self, again_s: float = 1.0, **bounds: Any) -> None:
        self.replica = Replica(**bounds)
        self.reader = SharedReader(self.replica, again_s)  # type: ignore[arg-type]
        replicas = ReplicaClient(self.replica, LoadShedder(), shared=self.reader)  # type: ignore[arg-type]
        self.texts: list[list[str]] = [[] for _ in range(NUM)]
        self.tasks = [asyncio.create_task(self._ask(replicas, number)) for number in range(NUM)]

    async def begin(self) -> None:
        await until_async(lambda: len(self.replica.pieces) == NUM)
        self.replica.step("a")
        await until_async(lambda: bool(self.replica.num_open))
        await self.all_have("a")

    async def all_have(self, text: str, requests: range = range(NUM)) -> None:
        await until_async(lambda: all(f"{number}{text}" in self.texts[number] for number in requests))

    async def all_end(self, text: str) -> None:
        """The requests are sent once more, and end there with this text."""
        await until_async(lambda: len(self.replica.pieces) == 2 * NUM)
        for number, call in enumerate(self.replica.calls[NUM:]):
            first = int(call.request_id.removeprefix("request "))
            self.replica.pieces[NUM + number].put_nowait(Piece(f"{first}{text}", (number,), 0, "stop", replica="r"))
        await asyncio.gather(*self.tasks)

    async def _ask(self, replicas: ReplicaClient, number: int) -> None:
        call = GenerateRequest(f"request {number}", [1], SamplingParams(max_tokens=10))
        async with aclosing(replicas.stream_calls([call])) as pieces:
            async for _, piece in pieces:
                self.texts[number].append(piece.text)


def left_in(reader: SharedReader) -> list[Any]:
    """What the reader still keeps of requests."""
    return [*reader._expected, *reader._num_streams]


async def test_a_step_of_all_streams_is_one_message() -> None:
    """Regression: each of 32 streams was a message a step, of 240 to 460 us each."""
    crowd = Crowd()
    await crowd.begin()
    for text in "bcd":
        crowd.replica.step(text)
        await crowd.all_have(text)
    crowd.replica.step("e", end=True)
    await asyncio.gather(*crowd.tasks)
    assert crowd.texts == [[f"{number}{text}" for text in "abcde"] for number in range(NUM)]
    [shared] = crowd.replica.shared
    assert [len(entries) for entries in shared.items] == [NUM] * 4
    # The first piece does not wait for others, and the second item names the shared stream.
    assert [[type(item) for item in call.items] for call in crowd.replica.own] == [[list, int]] * NUM
    assert not left_in(crowd.reader)


async def test_a_single_stream_opens_no_shared_one() -> None:
    replica = Replica()
    replicas = ReplicaClient(replica, LoadShedder(), shared=SharedReader(replica))  # type: ignore[arg-type]
    call = GenerateRequest("r", [1], SamplingParams(max_tokens=10))
    stream = replicas.stream_calls([call])
    first = asyncio.ensure_future(anext(stream))
    await until_async(lambda: bool(replica.pieces))
    replica.step("a", requests=range(1))
    replica.step("b", end=True, requests=range(1))
    assert [(await first)[1].text, *[piece.text async for _, piece in stream]] == ["0a", "0b"]
    assert not replica.shared


async def test_a_cancelled_request_leaves_the_others() -> None:
    crowd = Crowd()
    await crowd.begin()
    crowd.replica.step("b")
    await crowd.all_have("b")
    crowd.tasks[0].cancel()
    await until_async(lambda: crowd.replica.closed == 1)
    crowd.replica.step("c", end=True, requests=range(1, NUM))
    await asyncio.gather(*crowd.tasks[1:])
    assert [texts[-1] for texts in crowd.texts] == ["0b", *(f"{number}c" for number in range(1, NUM))]
    assert not left_in(crowd.reader)


async def test_an_error_comes_after_the_earlier_output() -> None:
    crowd = Crowd()
    await crowd.begin()
    crowd.replica.step("b")
    for pieces in crowd.replica.pieces:
        pieces.put_nowait(EngineError("a step failed"))
    results = await asyncio.gather(*crowd.tasks, return_exceptions=True)
    assert [str(result) for result in results] == ["a step failed"] * NUM
    assert crowd.texts == [[f"{number}a", f"{number}b"] for number in range(NUM)]


async def test_streams_of_a_replica_that_dies_continue() -> None:
    crowd = Crowd()
    await crowd.begin()
    crowd.replica.step("b")
    await crowd.all_have("b")
    for call in (*crowd.replica.own, *crowd.replica.shared):
        call.break_off()
    await crowd.all_end("c")
    assert crowd.texts == [[f"{number}{text}" for text in "abc"] for number in range(NUM)]


async def test_requests_of_a_broken_shared_stream_continue() -> None:
    """Pieces that were lost are generated again."""
    crowd = Crowd(again_s=0.0)
    await crowd.begin()
    crowd.replica.step("b")
    await crowd.all_have("b")
    crowd.replica.shared[0].break_off()
    await until_async(lambda: not crowd.replica.num_open)
    crowd.replica.step("lost")
    await crowd.all_end("c")
    assert crowd.texts == [[f"{number}{text}" for text in "abc"] for number in range(NUM)]
    assert crowd.replica.closed == 2 * NUM, "the engine went on without a reader"
    assert crowd.replica.shared[0].cancelled


async def test_a_late_reader_gets_the_queued_pieces() -> None:
    """Regression: a request slow with its first piece lost the others, and got an error."""
    reader = SharedReader(Replica())  # type: ignore[arg-type]
    expected = reader.expect()
    for text, end in (("a", None), ("b", "stop")):
        expected.arrived.put_nowait(Piece(text, (1,), 0, end, replica="r"))
    assert [piece.text async for piece in reader.rest(expected, connection=99)] == ["a", "b"]
    unfinished = reader.expect()
    unfinished.arrived.put_nowait(Piece("a", (1,), 0, None, replica="r"))
    assert [piece.text async for piece in reader.rest(unfinished, connection=99)] == ["a"]


async def test_an_idle_shared_stream_ends() -> None:
    """A replica that stops waits for it. A request that begins just then has its own stream."""
    crowd = Crowd(idle_s=0.01)
    await crowd.begin()
    await until_async(lambda: not crowd.replica.num_open)
    crowd.replica.step("b", end=True)
    await asyncio.gather(*crowd.tasks)
    assert crowd.texts == [[f"{number}a", f"{number}b"] for number in range(NUM)]
    await until_async(lambda: not crowd.replica.num_open)
    assert not crowd.replica.shared[0].cancelled
    assert not left_in(crowd.reader)


async def test_messages_have_a_bound() -> None:
    """Pieces that accumulate on a slow connection could exceed a gRPC message."""
    streams = SharedStreams(most_tokens=5)
    messages = streams.messages(SharedStreamCall("i", 1, "r"))
    first = asyncio.ensure_future(anext(messages))
    await asyncio.sleep(0)

    async def lists() -> AsyncGenerator[list[Piece], None]:
        for number in range(5):
            end = "stop" if number == 4 else None
            yield [Piece("t", (1, 2, 3), 0, end)]  # type: ignore[arg-type]

    assert [item async for item in streams.route_pieces(lists(), SharedStreamKey("i", 7))][1:] == [1]
    assert [len(await first), len(await anext(messages))] == [2, 2]
    await messages.aclose()
