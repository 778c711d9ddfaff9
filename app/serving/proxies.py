"""What Serve's HTTP proxies do for us: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names `middlewares`."""

from __future__ import annotations

from starlette.middleware import Middleware

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
        Middleware(ReadsRefusedBodies),
    ]
