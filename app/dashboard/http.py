"""Routes of the dashboard: the page, its files, and the state once or as server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Query, Request
from pydantic import Field
from starlette.requests import ClientDisconnect
from starlette.responses import RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from folio.app.dashboard.collector import Collector, Wish
from folio.app.dashboard.state import DashboardState
from folio.app.http.static_files import add_files

logger = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
# A viewer that takes no event for this long loses its connection.
STALLED_S = 30.0
# Nothing of the page comes from, or goes to, another server.
_CSP = "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_HEADERS = {"content-security-policy": _CSP, "referrer-policy": "no-referrer"}

# Bounded because every replica gets all names in every poll.
Names = Annotated[list[Annotated[str, Field(max_length=64)]], Query(default_factory=list, max_length=8)]


def add_dashboard(api: FastAPI, collector: Collector) -> None:
    """Add the dashboard's routes."""
    files = {f"/dashboard/static/{path.name}": path for path in STATIC.iterdir()}
    add_files(api, {"/dashboard": STATIC / "index.html", **files}, _HEADERS)

    @api.head("/", include_in_schema=False)
    @api.get("/", include_in_schema=False)
    async def root(request: Request) -> Response:
        return RedirectResponse(request.scope.get("root_path", "") + "/dashboard", 307)

    @api.get("/dashboard/state", response_model=DashboardState, tags=["operation"])
    async def state(replica: Names, request: Names) -> Response:
        """The dashboard's state once: load, memory, blocks and steps of every replica; traffic and routing decisions of
        this ingress."""
        wish = Wish.of(replica, request)
        return Response(
            await collector.state(wish), headers={"cache-control": "no-store"}, media_type="application/json"
        )

    @api.get("/dashboard/events", response_class=Response, tags=["operation"])
    async def events(replica: Names, request: Names, fast: bool = False) -> Response:
        """The state of `/dashboard/state` each second as server-sent events; with `fast` ten times as often."""
        return EventStream(collector.events(Wish.of(replica, request, is_fast=fast)))


class EventStream(Response):
    """Server-sent events for a reader that may stall: at most one event waits for it, and only for `stalled_s`."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], stalled_s: float = STALLED_S) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._stalled_s = events, stalled_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            first = await anext(self._events)  # before the status, since it may raise a refusal
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            sending = asyncio.create_task(self._send_all(first, send))
            leaving = asyncio.create_task(_disconnected(receive))
            try:
                await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            finally:
                leaving.cancel()
                sending.cancel()
                await asyncio.wait((sending, leaving))
            if not sending.cancelled() and (error := sending.exception()) is not None:
                raise error

    async def _send_all(self, event: str | None, send: Send) -> None:
        while event is not None:
            try:
                async with asyncio.timeout(self._stalled_s):
                    await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
            except TimeoutError:
                logger.info("a viewer of the dashboard has taken nothing for %g s; its stream ends", self._stalled_s)
                raise ClientDisconnect from None
            event = await anext(self._events, None)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
