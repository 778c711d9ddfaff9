"""What a replica counts for Prometheus, through `ray.serve.metrics`."""

from __future__ import annotations

from ray.serve import metrics

from app.engine.speculation import SpeculationCounts
from app.engine.start_times import StartTimes

_TOKENS: list[float] = [1, 16, 64, 256, 1024, 4096, 16_384, 65_536]


class RoutingAudit:
    """How well routers know this replica's prefix cache: of each request, the cached tokens that were expected, and
    those that were found."""

    def __init__(self) -> None:
        self._expected = metrics.Counter(
            "folio_expected_cached_tokens", "Prompt tokens that routers expected to be cached."
        )
        self._cached = metrics.Counter("folio_cached_tokens", "Prompt tokens that were, of the same requests.")
        self._missed = metrics.Histogram(
            "folio_expected_cached_tokens_error",
            "Prompt tokens of a request by which both differ.",
            boundaries=_TOKENS,
        )

    def note(self, expected_tokens: int, cached_tokens: int) -> None:
        """A request has begun."""
        if expected_tokens:  # a counter may not be increased by 0
            self._expected.inc(expected_tokens)
        if cached_tokens:
            self._cached.inc(cached_tokens)
        self._missed.observe(abs(expected_tokens - cached_tokens))


class SpeculationMeter:
    """Guessed tokens that this replica has checked, and those that were right: the second by the first is the
    acceptance rate."""

    def __init__(self) -> None:
        self._draft = metrics.Counter("folio_draft_tokens", "Guessed tokens that were checked.", ("proposer",))
        self._accepted = metrics.Counter("folio_accepted_tokens", "Guessed tokens that were right.", ("proposer",))
        self._draft_tokens = self._accepted_tokens = 0

    def note(self, counts: SpeculationCounts | None) -> None:
        """The engine has come to these counts; `None`: it does not guess. One thread at a time."""
        if counts is None:
            return
        # The engine's thread goes on counting: accepted first, so that there are never more of them than guesses.
        accepted_tokens, draft_tokens = counts.accepted_tokens, counts.draft_tokens
        tags = {"proposer": counts.proposer}
        if draft_tokens > self._draft_tokens:
            self._draft.inc(draft_tokens - self._draft_tokens, tags)
        if accepted_tokens > self._accepted_tokens:
            self._accepted.inc(accepted_tokens - self._accepted_tokens, tags)
        self._draft_tokens, self._accepted_tokens = draft_tokens, accepted_tokens


class ReadyGauge:
    """How long this replica took to be ready, in all and phase by phase (`StartTimes`)."""

    def __init__(self) -> None:
        self._seconds = metrics.Gauge(
            "folio_ready_s", "Seconds of a phase of the start; of the engine's whole start: all.", ("phase",)
        )

    def note(self, times: StartTimes) -> None:
        for phase, seconds in times.phases().items():
            self._seconds.set(seconds, {"phase": phase})
        self._seconds.set(times.ready_s, {"phase": "all"})
