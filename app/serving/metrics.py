"""Prometheus metrics of an ingress. Names: docs/reference/metrics.md.

Names end with their base unit (seconds, bytes, tokens), and labels are in snake case, as `promtool check metrics` asks.
`folio.app.serving.metrics_page` makes the page `/metrics` and adds the label `model_name`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opentelemetry import trace
from ray.serve import metrics

from folio.app.dashboard.traffic import MOST_OUTPUTS, EndedRequest, TrafficLog
from folio.app.fleet.messages import GenerateRequest, Piece
from folio.app.http.errors import outcome_of
from folio.app.http.request_context import EdgeObserver
from folio.app.serving.metric_rows import Counter, Histogram, MetricTable, Rows
from folio.app.tracing import set_outcome

if TYPE_CHECKING:
    from folio.app.engine.sampling.params import SamplingParams

# From 0.01 s to ten minutes, with enough buckets above 10 s to see how overload grows.
FIRST_S: list[float] = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 7.5, 10, 15, 20, 30, 60, 120, 300, 600]
_TOKEN_S: list[float] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10]
_WHOLE_S: list[float] = [0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 20, 30, 60, 120, 300, 600, 1200, 3600]
_LENGTHS: list[float] = [float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)]
# Half integers: Ray adds the middle of the bucket to a sum for each value, and that is the value itself up to 4.
_OUTPUTS: list[float] = [0.5, 1.5, 2.5, 3.5, 4.5, 8.5, 16.5, 32.5, 64.5, 128.5]
# Outcomes of requests whose prompts no replica has taken, if they have no output.
_REFUSED = frozenset({"invalid", "refused", "unavailable"})


@dataclass(slots=True)
class _Output:
    """Times and tokens of one output: of its first piece, and of all so far. `has_ended`: with a finish reason."""

    first_at: float
    first_tokens: int
    last_at: float
    tokens: int
    has_ended: bool = False


class Measured:
    """Measurements of one request.

    Attributes:
        model: its name in the request, once it is known to exist.
        served_by: the model with that name, alias or adapter; empty before it is known.
        params: of all its prompts; `None` if they are pooled.
        prompt_lengths: tokens of each prompt.
        output_lengths: finish reason → tokens of each output that ended with it; 0 of a vector.
        first_s: seconds until the first piece of a stream.
        whole_s: seconds until the end, once it has ended.
    """

    def __init__(self) -> None:
        self.model = self.served_by = ""
        self.begun_at = time.perf_counter()
        self._outputs: dict[tuple[int, int], _Output] = {}
        self._cached: dict[int, int] = {}  # by prompt
        self.params: SamplingParams | None = None
        self.prompt_lengths: list[int] = []
        self.output_lengths: defaultdict[str, list[int]] = defaultdict(list)
        self.output_tokens = 0
        self.outcome = "ok"
        self.first_s: float | None = None
        self.whole_s = 0.0

    @property
    def prompt_tokens(self) -> int:
        return sum(self.prompt_lengths)

    @property
    def taken_lengths(self) -> list[int]:
        """Tokens of each prompt; empty if no replica is known to have computed one."""
        return [] if self.outcome in _REFUSED and not self._outputs else self.prompt_lengths

    @property
    def ended(self) -> EndedRequest:
        """The dashboard's record of the request, once it has ended."""
        return EndedRequest(
            is_ok=self.outcome == "ok",
            prompt_tokens=sum(self.taken_lengths),
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            first_s=self.first_s,
            token_s=self.token_s[:MOST_OUTPUTS],
            whole_s=self.whole_s,
        )

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached.values())

    @property
    def token_s(self) -> list[float]:
        """Mean time per token of each output with more than one piece."""
        return [
            (output.last_at - output.first_at) / (output.tokens - output.first_tokens)
            for output in self._outputs.values()
            if output.tokens > output.first_tokens
        ]

    @property
    def decode_s(self) -> list[float]:
        """Seconds from the first piece to the last one of each streamed output that has ended."""
        return [output.last_at - output.first_at for output in self._outputs.values() if output.has_ended]

    def sends(self, calls: Sequence[GenerateRequest], model: str) -> None:
        """Note the calls of engine replicas."""
        self.model = model
        self.prompt_lengths += [len(call.prompt_token_ids) for call in calls]
        self.params = calls[0].params if calls[0].pooling is None else None

    def streams(self, piece: Piece, prompt: int = 0) -> None:
        now, num_tokens = time.perf_counter(), len(piece.token_ids)
        if self.first_s is None:
            self.first_s = now - self.begun_at
        output = self._outputs.get((prompt, piece.index))
        if output is None:
            output = self._outputs[prompt, piece.index] = _Output(now, num_tokens, now, num_tokens)
        else:
            output.last_at, output.tokens = now, output.tokens + num_tokens
        if piece.finish_reason is not None:
            output.has_ended = True
            self.output_lengths[piece.finish_reason].append(output.tokens)
        self._count(piece, prompt)

    def receives(self, outputs: Sequence[Sequence[Piece]]) -> None:
        """Note all outputs of each prompt, without a stream."""
        for prompt, pieces in enumerate(outputs):
            for piece in pieces:
                if piece.finish_reason is not None:
                    self.output_lengths[piece.finish_reason].append(len(piece.token_ids))
                self._count(piece, prompt)

    def fails(self, error: Exception) -> None:
        """Note an error that is reported in the answer instead of being raised."""
        self.outcome = outcome_of(error)

    def _count(self, piece: Piece, prompt: int) -> None:
        self.output_tokens += len(piece.token_ids)
        if self.prompt_lengths and piece.num_cached_tokens > self._cached.get(prompt, 0):  # a fork has no prompt
            self._cached[prompt] = piece.num_cached_tokens


_TAGS = ("route", "model")
REQUESTS: Rows[Measured] = (
    Counter("folio_requests", "Requests that have ended, by outcome.", lambda m: {m.outcome: 1}, (*_TAGS, "outcome")),
    Counter(
        "folio_prompt_tokens",
        "Tokens of prompts that a replica has taken, cached ones included.",
        lambda m: sum(m.taken_lengths),
        _TAGS,
    ),
    Counter(
        "folio_prompt_cached_tokens", "Tokens of prompts found in the prefix cache.", lambda m: m.cached_tokens, _TAGS
    ),
    Counter("folio_output_tokens", "Tokens generated and passed on.", lambda m: m.output_tokens, _TAGS),
    Histogram(
        "folio_time_to_first_token_seconds",
        "Streams: from the request to the first piece of any output (TTFT).",
        lambda m: m.first_s,
        _TAGS,
        FIRST_S,
    ),
    Histogram(
        "folio_time_per_output_token_seconds",
        "Streams: mean time per token of each output after its first piece (TPOT).",
        lambda m: m.token_s,
        _TAGS,
        _TOKEN_S,
    ),
    Histogram(
        "folio_decode_seconds",
        "Streams: from an output's first piece to its last.",
        lambda m: m.decode_s,
        _TAGS,
        _WHOLE_S,
    ),
    Histogram("folio_prompt_length_tokens", "Tokens of a prompt.", lambda m: m.taken_lengths, _TAGS, _LENGTHS),
    Histogram(
        "folio_requested_outputs",
        "Outputs of a prompt (n).",
        lambda m: None if m.params is None else m.params.n,
        _TAGS,
        _OUTPUTS,
    ),
    Histogram(
        "folio_requested_tokens",
        "Most tokens of an output (max_tokens), of requests that have a limit.",
        lambda m: None if m.params is None else m.params.max_tokens,
        _TAGS,
        _LENGTHS,
    ),
    Counter(
        "folio_outputs",
        "Outputs that were passed on to their end, by finish reason.",
        lambda m: {reason: len(lengths) for reason, lengths in m.output_lengths.items()},
        (*_TAGS, "reason"),
    ),
    Histogram(
        "folio_output_length_tokens",
        "Tokens of an output that was passed on to its end.",
        lambda m: [tokens for lengths in m.output_lengths.values() for tokens in lengths if tokens],
        _TAGS,
        _LENGTHS,
    ),
    Histogram(
        "folio_request_seconds",
        "From the request to the end of its answer.",
        lambda m: m.whole_s if m.outcome == "ok" else None,
        _TAGS,
        _WHOLE_S,
    ),
)


class RequestMeter:
    """An ingress's requests by route and outcome, tokens, and times. About 45 µs a request, below 1 µs a piece.

    Args:
        traffic: the dashboard's record of requests.
    """

    def __init__(self, traffic: TrafficLog | None = None) -> None:
        self._traffic = traffic or TrafficLog()
        self._table = MetricTable(REQUESTS)
        self._running = metrics.Gauge("folio_requests_in_flight", "Requests that have not ended.", ("route",))
        self._num_running: dict[str, int] = defaultdict(int)

    @contextmanager
    def measure(self, route: str) -> Iterator[Measured]:
        """The context of a request from its arrival to its end. An exception that leaves it sets the outcome."""
        measured, span = Measured(), trace.get_current_span()
        self._add_running(route, 1)
        try:
            yield measured
        except BaseException as error:
            measured.outcome = outcome_of(error)
            raise
        finally:
            self._add_running(route, -1)
            measured.whole_s = time.perf_counter() - measured.begun_at
            self._table.note(measured, route, measured.served_by)
            if self._traffic.is_on:
                self._traffic.note(measured.ended)
            if span.is_recording():
                describe_request(span, route, measured)

    def repeat(self) -> None:
        """Set the gauges again: Ray drops a gauge 20 s after it was last set."""
        for route, number in self._num_running.items():
            self._running.set(number, {"route": route})

    def _add_running(self, route: str, number: int) -> None:
        self._num_running[route] += number
        self._traffic.num_in_flight += number
        self._running.set(self._num_running[route], {"route": route})


def describe_request(span: trace.Span, route: str, measured: Measured) -> None:
    """Add a request's measurements to its span, under OpenTelemetry's names for generative AI where it has one."""
    span.set_attributes({"folio.route": route, "folio.outcome": measured.outcome})
    if measured.model:
        span.set_attributes(
            {
                "gen_ai.request.model": measured.model,
                "gen_ai.usage.input_tokens": measured.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": measured.cached_tokens,
                "gen_ai.usage.output_tokens": measured.output_tokens,
            }
        )
    if measured.first_s is not None:
        span.set_attribute("folio.first_token_s", measured.first_s)
    set_outcome(span, measured.outcome)


class EdgeMeter(EdgeObserver):
    """An ingress's refusals and dropped fields, and the state of its file of API keys."""

    def __init__(self) -> None:
        self._refused = metrics.Counter(
            "folio_refused_requests", "Requests refused by the edge, by the error's code.", ("code",)
        )
        self._ignored = metrics.Counter(
            "folio_ignored_fields",
            "Unknown fields of bodies that were dropped, by name; most names are other.",
            ("field",),
        )
        self._stale = metrics.Gauge(
            "folio_api_keys_stale", "1 while the file of API keys is invalid, and the previous keys are in use."
        )
        self._is_stale = False

    def on_refused(self, code: str) -> None:
        self._refused.inc(tags={"code": code})

    def on_ignored_field(self, name: str) -> None:
        self._ignored.inc(tags={"field": name})

    def on_keys_read(self, problem: str | None) -> None:
        self._is_stale = problem is not None
        self.repeat()

    def repeat(self) -> None:
        self._stale.set(int(self._is_stale))
