"""Transport over a server's HTTP API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
from pydantic import BaseModel, TypeAdapter
from pydantic_core import from_json

from folio.app.client.transport import PerLoop, connection_lost, no_such_call, unreachable
from folio.app.event_stream import DONE, event_data
from folio.app.http_errors import error_of, error_of_status
from folio.app.openai.messages.replies import MessageEvent, MessageObject, TokenCount
from folio.app.openai.operation.replies import (
    BudgetReport,
    LoadReport,
    ModelCard,
    ModelDeleted,
    ModelList,
    PinCard,
    PinDeleted,
    PinList,
)
from folio.app.openai.pooled.replies import EmbeddingList, Ranking, ScoreList
from folio.app.openai.replies import ChatCompletion, ChatCompletionChunk, Completion
from folio.app.openai.responses.replies import ResponseObject, StreamEvent
from folio.vmem import MemoryReport

_CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class _Route:
    """`answer`: of the answer's JSON; `None`: the answer is text that says only that it succeeded."""

    method: str
    path: str
    answer: TypeAdapter[Any] | None


_ROUTES = {
    "generate": _Route("POST", "/v1/completions", TypeAdapter(Completion)),
    "generate_stream": _Route("POST", "/v1/completions", TypeAdapter(Completion)),
    "chat": _Route("POST", "/v1/chat/completions", TypeAdapter(ChatCompletion)),
    "chat_stream": _Route("POST", "/v1/chat/completions", TypeAdapter(ChatCompletionChunk)),
    "responses": _Route("POST", "/v1/responses", TypeAdapter(ResponseObject)),
    "responses_stream": _Route("POST", "/v1/responses", TypeAdapter(StreamEvent)),
    "messages": _Route("POST", "/v1/messages", TypeAdapter(MessageObject)),
    "messages_stream": _Route("POST", "/v1/messages", TypeAdapter(MessageEvent)),
    "count_tokens": _Route("POST", "/v1/messages/count_tokens", TypeAdapter(TokenCount)),
    "embed": _Route("POST", "/v1/embeddings", TypeAdapter(EmbeddingList)),
    "score": _Route("POST", "/v1/score", TypeAdapter(ScoreList)),
    "rerank": _Route("POST", "/v1/rerank", TypeAdapter(Ranking)),
    "fork": _Route("POST", "/v1/forks", TypeAdapter(Completion)),
    "fork_stream": _Route("POST", "/v1/forks", TypeAdapter(Completion)),
    "models": _Route("GET", "/v1/models", TypeAdapter(ModelList)),
    "add_model": _Route("POST", "/v1/models", TypeAdapter(ModelCard)),
    "remove_model": _Route("DELETE", "/v1/models/", TypeAdapter(ModelDeleted)),
    "load_adapter": _Route("POST", "/v1/load_lora_adapter", None),
    "unload_adapter": _Route("POST", "/v1/unload_lora_adapter", None),
    "pin": _Route("POST", "/v1/pins", TypeAdapter(PinCard)),
    "unpin": _Route("DELETE", "/v1/pins/", TypeAdapter(PinDeleted)),
    "pins": _Route("GET", "/v1/pins", TypeAdapter(PinList)),
    "load": _Route("GET", "/v1/load", TypeAdapter(LoadReport)),
    "reports": _Route("GET", "/v1/load/memory", TypeAdapter(dict[str, MemoryReport])),
    "set_budget": _Route("PUT", "/v1/budget", TypeAdapter(BudgetReport)),
    "ready": _Route("GET", "/ready", TypeAdapter(None)),
}

_WITHOUT_END_MARK = ("responses_stream", "messages_stream")


class OverHttp:
    """Args: the URL without `/v1`, and headers of every request."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = url.rstrip("/")
        self._headers = headers
        self._sessions = PerLoop(self._session, aiohttp.ClientSession.close)

    async def call(self, method: str, *args: Any) -> Any:
        async with self._answer(method, args, streams=False) as (route, response):
            content = await response.read()
            answer = None if route.answer is None else route.answer.validate_json(content or b"null")
        return answer.answers if isinstance(answer, BudgetReport) else answer

    async def stream(self, method: str, *args: Any) -> AsyncGenerator[Any, None]:
        async with self._answer(method, args, streams=True) as (route, response):
            is_complete = False
            assert route.answer is not None
            async for data in event_data(response.content.iter_any()):
                if data == DONE:
                    is_complete = True
                elif (error := error_of(from_json(data))) is not None:
                    raise error
                else:
                    yield route.answer.validate_json(data)
            if not is_complete and method not in _WITHOUT_END_MARK:
                raise connection_lost(self._url)

    async def close(self) -> None:
        await self._sessions.close()

    @asynccontextmanager
    async def _answer(
        self, method: str, args: tuple[Any, ...], *, streams: bool
    ) -> AsyncIterator[tuple[_Route, aiohttp.ClientResponse]]:
        """The head of an answer with status 200. Leaving the context early cancels the request."""
        route = _ROUTES.get(method)
        if route is None:
            raise no_such_call(method, "HTTP")
        path, body, headers = route.path, None, dict(self._headers)
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
            async with self._sessions.get().request(
                route.method, self._url + path, json=body, headers=headers
            ) as response:
                if response.status >= 400:
                    raise error_of_status(response.status, response.headers.get("Retry-After"), await response.read())
                yield route, response
        except aiohttp.ClientConnectorError as error:
            raise unreachable(self._url, error.os_error) from error
        except aiohttp.ClientError as error:
            raise connection_lost(self._url) from error

    def _session(self) -> aiohttp.ClientSession:
        # The request itself bounds the time of its answer.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
        return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
