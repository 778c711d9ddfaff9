"""Callers of requests that arrive later than their HTTP request: the lines of batches."""

from __future__ import annotations

from folio.app.config.http import HttpSettings
from folio.app.edge.keys import KeyRing
from folio.app.errors import ForbiddenError, RateLimitError
from folio.app.http.request_context import RequestContext, current_context


class Callers:
    """Callers by the names of their API keys.

    Args:
        keys: valid API keys; `None`: no key is needed.
    """

    def __init__(self, settings: HttpSettings, keys: KeyRing | None) -> None:
        # A line waits as long as its batch: the server's timeouts are for clients that wait.
        self._settings = settings.model_copy(update={"default_timeout_s": None, "max_timeout_s": None})
        self._keys = keys

    def current_name(self) -> str:
        """The name of the caller of the HTTP request being answered; empty without keys."""
        context = current_context()
        return "" if context is None or context.key is None else context.key.name

    async def begin(self, name: str, request_id: str, num_body_bytes: int) -> RequestContext:
        """Begin a request of a caller, charged to it. The caller must `end` the context.

        Raises:
            ForbiddenError: the key does not exist any more.
            RateLimitError: the request has to wait, so that half of the caller's limits are left for other requests.
        """
        context = RequestContext(self._settings, request_id, num_body_bytes=num_body_bytes)
        if self._keys is None:
            return context
        await self._keys.refresh()
        key = self._keys.named(name)
        if key is None:
            raise ForbiddenError("the API key that made the batch does not exist any more; make the batch again")
        context.key = key.entry
        if (wait_s := key.quota.spare_wait_s()) > 0:
            raise RateLimitError(f"batches leave half of the limits of the key {name!r} to other requests", wait_s)
        context.begin(key.quota)
        return context
