"""Calls of replicas that die, refuse, hang and break off: a handle whose answers are scripted, without a cluster."""

from __future__ import annotations

import asyncio
import pickle
import time
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import (
    ActorUnavailableError,
    NodeDiedError,
    RaySystemError,
    RayTaskError,
    TaskCancelledError,
    WorkerCrashedError,
)

from folio.app.engine import SamplingParams
from folio.app.engine.request.engine_request import BegunOutput, EngineRequest
from folio.app.errors import (
    DeadlineError,
    EngineError,
    FolioError,
    ModelUnavailableError,
    NoReplicaError,
    OverloadedError,
    UnavailableError,
    UnknownRequestError,
)
from folio.app.fleet.departures import DEPARTURES, CallMovedError
from folio.app.fleet.messages import ForkCall, GenerateRequest, Piece
from folio.app.fleet.overload import LoadShedder
from folio.app.fleet.retry import CallRetries
from folio.app.fleet.roles import Prefilled, Prefilling
from folio.app.fleet.streams import fits_by_value
from folio.app.serving import peers
from folio.app.serving.calls import ReplicaClient
from tests.fakes.replicas import Handle, Script, stopped

CALL = GenerateRequest("r", [1, 2], SamplingParams())
BEGUN, END = Piece("a", (1,)), Piece("b", (2,), 0, "stop")
GONE = ActorUnavailableError("gone", None)
LOST = [WorkerCrashedError(), TaskCancelledError(), NodeDiedError("lost"), RaySystemError("lost")]


def replicas_with(
    *answers: list[Any], script: Script | None = None, shedder: LoadShedder | None = None
) -> tuple[ReplicaClient, Handle]:
    """A client whose handle gives these answers in order, or those of the script."""
    left = list(answers)
    handle: Any = Handle(script or (lambda call: left.pop(0)))
    return ReplicaClient(handle, shedder or LoadShedder()), handle


def full(replica: str, retry_after_s: float = 20.0) -> RayTaskError:
    error = OverloadedError("full", retry_after_s)
    error.replica = replica
    return RayTaskError("generate", "traceback", error)


def broken(replica: str) -> RayTaskError:
    error = ModelUnavailableError("the model 'm' cannot be served now: its files are gone")
    error.replica = replica
    return RayTaskError("generate", "traceback", error)


NONE_LEFT = OverloadedError("the queues of all engine replicas are full")
CALLS = [GenerateRequest(str(i), [i], SamplingParams(max_tokens=1)) for i in range(200)]  # their ids are their numbers


async def ask(replicas: ReplicaClient, stream: bool, call: GenerateRequest = CALL) -> list[str]:
    """The texts of the pieces."""
    if stream:
        return [piece.text async for _, piece in replicas.stream_calls([call])]
    [pieces] = await replicas.complete_calls([call])
    return [piece.text for piece in pieces]


STREAM = pytest.mark.parametrize("stream", [True, False])


@STREAM
@pytest.mark.parametrize("error", [GONE, stopped("a"), asyncio.CancelledError(), *LOST])
async def test_a_call_of_a_lost_replica_is_retried(stream: bool, error: BaseException) -> None:
    replicas, handle = replicas_with([error], [END])
    assert await ask(replicas, stream) == ["b"]
    [first, second] = handle.calls
    assert (first.stopped, second.stopped) == ((), ("a",) if isinstance(error, RayTaskError) else ())
    assert second.request_id == first.request_id


@STREAM
async def test_at_most_two_retries(stream: bool) -> None:
    """Regression: a request at which engines fail would take down one after the other."""
    replicas, handle = replicas_with(script=lambda call: [stopped(f"e{len(call.stopped)}")])
    with pytest.raises(UnavailableError) as error:
        await ask(replicas, stream)
    assert [call.stopped for call in handle.calls] == [(), ("e0",), ("e0", "e1")]
    assert error.value.retry_after_s


@STREAM
async def test_no_retry_without_a_replica(stream: bool) -> None:
    """Regression: the call waited for a replica three times."""
    error = NoReplicaError("no engine replica within 10 s", 10.0)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    replicas, handle = replicas_with(script=lambda call: [error])
    with pytest.raises(NoReplicaError) as caught:
        await ask(replicas, stream)
    assert caught.value.retry_after_s == 10.0
    assert len(handle.calls) == 1


async def test_a_stream_continues_at_another_replica() -> None:
    """With the same seed; its caller gets nothing twice, and the cached tokens of the first replica."""
    begun, end = replace(BEGUN, num_cached_tokens=7), replace(END, num_cached_tokens=9)
    replicas, handle = replicas_with([begun, GONE], [GONE], [end])
    pieces = [piece async for _, piece in replicas.stream_calls([CALL])]
    assert [(piece.text, piece.num_cached_tokens) for piece in pieces] == [("a", 7), ("b", 7)]
    assert [[(o.index, list(o.token_ids)) for o in call.begun] for call in handle.calls] == [[], [(0, [1])], [(0, [1])]]
    [seed] = {call.params.seed for call in handle.calls}
    assert seed is not None
    assert handle.responses[0].cancelled


@STREAM
async def test_a_call_whose_prompt_is_computed_continues_elsewhere(stream: bool) -> None:
    """As often as it takes: that is no failure, and the caller's log does not mention it."""
    first = Prefilled([replace(BEGUN, replica="prefill")])
    replicas, handle = replicas_with([first], [GONE], [END])
    assert "".join(await ask(replicas, stream)) == "ab"
    assert [[list(o.token_ids) for o in call.begun] for call in handle.calls] == [[], [[1]], [[1]]]
    assert {call.begun_by for call in handle.calls[1:]} == {"prefill"}
    assert not DEPARTURES._calls


async def test_blocks_are_fetched_while_the_prompt_is_computed() -> None:
    """By the replica that gets the call, until its first piece; a call that ends before leaves none behind."""
    DEPARTURES.note_outputs("prefill", {"": ("m", "there")})
    first = Prefilled([replace(BEGUN, replica="prefill")])
    replicas, handle = replicas_with([Prefilling("prefill"), 0.01, first], ["decode", None], [BEGUN, 0.01, END])
    pieces = replicas.stream_calls([CALL])
    assert [(await anext(pieces))[1].text for _ in range(2)] == ["a", "a"]
    _, fetching, continued = handle.calls
    assert (fetching.fetches, fetching.begun_by, fetching.held_at) == (True, "prefill", "there")
    assert (continued.fetches, continued.fetched_by) == (False, "decode")
    await asyncio.sleep(0)
    assert handle.responses[1].cancelled
    assert [piece.text async for _, piece in pieces] == ["b"]
    replicas, handle = replicas_with([Prefilling("prefill"), 0.01, first], ["decode", None], [GONE])
    pieces = replicas.stream_calls([CALL])
    await anext(pieces)
    await pieces.aclose()
    await asyncio.sleep(0)
    assert handle.responses[1].cancelled


async def test_a_stream_leaves_a_replica_that_stops_again_and_again() -> None:
    """Moves are no failures of the call; but there is a bound, since one that hangs leaves like one that stops."""
    begun = [replace(BEGUN, replica=f"replica {number}") for number in range(10)]
    replicas, handle = replicas_with(*([piece, None] for piece in begun))
    pieces = replicas.stream_calls([CALL])
    for number in range(9):
        assert (await anext(pieces))[1].text == "a"
        DEPARTURES.update([f"replica {number}"], ["stays"])
    with pytest.raises(UnavailableError):
        await anext(pieces)
    assert [len(call.begun) and len(call.begun[0].token_ids) for call in handle.calls] == [*range(9)]
    assert not DEPARTURES._calls


@STREAM
async def test_a_call_without_output_leaves_a_replica_that_stops(stream: bool) -> None:
    """And the next one is told where the part of its prompt is that was computed."""
    for name in ("leaves", "stays"):
        DEPARTURES.note_outputs(name, {"": ("m", "there")})
    replicas, handle = replicas_with(["leaves", None], [END])
    asked = asyncio.create_task(ask(replicas, stream))
    async with asyncio.timeout(10):
        while "leaves" not in DEPARTURES._calls:
            await asyncio.sleep(0)
        DEPARTURES.update(["leaves"], ["stays"])
        assert await asked == ["b"]
    assert [(call.begun, call.held_at) for call in handle.calls] == [((), ""), ((), "there")]
    assert handle.responses[0].cancelled


async def test_a_call_does_not_return_to_the_replica_that_has_fetched_its_blocks() -> None:
    """Regression: once it has left its queue, it went back to it."""
    DEPARTURES.note_outputs("prefill", {"": ("m", "there")})
    first = Prefilled([replace(BEGUN, replica="prefill")])
    replicas, handle = replicas_with([Prefilling("prefill"), 0.01, first], ["decode", None], ["decode", None], [END])
    asked = asyncio.create_task(ask(replicas, True))
    async with asyncio.timeout(10):
        while "decode" not in DEPARTURES._calls:
            await asyncio.sleep(0)
        DEPARTURES.move("decode", [CALL.model], 1)
        assert "".join(await asked) == "ab"
    assert [call.fetched_by for call in handle.calls] == ["", "", "decode", ""]
    assert handle.calls[-1].crowded == ("decode",)


async def test_what_has_left_a_queue_does_not_return_to_it() -> None:
    replicas, handle = replicas_with(*[[name, None] for name in "abcd"], [END])
    asked = asyncio.create_task(ask(replicas, True))
    async with asyncio.timeout(10):
        for name in "abcd":
            while name not in DEPARTURES._calls:
                await asyncio.sleep(0)
            DEPARTURES.move(name, ("",), 1)
        assert await asked == ["b"]
    assert [call.crowded for call in handle.calls] == [(), ("a",), ("b",), ("c",), ("d",)]


@pytest.mark.parametrize("num_moves", [3, 4])
async def test_a_call_that_has_often_moved_stays(num_moves: int) -> None:
    retries = CallRetries(CALL, LoadShedder())
    for _ in range(num_moves):
        assert retries.note_failure(CallMovedError("a")) == "moved"
    assert retries.can_leave == (num_moves < 4)
    assert not CallRetries(replace(CALL, params=SamplingParams(n=1, best_of=2)), LoadShedder()).can_leave


@pytest.mark.parametrize("replaced_within_s", [60.0, 0.0])
async def test_calls_wait_for_the_replica_that_is_started_instead(replaced_within_s: float) -> None:
    error = NoReplicaError("none", 10.0)
    error.replaced_within_s = replaced_within_s
    replicas, handle = replicas_with([BEGUN, GONE], [error], [error], [END])
    if replaced_within_s:
        assert await ask(replicas, True) == ["a", "b"]
        assert [len(call.begun) for call in handle.calls] == [0, 1, 1, 1]
    else:
        with pytest.raises(NoReplicaError):
            await ask(replicas, True)


async def test_no_call_waits_longer_than_replicas_take_to_start() -> None:
    error = NoReplicaError("none", 10.0)
    error.replaced_within_s = 10.01
    replicas, handle = replicas_with(script=lambda call: [error])
    with pytest.raises(NoReplicaError):
        await ask(replicas, True)
    assert len(handle.calls) > 1


async def test_only_the_outputs_that_have_not_ended_continue() -> None:
    outputs = [
        Piece("a", (1,), 1, None, None, 2),
        Piece("b", (2,), 0, "stop", None, 2),
        Piece("c", (3,), 1, None, None, 1),
    ]
    last = [Piece("d", (4,), 2, "stop", None, 1), Piece("e", (5,), 1, "stop")]
    replicas, handle = replicas_with([*outputs, GONE], last)
    call = replace(CALL, params=SamplingParams(n=3))
    assert await ask(replicas, True, call) == ["a", "b", "c", "d", "e"]
    assert [(o.index, list(o.token_ids)) for o in handle.calls[1].begun] == [(1, [1, 3]), (2, [])]


async def test_selected_outputs_are_not_continued() -> None:
    """They are delivered in the order of their merit, not of their numbers."""
    replicas, handle = replicas_with([Piece("a", (1,), 0, "stop", None, 1), GONE])
    with pytest.raises(UnavailableError):
        await ask(replicas, True, replace(CALL, params=SamplingParams(n=2, best_of=3)))
    assert len(handle.calls) == 1


async def test_how_streams_end() -> None:
    """Too early, without any output, and after the last piece."""
    assert await ask(replicas_with([BEGUN], [END])[0], True) == ["a", "b"]
    assert await ask(replicas_with([], [END])[0], True) == ["b"]
    assert await ask(replicas_with([BEGUN, END, GONE])[0], True) == ["a", "b"]


@STREAM
@pytest.mark.parametrize("error", [EngineError("a step failed"), DeadlineError("late")])
async def test_a_failed_step_and_a_deadline_are_final(stream: bool, error: FolioError) -> None:
    replicas, handle = replicas_with([RayTaskError("generate", "traceback", error)])
    with pytest.raises(type(error)):
        await ask(replicas, stream)
    assert len(handle.calls) == 1


@STREAM
@pytest.mark.parametrize(("refusal", "crowded"), [(full("a"), ("a",)), (broken("a"), ())])
async def test_a_refused_call_is_offered_to_another_replica(
    stream: bool, refusal: RayTaskError, crowded: tuple[str, ...]
) -> None:
    """Its queue is full, or it cannot load the model. The next call asks a full one last."""
    replicas, handle = replicas_with([refusal], [END], [END])
    assert await ask(replicas, stream) == ["b"]
    assert [call.refused_by for call in handle.calls] == [(), ("a",)]
    await ask(replicas, stream)
    assert (handle.calls[2].refused_by, handle.calls[2].crowded) == ((), crowded)


@STREAM
async def test_the_shortest_wait_of_full_replicas_is_named(stream: bool) -> None:
    """The shortest Retry-After counts, and the ingress sheds load from now on."""
    shedder = LoadShedder()
    replicas, handle = replicas_with([full("a", 40.0)], [full("b", 10.0)], [NONE_LEFT], shedder=shedder)
    with pytest.raises(OverloadedError, match="queues of all engine replicas") as error:
        await ask(replicas, stream)
    assert error.value.retry_after_s == pytest.approx(10.0, abs=1.0)
    assert handle.calls[2].refused_by == ("a", "b")
    assert shedder.admission_delay_s(time.monotonic()) is not None


async def test_one_request_is_offered_to_few_full_replicas() -> None:
    shedder = LoadShedder()
    replicas, handle = replicas_with(script=lambda call: [full(f"r{len(call.refused_by)}")], shedder=shedder)
    with pytest.raises(OverloadedError):
        await ask(replicas, False)
    assert len(handle.calls) == 8
    assert shedder.admission_delay_s(time.monotonic()) is not None  # a sample large enough


@STREAM
async def test_a_model_that_no_replica_can_load_is_unavailable_with_the_reason(stream: bool) -> None:
    """The router would wait for another replica, and then say that there is none."""
    shedder = LoadShedder()
    replicas, handle = replicas_with([broken("a")], [NONE_LEFT], shedder=shedder)
    with pytest.raises(UnavailableError, match="its files are gone") as error:
        await ask(replicas, stream)
    assert (type(error.value), error.value.retry_after_s) == (UnavailableError, 5.0)
    assert len(handle.calls) == 2
    assert shedder.admission_delay_s(time.monotonic()) is None


async def test_each_model_sheds_its_own_load() -> None:
    left: list[list[Any]] = [[full("a", 40.0)], [NONE_LEFT]]
    handle: Any = Handle(lambda call: left.pop(0))
    whole, of_m, of_n = LoadShedder(), LoadShedder(), LoadShedder()
    replicas = ReplicaClient(handle, whole, shedders={"m": of_m, "n": of_n})
    with pytest.raises(OverloadedError):
        await ask(replicas, False, GenerateRequest("r", [1], SamplingParams(), model="m"))
    now = time.monotonic()
    assert [shedder.is_shedding(now) for shedder in (whole, of_m, of_n)] == [False, True, False]


async def test_a_retried_call_has_the_time_left() -> None:
    call = GenerateRequest("r", [1], SamplingParams(), timeout_s=5.0)
    replicas, handle = replicas_with([GONE], [END])
    await ask(replicas, False, call)
    assert handle.calls[0].timeout_s == 5.0
    assert 0 < handle.calls[1].timeout_s < 5.0
    call = GenerateRequest("r", [1], SamplingParams(), timeout_s=1e-9)
    replicas, handle = replicas_with([GONE], [END])
    with pytest.raises(DeadlineError):
        await ask(replicas, False, call)
    assert len(handle.calls) == 1


async def test_one_call_of_several_is_retried_alone() -> None:
    tries: dict[str, int] = {}

    def script(call: Any) -> list[Any]:
        tries[call.request_id] = tries.get(call.request_id, 0) + 1
        return [GONE] if call.request_id == "1" and tries["1"] == 1 else [BEGUN, END]

    replicas, _ = replicas_with(script=script)
    pieces = [entry async for entry in replicas.stream_calls(CALLS[:3])]
    assert sorted(number for number, _ in pieces) == [0, 0, 1, 1, 2, 2]
    assert tries == {"0": 1, "1": 2, "2": 1}


class Queue:
    """A replica with `room` for calls at once."""

    def __init__(self, room: int) -> None:
        self.room, self.most_offered, self.num_refused = room, 0, 0
        self.shedder = LoadShedder()
        self._handle: Any = None

    def replicas(self, window: int) -> Any:
        self._handle = Handle(self._items)
        return ReplicaClient(self._handle, self.shedder, window)

    def _items(self, call: Any) -> list[Any]:
        running = sum(not response.ended for response in self._handle.responses)
        self.most_offered = max(self.most_offered, running + 1)
        if running >= self.room:
            self.num_refused += 1
            return [full("a", 0.0) if not call.refused_by else OverloadedError("all are full")]
        return [BEGUN, BEGUN, END]


@STREAM
def test_a_request_with_more_prompts_than_the_queue_has_room(stream: bool) -> None:
    """Regression: one prompt too many was refused, and with it the whole request, on every attempt."""

    async def run(room: int, window: int) -> Queue:
        replicas = (queue := Queue(room)).replicas(window)
        if stream:
            entries = [entry async for entry in replicas.stream_calls(CALLS[:20])]
            assert sorted(number for number, _ in entries) == sorted([*range(20)] * 3)
        else:
            [*outputs] = await replicas.complete_calls(CALLS[:20])
            assert [piece.text for [piece] in outputs] == ["aab"] * 20
        assert queue.shedder.admission_delay_s(time.monotonic()) is None
        return queue

    windowed = asyncio.run(run(8, 4))
    assert (windowed.most_offered, windowed.num_refused) == (4, 0)
    assert asyncio.run(run(3, 8)).num_refused > 0


@STREAM
async def test_a_request_without_an_accepted_call_is_refused(stream: bool) -> None:
    shedder = LoadShedder()
    replicas, _ = replicas_with(script=lambda call: [NONE_LEFT] if call.refused_by else [full("a")], shedder=shedder)
    answers = anext(replicas.stream_calls(CALLS[:5])) if stream else replicas.complete_calls(CALLS[:5])
    with pytest.raises(OverloadedError, match="queues of all engine replicas"):
        await answers
    assert shedder.admission_delay_s(time.monotonic()) is not None


@STREAM
@pytest.mark.parametrize("failure", [RayTaskError("generate", "traceback", EngineError("x")), "cannot be sent"])
async def test_when_one_call_fails_the_others_are_cancelled(stream: bool, failure: Any) -> None:
    """Regression: calls before one that could not be sent ran on."""
    replicas, handle = replicas_with(script=lambda call: [failure] if call.request_id == "2" else [None])
    with pytest.raises((EngineError, RuntimeError)):
        await (anext(replicas.stream_calls(CALLS[:3])) if stream else replicas.complete_calls(CALLS[:3]))
    assert [response.cancelled for response in handle.responses[:2]] == [True, True]


async def test_cancellation_is_passed_on_without_a_retry() -> None:
    replicas, handle = replicas_with(script=lambda call: [None])
    task = asyncio.create_task(replicas.complete_calls([CALL]))
    while not handle.responses:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [response.cancelled for response in handle.responses] == [True]


FORK = ForkCall("f", "r", 0, "a", SamplingParams(n=2), model="m")
HERE, THERE = ("a", True), ("b", True)


@pytest.mark.parametrize("error", [GONE, RayTaskError("generate", "traceback", UnknownRequestError("none"))])
@pytest.mark.parametrize(
    ("looks", "asked"),
    [
        ([[THERE]], ["a", "b"]),  # it has continued there
        ([[("b", False)], [("b", False), THERE]], ["a", "b"]),  # it continues a moment later
        ([[UnavailableError("busy"), ("b", False)]] * 2, ["a"]),
        ([[HERE, ("b", False)]], ["a"]),  # another caller's
    ],
)
async def test_a_fork_goes_where_its_output_is(
    error: BaseException, looks: list[Any], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answers_of_each(handle: Any, *question: Any, timeout_s: float) -> list[Any]:
        assert question == ("has_output", "m", "r", 0)
        return left.pop(0)

    left = looks.copy()
    monkeypatch.setattr(peers, "answers_of_each", answers_of_each)
    monkeypatch.setattr(peers, "_CONTINUES_WITHIN_S", 0.0)
    replicas, handle = replicas_with(
        script=lambda call: [error] if call.replica == "a" else [replace(END, index=1), END]
    )
    answer = replicas.complete_fork(FORK)
    if len(asked) == 1:
        with pytest.raises((UnavailableError, UnknownRequestError)):
            await answer
    else:
        assert [piece.index for piece in await answer] == [0, 1]
    assert [call.replica for call in handle.calls] == asked
    assert not left


async def test_a_fork_is_refused_once_by_each_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two have another caller's output, which may have ended at both."""

    async def answers_of_each(handle: Any, *question: Any, timeout_s: float) -> list[Any]:
        return [HERE, THERE]

    monkeypatch.setattr(peers, "answers_of_each", answers_of_each)
    error = RayTaskError("generate", "traceback", UnknownRequestError("none"))
    replicas, handle = replicas_with(script=lambda call: [error])
    with pytest.raises(UnknownRequestError):
        await replicas.complete_fork(FORK)
    assert [call.replica for call in handle.calls] == ["a", "b"]


async def test_a_fork_continues_at_any_replica() -> None:
    """From what its parent had generated, and it itself has delivered."""
    inherited = tuple(BegunOutput(index, [8, 9], 2, 1) for index in range(2))
    asked = EngineRequest("engine's", [1, 2], FORK.params, adapter="a@1", begun=inherited)
    call = FORK.as_generated(asked)
    assert (call.request_id, call.model, call.adapter) == ("f", "m", "a@1")
    ended = [Piece("c", (3,), 0, "stop", None, 1), Piece("d", (4,), 1, "stop")]
    replicas, handle = replicas_with([call, GONE], [Piece("a", (5,), 1), GONE], ended)
    assert [piece.text async for piece in replicas.stream_fork(FORK)] == ["a", "c", "d"]
    begun = [[replace(output, token_ids=list(output.token_ids)) for output in call.begun] for call in handle.calls[1:]]
    assert begun == [list(inherited), [inherited[0], BegunOutput(1, [8, 9, 5], 2, 1)]]


@pytest.mark.parametrize(
    ("params", "by_value"),
    [
        ({}, True),
        ({"max_tokens": None}, True),
        ({"max_tokens": None, "n": 2}, False),
        ({"max_tokens": 8192, "n": 16}, True),
        ({"max_tokens": 8192, "n": 17}, False),
        ({"logprobs": 0}, False),
        ({"prompt_logprobs": 1}, False),
    ],
)
async def test_items_too_long_for_a_message_go_by_reference(params: dict[str, Any], by_value: bool) -> None:
    sampling = SamplingParams(**params)
    assert fits_by_value(sampling) == by_value

    replicas, handle = replicas_with([END], [END])
    await ask(replicas, True, GenerateRequest("r", [1], sampling))
    await ask(replicas, False, GenerateRequest("r", [1], sampling))
    assert handle.by_reference == [not by_value] * 2


def pooled_pieces(call: Any) -> list[Any]:
    """Vectors in an order that is not the prompts': each is its prompt's first token."""
    prompts = [call.prompt_token_ids, *call.more_prompts]
    numbers = [*range(1, len(prompts)), 0]
    return [
        Piece("", (), index=i, finish_reason="stop", num_unfinished=left, pooled=bytes([prompts[i][0]]))
        for i, left in zip(numbers, reversed(range(len(prompts))), strict=True)
    ]


@pytest.mark.parametrize(
    ("lengths", "window", "sizes"),
    [
        ([5] * 3, 32, [3]),
        ([5] * 40, 32, [16, 16, 8]),
        ([5] * 9, 4, [4, 4, 1]),
        ([3000, 1000, 97, 5000, 1], 32, [2, 1, 1, 1]),
        ([5], 32, [1]),
    ],
)
async def test_prompts_to_pool_go_in_groups(lengths: list[int], window: int, sizes: list[int]) -> None:
    """As many as may be in flight at once, as long as they are short."""
    handle: Any = Handle(pooled_pieces)
    replicas = ReplicaClient(handle, LoadShedder(), window)
    calls = [GenerateRequest(str(i), [i] * n, SamplingParams(max_tokens=1)) for i, n in enumerate(lengths)]
    outputs = await replicas.complete_pooled(calls)
    assert [[piece.pooled for piece in pieces] for pieces in outputs] == [[bytes([i])] for i in range(len(lengths))]
    assert [1 + len(call.more_prompts) for call in handle.calls] == sizes
    assert sum(call.num_prompt_tokens for call in handle.calls) == sum(lengths)


async def test_a_group_is_sent_again_as_a_whole() -> None:
    tries = []

    def script(call: Any) -> list[Any]:
        tries.append(call.request_id)
        return [GONE] if len(tries) == 1 else pooled_pieces(call)

    replicas, _ = replicas_with(script=script)
    outputs = await replicas.complete_pooled(CALLS[:20])
    assert [len(pieces) for pieces in outputs] == [1] * 20
    assert sorted(tries) == ["0", "0", "16"]


async def test_groups_in_flight_hold_no_more_prompts_than_the_window() -> None:
    most = 0

    def script(call: Any) -> list[Any]:
        nonlocal most
        calls = [c for c, r in zip(handle.calls, handle.responses, strict=False) if not r.ended]
        most = max(most, sum(1 + len(c.more_prompts) for c in [*calls, call]))
        return pooled_pieces(call)

    handle: Any = Handle(script)
    await ReplicaClient(handle, LoadShedder(), 40).complete_pooled(CALLS)
    assert most == 32
