"""Folio client: typed bodies in, typed answers and Folio's own errors out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import NoneType
from typing import TYPE_CHECKING, Any, cast

from folio.app.api.anthropic.body import CountTokensRequest, MessagesRequest
from folio.app.api.anthropic.replies import MessageEvent, MessageObject, TokenCount
from folio.app.api.openai.bodies import CompletionRequest, ForkRequest
from folio.app.api.openai.chat_body import ChatCompletionRequest
from folio.app.api.openai.replies import ChatCompletion, ChatCompletionChunk, Completion
from folio.app.api.operators.bodies import AddModelRequest, LoadAdapterRequest, PinRequest, UnloadAdapterRequest
from folio.app.api.operators.replies import LoadReport, ModelCard, ModelList, PinList
from folio.app.api.pooled.bodies import EmbeddingRequest, RerankRequest, ScoreRequest
from folio.app.api.pooled.replies import EmbeddingList, Ranking, ScoreList
from folio.app.api.responses.body import ResponsesRequest
from folio.app.api.responses.replies import ResponseObject, StreamEvent
from folio.app.client.transport import Transport
from folio.app.errors import EngineError, UnavailableError
from folio.vmem import BudgetAnswer, MemoryReport

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

_READY_POLL_S = 0.5


class Folio:
    """A Folio application: within its Ray cluster by its name, from outside by a URL.

    Methods may be called from any event loop, and raise the application's `FolioError`s. Cancelling a call, or closing
    a stream before its end, frees the request's memory. Requests of one `session` go to the same replica where that
    costs little. A request's time limit is part of its body (`timeout_s`).

    Args:
        application: a name or a handle, in any process of the application's Ray cluster; `http://host:port` or
            `https://…`, with the application's route prefix if it has one; or `grpc://host:port` or `grpcs://…`, with
            the application's name as the path where Serve has several. Calls by URL need no Ray. `fork`,
            `responses`, `messages`, `count_tokens`, `embed`, `score`, `rerank`, `set_budget`, `models`, `add_model`,
            `remove_model`, `load_adapter` and `unload_adapter` are not available over gRPC.
        api_key: for calls by URL of a server with keys. Calls within the cluster need none.
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
        """Close the connections of the running event loop. A further call opens new ones."""
        await self._transport.close()

    async def ready(self, timeout_s: float = 120.0) -> None:
        """Wait until an engine replica of the application answers.

        Raises:
            UnavailableError: none answered within `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._transport.call("ready", NoneType)
                    return
            except (EngineError, TimeoutError) as error:
                if loop.time() + _READY_POLL_S >= deadline:
                    raise UnavailableError(
                        f"{self._callee} is not ready after {timeout_s} s: {error}; see `serve status`"
                    ) from error
            await asyncio.sleep(_READY_POLL_S)

    async def generate(self, request: CompletionRequest, session: str | None = None) -> Completion:
        """A completion."""
        return await self._transport.call("generate", Completion, request, session)

    def generate_stream(
        self, request: CompletionRequest, session: str | None = None
    ) -> AsyncGenerator[Completion, None]:
        """The chunks of a completion."""
        return self._transport.stream("generate_stream", Completion, request, session)

    async def chat(self, request: ChatCompletionRequest, session: str | None = None) -> ChatCompletion:
        """A chat completion."""
        return await self._transport.call("chat", ChatCompletion, request, session)

    def chat_stream(
        self, request: ChatCompletionRequest, session: str | None = None
    ) -> AsyncGenerator[ChatCompletionChunk, None]:
        """The chunks of a chat completion."""
        return self._transport.stream("chat_stream", ChatCompletionChunk, request, session)

    async def responses(self, request: ResponsesRequest, session: str | None = None) -> ResponseObject:
        """A response of the responses API."""
        return await self._transport.call("responses", ResponseObject, request, session)

    def responses_stream(
        self, request: ResponsesRequest, session: str | None = None
    ) -> AsyncGenerator[StreamEvent, None]:
        """The events of a response. Once it has begun, an error is its last event."""
        return self._transport.stream("responses_stream", StreamEvent, request, session)

    async def messages(self, request: MessagesRequest, session: str | None = None) -> MessageObject:
        """A message of Anthropic's API."""
        return await self._transport.call("messages", MessageObject, request, session)

    def messages_stream(
        self, request: MessagesRequest, session: str | None = None
    ) -> AsyncGenerator[MessageEvent, None]:
        """The events of a message."""
        return self._transport.stream("messages_stream", MessageEvent, request, session)

    async def count_tokens(self, request: CountTokensRequest) -> TokenCount:
        """The number of tokens of a conversation of Anthropic's API."""
        return await self._transport.call("count_tokens", TokenCount, request)

    async def embed(self, request: EmbeddingRequest) -> EmbeddingList:
        """The embeddings of inputs, of a model that makes them."""
        return await self._transport.call("embed", EmbeddingList, request)

    async def score(self, request: ScoreRequest) -> ScoreList:
        """The scores of pairs of texts."""
        return await self._transport.call("score", ScoreList, request)

    async def rerank(self, request: RerankRequest) -> Ranking:
        """Documents in the order of their relevance to a query."""
        return await self._transport.call("rerank", Ranking, request)

    async def fork(self, request: ForkRequest) -> Completion:
        """More outputs of a running or recently finished request.

        Raises:
            UnknownRequestError: the request is not known any more.
        """
        return await self._transport.call("fork", Completion, request)

    def fork_stream(self, request: ForkRequest) -> AsyncGenerator[Completion, None]:
        """The chunks of `fork`."""
        return self._transport.stream("fork_stream", Completion, request)

    async def pin(self, request: PinRequest) -> None:
        """Compute a prefix on every engine replica and pin it; returns when all replicas have it.

        Raises:
            RequestError: the prefix is too short to be shared, or the name is taken.
            EngineError: the prefix exceeds a replica's quota for pins.
        """
        await self._transport.call("pin", NoneType, request)

    async def unpin(self, name: str, model: str | None = None) -> None:
        """Unpin a prefix.

        Args:
            model: the pin's model; by default the only one with a pin of this name.

        Raises:
            UnknownPinError: no prefix of that name is pinned.
            RequestError: several models have one, and none is named.
        """
        await self._transport.call("unpin", NoneType, name, *([] if model is None else [model]))

    async def pins(self) -> PinList:
        """The pinned prefixes of all engine replicas that answer in time."""
        return await self._transport.call("pins", PinList)

    async def models(self) -> ModelList:
        """The served models and their adapters; of models that share a device also their states."""
        return await self._transport.call("models", ModelList)

    async def add_model(self, request: AddModelRequest) -> ModelCard:
        """Add a model to those of every engine replica, or of none. Its first request loads it.

        Raises:
            RequestError: the model cannot be served, or the name is taken.
            ForbiddenError: the server adds no models at run time, or the caller is no operator.
            UnavailableError: a replica has not answered, or another change is in progress.
        """
        return await self._transport.call("add_model", ModelCard, request)

    async def remove_model(self, name: str) -> None:
        """Remove a model that was added, and its adapters; requests for it end with `UnavailableError`. Raises as
        `add_model`, and `UnknownModelError` if no such model has been added."""
        await self._transport.call("remove_model", NoneType, name)

    async def load_adapter(self, request: LoadAdapterRequest) -> None:
        """Load a LoRA adapter on every engine replica, or on none.

        Raises:
            RequestError: the adapter cannot be served, or the name is taken.
            ForbiddenError: the server loads no adapters at run time, or the caller is no operator.
            UnavailableError: a replica has not answered, or another change is in progress.
        """
        await self._transport.call("load_adapter", NoneType, request)

    async def unload_adapter(self, request: UnloadAdapterRequest) -> None:
        """Unload a LoRA adapter from every engine replica; requests that have begun go on. Raises as `load_adapter`,
        and `UnknownModelError` if no such adapter has been loaded."""
        await self._transport.call("unload_adapter", NoneType, request)

    async def report(self) -> dict[str, MemoryReport]:
        """KV memory of every engine replica, by its name, with which the ids of its answers end."""
        return await self._transport.call("reports", dict[str, MemoryReport])

    async def load(self) -> LoadReport:
        """Load of every engine replica, as in `GET /v1/load`. Replicas that do not answer in time are only counted."""
        return await self._transport.call("load", LoadReport)

    async def set_budget(self, budget_bytes: int, revision: int) -> list[BudgetAnswer]:
        """Change the budget of every engine replica's KV cache.

        Args:
            revision: larger than that of all earlier calls.

        Raises:
            RequestError: the budget is out of bounds.
        """
        return await self._transport.call("set_budget", list[BudgetAnswer], budget_bytes, revision)


def _transport(application: str | DeploymentHandle[Any], headers: dict[str, str]) -> Transport:
    """The transport for an application. Imports are local: calls by URL need no Ray, those by handle no gRPC."""
    scheme = application.partition("://")[0] if isinstance(application, str) and "://" in application else None
    if scheme in ("http", "https"):
        from folio.app.client.over_http import OverHttp

        return OverHttp(cast(str, application), headers)
    if scheme in ("grpc", "grpcs"):
        from folio.app.client.over_grpc import OverGrpc

        return OverGrpc(cast(str, application), headers)
    if scheme is not None:
        raise ValueError(f"the scheme of {application!r} is {scheme}://; it must be http, https, grpc or grpcs")
    from folio.app.client.over_handle import OverHandle

    return OverHandle(application)
