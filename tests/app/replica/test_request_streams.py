"""Requests of a replica, with an engine that returns given deltas."""

from __future__ import annotations

import asyncio
import math
import pickle
from collections.abc import AsyncGenerator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from folio.app.engine import Delta, SamplingParams
from folio.app.engine.request.engine_request import BegunOutput
from folio.app.errors import DeadlineError, OverloadedError, UnavailableError, UnknownRequestError
from folio.app.fleet.messages import ExpectedPrefix, ForkCall, GenerateRequest, Piece, whole_outputs
from folio.app.fleet.roles import Prefilled, Prefilling
from folio.app.fleet.streams import StreamPace
from folio.app.replica.prefill import pieces_here
from folio.app.replica.request_streams import RequestStreams
from tests.app.replica.given_deltas import DELTAS, REQUEST, Engine
from tests.local_server import Shelf


async def outputs_of(requests: RequestStreams, call: GenerateRequest | ForkCall) -> list[Piece]:
    """Each output in one piece."""
    *_, outputs = [item async for item in requests.pieces(replace(call, whole=True))]
    assert isinstance(outputs, list)
    return whole_outputs(outputs)


def streams_of(engine: Any, noted: list[tuple[int, int]] | None = None) -> RequestStreams:
    """Requests of one model. `noted`: gets the arguments of `note_cached`."""
    return streams_of_shelf(Shelf(builtin=engine), noted)


def streams_of_shelf(shelf: Any, noted: list[tuple[int, int]] | None = None) -> RequestStreams:
    async def model_of(name: str, adapter: str | None) -> Any:
        return shelf.model(name or "builtin")

    return RequestStreams(
        shelf,
        "builtin",
        model_of,
        replica="here",
        pace=StreamPace(10, min_interval_s=0.05, max_interval_s=1.0),
        note_cached=lambda *tokens: None if noted is None else noted.append(tokens),
        on_failure=lambda: None,
    )


async def test_outputs_whole_and_in_pieces() -> None:
    noted: list[tuple[int, int]] = []
    requests = streams_of(engine := Engine(DELTAS), noted)
    whole = await outputs_of(requests, REQUEST)
    assert [(p.index, p.text, p.token_ids, p.finish_reason) for p in whole] == [
        (0, "ac", (1, 4), "length"),
        (1, "b", (2, 3), "stop"),
    ]
    pieces = [piece async for some in requests.pieces(REQUEST) for piece in some]
    assert [(p.index, p.text, p.token_ids) for p in pieces] == [(0, "a", (1,)), (1, "b", (2, 3)), (0, "c", (4,))]
    assert [p.ends_request for p in pieces] == [False, False, True]
    assert {(p.replica, p.num_cached_tokens) for p in whole + pieces} == {("here", 3)}
    assert noted == [(4, 3)] * 2
    whole_pace, stream_pace = engine.paces
    assert whole_pace() == math.inf, "vectors are sent together"
    assert stream_pace() == 0.05


@pytest.mark.parametrize(("replica", "num_expected"), [("here", 4), ("another", None)])
async def test_the_engine_gets_the_request_as_it_is(replica: str, num_expected: int | None) -> None:
    requests = streams_of(engine := Engine(DELTAS))
    sent = replace(REQUEST, expected=ExpectedPrefix(replica, 4))
    await outputs_of(requests, pickle.loads(pickle.dumps(sent)))
    assert engine.asked == [replace(sent, expected_cached_tokens=num_expected, whole=True)]


@pytest.mark.parametrize("whole", [True, False])
async def test_a_call_that_leaves_has_its_first_pieces_only(whole: bool) -> None:
    """After the replica's name; and the engine's stream is closed with them. A call that ends with them does not
    leave."""
    call = replace(REQUEST, pooling=None, whole=whole, expected=ExpectedPrefix("here", 4, leaves=True))
    requests = streams_of(engine := Engine(DELTAS))
    name, item = [item async for item in pieces_here(requests, call, "here")]
    assert name == "here"
    assert isinstance(name, Prefilling)
    assert isinstance(item, Prefilled)
    assert [(piece.index, piece.token_ids) for piece in item] == [(0, (1,))]
    assert engine.closed == 1
    elsewhere = replace(call, expected=ExpectedPrefix("there", 4, leaves=True), whole=False)
    assert len([item async for item in pieces_here(requests, elsewhere, "here")]) == 3
    short = streams_of(Engine([Delta("r", (1,), "a", "length")]))
    assert [type(item) async for item in pieces_here(short, call, "here")] == [Prefilling, list]


async def test_more_prompts_are_outputs_of_one_call() -> None:
    engine = Engine([Delta("r", (), "", "stop", num_cached_tokens=3, pooled=b"1234")])
    noted: list[tuple[int, int]] = []
    requests = streams_of(engine, noted)
    pieces = await outputs_of(requests, replace(REQUEST, params=SamplingParams(), more_prompts=([3], [4, 5])))
    asked = [(request.prompt_token_ids, request.expected_cached_tokens) for request in engine.asked]
    assert asked == [([1, 2], 4), ([3], None), ([4, 5], None)]
    assert [(piece.index, piece.pooled) for piece in pieces] == [(0, b"1234"), (1, b"1234"), (2, b"1234")]
    assert sorted(piece.num_unfinished for piece in pieces) == [0, 1, 2]
    assert noted == [(4, 3)], "the router expects a prefix of the first prompt only"


async def test_a_closed_stream_ends_its_request() -> None:
    requests = streams_of(engine := Engine(DELTAS))
    pieces = requests.pieces(REQUEST)
    await anext(pieces)
    await pieces.aclose()
    assert engine.closed == 1


async def test_errors_come_through() -> None:
    requests = streams_of(Engine(DELTAS[:1], DeadlineError("too late")))
    with pytest.raises(DeadlineError):
        await outputs_of(requests, REQUEST)
    with pytest.raises(DeadlineError):
        _ = [piece async for piece in requests.pieces(REQUEST)]


@pytest.mark.parametrize("error", [OverloadedError("full", 2.0), UnavailableError("stopped")])
async def test_a_refusal_names_the_replica(error: OverloadedError | UnavailableError) -> None:
    requests = streams_of(Engine([], error))
    with pytest.raises(type(error)) as refused:
        await outputs_of(requests, REQUEST)
    assert refused.value.replica == "here"


async def test_forks() -> None:
    requests = streams_of(engine := Engine(DELTAS))
    call = ForkCall("f", "r", 1, "here", SamplingParams(n=2), 3.0, "key:k")
    whole = await outputs_of(requests, call)
    assert [piece.text for piece in whole] == ["ac", "b"]
    first, *pieces = [item async for item in requests.pieces(call)]
    begun = (BegunOutput(0, [3], 1),)
    assert first == GenerateRequest("f", [1, 2], call.params, timeout_s=3.0, owner="key:k", begun=begun)
    assert "".join(piece.text for some in pieces for piece in some) == "abc"
    assert engine.forks == [("r", call.params, "f", {"index": 1, "timeout_s": 3.0, "owner": "key:k"})] * 2


async def test_a_fork_of_another_replicas_request() -> None:
    requests = streams_of(engine := Engine(DELTAS))
    call = ForkCall("f", "r", 0, "another", SamplingParams())
    with pytest.raises(UnknownRequestError, match="is gone"):
        await outputs_of(requests, call)
    with pytest.raises(UnknownRequestError, match="is gone"):
        _ = [piece async for piece in requests.pieces(call)]
    assert not engine.forks


async def test_a_repeated_request_never_runs_beside_the_first() -> None:
    """Regression: a request whose ingress had died was computed twice at once when it was sent again."""
    engine = Engine(DELTAS)
    requests = streams_of(engine)
    request = replace(REQUEST, repeat_key="k")
    first = requests.pieces(request)
    await anext(first)
    second = asyncio.ensure_future(outputs_of(requests, request))
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(engine.asked) == 1
    await first.aclose()
    assert [piece.text for piece in await second] == ["ac", "b"]
    assert (len(engine.asked), engine.closed) == (2, 2)


async def test_the_time_to_send_a_request_again_includes_the_wake() -> None:
    class Full:
        """A model that sleeps, and whose queue is full."""

        name, engine, expected_wake_s = "second", object(), 3.0

        async def stream(self, *_: Any) -> AsyncGenerator[list[Any], None]:
            error = OverloadedError("queue full; try again in 2 s", 2.0)
            error.num_queued = 8
            raise error
            yield []

    requests = streams_of_shelf(SimpleNamespace(model=lambda name: Full(), healthy=True))
    with pytest.raises(OverloadedError, match="try again in 5 s") as refused:
        await outputs_of(requests, GenerateRequest("r", [1], SamplingParams(), model="second"))
    error = refused.value
    assert (error.retry_after_s, error.num_queued, error.replica) == (5.0, 8, "here")
