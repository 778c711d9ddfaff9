"""What an ingress replica counts of its requests, over HTTP and by handle.

What an ingress replica counts of requests that it does not let in.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

from ray.serve import metrics

from app.exchange import EdgeObserver
from app.fleet.messages import GenerateRequest, Piece
from app.http_errors import error_response

_FIRST_S: list[float] = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60]
_TOKEN_S: list[float] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1]
_WHOLE_S: list[float] = [0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600]
# What clients are told by status; of the others 4xx is "invalid", 5xx "failed".
_OUTCOMES = {408: "timeout", 429: "refused", 503: "unavailable"}


class RequestMeter:
    """Counts requests by route and outcome, tokens, and times. About 40 µs a request, and less than 1 µs a piece."""

    def __init__(self) -> None:
        self._requests = metrics.Counter(
            "folio_requests",
            "Requests that have ended, by what became of them.",
            ("route", "outcome"),  # type: ignore[arg-type]  # Ray's annotation says one name, and means several
        )
        self._running = metrics.Gauge("folio_requests_in_flight", "Requests that have not ended.", ("route",))
        self._prompt = metrics.Counter("folio_prompt_tokens", "Tokens of prompts, cached ones included.", ("route",))
        self._cached = metrics.Counter(
            "folio_prompt_cached_tokens", "Tokens of prompts that the prefix cache had.", ("route",)
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
            "Streams: mean time per token of each output behind its first piece (TPOT).",
            boundaries=_TOKEN_S,
            tag_keys=("route",),
        )
        self._whole_s = metrics.Histogram(
            "folio_request_s", "From the request to the end of its answer.", boundaries=_WHOLE_S, tag_keys=("route",)
        )
        self._num_running: Counter[str] = Counter()

    def measure(self, route: str) -> Measured:
        """For the `with` around a request from its arrival to its end. What leaves it is the outcome."""
        return Measured(self, route)

    def begun(self, route: str) -> None:
        self._num_running[route] += 1
        self._running.set(self._num_running[route], {"route": route})

    def repeat(self) -> None:
        """Tell how many are in flight once more: Ray forgets a gauge 20 s after it was last set."""
        for route, number in self._num_running.items():
            self._running.set(number, {"route": route})

    def ended(self, route: str, outcome: str, measured: Measured) -> None:
        tags = {"route": route}
        self._num_running[route] -= 1
        self._running.set(self._num_running[route], tags)
        self._requests.inc(1, {"route": route, "outcome": outcome})
        counts = (self._prompt, measured.prompt_tokens), (self._cached, measured.cached_tokens)
        for counter, number in (*counts, (self._output, measured.output_tokens)):
            if number:  # a counter may not be increased by 0
                counter.inc(number, tags)
        if measured.first_s is not None:
            self._first_s.observe(measured.first_s, tags)
        for seconds in measured.token_s:
            self._token_s.observe(seconds, tags)
        if outcome == "ok":
            self._whole_s.observe(measured.whole_s, tags)


@dataclass(slots=True)
class _Output:
    """Of one output: when its first piece came, and with how many tokens; the same of all so far."""

    first_at: float
    first_tokens: int
    last_at: float
    tokens: int


class Measured:
    """One request. Times are seconds from its beginning.

    Attributes:
        first_s: when the first piece came, if it is streamed.
        whole_s: when it ended.
    """

    def __init__(self, meter: RequestMeter, route: str) -> None:
        self._meter, self._route = meter, route
        self._begun_at = 0.0
        self._outputs: dict[tuple[int, int], _Output] = {}
        self._cached: dict[int, int] = {}  # by prompt
        self.prompt_tokens = 0
        self.output_tokens = 0
        self._error: BaseException | None = None
        self.first_s: float | None = None
        self.whole_s = 0.0

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached.values())

    @property
    def token_s(self) -> list[float]:
        """Mean time per token of each output that went on after its first piece."""
        return [
            (output.last_at - output.first_at) / (output.tokens - output.first_tokens)
            for output in self._outputs.values()
            if output.tokens > output.first_tokens
        ]

    def sends(self, calls: Iterable[GenerateRequest]) -> None:
        """Its prompts go to engine replicas."""
        self.prompt_tokens += sum(len(call.prompt_token_ids) for call in calls)

    def streams(self, piece: Piece, prompt: int = 0) -> None:
        """A piece has come."""
        now, num_tokens = time.perf_counter(), len(piece.token_ids)
        if self.first_s is None:
            self.first_s = now - self._begun_at
        output = self._outputs.get((prompt, piece.index))
        if output is None:
            self._outputs[prompt, piece.index] = _Output(now, num_tokens, now, num_tokens)
        else:
            output.last_at, output.tokens = now, output.tokens + num_tokens
        self._count(piece, prompt)

    def receives(self, outputs: Sequence[Sequence[Piece]]) -> None:
        """All outputs of each prompt have come at once."""
        for prompt, pieces in enumerate(outputs):
            for piece in pieces:
                self._count(piece, prompt)

    def fails(self, error: Exception) -> None:
        """It ends with this, although its answer says so in its own way."""
        self._error = error

    def _count(self, piece: Piece, prompt: int) -> None:
        self.output_tokens += len(piece.token_ids)
        if self.prompt_tokens and piece.num_cached_tokens > self._cached.get(prompt, 0):  # a fork has no prompt
            self._cached[prompt] = piece.num_cached_tokens

    def __enter__(self) -> Measured:
        self._begun_at = time.perf_counter()
        self._meter.begun(self._route)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.whole_s = time.perf_counter() - self._begun_at
        self._meter.ended(self._route, outcome_of(error or self._error), self)


def outcome_of(error: BaseException | None) -> str:
    """What became of a request that ends with this."""
    if error is None:
        return "ok"
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "cancelled"
    status, _ = error_response(error)
    return _OUTCOMES.get(status, "invalid" if status < 500 else "failed")


class EdgeMeter(EdgeObserver):
    """Counts refusals, and shows whether the API keys are those of their file."""

    def __init__(self) -> None:
        self._refused = metrics.Counter("folio_refused_requests", "Requests that were not let in, by why.", ("code",))
        self._stale = metrics.Gauge(
            "folio_api_keys_stale", "1 while the file of API keys cannot be used, and the keys are those from before."
        )
        self._is_stale = False

    def on_refused(self, code: str) -> None:
        self._refused.inc(tags={"code": code})

    def on_keys_read(self, problem: str | None) -> None:
        self._is_stale = problem is not None
        self.repeat()

    def repeat(self) -> None:
        """See `RequestMeter.repeat`."""
        self._stale.set(int(self._is_stale))
