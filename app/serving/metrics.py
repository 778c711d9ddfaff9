"""Prometheus metrics of ingresses and engine replicas, and the page `/metrics`. Names: docs/reference/metrics.md.

`ray.serve.metrics` sends a process's metrics to the agent of its node every 10 s (`metrics_report_interval_ms` of Ray),
and each agent serves those of all its processes. Every ingress merges the agents' pages: all ingresses have the same
page, equal to what Prometheus collects from the agents.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import aiohttp
import ray
from opentelemetry import trace
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from ray.serve import metrics

from app.dashboard.traffic import TrafficLog
from app.engine.report import ReplicaReport, StartTimes
from app.errors import UnavailableError
from app.fleet.messages import GenerateRequest, Piece
from app.http_errors import outcome_of
from app.request_context import EdgeObserver
from app.tracing import set_outcome
from vmem import MemoryReport

if TYPE_CHECKING:
    from app.engine.load_report import Activity
    from app.engine.speculation import SpeculationCounts

_FIRST_S: list[float] = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60]
_TOKEN_S: list[float] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1]
_WHOLE_S: list[float] = [0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600]
_TOKENS: list[float] = [1, 16, 64, 256, 1024, 4096, 16_384, 65_536]
_STEP_S: list[float] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5]
_QUEUE_S: list[float] = [0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60]


class RequestMeter:
    """An ingress's requests by route and outcome, tokens, and times. About 40 µs a request, below 1 µs a piece.

    Args:
        traffic: the dashboard's record of requests.
    """

    def __init__(self, traffic: TrafficLog | None = None) -> None:
        self._traffic = traffic or TrafficLog()
        self._requests = metrics.Counter(
            "folio_requests",
            "Requests that have ended, by outcome.",
            ("route", "outcome"),  # type: ignore[arg-type]  # Ray's annotation allows one name only
        )
        self._running = metrics.Gauge("folio_requests_in_flight", "Requests that have not ended.", ("route",))
        self._prompt = metrics.Counter("folio_prompt_tokens", "Tokens of prompts, cached ones included.", ("route",))
        self._cached = metrics.Counter(
            "folio_prompt_cached_tokens", "Tokens of prompts found in the prefix cache.", ("route",)
        )
        self._output = metrics.Counter("folio_output_tokens", "Tokens generated and passed on.", ("route",))
        self._first_s = metrics.Histogram(
            "folio_first_token_s",
            "Streams: from the request to the first piece of any output (TTFT).",
            boundaries=_FIRST_S,
            tag_keys=("route",),
        )
        self._token_s = metrics.Histogram(
            "folio_output_token_s",
            "Streams: mean time per token of each output after its first piece (TPOT).",
            boundaries=_TOKEN_S,
            tag_keys=("route",),
        )
        self._whole_s = metrics.Histogram(
            "folio_request_s", "From the request to the end of its answer.", boundaries=_WHOLE_S, tag_keys=("route",)
        )
        self._num_running: Counter[str] = Counter()

    @contextmanager
    def measure(self, route: str) -> Iterator[Measured]:
        """The context of a request from its arrival to its end. The error that leaves it is the outcome."""
        measured, span = Measured(), trace.get_current_span()
        self._add_running(route, 1)
        try:
            yield measured
        except BaseException as error:
            measured.outcome = outcome_of(error)
            raise
        finally:
            self._add_running(route, -1)
            self._record(route, measured)
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

    def _record(self, route: str, measured: Measured) -> None:
        tags = {"route": route}
        self._requests.inc(1, {"route": route, "outcome": measured.outcome})
        counts = (self._prompt, measured.prompt_tokens), (self._cached, measured.cached_tokens)
        for counter, number in (*counts, (self._output, measured.output_tokens)):
            if number:  # Ray refuses an increase by 0
                counter.inc(number, tags)
        if measured.first_s is not None:
            self._first_s.observe(measured.first_s, tags)
        token_s = measured.token_s
        for seconds in token_s:
            self._token_s.observe(seconds, tags)
        if measured.outcome == "ok":
            self._whole_s.observe(time.perf_counter() - measured.begun_at, tags)
        if self._traffic.is_on:
            self._traffic.note(
                is_ok=measured.outcome == "ok",
                prompt_tokens=measured.prompt_tokens,
                cached_tokens=measured.cached_tokens,
                output_tokens=measured.output_tokens,
                first_s=measured.first_s,
                token_s=token_s,
            )


@dataclass(slots=True)
class _Output:
    """Times and tokens of one output: of its first piece, and of all so far."""

    first_at: float
    first_tokens: int
    last_at: float
    tokens: int


class Measured:
    """Measurements of one request. `first_s`: seconds until the first piece of a stream; `model`: once it is known to
    exist."""

    def __init__(self) -> None:
        self.model = ""
        self.begun_at = time.perf_counter()
        self._outputs: dict[tuple[int, int], _Output] = {}
        self._cached: dict[int, int] = {}  # by prompt
        self.prompt_tokens = self.output_tokens = 0
        self.outcome = "ok"
        self.first_s: float | None = None

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

    def sends(self, calls: Iterable[GenerateRequest], model: str) -> None:
        """Note the calls of engine replicas."""
        self.model = model
        self.prompt_tokens += sum(len(call.prompt_token_ids) for call in calls)

    def streams(self, piece: Piece, prompt: int = 0) -> None:
        now, num_tokens = time.perf_counter(), len(piece.token_ids)
        if self.first_s is None:
            self.first_s = now - self.begun_at
        output = self._outputs.get((prompt, piece.index))
        if output is None:
            self._outputs[prompt, piece.index] = _Output(now, num_tokens, now, num_tokens)
        else:
            output.last_at, output.tokens = now, output.tokens + num_tokens
        self._count(piece, prompt)

    def receives(self, outputs: Sequence[Sequence[Piece]]) -> None:
        """Note all outputs of each prompt, without a stream."""
        for prompt, pieces in enumerate(outputs):
            for piece in pieces:
                self._count(piece, prompt)

    def fails(self, error: Exception) -> None:
        """Note an error that the answer reports, so that it is not raised."""
        self.outcome = outcome_of(error)

    def _count(self, piece: Piece, prompt: int) -> None:
        self.output_tokens += len(piece.token_ids)
        if self.prompt_tokens and piece.num_cached_tokens > self._cached.get(prompt, 0):  # a fork has no prompt
            self._cached[prompt] = piece.num_cached_tokens


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


class EngineMeter:
    """An engine's activity, recorded with its load reports and not in its steps."""

    def __init__(self) -> None:
        self._running = metrics.Gauge("folio_running_sequences", "Sequences that have blocks.")
        self._waiting = metrics.Gauge(
            "folio_waiting_sequences", "Sequences without blocks: not begun yet, or preempted."
        )
        self._bytes = metrics.Gauge("folio_kv_bytes", "Memory of the KV cache.", ("kind",))
        self._queried = metrics.Counter(
            "folio_prefix_queried_tokens", "Tokens of sequences that were looked up in the prefix cache."
        )
        self._hit = metrics.Counter("folio_prefix_hit_tokens", "Tokens of sequences found in the prefix cache.")
        self._evicted = metrics.Counter("folio_evicted_blocks", "Evicted cached blocks.")
        self._preemptions = metrics.Counter("folio_preemptions", "Preempted requests, by swap or recompute.", ("way",))
        self._mapping_s = metrics.Counter(
            "folio_mapping_s", "Seconds of mapping work: exposed (steps waited) or hidden (beside steps).", ("time",)
        )
        self._mapper_failures = metrics.Counter(
            "folio_mapper_failures", "Units of mapping work that the device refused, and that are tried again."
        )
        self._failed = metrics.Counter("folio_failed_steps", "Steps that failed, and with them all requests in flight.")
        self._step_s = metrics.Histogram("folio_step_s", "Time of an engine step.", boundaries=_STEP_S)
        self._queue_s = metrics.Histogram(
            "folio_queue_s",
            "From a request's arrival at the engine to the step that computes its first tokens.",
            boundaries=_QUEUE_S,
        )
        self._draft = metrics.Counter("folio_draft_tokens", "Draft tokens that were verified.", ("proposer",))
        self._accepted = metrics.Counter("folio_accepted_tokens", "Draft tokens that were accepted.", ("proposer",))
        self._ready_s = metrics.Gauge(
            "folio_ready_s", "Seconds of a phase of the start; of the engine's whole start: all.", ("phase",)
        )
        self._totals: dict[tuple[str, str], float] = {}

    def note(self, load: ReplicaReport, memory: MemoryReport, activity: Activity) -> None:
        """Record a report. One thread at a time."""
        self._running.set(load.num_running)
        self._waiting.set(load.num_waiting)
        for kind in ("budget", "physical", "anchor", "active", "cached", "pinned", "parked", "mapped", "swapped"):
            self._bytes.set(getattr(memory, f"{kind}_bytes"), {"kind": kind})
        self._count(self._queried, {"": memory.queried_tokens})
        self._count(self._hit, {"": memory.hit_tokens})
        self._count(self._evicted, {"": memory.evicted_blocks})
        self._count(self._preemptions, {str(way): number for way, number in activity.num_preempted.items()}, "way")
        seconds = {"exposed": memory.exposed_us / 1e6, "hidden": memory.hidden_us / 1e6}
        self._count(self._mapping_s, seconds, "time")
        self._count(self._mapper_failures, {"": memory.mapper_failures})
        self._count(self._failed, {"": activity.num_failed_steps})
        for step_s in activity.step_s:
            self._step_s.observe(step_s)
        for queue_s in activity.queue_s:
            self._queue_s.observe(queue_s)

    def note_speculation(self, counts: SpeculationCounts | None) -> None:
        """Record draft and accepted tokens, whose quotient is the acceptance rate. `None`: no speculation."""
        if counts is not None:
            # Accepted first: the engine's thread goes on counting, and accepted tokens must not exceed draft tokens.
            accepted_tokens, draft_tokens = counts.accepted_tokens, counts.draft_tokens
            self._count(self._draft, {counts.proposer: draft_tokens}, "proposer")
            self._count(self._accepted, {counts.proposer: accepted_tokens}, "proposer")

    def note_start(self, times: StartTimes) -> None:
        """Set the seconds until this replica was ready, by phase and in all. Repeat it, as `RequestMeter.repeat`."""
        for phase, seconds in (*times.phases().items(), ("all", times.ready_s)):
            self._ready_s.set(seconds, {"phase": phase})

    def _count(self, counter: metrics.Counter, sums: Mapping[Any, float], tag: str | None = None) -> None:
        """Increase a counter to these totals since the start. Ray refuses an increase by 0."""
        for value, total in sums.items():
            key = (counter.info["name"], value)
            if (gained := total - self._totals.get(key, 0)) > 0:
                counter.inc(gained, {tag: value} if tag is not None else {})
                self._totals[key] = total


class RoutingAudit:
    """Expected and found cached tokens of each request: how well routers know this replica's prefix cache."""

    def __init__(self) -> None:
        self._expected = metrics.Counter(
            "folio_expected_cached_tokens", "Prompt tokens that routers expected to be cached."
        )
        self._cached = metrics.Counter("folio_cached_tokens", "Prompt tokens that were cached, of the same requests.")
        self._missed = metrics.Histogram(
            "folio_expected_cached_tokens_error",
            "Absolute difference of expected and found cached tokens of a request.",
            boundaries=_TOKENS,
        )

    def note(self, expected_tokens: int, cached_tokens: int) -> None:
        if expected_tokens:  # a counter may not be increased by 0
            self._expected.inc(expected_tokens)
        if cached_tokens:
            self._cached.inc(cached_tokens)
        self._missed.observe(abs(expected_tokens - cached_tokens))


# Metrics of Folio, and of Serve.
_PREFIXES = ("ray_folio_", "ray_serve_")
# Labels that are equal for all processes of a session.
_NOISE = {"Component", "SessionName", "Version", "otel_scope_name", "otel_scope_schema_url", "otel_scope_version"}
# An agent that counts for hundreds of processes takes a second or so.
_TIMEOUT_S = 10.0
# Age up to which the last page is served: agents have new figures every few seconds, and their pages take time.
_FRESH_S = 1.0


class MetricsPage:
    """
    Args:
        application: name of the application whose metrics are shown.
        agents: returns the addresses of the nodes' agents; may block.
    """

    def __init__(self, application: str, agents: Callable[[], Sequence[str]] | None = None) -> None:
        self._application = application
        self._agents = agents or agents_of_this_cluster
        self._lock = asyncio.Lock()
        self._page = ""
        self._made_at = -_FRESH_S

    async def text(self) -> str:
        """The page in Prometheus' text format, at most `_FRESH_S` old.

        Raises:
            UnavailableError: a node's agent does not answer, or no agent has metrics of this application yet.
        """
        async with self._lock:
            if time.monotonic() - self._made_at >= _FRESH_S:
                pages = await self._fetch(await asyncio.to_thread(self._agents))
                self._page = await asyncio.to_thread(merge, pages, self._application)
                self._made_at = time.monotonic()
            return self._page

    async def _fetch(self, urls: Sequence[str]) -> list[str]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as session:
            return await asyncio.gather(*(_get(session, url) for url in urls))


async def _get(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(url, raise_for_status=True) as answer:
            return await answer.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UnavailableError(
            f"Ray's metrics agent at {url} does not answer ({type(error).__name__}: {error}), and its metrics would be "
            "missing: try again later"
        ) from error


def agents_of_this_cluster() -> list[str]:
    """Addresses of the metrics agents of all living nodes."""
    return [
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for node in ray.nodes()
        if node["Alive"]
    ]


def merge(pages: Iterable[str], application: str) -> str:
    """The metrics of one application on the agents' pages, each metric once. Raises `UnavailableError` if there are
    none."""
    merged: dict[str, Metric] = {}
    for page in pages:
        for family in text_string_to_metric_families("".join(_relevant(page))):
            of_application = [
                Sample(sample.name, {k: v for k, v in sample.labels.items() if k not in _NOISE}, sample.value)
                for sample in family.samples
                if sample.labels.get("application") == application
            ]
            if of_application:
                metric = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                metric.samples += of_application
    if not merged:
        raise UnavailableError(
            f"there are no metrics of {application!r} yet; the first appear seconds after the start: try again"
        )
    registry: Any = SimpleNamespace(collect=lambda: [merged[name] for name in sorted(merged)])
    return generate_latest(registry).decode()


def _relevant(page: str) -> Iterator[str]:
    """The lines of relevant metrics: an agent has thousands of others, and parsing takes time."""
    for line in page.splitlines(keepends=True):
        name = line.split(" ", 3)[2] if line.startswith("# ") else line
        if name.startswith(_PREFIXES):
            yield line
