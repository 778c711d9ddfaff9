"""What Serve's HTTP proxies do for us: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names `middlewares`."""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from app.edge.unread import ReadsRefusedBodies
from app.serving.closed_door import RepeatsRefusals
from app.serving.enclosed import EnclosesBody
from app.serving.lost_answers import AnswersForLost
from app.serving.not_ready import AnswersNotReady
from app.serving.serve_paths import GuardsRoutes


def middlewares() -> list[Middleware]:
    """The last one is the first to see a request."""
    return [
        Middleware(AnswersForLost),
        Middleware(RepeatsRefusals),
        Middleware(EnclosesBody),
        Middleware(AnswersNotReady),
        Middleware(GuardsRoutes),
        Middleware(DecodableHeaders),
        Middleware(ReadsRefusedBodies),
    ]


class DecodableHeaders:
    """ASGI middleware: a header that is not UTF-8 is taken for Latin-1, and written as UTF-8. Serve's proxy decodes
    request and session ids, and would answer 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not all(value.isascii() for _, value in scope["headers"]):
            scope = {**scope, "headers": [(name, _as_utf8(value)) for name, value in scope["headers"]]}
        await self._app(scope, receive, send)


def _as_utf8(value: bytes) -> bytes:
    try:
        value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1").encode()
    return value
