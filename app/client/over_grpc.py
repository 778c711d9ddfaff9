"""Calls of a server by gRPC (`app/proto/folio.proto`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import grpc
from pydantic import TypeAdapter
from pydantic_core import from_json

from app.client.transport import PerLoop, connection_lost, no_such_call, unreachable
from app.errors import DeadlineError, EngineError, FolioError, OverloadedError, RequestError
from app.http_errors import error_of
from app.openai.operator_replies import LoadReport, PinList
from app.openai.replies import ChatCompletion, ChatCompletionChunk, Completion
from app.proto import convert
from app.proto import folio_pb2 as pb
from app.proto.folio_pb2_grpc import FolioStub
from vmem import MemoryReport

# So much later than `timeout_s` the call itself ends: the server's error says more.
_GRACE_S = 2.0
_REPORTS = TypeAdapter(dict[str, MemoryReport])


class OverGrpc:
    """Of the server at `grpc://host:port`, or `grpcs://…` with TLS; of several applications of one Serve, that of the
    path's name: `grpc://host:port/folio`."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        self._url = url
        self._target = parts.netloc
        self._has_tls = parts.scheme == "grpcs"
        self._metadata = [(name.lower(), value) for name, value in headers.items()]
        if application := parts.path.strip("/"):
            self._metadata.append(("application", application))
        self._channels = PerLoop(self._channel, grpc.aio.Channel.close)

    async def call(self, method: str, *args: Any) -> Any:
        name, message, read = self._prepared(method, args)
        with self._errors():
            return read(await self._started(name, message, args))

    async def stream(self, method: str, *args: Any) -> AsyncGenerator[Any, None]:
        name, message, read = self._prepared(method, args)
        with self._errors():
            call = self._started(name, message, args)
            try:
                async for answer in call:
                    if answer.id:  # else an error follows
                        yield read(answer)
            finally:
                call.cancel()

    async def close(self) -> None:
        await self._channels.close()

    def _prepared(self, method: str, args: Sequence[Any]) -> tuple[str, Any, Callable[[Any], Any]]:
        """Name of the call, its message, and what becomes of the answer's."""
        session = args[1] if len(args) > 1 else None
        match method:
            case "generate" | "generate_stream":
                name, message = "Generate", convert.generate_message(_json(args[0]), session)
            case "chat" | "chat_stream":
                name, message = "Chat", convert.chat_message(_json(args[0]), session)
            case "pin":
                return "Pin", convert.pin_message(_json(args[0])), _nothing
            case "unpin":
                return "Unpin", pb.UnpinRequest(name=args[0]), _nothing
            case "pins":
                return "Pins", pb.PinsRequest(), _pins
            case "load":
                return "Load", pb.LoadRequest(), _load
            case "reports":
                return "Report", pb.ReportRequest(), _reports
            case "ready":
                return "Ready", pb.ReadyRequest(), _nothing
            case _:
                raise no_such_call(method, "gRPC")
        kind = _KINDS[method]
        if method.endswith("_stream"):
            name += "Stream"
        return name, message, lambda answer: kind.model_validate(convert.answer_fields(answer))

    def _started(self, name: str, message: Any, args: Sequence[Any]) -> Any:
        timeout_s = getattr(args[0], "timeout_s", None) if args else None
        method = getattr(FolioStub(self._channels.get()), name)
        return method(message, metadata=self._metadata, timeout=None if timeout_s is None else timeout_s + _GRACE_S)

    def _channel(self) -> Any:
        options = [
            ("grpc.max_receive_message_length", -1),  # who asks for much gets it
            # By default a server that was away is looked for ever more seldom, up to once in two minutes.
            ("grpc.initial_reconnect_backoff_ms", 500),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        if self._has_tls:
            return grpc.aio.secure_channel(self._target, grpc.ssl_channel_credentials(), options)
        return grpc.aio.insecure_channel(self._target, options)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from error

    def _error(self, error: grpc.aio.AioRpcError) -> FolioError:
        told = dict(error.trailing_metadata() or ())
        retry_after = told.get("retry-after")
        if "folio-error" in told:
            known = error_of(from_json(told["folio-error"]), None if retry_after is None else float(retry_after))
            if known is not None:
                return known
        details = error.details() or error.code().name
        match error.code():  # by gRPC itself, or by Serve
            case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.NOT_FOUND:  # the latter: no application is there yet
                return unreachable(self._url, details)
            case grpc.StatusCode.CANCELLED:
                return connection_lost(self._url)
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return DeadlineError(details)
            case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" not in details:
                return OverloadedError(details)
            case grpc.StatusCode.RESOURCE_EXHAUSTED | grpc.StatusCode.UNIMPLEMENTED:
                return RequestError(details)
        return EngineError(f"{error.code().name}: {details}")


_KINDS: dict[str, Any] = {
    "generate": Completion,
    "generate_stream": Completion,
    "chat": ChatCompletion,
    "chat_stream": ChatCompletionChunk,
}


def _json(request: Any) -> dict[str, Any]:
    body: dict[str, Any] = request.model_dump(mode="json", exclude_unset=True, by_alias=True)
    return body


def _nothing(answer: Any) -> None:
    """Of an answer that says only that it is done."""


def _pins(answer: pb.PinList) -> PinList:
    return PinList.model_validate({"data": []} | convert.plain(answer))


def _load(answer: pb.LoadReport) -> LoadReport:
    return LoadReport.model_validate({"least_queued_s": None, "replicas": []} | convert.plain(answer))


def _reports(answer: pb.MemoryReports) -> dict[str, MemoryReport]:
    return _REPORTS.validate_python(convert.reports_fields(answer))
