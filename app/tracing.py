"""OpenTelemetry traces of requests, through Ray Serve's `tracing_config`; off unless the YAML has one.

    replica_handle_request Ingress …            Serve: the request at the ingress; child of the client's `traceparent`
      route_to_replica EngineReplica …          Serve: until a replica has the call
        replica_handle_request EngineReplica …  Serve: the call at the replica
          queue, prefill, decode                Folio: what the engine did

Folio adds attributes to Serve's span of the ingress. Attributes are numbers and names, never text. Without
`tracing_config` a request costs two reads of a context variable.

`otlp` and `files` are values of `exporter_import_path`. Serve calls the function in each replica's process, before it
makes the process's `TracerProvider`.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Span, Status, StatusCode

from folio.app.compat.ray import logs_directory
from folio.app.engine.request.delta import Delta
from folio.app.http.errors import outcome_of

# The only one of Serve's spans that may begin a trace.
_REQUEST = "replica_handle_request Ingress"


def otlp() -> list[SpanProcessor]:
    """Send spans by OTLP over HTTP, to where OpenTelemetry's standard variables say (`OTEL_EXPORTER_OTLP_ENDPOINT`,
    by default http://localhost:4318)."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # of the extra `traces`

    return _processors(OTLPSpanExporter())


def files() -> list[SpanProcessor]:
    """Write spans as JSON lines to `spans/*.jsonl` in Serve's folder of logs, a file for each replica."""
    folder = logs_directory() / "spans"
    folder.mkdir(parents=True, exist_ok=True)
    out = (folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8", buffering=1)
    return _processors(ConsoleSpanExporter(out=out, formatter=_as_line))


def _as_line(span: ReadableSpan) -> str:
    return str(span.to_json(indent=None)) + "\n"


def _processors(exporter: SpanExporter) -> list[SpanProcessor]:
    # Serve records exceptions as events, with messages that may quote a request. The provider made next reads this.
    os.environ["OTEL_SPAN_EVENT_COUNT_LIMIT"] = "0"
    os.environ.setdefault("OTEL_SERVICE_NAME", "folio")
    os.environ.setdefault("OTEL_BSP_SCHEDULE_DELAY", "1000")  # ms: the last spans leave before a replica ends
    return [BatchSpanProcessor(exporter)]


class WholeTraces(Sampler):
    """Serve's sampler, but traces begin at an ingress. Serve passes no context on for a request that is not sampled,
    and its own sampler would then begin another trace at the router or at the replica."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def should_sample(
        self, parent_context: Context | None, trace_id: int, name: str, *args: Any, **kwargs: Any
    ) -> SamplingResult:
        if not trace.get_current_span(parent_context).get_span_context().is_valid and not name.startswith(_REQUEST):
            return SamplingResult(Decision.DROP)
        return self._sampler.should_sample(parent_context, trace_id, name, *args, **kwargs)

    def get_description(self) -> str:
        return f"WholeTraces({self._sampler.get_description()})"


def keep_traces_whole() -> None:
    """Call once in a replica's process, before its first request. No effect without `tracing_config`."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        provider.sampler = WholeTraces(provider.sampler)


def traced(deltas: AsyncGenerator[list[Delta], None], num_prompt_tokens: int) -> AsyncGenerator[list[Delta], None]:
    """A request's deltas; with a recording span, also spans of the engine's work on the request."""
    span = trace.get_current_span()
    return _traced(deltas, num_prompt_tokens, span) if span.is_recording() else deltas


async def _traced(
    deltas: AsyncGenerator[list[Delta], None], num_prompt_tokens: int, parent: Span
) -> AsyncGenerator[list[Delta], None]:
    begun_at, first_at, num_tokens, first = time.time_ns(), None, 0, None
    outcome = "cancelled"
    try:
        async with aclosing(deltas):
            async for some in deltas:
                if first is None:
                    first_at, first = time.time_ns(), some[0]
                num_tokens += sum(len(delta.token_ids) for delta in some)
                yield some
        outcome = "ok"
    except Exception as error:
        outcome = outcome_of(error)
        raise
    finally:
        ended_at, ended = time.time_ns(), {"folio.outcome": outcome}
        if first is None or first_at is None:  # it ended before its first token
            _add_span(parent, "queue or prefill", begun_at, ended_at, ended)
        else:
            prefill_at = min(begun_at + int(first.queue_s * 1e9), first_at)
            tokens = {"folio.prompt_tokens": num_prompt_tokens, "folio.cached_tokens": first.num_cached_tokens}
            _add_span(parent, "queue", begun_at, prefill_at)
            _add_span(parent, "prefill", prefill_at, first_at, tokens)
            _add_span(parent, "decode", first_at, ended_at, {"folio.output_tokens": num_tokens, **ended})


def _add_span(parent: Span, name: str, start: int, end: int, attributes: Mapping[str, str | int] | None = None) -> None:
    """Record a span from `start` to `end`, in nanoseconds since the epoch."""
    context = trace.set_span_in_context(parent, Context())
    span = trace.get_tracer("folio").start_span(name, context, attributes=attributes, start_time=start)
    set_outcome(span, str((attributes or {}).get("folio.outcome", "ok")))
    span.end(end)


def set_outcome(span: Span, outcome: str) -> None:
    """Mark a span of a failed request as an error. Refused and cancelled requests are no errors of the server."""
    if outcome in ("failed", "unavailable"):
        span.set_status(Status(StatusCode.ERROR))
