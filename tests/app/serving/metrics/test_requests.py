"""What an ingress replica tells Prometheus of its requests, without a cluster."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from app.engine.sampling.params import SamplingParams
from app.errors import (
    DeadlineError,
    EngineError,
    OverloadedError,
    RequestError,
    UnavailableError,
    UnknownModelError,
)
from app.fleet.messages import GenerateRequest, Piece
from app.serving.metrics import RequestMeter
from tests.app.serving.metrics.conftest import Told

CALLS = [GenerateRequest("a", [1, 2, 3], SamplingParams()), GenerateRequest("b", [1, 2], SamplingParams())]


def sums(told: Told) -> Counter[str]:
    return Counter({name: sum(v for n, v, _ in told if n == name) for name, _, _ in told})


def test_tokens_and_times_of_a_stream(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first piece of any output; then the mean time of each output's later tokens."""
    clock = iter([10.0, 10.5, 11.0, 12.5, 13.0])
    monkeypatch.setattr("app.serving.metrics.requests.time.perf_counter", lambda: next(clock))
    with RequestMeter().measure("chat") as measured:
        measured.sends(CALLS)
        measured.streams(Piece("x", (7, 8), num_cached_tokens=2))
        measured.streams(Piece("y", (7,), num_cached_tokens=1), prompt=1)
        measured.streams(Piece("z", (7, 8, 9, 10), finish_reason="stop", num_cached_tokens=2))
    route = {"route": "chat"}
    assert told == [
        ("folio_requests_in_flight", 1, route),
        ("folio_requests_in_flight", 0, route),
        ("folio_requests", 1, route | {"outcome": "ok"}),
        ("folio_prompt_tokens", 5, route),
        ("folio_prompt_cached_tokens", 3, route),
        ("folio_output_tokens", 7, route),
        ("folio_first_token_s", 0.5, route),
        ("folio_output_token_s", 0.5, route),  # four tokens in two seconds; the other output had but one piece
        ("folio_request_s", 3.0, route),
    ]


def test_a_whole_answer_has_no_first_token(told: Told) -> None:
    with RequestMeter().measure("completions") as measured:
        measured.sends(CALLS)
        measured.receives([[Piece("x", (7, 8)), Piece("y", (7,), 1)], [Piece("z", (7,))]])
    totals = sums(told)
    assert (totals["folio_prompt_tokens"], totals["folio_output_tokens"]) == (5, 4)
    assert "folio_first_token_s" not in totals
    assert "folio_prompt_cached_tokens" not in totals
    assert totals["folio_requests"] == 1


def test_a_fork_has_no_prompt(told: Told) -> None:
    with RequestMeter().measure("fork") as measured:
        measured.receives([[Piece("x", (7,), num_cached_tokens=64)]])
    assert "folio_prompt_cached_tokens" not in sums(told)
    assert sums(told)["folio_output_tokens"] == 1


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RequestError("x"), "invalid"),
        (UnknownModelError("x"), "invalid"),
        (DeadlineError("x"), "timeout"),
        (OverloadedError("x", 1.0), "refused"),
        (UnavailableError("x"), "unavailable"),
        (EngineError("x"), "failed"),
        (ZeroDivisionError("x"), "failed"),
        (asyncio.CancelledError(), "cancelled"),
        (GeneratorExit(), "cancelled"),
    ],
)
def test_what_leaves_the_with_is_the_outcome(told: Told, error: BaseException, outcome: str) -> None:
    """And what was sent until then counts, except for the time of whole requests."""
    meter = RequestMeter()
    with pytest.raises(type(error)), meter.measure("chat") as measured:  # noqa: PT012
        measured.sends(CALLS)
        raise error
    assert ("folio_requests", 1, {"route": "chat", "outcome": outcome}) in told
    assert ("folio_requests_in_flight", 0, {"route": "chat"}) in told
    assert sums(told)["folio_prompt_tokens"] == 5
    assert "folio_request_s" not in sums(told)


def test_how_many_are_in_flight_is_told_again(told: Told) -> None:
    """Ray forgets a gauge 20 s after it was last set, and a request may take minutes."""
    meter = RequestMeter()
    with meter.measure("chat"):
        told.clear()
        meter.repeat()
        assert told == [("folio_requests_in_flight", 1, {"route": "chat"})]
    told.clear()
    meter.repeat()
    assert told == [("folio_requests_in_flight", 0, {"route": "chat"})]


def test_an_answer_may_say_itself_that_it_failed(told: Told) -> None:
    with RequestMeter().measure("responses") as measured:
        measured.fails(EngineError("x"))
    assert ("folio_requests", 1, {"route": "responses", "outcome": "failed"}) in told


def test_requests_in_flight_are_counted_by_route(told: Told) -> None:
    meter = RequestMeter()
    with meter.measure("chat"), meter.measure("chat"), meter.measure("fork"):
        pass
    in_flight = [(tags["route"], value) for name, value, tags in told if name == "folio_requests_in_flight"]
    assert in_flight == [("chat", 1), ("chat", 2), ("fork", 1), ("fork", 0), ("chat", 1), ("chat", 0)]
