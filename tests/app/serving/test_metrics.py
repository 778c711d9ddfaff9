"""Metrics of ingresses; the list of all metrics in the docs."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from dataclasses import replace

import pytest

from folio.app.engine.request.pooled import PoolingParams
from folio.app.engine.sampling.params import SamplingParams
from folio.app.errors import (
    DeadlineError,
    EngineError,
    OverloadedError,
    RequestError,
    UnavailableError,
    UnknownModelError,
)
from folio.app.fleet.messages import GenerateRequest, Piece
from folio.app.serving.metrics import FIRST_S, EdgeMeter, RequestMeter
from tests.app.serving.conftest import Recorded
from tests.declared_metrics import ROOT, declared_metrics

PARAMS = SamplingParams(n=2, max_tokens=64)
CALLS = [GenerateRequest("a", [1, 2, 3], PARAMS), GenerateRequest("b", [1, 2], PARAMS)]


def test_dropped_fields_are_counted_by_name(recorded: Recorded) -> None:
    meter = EdgeMeter()
    meter.on_ignored_field("provider")
    meter.on_ignored_field("other")
    names = [{"field": "provider"}, {"field": "other"}]
    assert recorded == [("folio_ignored_fields", 1, tags) for tags in names]


def test_the_documentation_lists_exactly_the_metrics_that_exist() -> None:
    page = (ROOT / "docs/reference/metrics.md").read_text()
    listed = {
        (name, kind, tuple(sorted(re.findall(r"`(\w+)`", tags))))
        for name, kind, tags in re.findall(r"^\| `(\w+)` \| (\w+) \|([^|]*)\|", page, re.MULTILINE)
    }
    made = declared_metrics()
    assert len(made) > 20
    assert listed == made


def sums(recorded: Recorded) -> Counter[str]:
    return Counter({name: sum(v for n, v, _ in recorded if n == name) for name, _, _ in recorded})


def test_tokens_and_times_of_a_stream(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """TTFT is that of the first piece of any output; TPOT is the mean of each output's later tokens."""
    clock = iter([10.0, 10.5, 11.0, 12.5, 13.0])
    monkeypatch.setattr("folio.app.serving.metrics.time.perf_counter", lambda: next(clock))
    with RequestMeter().measure("chat") as measured:
        measured.served_by = "base"
        measured.sends(CALLS, "m")
        measured.streams(Piece("x", (7, 8), num_cached_tokens=2))
        measured.streams(Piece("y", (7,), num_cached_tokens=1), prompt=1)
        measured.streams(Piece("z", (7, 8, 9, 10), finish_reason="stop", num_cached_tokens=2))
    route = {"route": "chat", "model": "base"}
    assert recorded == [
        ("folio_requests_in_flight", 1, {"route": "chat"}),
        ("folio_requests_in_flight", 0, {"route": "chat"}),
        ("folio_requests", 1, route | {"outcome": "ok"}),
        ("folio_prompt_tokens", 5, route),
        ("folio_prompt_cached_tokens", 3, route),
        ("folio_output_tokens", 7, route),
        ("folio_time_to_first_token_seconds", 0.5, route),
        ("folio_time_per_output_token_seconds", 0.5, route),  # four tokens in two seconds; the other has one piece
        ("folio_decode_seconds", 2.0, route),  # of the output that has ended
        ("folio_prompt_length_tokens", 3, route),
        ("folio_prompt_length_tokens", 2, route),
        ("folio_requested_outputs", 2, route),
        ("folio_requested_tokens", 64, route),
        ("folio_outputs", 1, route | {"reason": "stop"}),
        ("folio_output_length_tokens", 6, route),
        ("folio_request_seconds", 3.0, route),
    ]


def test_a_whole_answer_has_no_first_token(recorded: Recorded) -> None:
    with RequestMeter().measure("completions") as measured:
        measured.sends(CALLS, "m")
        pieces = [Piece("x", (7, 8), 0, "stop"), Piece("y", (7,), 1, "length")], [Piece("z", (7,), 0, "stop")]
        measured.receives(pieces)
    totals = sums(recorded)
    outputs = [(value, tags["reason"]) for name, value, tags in recorded if name == "folio_outputs"]
    assert outputs == [(2, "stop"), (1, "length")]
    assert [value for name, value, _ in recorded if name == "folio_output_length_tokens"] == [2, 1, 1]
    assert "folio_decode_seconds" not in totals
    assert (totals["folio_prompt_tokens"], totals["folio_output_tokens"]) == (5, 4)
    assert "folio_time_to_first_token_seconds" not in totals
    assert "folio_prompt_cached_tokens" not in totals
    assert totals["folio_requests"] == 1


def test_a_fork_has_no_prompt(recorded: Recorded) -> None:
    with RequestMeter().measure("fork") as measured:
        measured.receives([[Piece("x", (7,), num_cached_tokens=64)]])
    assert "folio_prompt_cached_tokens" not in sums(recorded)
    assert sums(recorded)["folio_output_tokens"] == 1
    assert not {"folio_prompt_length_tokens", "folio_requested_outputs"} & sums(recorded).keys()


def test_a_pooled_prompt_has_a_vector_and_no_length(recorded: Recorded) -> None:
    with RequestMeter().measure("embeddings") as measured:
        measured.sends([replace(CALLS[0], pooling=PoolingParams("embedding"))], "m")
        measured.receives([[Piece("", (), finish_reason="stop", pooled=b"1234")]])
    names = {name for name, _, _ in recorded}
    assert {"folio_outputs", "folio_prompt_length_tokens", "folio_prompt_tokens"} <= names
    assert not {"folio_output_length_tokens", "folio_requested_outputs", "folio_requested_tokens"} & names


def test_requests_without_a_limit_are_not_in_its_histogram(recorded: Recorded) -> None:
    with RequestMeter().measure("chat") as measured:
        measured.sends([GenerateRequest("a", [1], SamplingParams(max_tokens=None))], "m")
    assert "folio_requested_tokens" not in sums(recorded)
    assert sums(recorded)["folio_requested_outputs"] == 1


def test_an_output_cut_short_has_no_length(recorded: Recorded) -> None:
    """Its tokens count all the same."""
    with pytest.raises(asyncio.CancelledError), RequestMeter().measure("chat") as measured:  # noqa: PT012
        measured.sends(CALLS, "m")
        measured.streams(Piece("x", (7, 8)))
        raise asyncio.CancelledError
    assert not {"folio_output_length_tokens", "folio_outputs", "folio_decode_seconds"} & sums(recorded).keys()
    assert sums(recorded)["folio_output_tokens"] == 2


def test_waits_of_minutes_are_told_apart() -> None:
    """TTFT had no bucket between 10 and 30 s, and none above 60 s."""
    assert [bound for bound in FIRST_S if bound >= 10] == [10, 15, 20, 30, 60, 120, 300, 600]


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
def test_the_error_of_a_request_is_its_outcome(recorded: Recorded, error: BaseException, outcome: str) -> None:
    """The time of whole requests does not count, and tokens only if a replica has taken the prompt."""
    meter = RequestMeter()
    with pytest.raises(type(error)), meter.measure("chat") as measured:  # noqa: PT012
        measured.sends(CALLS, "m")
        raise error
    assert ("folio_requests", 1, {"route": "chat", "model": "", "outcome": outcome}) in recorded
    assert ("folio_requests_in_flight", 0, {"route": "chat"}) in recorded
    is_refused = outcome in ("invalid", "refused", "unavailable")
    assert sums(recorded).get("folio_prompt_tokens") == (None if is_refused else 5)
    assert ("folio_prompt_length_tokens" in sums(recorded)) != is_refused
    assert "folio_request_seconds" not in sums(recorded)


def test_the_requests_in_flight_are_repeated(recorded: Recorded) -> None:
    """Ray drops a gauge 20 s after it was last set, and a request may take minutes."""
    meter = RequestMeter()
    with meter.measure("chat"):
        recorded.clear()
        meter.repeat()
        assert recorded == [("folio_requests_in_flight", 1, {"route": "chat"})]
    recorded.clear()
    meter.repeat()
    assert recorded == [("folio_requests_in_flight", 0, {"route": "chat"})]


def test_an_error_within_an_answer_is_the_outcome(recorded: Recorded) -> None:
    with RequestMeter().measure("responses") as measured:
        measured.fails(EngineError("x"))
    assert ("folio_requests", 1, {"route": "responses", "model": "", "outcome": "failed"}) in recorded


def test_requests_in_flight_are_counted_by_route(recorded: Recorded) -> None:
    meter = RequestMeter()
    with meter.measure("chat"), meter.measure("chat"), meter.measure("fork"):
        pass
    in_flight = [(tags["route"], value) for name, value, tags in recorded if name == "folio_requests_in_flight"]
    assert in_flight == [("chat", 1), ("chat", 2), ("fork", 1), ("fork", 0), ("chat", 1), ("chat", 0)]
