"""What an ingress replica counts of requests that it does not let in."""

from __future__ import annotations

from ray.serve import metrics

from app.edge.watcher import Watcher


class EdgeMeter(Watcher):
    """Counts refusals, and shows whether the API keys are those of their file."""

    def __init__(self) -> None:
        self._refused = metrics.Counter("folio_refused_requests", "Requests that were not let in, by why.", ("code",))
        self._stale = metrics.Gauge(
            "folio_api_keys_stale", "1 while the file of API keys cannot be used, and the keys are those from before."
        )
        self._is_stale = False

    def refused(self, code: str) -> None:
        self._refused.inc(tags={"code": code})

    def keys_read(self, problem: str | None) -> None:
        self._is_stale = problem is not None
        self.repeat()

    def repeat(self) -> None:
        """See `RequestMeter.repeat`."""
        self._stale.set(int(self._is_stale))
