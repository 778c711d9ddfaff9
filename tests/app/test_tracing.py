"""Spans of requests, with an exporter in memory: what they say, what begins a trace, and that none has text."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, ParentBasedTraceIdRatio
from opentelemetry.trace import StatusCode
from ray.serve._private.tracing_utils import _load_span_processors
from ray.serve.schema import TracingConfig

from folio.app import tracing
from folio.app.engine.request.delta import Delta
from folio.app.engine.sampling.params import SamplingParams
from folio.app.errors import EngineError, OverloadedError
from folio.app.fleet.messages import GenerateRequest, Piece
from folio.app.serving.metrics import RequestMeter
from folio.app.tracing import WholeTraces, keep_traces_whole, traced

INGRESS, ROUTER, REPLICA = (
    "replica_handle_request Ingress __call__",
    "route_to_replica EngineReplica generate_stream",
    "replica_handle_request EngineReplica generate_stream",
)


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> TracerProvider:
    provider = TracerProvider(sampler=ALWAYS_ON)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return provider


@pytest.fixture
def spans(provider: TracerProvider) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


def by_name(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in spans.get_finished_spans()}


async def deltas(*lists: list[Delta], error: Exception | None = None) -> AsyncIterator[list[Delta]]:
    for some in lists:
        yield some
    if error is not None:
        raise error


def delta(*token_ids: int, **fields: Any) -> Delta:
    return Delta("r", token_ids, "a secret", **fields)


async def run(source: Any) -> list[list[Delta]]:
    async with aclosing(traced(source, 7)) as lists:
        return [some async for some in lists]


async def test_a_request_has_queue_prefill_and_decode(spans: InMemorySpanExporter) -> None:
    lists = [delta(1, queue_s=1e-7, num_cached_tokens=4)], [delta(2), delta(3, finish_reason="stop")]
    with trace.get_tracer("t").start_as_current_span(REPLICA) as call:
        assert await run(deltas(*lists)) == list(lists)  # type: ignore[comparison-overlap]
    found = by_name(spans)
    queue, prefill, decode = found["queue"], found["prefill"], found["decode"]
    parents = {span.parent.span_id for span in (queue, prefill, decode) if span.parent}
    assert parents == {call.get_span_context().span_id}
    assert (queue.end_time, prefill.end_time) == (prefill.start_time, decode.start_time)
    assert (queue.end_time or 0) - (queue.start_time or 0) == 100
    assert dict(prefill.attributes or {}) == {"folio.prompt_tokens": 7, "folio.cached_tokens": 4}
    assert dict(decode.attributes or {}) == {"folio.output_tokens": 3, "folio.outcome": "ok"}
    assert "secret" not in "".join(span.to_json() for span in found.values())


async def test_the_queue_never_ends_after_the_first_tokens(spans: InMemorySpanExporter) -> None:
    """The engine's clock and the event loop's may be apart by the time of a wake-up."""
    with trace.get_tracer("t").start_as_current_span(REPLICA):
        await run(deltas([delta(1, queue_s=3600.0, finish_reason="stop")]))
    queue, prefill = by_name(spans)["queue"], by_name(spans)["prefill"]
    assert queue.end_time == prefill.start_time == prefill.end_time


@pytest.mark.parametrize(
    ("error", "outcome", "status"),
    [
        (OverloadedError("a secret", 1.0), "refused", StatusCode.UNSET),
        (EngineError("a secret"), "failed", StatusCode.ERROR),
    ],
)
async def test_a_request_that_fails_before_its_first_token(
    spans: InMemorySpanExporter, error: Exception, outcome: str, status: StatusCode
) -> None:
    with trace.get_tracer("t").start_as_current_span(REPLICA), pytest.raises(type(error)):
        await run(deltas(error=error))
    span = by_name(spans)["queue or prefill"]
    assert (span.attributes or {})["folio.outcome"] == outcome
    assert span.status.status_code == status
    assert "secret" not in span.to_json()


async def test_a_cancelled_request_ends_its_spans(spans: InMemorySpanExporter) -> None:
    with trace.get_tracer("t").start_as_current_span(REPLICA):
        async with aclosing(traced(deltas([delta(1)], [delta(2)]), 7)) as lists:  # type: ignore[arg-type]
            await anext(lists)
    assert (by_name(spans)["decode"].attributes or {})["folio.outcome"] == "cancelled"


async def test_without_a_span_deltas_pass_as_they_are(spans: InMemorySpanExporter) -> None:
    source: Any = deltas([delta(1)])
    assert traced(source, 7) is source
    assert not spans.get_finished_spans()


def test_the_span_of_the_ingress_has_the_requests_measurements(spans: InMemorySpanExporter) -> None:
    call = GenerateRequest("a", [1, 2, 3], SamplingParams())
    with trace.get_tracer("t").start_as_current_span(INGRESS), RequestMeter().measure("chat") as measured:
        measured.sends([call], "builtin")
        measured.streams(Piece("a secret", (7, 8), num_cached_tokens=2))
    [span] = spans.get_finished_spans()
    attributes = dict(span.attributes or {})
    assert attributes.pop("folio.first_token_s", -1) >= 0
    assert attributes == {
        "folio.route": "chat",
        "folio.outcome": "ok",
        "gen_ai.request.model": "builtin",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.usage.output_tokens": 2,
    }


def test_a_model_that_does_not_exist_is_not_named(spans: InMemorySpanExporter) -> None:
    """A client may write any text there."""
    with (
        trace.get_tracer("t").start_as_current_span(INGRESS),
        pytest.raises(EngineError),
        RequestMeter().measure("chat"),
    ):
        raise EngineError("a secret")
    [span] = spans.get_finished_spans()
    assert dict(span.attributes or {}) == {"folio.route": "chat", "folio.outcome": "failed"}


@pytest.mark.parametrize(("name", "begins"), [(INGRESS, True), (ROUTER, False), (REPLICA, False)])
def test_only_an_ingress_begins_a_trace(
    provider: TracerProvider, spans: InMemorySpanExporter, name: str, begins: bool
) -> None:
    """Regression: for a request that is not sampled Serve's router and replica began traces of their own."""
    provider.sampler = ParentBasedTraceIdRatio(1.0)
    keep_traces_whole()
    with trace.get_tracer("t").start_as_current_span(name) as span:
        assert span.is_recording() == begins
        with trace.get_tracer("t").start_as_current_span(ROUTER) as child:
            assert child.is_recording() == begins
    assert len(spans.get_finished_spans()) == 2 * begins


@pytest.mark.parametrize("flag", [0, 1])
def test_the_decision_of_the_client_counts(provider: TracerProvider, flag: int) -> None:
    provider.sampler = WholeTraces(ParentBased(ALWAYS_ON))
    parent = trace.NonRecordingSpan(trace.SpanContext(1, 2, is_remote=True, trace_flags=trace.TraceFlags(flag)))
    span = trace.get_tracer("t").start_span(REPLICA, trace.set_span_in_context(parent))
    assert span.is_recording() == bool(flag)
    assert span.get_span_context().trace_id == 1


def test_nothing_changes_without_tracing() -> None:
    before = trace.get_tracer_provider()
    keep_traces_whole()
    assert trace.get_tracer_provider() is before


@pytest.fixture
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_SPAN_EVENT_COUNT_LIMIT", "OTEL_SERVICE_NAME", "OTEL_BSP_SCHEDULE_DELAY"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("_environment")
def test_files_have_a_line_for_each_span_and_no_exceptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Serve uses it: the processors first, then the provider. Serve records exceptions, whose messages may quote a
    request."""
    monkeypatch.setattr(tracing, "logs_directory", lambda: tmp_path)
    config = TracingConfig(enabled=True, exporter_import_path="folio.app.tracing:files", sampling_ratio=1.0)
    processors = _load_span_processors(config.exporter_import_path, "x")
    provider = TracerProvider()
    for processor in processors:
        provider.add_span_processor(processor)
    with provider.get_tracer("t").start_as_current_span(INGRESS) as span:
        span.record_exception(ValueError("a secret"))
    provider.shutdown()
    [path] = (tmp_path / "spans").iterdir()
    [line] = path.read_text().splitlines()
    written = json.loads(line)
    assert (written["name"], written["events"]) == (INGRESS, [])
    assert written["resource"]["attributes"]["service.name"] == "folio"


@pytest.mark.usefixtures("_environment")
def test_spans_go_to_the_collector_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.getsockname()[1]}")
        [processor] = _load_span_processors("folio.app.tracing:otlp", "x")
        provider = TracerProvider()
        provider.add_span_processor(processor)
        provider.get_tracer("t").start_span(INGRESS).end()
        (ending := threading.Thread(target=provider.shutdown)).start()
        with collector.accept()[0] as connection:
            assert connection.recv(1 << 16).startswith(b"POST /v1/traces ")
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            ending.join()
