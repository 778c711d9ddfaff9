"""Traffic of an ingress in the last minute, recorded while the dashboard is watched."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from folio.app.dashboard.state import Percentiles, Traffic

_WINDOW_S = 60.0
# Rates are means over this time: a wave of load must show.
_RATE_S = 10.0
_MOST_REQUESTS, MOST_OUTPUTS = 4096, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """A request that ends now. `token_s`: time per further token of each output, of at most `MOST_OUTPUTS`;
    `whole_s`: from the request to its end."""

    at: float = field(default_factory=time.monotonic)
    is_ok: bool
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    first_s: float | None
    token_s: Sequence[float]
    whole_s: float


class TrafficLog:
    """The latest requests that have ended. One thread at a time.

    Attributes:
        num_in_flight: requests that have not ended; always counted.
    """

    def __init__(self) -> None:
        self.num_in_flight = 0
        self._requests: deque[EndedRequest] = deque(maxlen=_MOST_REQUESTS)
        self._since: float | None = None

    @property
    def is_on(self) -> bool:
        """Whether requests are to be noted."""
        return self._since is not None

    def start(self) -> None:
        """Start recording. Idempotent."""
        if self._since is None:
            self._since = time.monotonic()

    def stop(self) -> None:
        self._since = None
        self._requests.clear()

    def note(self, request: EndedRequest) -> None:
        self._requests.append(request)

    def summary(self) -> Traffic:
        """The figures at this moment."""
        now = time.monotonic()
        if self._since is None:
            return Traffic(num_in_flight=self.num_in_flight)
        while self._requests and self._requests[0].at < now - _WINDOW_S:
            self._requests.popleft()
        watched_s = min(now - self._since, _WINDOW_S)
        rate_s = max(min(watched_s, _RATE_S), 1.0)
        latest = [request for request in self._requests if request.at >= now - rate_s]
        return Traffic(
            watched_s=round(watched_s, 1),
            num_in_flight=self.num_in_flight,
            requests_per_s=len(latest) / rate_s,
            failed_per_s=sum(not request.is_ok for request in latest) / rate_s,
            output_tokens_per_s=sum(request.output_tokens for request in latest) / rate_s,
            prompt_tokens=sum(request.prompt_tokens for request in self._requests),
            cached_tokens=sum(request.cached_tokens for request in self._requests),
            ttft_s=_percentiles([r.first_s for r in self._requests if r.first_s is not None]),
            tpot_s=_percentiles([seconds for r in self._requests for seconds in r.token_s]),
            whole_s=_percentiles([r.whole_s for r in self._requests if r.is_ok]),
        )


def _percentiles(values: Sequence[float]) -> Percentiles:
    if not values:
        return Percentiles()
    p50, p90, p99 = (round(float(value), 6) for value in np.percentile(values, (50, 90, 99)))
    return Percentiles(num=len(values), p50=p50, p90=p90, p99=p99)
