"""Transport over a server's HTTP API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from types import NoneType
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
from pydantic import BaseModel, TypeAdapter
from pydantic_core import from_json

from folio.app.api.operators.replies import BudgetReport
from folio.app.client.transport import PerLoop, connection_lost, unreachable
from folio.app.http.errors import error_of, error_of_status
from folio.app.http.event_stream import DONE, event_data
from folio.app.http.operations import OPERATIONS

_CONNECT_TIMEOUT_S = 10.0


# Calls beside the operations: method and path, which may end with a name.
_CALLS = {
    "models": ("GET", "/v1/models"),
    "add_model": ("POST", "/v1/models"),
    "remove_model": ("DELETE", "/v1/models/"),
    "load_adapter": ("POST", "/v1/load_lora_adapter"),
    "unload_adapter": ("POST", "/v1/unload_lora_adapter"),
    "pin": ("POST", "/v1/pins"),
    "unpin": ("DELETE", "/v1/pins/"),
    "pins": ("GET", "/v1/pins"),
    "load": ("GET", "/v1/load"),
    "reports": ("GET", "/v1/load/memory"),
    "set_budget": ("PUT", "/v1/budget"),
    "ready": ("GET", "/ready"),
}
_WITHOUT_END_MARK = ("responses_stream", "messages_stream")
_ROUTES = {operation.name: ("POST", operation.path) for operation in OPERATIONS} | _CALLS


class OverHttp:
    """Calls over HTTP. Args: the URL without `/v1`, and headers of every request."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = url.rstrip("/")
        self._headers = headers
        self._sessions = PerLoop(self._session, aiohttp.ClientSession.close)

    async def call(self, method: str, answer: Any, *args: Any) -> Any:
        async with self._answer(method, args, streams=False) as response:
            content = await response.read()
        if method == "set_budget":
            return BudgetReport.model_validate_json(content).answers
        return None if answer is NoneType else _reader(answer).validate_json(content)

    async def stream(self, method: str, item: Any, *args: Any) -> AsyncGenerator[Any, None]:
        async with self._answer(method, args, streams=True) as response:
            is_complete, reader = False, _reader(item)
            async for data in event_data(response.content.iter_any()):
                if data == DONE:
                    is_complete = True
                elif (error := error_of(from_json(data))) is not None:
                    raise error
                else:
                    yield reader.validate_json(data)
            if not is_complete and method not in _WITHOUT_END_MARK:
                raise connection_lost(self._url)

    async def close(self) -> None:
        await self._sessions.close()

    @asynccontextmanager
    async def _answer(
        self, method: str, args: tuple[Any, ...], *, streams: bool
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The head of an answer with status 200. Leaving the context early cancels the request."""
        verb, path = _ROUTES[method.removesuffix("_stream")]
        body, headers = None, dict(self._headers)
        first, session = (*args, None, None)[:2]
        if method == "set_budget":
            body, session = {"budget_bytes": first, "revision": session}, None
        elif isinstance(first, BaseModel):
            body = first.model_dump(mode="json", exclude_unset=True, by_alias=True)
            if "stream" in type(first).model_fields:
                body["stream"] = streams
        elif first is not None:
            path += quote(first, safe="")
            if method == "unpin" and session is not None:
                path, session = f"{path}?{urlencode({'model': session})}", None
        if session is not None:
            headers["X-Session-Id"] = session
        try:
            async with self._sessions.get().request(verb, self._url + path, json=body, headers=headers) as response:
                if response.status >= 400:
                    raise error_of_status(response.status, response.headers.get("Retry-After"), await response.read())
                yield response
        except aiohttp.ClientConnectorError as error:
            raise unreachable(self._url, error.os_error) from error
        except aiohttp.ClientError as error:
            raise connection_lost(self._url) from error

    def _session(self) -> aiohttp.ClientSession:
        # The request itself bounds the time of its answer.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
        return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


@cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
