"""While an ingress lets nobody in, Serve's proxy says so for it.

A refusal by the ingress costs most of what any request costs in Serve's processes, and under overload there are more
refusals than requests. So the ingress adds to its refusals how long its door stays closed; a middleware in the proxy
gives the same answer to whoever else posts to the same path meanwhile, and tells the ingress later how often it has.
Where there are several ingresses, another one might have let them in; all find out how far to open their doors
(`fleet/overload.py`).
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.edge.watcher import Watcher
from app.openai.errors import CLOSED_HEADER
from app.serving.enclosed import is_enclosed

_KEY = "folio.refused"
_NAME = CLOSED_HEADER.lower().encode()
# The ingress is asked again after so long in any case.
_MOST_S = 0.25
_REPEATED = {b"content-type", b"content-length", b"retry-after", b"x-content-type-options"}
_SECONDS = re.compile(rb"[0-9]{1,6}\.[0-9]{3}")
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")

Headers = list[tuple[bytes, bytes]]


@dataclass(slots=True)
class _Refusal:
    """`until`: by `time.monotonic`. `num_repeated`: of which the ingress has not been told."""

    until: float
    status: int
    headers: Headers
    body: bytes = b""
    num_repeated: int = 0


class RepeatsRefusals:
    """ASGI middleware for Serve's proxies. A path that is not Folio's never has such a refusal."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._refusals: dict[str, _Refusal] = {}  # by path, of which Folio has few with a door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Of others there may be more to come, which would be taken for the connection's next request.
        if not is_enclosed(scope) or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        refusal = self._refusals.get(scope["path"])
        if refusal is not None and time.monotonic() < refusal.until:
            request_id, from_page = _wanted(scope["headers"])
            if not from_page:
                refusal.num_repeated += 1
                await _refuse(send, refusal, request_id)
                return
        num_repeated = 0
        if refusal is not None and refusal.num_repeated:
            num_repeated, refusal.num_repeated = refusal.num_repeated, 0
            scope[_KEY] = num_repeated
        noted: _Refusal | None = None
        has_begun = False

        async def send_and_note(message: Message) -> None:
            nonlocal noted, has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                noted = _noted(message)
                if noted is not None:
                    kept = [pair for pair in message["headers"] if pair[0].lower() != _NAME]
                    message = {**message, "headers": kept}
            elif noted is not None:
                if not message.get("more_body", False):
                    noted.body = message.get("body", b"")
                    if before := self._refusals.get(scope["path"]):
                        noted.num_repeated = before.num_repeated
                    self._refusals[scope["path"]] = noted
                noted = None
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            if num_repeated and not has_begun:  # perhaps no ingress has heard of it
                self._refusals[scope["path"]].num_repeated += num_repeated


class HearsOfRefusals:
    """ASGI middleware for the application in an ingress: `watcher` hears what proxies have refused for it."""

    def __init__(self, app: ASGIApp, watcher: Watcher) -> None:
        self._app = app
        self._watcher = watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        number: int = scope.pop(_KEY, 0)
        if number:
            self._watcher.refused("closed_door", number)
        await self._app(scope, receive, send)


def _noted(start: Message) -> _Refusal | None:
    """If it is one that may be repeated."""
    said = next((value for name, value in start["headers"] if name.lower() == _NAME), b"")
    if start["status"] != 429 or not _SECONDS.fullmatch(said):
        return None
    closed_s = float(said)
    headers = [(name, value) for name, value in start["headers"] if name.lower() in _REPEATED]
    return _Refusal(time.monotonic() + min(closed_s, _MOST_S), start["status"], headers)


def _wanted(headers: Iterable[tuple[bytes, bytes]]) -> tuple[bytes, bool]:
    """(request id, whether a browser's page asks: it could not read an answer without the headers for its origin)."""
    request_id, from_page = b"", False
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            request_id = value
        elif name == b"origin":
            from_page = True
    return request_id or uuid.uuid4().hex.encode(), from_page


async def _refuse(send: Send, refusal: _Refusal, request_id: bytes) -> None:
    headers = [*refusal.headers, (b"x-request-id", request_id)]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": refusal.body})
