"""What goes through Serve's proxies."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from app.serving.proxies import DecodableHeaders


@pytest.mark.parametrize(("sent", "passed"), [(b"\xff", "ÿ".encode()), ("é".encode(), "é".encode()), (b"a", b"a")])
def test_headers_can_be_decoded(sent: bytes, passed: bytes) -> None:
    """`X-Session-Id: \\xff` was answered 500, with a traceback of Serve's in the proxy's log."""
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(scope["headers"])

    async def nothing(*_: object) -> Any:
        raise AssertionError

    headers = [(b"x-session-id", sent), (b"accept", b"*/*")]
    asyncio.run(DecodableHeaders(app)({"type": "http", "headers": headers}, nothing, nothing))
    assert seen == [(b"x-session-id", passed), (b"accept", b"*/*")]
