"""Folio as programs call it: typed bodies in, typed answers and Folio's own errors out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, cast

from app.client.transport import Transport
from app.errors import EngineError, UnavailableError
from app.openai.bodies import ChatCompletionRequest, CompletionRequest, ForkRequest, PinRequest
from app.openai.operator_replies import LoadReport, PinList
from app.openai.replies import ChatCompletion, ChatCompletionChunk, Completion
from app.openai.responses.body import ResponsesRequest
from app.openai.responses.replies import ResponseObject, StreamEvent
from vmem import BudgetAnswer, MemoryReport

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

_READY_POLL_S = 0.5


class Folio:
    """A Folio application: within its Ray cluster by its name, from outside by a URL.

    Methods may be called from any event loop, and raise `FolioError`s as the application raised them. Whoever cancels a
    call, or closes a stream before its end, frees what the request had. `session`: requests of one go to the same
    replica where that costs little. How long a request may take is part of its body (`timeout_s`).

    Args:
        application: its name, or a handle of it, in any process of its Ray cluster; `http://host:port` or `https://…`,
            with the application's route prefix if it has one; or `grpc://host:port` or `grpcs://…`, with its name as
            the path where Serve has several. Calls by URL need no Ray, and have no `fork` and `set_budget`; `responses`
            is HTTP's only.
        api_key: by URL, where the server has keys. Within the cluster there is no need of one.
    """

    def __init__(self, application: str | DeploymentHandle[Any] = "folio", *, api_key: str | None = None) -> None:
        name = application if isinstance(application, str) else application.app_name
        self._callee = f"the application {name!r}"
        self._transport = _transport(application, {} if api_key is None else {"Authorization": f"Bearer {api_key}"})

    async def __aenter__(self) -> Folio:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections of the running event loop, if there are any; a further call opens new ones."""
        await self._transport.close()

    async def ready(self, timeout_s: float = 120.0) -> None:
        """Returns when the application is there and one of its engine replicas answers.

        Raises:
            UnavailableError: not within `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._transport.call("ready")
                    return
            except (EngineError, TimeoutError) as error:
                if loop.time() + _READY_POLL_S >= deadline:
                    raise UnavailableError(
                        f"{self._callee} is not ready after {timeout_s} s: {error}; see `serve status`"
                    ) from error
            await asyncio.sleep(_READY_POLL_S)

    async def generate(self, request: CompletionRequest, session: str | None = None) -> Completion:
        """A completion, whole."""
        return cast(Completion, await self._transport.call("generate", request, session))

    def generate_stream(
        self, request: CompletionRequest, session: str | None = None
    ) -> AsyncGenerator[Completion, None]:
        """A completion, piece by piece."""
        return self._transport.stream("generate_stream", request, session)

    async def chat(self, request: ChatCompletionRequest, session: str | None = None) -> ChatCompletion:
        """A chat completion, whole."""
        return cast(ChatCompletion, await self._transport.call("chat", request, session))

    def chat_stream(
        self, request: ChatCompletionRequest, session: str | None = None
    ) -> AsyncGenerator[ChatCompletionChunk, None]:
        """A chat completion, piece by piece."""
        return self._transport.stream("chat_stream", request, session)

    async def responses(self, request: ResponsesRequest, session: str | None = None) -> ResponseObject:
        """A response of the responses API, whole."""
        return cast(ResponseObject, await self._transport.call("responses", request, session))

    def responses_stream(
        self, request: ResponsesRequest, session: str | None = None
    ) -> AsyncGenerator[StreamEvent, None]:
        """A response, event by event. Once it has begun, what goes wrong is its last event."""
        return self._transport.stream("responses_stream", request, session)

    async def fork(self, request: ForkRequest) -> Completion:
        """More outputs of a request that runs, or has just ended, whole.

        Raises:
            UnknownRequestError: it is not there any more.
        """
        return cast(Completion, await self._transport.call("fork", request))

    def fork_stream(self, request: ForkRequest) -> AsyncGenerator[Completion, None]:
        """The same, piece by piece."""
        return self._transport.stream("fork_stream", request)

    async def pin(self, request: PinRequest) -> None:
        """Compute a prefix on every engine replica and keep it; returns when all have.

        Raises:
            RequestError: it is too short to be shared, or the name is taken.
            EngineError: a replica has no room for it within its quota.
        """
        await self._transport.call("pin", request)

    async def unpin(self, name: str) -> None:
        """Let a pinned prefix go. Raises `RequestError` if none of that name is pinned."""
        await self._transport.call("unpin", name)

    async def pins(self) -> PinList:
        """The pinned prefixes of all engine replicas that answer soon."""
        return cast(PinList, await self._transport.call("pins"))

    async def report(self) -> dict[str, MemoryReport]:
        """KV memory of every engine replica, by its name, which is also the end of the ids of its answers."""
        return cast(dict[str, MemoryReport], await self._transport.call("reports"))

    async def load(self) -> LoadReport:
        """How busy every engine replica is, as in `GET /v1/load`. Those that do not answer soon are counted only."""
        return cast(LoadReport, await self._transport.call("load"))

    async def set_budget(self, budget_bytes: int, revision: int) -> list[BudgetAnswer]:
        """Change how much memory the KV cache of every engine replica may take.

        Args:
            revision: larger than that of every order before.

        Raises:
            RequestError: the budget is out of bounds.
        """
        return cast(list[BudgetAnswer], await self._transport.call("set_budget", budget_bytes, revision))


def _transport(application: str | DeploymentHandle[Any], headers: dict[str, str]) -> Transport:
    """Imports what it needs only: calls by URL need no Ray, those within a cluster no gRPC."""
    scheme = application.partition("://")[0] if isinstance(application, str) and "://" in application else None
    if scheme in ("http", "https"):
        from app.client.over_http import OverHttp

        return OverHttp(cast(str, application), headers)
    if scheme in ("grpc", "grpcs"):
        from app.client.over_grpc import OverGrpc

        return OverGrpc(cast(str, application), headers)
    if scheme is not None:
        raise ValueError(f"{application!r} begins with {scheme}://; it may be http, https, grpc or grpcs")
    from app.client.over_handle import OverHandle

    return OverHandle(application)
