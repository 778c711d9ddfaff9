"""Folio as other Ray applications call it: typed bodies in, typed answers and Folio's own errors out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from app.errors import EngineError, UnavailableError
from app.openai.bodies import ChatCompletionRequest, CompletionRequest, ForkRequest, PinRequest
from app.openai.operator_replies import LoadReport
from app.openai.replies import ChatCompletion, ChatCompletionChunk, Completion
from app.openai.responses_body import ResponsesRequest
from app.openai.responses_replies import ResponseObject, StreamEvent
from app.serving.failures import translated
from vmem import BudgetAnswer, MemoryReport

_READY_POLL_S = 0.5


class Folio:
    """A Folio application, from any process of its Ray cluster: a deployment, a task, or a script's `asyncio.run`.

    Methods may be called from any event loop, and raise `FolioError`s as the application raised them. Whoever cancels a
    call, or closes a stream before its end, frees what the request had. `session`: requests of one go to the same
    replica where that costs little. How long a request may take is part of its body (`timeout_s`).

    Args:
        application: its name, which is looked up at the first call, so that both applications may start in any order;
            or a handle of it.
    """

    def __init__(self, application: str | DeploymentHandle[Any] = "folio") -> None:
        self._name = application if isinstance(application, str) else application.app_name
        self._callee = f"the application {self._name!r}"
        self._handle = None if isinstance(application, str) else application

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
                    return await self._call("ready")
            except (EngineError, TimeoutError) as error:
                if loop.time() + _READY_POLL_S >= deadline:
                    raise UnavailableError(
                        f"the application {self._name!r} is not ready after {timeout_s} s: {error}; see `serve status`"
                    ) from error
            await asyncio.sleep(_READY_POLL_S)

    async def generate(self, request: CompletionRequest, session: str | None = None) -> Completion:
        """A completion, whole."""
        return cast(Completion, await self._call("generate", request, session))

    def generate_stream(
        self, request: CompletionRequest, session: str | None = None
    ) -> AsyncGenerator[Completion, None]:
        """A completion, piece by piece."""
        return self._stream("generate_stream", request, session)

    async def chat(self, request: ChatCompletionRequest, session: str | None = None) -> ChatCompletion:
        """A chat completion, whole."""
        return cast(ChatCompletion, await self._call("chat", request, session))

    def chat_stream(
        self, request: ChatCompletionRequest, session: str | None = None
    ) -> AsyncGenerator[ChatCompletionChunk, None]:
        """A chat completion, piece by piece."""
        return self._stream("chat_stream", request, session)

    async def responses(self, request: ResponsesRequest, session: str | None = None) -> ResponseObject:
        """A response of the responses API, whole."""
        return cast(ResponseObject, await self._call("responses", request, session))

    def responses_stream(
        self, request: ResponsesRequest, session: str | None = None
    ) -> AsyncGenerator[StreamEvent, None]:
        """A response, event by event. Once it has begun, what goes wrong is its last event."""
        return self._stream("responses_stream", request, session)

    async def fork(self, request: ForkRequest) -> Completion:
        """More outputs of a request that runs, or has just ended, whole.

        Raises:
            UnknownRequestError: it is not there any more.
        """
        return cast(Completion, await self._call("fork", request))

    def fork_stream(self, request: ForkRequest) -> AsyncGenerator[Completion, None]:
        """The same, piece by piece."""
        return self._stream("fork_stream", request)

    async def pin(self, request: PinRequest) -> None:
        """Compute a prefix on every engine replica and keep it; returns when all have.

        Raises:
            RequestError: it is too short to be shared, or the name is taken.
            EngineError: a replica has no room for it within its quota.
        """
        await self._call("pin", request)

    async def unpin(self, name: str) -> None:
        """Let a pinned prefix go. Raises `RequestError` if none of that name is pinned."""
        await self._call("unpin", name)

    async def report(self) -> dict[str, MemoryReport]:
        """KV memory of every engine replica, by its name, which is also the end of the ids of its answers."""
        return cast(dict[str, MemoryReport], await self._call("reports"))

    async def load(self) -> LoadReport:
        """How busy every engine replica is, as in `GET /v1/load`. Those that do not answer soon are counted only."""
        return cast(LoadReport, await self._call("load"))

    async def set_budget(self, budget_bytes: int, revision: int) -> list[BudgetAnswer]:
        """Change how much memory the KV cache of every engine replica may take.

        Args:
            revision: larger than that of every order before.

        Raises:
            RequestError: the budget is out of bounds.
        """
        return cast(list[BudgetAnswer], await self._call("set_budget", budget_bytes, revision))

    async def _call(self, method: str, *args: Any) -> Any:
        handle = await self._connected()
        response = getattr(handle, method).remote(*args)
        try:
            with translated(self._callee):
                return await response
        except asyncio.CancelledError:
            response.cancel()  # outside of a deployment Serve does not, and the request would go on
            raise

    async def _stream(self, method: str, *args: Any) -> AsyncGenerator[Any, None]:
        handle = await self._connected()
        response = getattr(handle.options(stream=True), method).remote(*args)
        finished = False
        try:
            with translated(self._callee):
                async for chunk in response:
                    yield chunk
            finished = True
        finally:
            if not finished:  # dropping the generator would not stop the request
                response.cancel()

    async def _connected(self) -> DeploymentHandle[Any]:
        if self._handle is None:
            self._handle = await asyncio.to_thread(_find, self._name)
        return self._handle


def _find(name: str) -> DeploymentHandle[Any]:
    """Asks Serve's controller, and waits for the answer."""
    try:
        return serve.get_app_handle(name)
    except RayServeException as error:
        raise UnavailableError(f"there is no application {name!r} in this Ray cluster: {error}") from error
