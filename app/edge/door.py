"""Load shedding before a body is read: an answer from the head alone, while the door of the ingress is shut."""

from __future__ import annotations

import json
import math
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.edge.refusal import Refusal
from app.edge.watcher import Watcher
from app.errors import OverloadedError

# Requests that become work for the engines.
_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})


class Gate(Protocol):
    """What decides."""

    def knock(self) -> AbstractContextManager[float | None]:
        """Of a request of which the head is there: `None`, and it may come in while this is open; or when there may be
        room for it, in seconds."""
        ...


class Door:
    """ASGI middleware, outside of everything that costs more than a refusal does.

    What comes of a refused body is read and thrown away by the HTTP server (uvicorn), so that the client, which may be
    sending still, gets its answer, and the connection is good for its next request. A browser's page could not read
    answers without the headers for its origin: its requests go on, and are refused inside.
    """

    def __init__(self, app: ASGIApp, gate: Gate, watcher: Watcher) -> None:
        self._app = app
        self._gate = gate
        self._watcher = watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not _is_doored(scope):
            await self._app(scope, receive, send)
            return
        with self._gate.knock() as retry_after_s:
            if retry_after_s is None:
                await self._app(scope, receive, send)
                return
        start, body = _answer(max(1, math.ceil(retry_after_s)))
        self._watcher.refused("overloaded")
        await send(dict(start))  # servers may write into it
        await send(dict(body))


def overloaded(retry_after_s: float) -> OverloadedError:
    """What a refusal by the door says."""
    return OverloadedError(
        f"all engine replicas have as many requests waiting as may; try again in {max(1, math.ceil(retry_after_s))} s",
        retry_after_s,
    )


def _is_doored(scope: Scope) -> bool:
    path: str = scope["path"]
    if path.removeprefix(scope.get("root_path", "")) not in _PATHS:
        return False
    return all(name != b"origin" for name, _ in scope["headers"])


@lru_cache(maxsize=256)
def _answer(retry_after_s: int) -> tuple[Message, Message]:
    refusal = Refusal.of(overloaded(retry_after_s))
    content = json.dumps(refusal.answer.model_dump(mode="json")).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(content)),
        (b"x-content-type-options", b"nosniff"),
        *refusal.headers,
    ]
    return (
        {"type": "http.response.start", "status": refusal.status, "headers": headers},
        {"type": "http.response.body", "body": content},
    )
