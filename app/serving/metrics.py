"""What a replica counts for Prometheus, through `ray.serve.metrics`."""

from __future__ import annotations

from ray.serve import metrics

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
