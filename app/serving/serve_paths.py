"""Paths that Serve's proxies answer by themselves."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

# What it says of the applications is for those who may call them. `/-/healthz` says nothing: it stays open, as
# `/health` is, for load balancers, which have no key.
ROUTES = "/-/routes"
_REFUSED = {401, 403, 429, 503}
# Without its body, if it has one.
_PASSED = {b"authorization", b"x-api-key", b"x-request-id"}


class GuardsRoutes:
    """ASGI middleware for Serve's proxies: `/-/routes` is answered to those only whom the application at `/` lets in
    there. Keys are known to ingresses alone, so one is asked first, for a path that it does not have."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].removeprefix(scope.get("root_path", "")) != ROUTES:
            await self._app(scope, receive, send)
            return
        path = scope["path"] + "/"
        headers = [(name, value) for name, value in scope["headers"] if name in _PASSED]
        asked = {**scope, "method": "GET", "path": path, "raw_path": path.encode(), "headers": headers}
        answer: list[Message] = []

        async def nothing() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        async def keep(message: Message) -> None:
            answer.append(message)

        await self._app(asked, nothing, keep)
        if answer and answer[0]["type"] == "http.response.start" and answer[0]["status"] in _REFUSED:
            for message in answer:
                await send(message)
            return
        await self._app(scope, receive, send)
