"""An ASGI server for one request at a time, message by message, and a guard around a scripted application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from folio.app.config.http import HttpSettings, KeySource
from folio.app.edge.guard import Guard
from folio.app.edge.keys import KeyRing
from folio.app.http.request_context import EdgeObserver

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789ab"
Headers = Iterable[tuple[str, str]]


@dataclass
class Answer:
    """Messages that the application sent."""

    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def status(self) -> int:
        status: int = self.messages[0]["status"]
        return status

    @property
    def headers(self) -> dict[str, str]:
        pairs = [(name.decode(), value.decode()) for name, value in self.messages[0]["headers"]]
        assert len(dict(pairs)) == len(pairs), f"a header occurs twice: {pairs}"
        return dict(pairs)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def error(self) -> Mapping[str, Any]:
        """OpenAI's error, whose shape is checked."""
        error: Mapping[str, Any] = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


def scope_of(method: str, path: str, headers: Headers = (), client: str = "10.0.0.1") -> dict[str, Any]:
    path, _, query = path.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "scheme": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers],
        "client": (client, 1234),
        "server": ("test", 80),
    }


async def call(
    app: Any,
    method: str = "GET",
    path: str = "/v1/models",
    headers: Headers = (),
    body: bytes | Iterable[bytes] = b"",
    client: str = "10.0.0.1",
    receive: Callable[[], Awaitable[dict[str, Any]]] | None = None,
    **scope: Any,
) -> Answer:
    """Call an application. A body in several parts has no Content-Length. `scope`: other values than usual."""
    headers = list(headers)
    if isinstance(body, bytes):
        chunks = [body]
        if body:
            headers.append(("content-length", str(len(body))))
    else:
        chunks = list(body)
        headers.append(("transfer-encoding", "chunked"))
    left = list(chunks)

    async def receive_chunks() -> dict[str, Any]:
        if not left:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    answer = Answer()

    async def send(message: dict[str, Any]) -> None:
        answer.messages.append(dict(message))

    async with asyncio.timeout(30):
        await app(scope_of(method, path, headers, client) | scope, receive or receive_chunks, send)
    return answer


class Codes(EdgeObserver):
    """Codes of refused requests."""

    def __init__(self) -> None:
        self.codes: list[str] = []

    def on_refused(self, code: str) -> None:
        self.codes.append(code)


def bearer(key: str) -> list[tuple[str, str]]:
    return [("Authorization", f"Bearer {key}")]


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the body, which arrives in one message."""
    message = await receive()
    assert not message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"]})


async def gone() -> dict[str, Any]:
    """Receives from a client that has disconnected."""
    return {"type": "http.disconnect"}


def guarded(app: Any = echo, keys: Path | None = None, **settings: Any) -> Guard:
    values = HttpSettings.model_validate(settings)
    return Guard(app, values, keys and KeyRing(KeySource(file=keys), values.key_limits))


def answer_of(app: Any, *args: Any, **kwargs: Any) -> Answer:
    return asyncio.run(call(app, *args, **kwargs))
